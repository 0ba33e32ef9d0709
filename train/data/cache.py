"""Where the tokens of a corpus are kept, and which process builds them."""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import contextmanager

import jax
import numpy as np

from train.config import Config
from train.data.corpus import Corpus, build_corpus, open_corpus
from train.data.sources import SourceFile, Told, list_files, report_corrupt, untold
from train.data.storage import Folder, LocalFolder, MemoryFolder, folder_at, is_url
from train.data.tokenizer import Tokenizer

_FORMAT = 1  # of the shards
_SMALL_BYTES = 2**26  # of files whose bytes are read anew at each start instead of being kept
TOKENS = "tokens"  # the folder of caches in ``config.output``
_POLL_SECONDS = 2.0


def open_corpora(config: Config, tokenizer: Tokenizer, told: Told) -> list[Corpus]:
    """The encoded documents of every part of the mixture, trained on and held out, built unless they are there.

    Each part has a folder of its own in ``data.cache``, named by a hash of names, sizes and stamps of its files (ETag
    or time of change), of the tokenizer and of the settings that encoding depends on: what changed is built anew, what
    did not is never built again. It is ``{output}/tokens`` by default. Bytes of a small corpus are encoded faster than
    read, and kept nowhere unless ``data.cache`` says where or one cache serves several processes.

    A cache behind a URL is one for all hosts: process 0 lists and builds, and the others, which need not see the
    files, wait until it is whole. A cache on disk is each host's own: whichever of its processes comes first builds,
    under a lock that ends with the process.

    Raises FileNotFoundError and ValueError for text that is missing or unreadable.
    """
    cache = config.data.cache or f"{config.output}/{TOKENS}"
    shared = is_url(cache) and jax.process_count() > 1
    if shared and jax.process_index():
        keys = _from_first(["" for _ in config.data.parts])
        corpora = [_wait(folder_at(_join(cache, key))) for key in keys]
    else:
        listed = list_files(config.data)
        keys = [_key(files, part.text_key, tokenizer) for files, part in zip(listed, config.data.parts, strict=True)]
        keys = _from_first(keys) if shared else keys
        forgotten = not config.data.cache and not shared and _is_small(listed, tokenizer)
        folders = [MemoryFolder() if forgotten else folder_at(_join(cache, key)) for key in keys]
        corpora = [
            _open_or_build(folder, files, part.text_key, tokenizer, told)
            for folder, files, part in zip(folders, listed, config.data.parts, strict=True)
        ]
    for corpus in corpora:
        report_corrupt(corpus.corrupt, corpus.files, told)
    return corpora


def _is_small(listed: list[list[SourceFile]], tokenizer: Tokenizer) -> bool:
    size = sum(file.size for files in listed for file in files)
    return tokenizer.identity == "bytes" and size <= _SMALL_BYTES


def _join(cache: str, key: str) -> str:
    return f"{cache.rstrip('/')}/{key}"


def _key(files: Sequence[SourceFile], text_key: str, tokenizer: Tokenizer) -> str:
    listing = [(file.name, file.size, file.stamp) for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, tokenizer.identity, text_key, listing]).encode()).hexdigest()[:32]


def _from_first(keys: list[str]) -> list[str]:
    """Process 0's keys, on every process: other hosts may see other times of change, or no files at all."""
    from jax.experimental import multihost_utils

    mine = np.array([list(key.encode().ljust(32)) for key in keys], np.uint8)
    return [bytes(key).decode() for key in np.asarray(multihost_utils.broadcast_one_to_all(mine))]


def _wait(folder: Folder) -> Corpus:
    while (corpus := open_corpus(folder)) is None:
        time.sleep(_POLL_SECONDS)
    return corpus


def _open_or_build(
    folder: Folder, files: Sequence[SourceFile], text_key: str, tokenizer: Tokenizer, told: Told
) -> Corpus:
    corpus = open_corpus(folder)
    if corpus is not None:
        return corpus
    with _lock(folder):
        if folder.read("index.npz") is None:  # nobody built it while this process waited for the lock
            told = untold if isinstance(folder, MemoryFolder) else told
            told(f"data: tokenising {len(files)} files into {folder}, once")
            build_corpus(files, text_key, tokenizer, folder, told)
        return open_corpus(folder)


@contextmanager
def _lock(folder: Folder):
    """Holds a lock file's lock where the folder is on disk. The system frees it when its process ends, however."""
    if not isinstance(folder, LocalFolder):
        yield
        return
    import fcntl  # not on Windows

    with (folder.path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
