"""``python -m train tokenize``: builds only the cache of tokens, on all cores of a host, and with several hosts or
jobs."""

import heapq
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from train.config import Config, DataConfig
from train.config.settings.checks import check
from train.data.building import Piece, build_piece, finish, missing, pieces_of
from train.data.cache import CachedText, cache_of, cached_texts, is_forgotten
from train.data.corpus import INDEX, open_corpus
from train.data.left_out import report
from train.data.sources import Log
from train.data.storage import folder_at, is_url
from train.data.tokenizer import Tokenizer, load_tokenizer, token_type


class Job(NamedTuple):
    """One of `count` jobs, which are started independently and share only the cache's folder."""

    number: int = 0
    count: int = 1


class _PieceOrder(NamedTuple):
    """A piece to be built, and its folder."""

    folder: str
    text_key: str
    bad_records: float
    piece: Piece


def tokenize(config: Config, log: Log = print, job: Job | None = None, workers: int | None = None) -> None:
    """Builds this job's pieces of the cache that `fit` would build, and the index when the pieces of all jobs exist.

    A piece is a file, or several small ones. Complete pieces are not built again; of an incomplete piece, the complete
    shards are kept. `workers` processes work in parallel, by default one for each core.

    Sizes and job numbers alone decide which job builds which pieces. There are no locks, so a job that died holds
    nothing; locks do not work on all network disks, nor at URLs. The disk or object store need only write files
    atomically. To build the pieces of a job that never ran, run the command with fewer jobs.

    Raises FileNotFoundError and ValueError for text that is missing or unreadable or has too many bad records, and for
    an invalid job.
    """
    check(workers is None or workers > 0, f"--workers must be positive, found {workers}")
    tokenizer = load_tokenizer(config.data)
    texts = _texts_to_cache(config, tokenizer)
    if not texts:
        log("data: encoding so few bytes is faster than reading a cache, so fit has none; set data.cache to have one")
        return
    tasks = [
        _PieceOrder(text.path, text.text_key, text.bad_records, piece)
        for text in texts
        for piece in pieces_of(text.files)
    ]
    absent = {(p.path, piece.number) for p in texts for piece in missing(p.folder(), pieces_of(p.files))}
    mine = [tasks[index] for index in share([task.piece.size for task in tasks], job or Job())]
    left = [task for task in mine if (task.folder, task.piece.number) in absent]
    log(f"data: {len(left)} of {len(mine)} pieces of this job, {len(tasks)} in all, are to be tokenised")
    for done, _ in enumerate(_built(config.data, left, workers or _cores()), start=1):
        log(f"data: {done} of {len(left)} pieces are done")
    for text in texts:
        _finish(text, token_type(tokenizer.vocabulary_size), log)


def _cores() -> int:
    """The cores that this process may use; some systems know only the number of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _texts_to_cache(config: Config, tokenizer: Tokenizer) -> list[CachedText]:
    """The texts of all stages, each once, whose tokens `fit` would cache."""
    found = {}
    for stage in config.every_stage:
        texts = cached_texts(stage, tokenizer)
        if is_url(cache_of(stage)) or not is_forgotten(stage, texts, tokenizer):
            found |= {text.path: text for text in texts}
    return list(found.values())


def _finish(text: CachedText, kind: np.dtype, log: Log) -> None:
    folder, pieces = text.folder(), pieces_of(text.files)
    absent = missing(folder, pieces)
    if absent:
        log(f"data: {folder}: {len(absent)} of {len(pieces)} pieces, of other jobs, are still missing")
        return
    if folder.read(INDEX) is None:
        finish(folder, text.files, kind)
    corpus = open_corpus(folder)
    report(corpus.left_out, corpus.files, text.bad_records, log)
    log(f"data: {folder} is complete: {corpus.tokens:,} tokens")


def share(sizes: Sequence[int], job: Job) -> list[int]:
    """The numbers of a job's pieces: from the largest down, each goes to the job with the least work so far."""
    loads = [(0, number) for number in range(job.count)]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[index] + 1, number))  # empty files are work too
        if number == job.number:
            mine.append(index)
    return mine


def job_of(environment: Mapping[str, str] = os.environ) -> Job:
    """Which job this is, read from the environment: the variables for processes of `fit`, SLURM's tasks, or job arrays.

    Without any, it is the only job. Raises ValueError for inconsistent numbers.
    """
    if environment.get("JAX_NUM_PROCESSES"):
        return _job(environment.get("JAX_PROCESS_ID", ""), environment["JAX_NUM_PROCESSES"], "JAX_PROCESS_ID")
    number, count = 0, 1
    if environment.get("SLURM_ARRAY_TASK_COUNT"):
        first, step = (int(environment.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in ("MIN", "STEP"))
        number = (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
        count = int(environment["SLURM_ARRAY_TASK_COUNT"])
    if "SLURM_STEP_NODELIST" in environment:  # else this is the batch script, which runs once
        tasks = int(environment.get("SLURM_NTASKS", 1))
        number, count = number * tasks + int(environment.get("SLURM_PROCID", 0)), count * tasks
    check(
        number < count,
        f"the job array has gaps: this is task {number + 1} of {count}, counted from the lowest number; number them "
        "without gaps, as in --array=0-15, or name the job by --job and --jobs",
    )
    return Job(number, count)


def named_job(number: int | None, count: int | None) -> Job:
    """The job of the command's options. Raises ValueError unless both are given and consistent."""
    if number is None or count is None:
        raise ValueError("--job and --jobs go together: the number of this job, from 0, and the number of jobs")
    return _job(number, count, "--job")


def _job(number: int | str, count: int | str, name: str) -> Job:
    if not (str(number).isdigit() and str(count).isdigit() and int(number) < int(count)):
        raise ValueError(f"{name} must be from 0 to the number of jobs less 1, found {number!r} of {count!r} jobs")
    return Job(int(number), int(count))


def _built(data: DataConfig, tasks: Sequence[_PieceOrder], workers: int) -> Iterator[None]:
    """Builds pieces in processes of their own, unless one process is enough; yields after each piece.

    The first error stops all of them; an interrupt stops them at once. Raises OSError if the system killed a
    process, most likely for lack of memory.
    """
    count = min(workers, len(tasks))
    if count < 2:
        _tokenizers[:] = [load_tokenizer(data)]
        yield from map(_build_one, tasks)
        return
    # Not forked: a process with threads cannot fork safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (data, workers // count)) as pool:
        try:
            with _without_interrupts():
                futures = [pool.submit(_build_one, task) for task in tasks]
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


def _build_one(task: _PieceOrder) -> None:
    build_piece(task.piece, task.text_key, task.bad_records, _tokenizers[0], folder_at(task.folder), print)
