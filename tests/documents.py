"""Documents encoded by the byte tokenizer, and rows packed from encoded documents in memory."""

import hashlib
from collections.abc import Sequence

import numpy as np

from train.config import Config, DataConfig, TrainConfig
from train.data import pipeline
from train.data.corpus import Corpus, HeldOutText, digest_of, piece_file
from train.data.index import Index, documents_of
from train.data.packing import PackedRows, pack_corpora
from train.data.sources import Log, silent
from train.data.storage import MemoryFolder
from train.data.tokenizer import PADDING, ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
BOS, EOS, MASK = BYTES.bos, BYTES.eos, BYTES.mask


def encode(text: bytes) -> np.ndarray:
    """The tokens of one document: BOS, its bytes, EOS."""
    return BYTES.encode_all([text])[0]


def training_rows(config: Config, log: Log = silent) -> PackedRows:
    """The rows that a config trains on."""
    return pipeline.training_rows(config, load_tokenizer(config.data), log)


def held_out_sample(config: Config) -> HeldOutText:
    """The text that a config holds out."""
    return pipeline.held_out_sample(config, load_tokenizer(config.data))


def held_out_documents(config: Config) -> list[np.ndarray]:
    """The tokens of every document that a config holds out."""
    return held_out_sample(config).documents()


def split(data: DataConfig) -> tuple[list[bytes], list[bytes]]:
    """The texts that a run trains on, and those that it holds out."""
    config = Config(data=data, train=TrainConfig(length=1, batch_tokens=1))
    corpora = [part.corpus for part in training_rows(config).parts]
    trained = [corpus.read(run.starts, run.sizes) for corpus in corpora for run in corpus.index.runs()]
    held_out = held_out_documents(config)
    return [BYTES.decode(tokens) for run in trained for tokens in run], [BYTES.decode(tokens) for tokens in held_out]


def collect(documents: Sequence[np.ndarray]) -> Corpus:
    """A corpus, in memory, of documents that are already encoded."""
    sizes = np.array([len(document) for document in documents], np.int64)
    tokens = np.concatenate(documents)
    content, folder = tokens.tobytes(), MemoryFolder()
    folder.write(piece_file(0, "tokens"), [content])
    index = Index(documents_of(sizes))
    digest = digest_of([hashlib.sha256(content).hexdigest()], index)
    return Corpus(folder, tokens.dtype, np.zeros(1, np.int64), index, digest, {}, 0)


def pack(documents: Sequence[np.ndarray], length: int, packing: str = "concatenate") -> PackedRows:
    """Rows of `length` from encoded documents, in the order given."""
    return pack_corpora([collect(documents)], [1.0], length, packing, PADDING)
