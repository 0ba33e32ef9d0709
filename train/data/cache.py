"""The cache of a corpus' tokens: where it is, and which process builds it."""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np

from train.config import Config
from train.config.settings.checks import check
from train.config.settings.data import SourceConfig
from train.data.building import Text, build_piece, finish, missing, pieces_of
from train.data.corpus import INDEX, Corpus, open_corpus
from train.data.sources import Log, SourceFile, list_files, report, silent
from train.data.storage import Folder, LocalFolder, MemoryFolder, folder_at, is_url
from train.data.tokenizer import Tokenizer

_FORMAT = 4  # version of the format of the folders
_SMALL_BYTES = 2**26  # total size of files; up to this size bytes are encoded again at each start and not cached
TOKENS = "tokens"  # the folder of caches in ``config.output``
_POLL_SECONDS = 2.0


def open_corpora(config: Config, tokenizer: Tokenizer, log: Log) -> list[Corpus]:
    """The encoded documents of every part of the mixture, both training and held-out; missing ones are built.

    Each part has a folder of its own in ``data.cache``, named by a hash of names, sizes and stamps of its files (ETag
    or time of change), of the tokenizer and of the settings that encoding depends on. So only what changed is built
    again. ``data.cache`` is ``{output}/tokens`` by default. The bytes of a small corpus are encoded faster than a cache
    is read; they are cached only if ``data.cache`` is set or several processes share the cache.

    A cache at a URL is shared by all hosts: process 0 lists and builds, and the others, which need not see the files,
    wait until it is complete. A cache on disk is each host's own: the first of its processes builds, under a lock that
    ends with the process. The command `tokenize` builds faster, before training.

    Raises FileNotFoundError and ValueError for text that is missing or unreadable, or has too many bad records.
    """
    import jax

    shared = is_url(_path(config, "")) and jax.process_count() > 1
    if shared and jax.process_index():
        keys = _from_first(["" for _ in config.data.parts])
        corpora = [_wait(folder_at(_path(config, key))) for key in keys]
    else:
        texts = texts_of(config, tokenizer)
        if shared:
            _from_first([text.path.rpartition("/")[2] for text in texts])
        forgotten = is_forgotten(config, texts, tokenizer) and not shared
        corpora = [
            _open_or_build(text, MemoryFolder() if forgotten else folder_at(text.path), tokenizer, log)
            for text in texts
        ]
    for corpus in corpora:
        _check_tokens(config, corpus)
        report(corpus.left_out, corpus.files, config.data.bad_records, log)
    return corpora


def texts_of(config: Config, tokenizer: Tokenizer) -> list[Text]:
    """Where the tokens of every part of the mixture are, or will be; this lists the files.

    Raises ValueError for conversations whose template does not tell the assistant's turns.
    """
    if config.data.has_conversations:
        tokenizer.chat.check_turns()
    return [
        Text(files, part, config.data.bad_records, _path(config, _key(files, part, tokenizer)))
        for files, part in zip(list_files(config.data), config.data.parts, strict=True)
    ]


def is_forgotten(config: Config, texts: Sequence[Text], tokenizer: Tokenizer) -> bool:
    """Whether a single process reads the bytes again at each start instead of caching them."""
    size = sum(file.size for text in texts for file in text.files)
    return not config.data.cache and tokenizer.identity == "bytes" and size <= _SMALL_BYTES


def _path(config: Config, key: str) -> str:
    cache = config.data.cache or f"{config.output}/{TOKENS}"
    return f"{cache.rstrip('/')}/{key}"


def _key(files: Sequence[SourceFile], source: SourceConfig, tokenizer: Tokenizer) -> str:
    listing = [(file.name, file.size, file.stamp) for file in files]
    chat = [source.messages_key, tokenizer.chat.identity] if source.messages_key else source.text_key
    return hashlib.sha256(json.dumps([_FORMAT, tokenizer.identity, chat, listing]).encode()).hexdigest()[:32]


def _check_tokens(config: Config, corpus: Corpus) -> None:
    """Raises ValueError for conversations with special tokens that the model's vocabulary does not have."""
    size = config.model.vocab_size
    check(
        not size or corpus.largest < size,
        f"model.vocab_size: the conversations have token {corpus.largest}, which a vocabulary of {size} lacks; a "
        "data.chat_template with other special tokens would work",
    )


def _from_first(keys: list[str]) -> list[str]:
    """Process 0's keys, on every process: other hosts may see other modification times, or no files at all."""
    from jax.experimental import multihost_utils

    mine = np.array([list(key.encode().ljust(32)) for key in keys], np.uint8)
    return [bytes(key).decode() for key in np.asarray(multihost_utils.broadcast_one_to_all(mine))]


def _wait(folder: Folder) -> Corpus:
    while (corpus := open_corpus(folder)) is None:
        time.sleep(_POLL_SECONDS)
    return corpus


def _open_or_build(text: Text, folder: Folder, tokenizer: Tokenizer, log: Log) -> Corpus:
    if corpus := open_corpus(folder):
        return corpus
    with _lock(folder):
        if folder.read(INDEX) is None:  # nobody built it while this process waited for the lock
            _build(text, folder, tokenizer, silent if isinstance(folder, MemoryFolder) else log)
        return open_corpus(folder)


def _build(text: Text, folder: Folder, tokenizer: Tokenizer, log: Log) -> None:
    left = missing(folder, pieces_of(text))
    if left:
        log(f"data: tokenising {sum(len(piece.files) for piece in left)} files into {folder}, once")
    for done, piece in enumerate(left, start=1):
        build_piece(piece, tokenizer, folder)
        log(f"data: {done} of {len(left)} pieces are done")
    finish(folder, text, tokenizer)


@contextmanager
def _lock(folder: Folder):
    """Holds a file lock if the folder is on disk. The system releases it when the process ends in any way."""
    if not isinstance(folder, LocalFolder):
        yield
        return
    import fcntl  # not on Windows

    with (folder.path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
