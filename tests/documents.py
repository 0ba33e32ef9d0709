"""Documents encoded by the byte tokenizer, and rows packed from encoded documents in memory."""

import hashlib
from collections.abc import Sequence

import numpy as np

from train.config import Config, DataConfig, TrainConfig
from train.data.corpus import Corpus, digest_of, shard_names
from train.data.index import Index
from train.data.packing import PackedRows, pack_corpora
from train.data.pipeline import held_out_documents, training_rows
from train.data.storage import MemoryFolder
from train.data.tokenizer import PADDING, ByteTokenizer

BYTES = ByteTokenizer()
BOS, EOS, MASK = BYTES.bos, BYTES.eos, BYTES.mask


def encode(text: bytes) -> np.ndarray:
    """The tokens of one document: BOS, its bytes, EOS."""
    return BYTES.encode_all([text])[0]


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
    content, folder, names = tokens.tobytes(), MemoryFolder(), shard_names([1])
    folder.write(names[0], content)
    index = Index(sizes, np.zeros(len(sizes), np.uint64))
    digest = digest_of([hashlib.sha256(content).hexdigest()], index)
    return Corpus(folder, tokens.dtype, names, np.zeros(1, np.int64), index, digest, {}, 0)


def pack(documents: Sequence[np.ndarray], length: int, packing: str = "concatenate") -> PackedRows:
    """Rows of `length` from encoded documents, in the order given."""
    return pack_corpora([collect(documents)], [1.0], length, packing, PADDING)
