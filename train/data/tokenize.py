"""``python -m train tokenize``: builds only the cache of tokens, on all cores of a host, and with several hosts or
jobs."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from train.config import Config, DataConfig
from train.config.settings.checks import check
from train.data.building import Piece, Text, build_piece, finish, missing, pieces_of
from train.data.cache import is_forgotten, texts_of
from train.data.corpus import INDEX, open_corpus
from train.data.sources import Log, report
from train.data.storage import folder_at, is_url
from train.data.tokenizer import Tokenizer, load_tokenizer


def tokenize(
    config: Config, log: Log = print, job: int | None = None, jobs: int | None = None, workers: int | None = None
) -> None:
    """Builds the pieces of one of several jobs of the cache that `fit` would build, and the index when the pieces of
    all jobs exist. Jobs are started independently and share only the cache's folder; by default there is one.

    A piece is a file, or several small ones. Complete pieces are not built again. `workers` processes work in parallel,
    by default one for each core.

    Sizes and job numbers alone decide which job builds which pieces: from the largest down, they go to the jobs in
    turn. There are no locks, so a job that died holds nothing; locks do not work on all network disks, nor at URLs. The
    disk or object store need only write files atomically. To build the pieces of a job that never ran, run the command
    with fewer jobs.

    Raises FileNotFoundError and ValueError for text that is missing or unreadable or has too many bad records, and for
    an invalid job.
    """
    check(workers is None or workers > 0, f"--workers must be positive, found {workers}")
    together = "--job and --jobs go together: the number of this job, from 0, and the number of jobs"
    check((job is None) == (jobs is None), together)
    job, jobs = job or 0, 1 if jobs is None else jobs
    check(0 <= job < jobs, f"--job must be from 0 to the number of jobs less 1, found {job} of {jobs} jobs")
    tokenizer = load_tokenizer(config.data)
    texts = _texts_to_cache(config, tokenizer)
    if not texts:
        log("data: encoding so few bytes is faster than reading a cache, so fit has none; set data.cache to have one")
        return
    pieces = [piece for text in texts for piece in pieces_of(text)]
    absent = {(piece.path, piece.number) for text in texts for piece in missing(folder_at(text.path), pieces_of(text))}
    mine = sorted(pieces, key=lambda piece: -piece.size)[job::jobs]
    left = [piece for piece in mine if (piece.path, piece.number) in absent]
    log(f"data: {len(left)} of {len(mine)} pieces of this job, {len(pieces)} in all, are to be tokenised")
    for done, _ in enumerate(_built(config.data, left, workers or _cores()), start=1):
        log(f"data: {done} of {len(left)} pieces are done")
    for text in texts:
        _finish(text, tokenizer, log)


def _cores() -> int:
    """The cores that this process may use; some systems know only the number of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _texts_to_cache(config: Config, tokenizer: Tokenizer) -> list[Text]:
    """The texts of all stages, each once, whose tokens `fit` would cache."""
    found = {}
    for stage in config.every_stage:
        texts = texts_of(stage, tokenizer)
        if is_url(texts[0].path) or not is_forgotten(stage, texts, tokenizer):
            found |= {text.path: text for text in texts}
    return list(found.values())


def _finish(text: Text, tokenizer: Tokenizer, log: Log) -> None:
    folder, pieces = folder_at(text.path), pieces_of(text)
    absent = missing(folder, pieces)
    if absent:
        log(f"data: {folder}: {len(absent)} of {len(pieces)} pieces, of other jobs, are still missing")
        return
    if folder.read(INDEX) is None:
        finish(folder, text, tokenizer)
    corpus = open_corpus(folder)
    report(corpus.left_out, corpus.files, text.bad_records, log)
    log(f"data: {folder} is complete: {corpus.tokens:,} tokens")


def _built(data: DataConfig, pieces: Sequence[Piece], workers: int) -> Iterator[None]:
    """Builds pieces in processes of their own, unless one process is enough; yields after each piece.

    The first error stops all of them; an interrupt stops them at once. Raises OSError if the system killed a
    process, most likely for lack of memory.
    """
    count = min(workers, len(pieces))
    if count < 2:
        _tokenizers[:] = [load_tokenizer(data)]
        yield from map(_build_one, pieces)
        return
    # Not forked: a process with threads cannot fork safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (data, workers // count)) as pool:
        try:
            with _without_interrupts():
                futures = [pool.submit(_build_one, piece) for piece in pieces]
            yield from (future.result() for future in as_completed(futures))
        except (KeyboardInterrupt, GeneratorExit):
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        except BrokenProcessPool:
            raise OSError(
                f"one of {count} workers was killed, perhaps for lack of memory; lower --workers; "
                "finished pieces are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delays Ctrl-C until the end, and hides it from processes started in between: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_tokenizers: list[Tokenizer] = []


def _begin(data: DataConfig, threads: int) -> None:
    """Set-up of a worker process: loads the tokenizer, and makes the worker end with its parent.

    The tokenizer's library uses `threads` threads, unless the user has set another number.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # read when the library first starts threads
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizers.append(load_tokenizer(data))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _build_one(piece: Piece) -> None:
    build_piece(piece, _tokenizers[0], folder_at(piece.path))
