"""``python -m train tokenize``: the cache of tokens alone, over all cores of a host, and by several hosts or jobs."""

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
from train.data.cache import TokensPlace, cache_of, is_forgotten, places_of
from train.data.corpus import INDEX, open_corpus
from train.data.sources import Told, report_corrupt
from train.data.storage import folder_at, is_url
from train.data.tokenizer import Tokenizer, load_tokenizer, token_type

_THREADS = "RAYON_NUM_THREADS"


class Job(NamedTuple):
    """One of `count` jobs, which are started independently and share no more than the cache's folder."""

    number: int = 0
    count: int = 1


class _PieceOrder(NamedTuple):
    """A piece to be built, and where."""

    folder: str
    text_key: str
    piece: Piece


def tokenize(config: Config, told: Told = print, job: Job | None = None, workers: int | None = None) -> None:
    """Builds this job's pieces of the cache that `fit` would build, and the index once those of all jobs are there.

    A piece is a file, or several small ones. Those that are whole are not built again; of one that was begun, the
    shards that are whole are kept. `workers` processes work side by side, one for each core by default.

    Which pieces are whose, sizes and numbers alone decide. Nothing is claimed, so nothing is held by a job that died,
    and it needs no more of a disk or an object store than that a file appears in one step: locks do not work on all
    network disks, and not behind URLs. A job that never ran is made up for by any command with fewer jobs.

    Raises FileNotFoundError and ValueError for text that is missing or unreadable, and a job that cannot be.
    """
    check(workers is None or workers > 0, f"--workers must be positive, found {workers}")
    tokenizer = load_tokenizer(config.data)
    places = _kept(config, tokenizer)
    if not places:
        told("data: so few bytes are encoded faster than read, and fit keeps them nowhere; set data.cache to keep them")
        return
    tasks = [_PieceOrder(place.path, place.text_key, piece) for place in places for piece in pieces_of(place.files)]
    absent = {(p.path, piece.number) for p in places for piece in missing(p.folder(), pieces_of(p.files))}
    mine = [tasks[index] for index in share([task.piece.size for task in tasks], job or Job())]
    left = [task for task in mine if (task.folder, task.piece.number) in absent]
    told(f"data: {len(left)} of {len(mine)} pieces of this job, {len(tasks)} in all, are to be tokenised")
    for done, _ in enumerate(_built(config.data, left, workers or _cores()), start=1):
        told(f"data: {done} of {len(left)} pieces are done")
    for place in places:
        _finish(place, token_type(tokenizer.vocabulary_size), told)


def _cores() -> int:
    """Those that this process may use; some systems know only those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kept(config: Config, tokenizer: Tokenizer) -> list[TokensPlace]:
    """The places of the text of all stages, each once, that `fit` would keep tokens of."""
    found = {}
    for stage in config.every_stage:
        places = places_of(stage, tokenizer)
        if is_url(cache_of(stage)) or not is_forgotten(stage, places, tokenizer):
            found |= {place.path: place for place in places}
    return list(found.values())


def _finish(place: TokensPlace, kind: np.dtype, told: Told) -> None:
    folder, pieces = place.folder(), pieces_of(place.files)
    absent = missing(folder, pieces)
    if absent:
        told(f"data: {folder} waits for {len(absent)} of {len(pieces)} pieces, of other jobs")
        return
    if folder.read(INDEX) is None:
        finish(folder, place.files, kind)
    corpus = open_corpus(folder)
    report_corrupt(corpus.corrupt, corpus.files, told)
    told(f"data: {folder} is whole: {corpus.tokens:,} tokens")


def share(sizes: Sequence[int], job: Job) -> list[int]:
    """The numbers of a job's pieces: the largest first, each goes to the job with the least so far."""
    loads = [(0, number) for number in range(job.count)]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[index] + 1, number))  # empty files are work too
        if number == job.number:
            mine.append(index)
    return mine


def job_of(environment: Mapping[str, str] = os.environ) -> Job:
    """Which job this is, as the environment tells: what names the processes of `fit`, SLURM's tasks, its job arrays.

    The only job where it tells nothing. Raises ValueError for numbers that make no sense.
    """
    if environment.get("JAX_NUM_PROCESSES"):
        return _job(environment.get("JAX_PROCESS_ID", ""), environment["JAX_NUM_PROCESSES"], "JAX_PROCESS_ID")
    number, count = 0, 1
    if environment.get("SLURM_ARRAY_TASK_COUNT"):
        first, step = (int(environment.get(f"SLURM_ARRAY_TASK_{name}", 1)) for name in ("MIN", "STEP"))
        number = (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
        count = int(environment["SLURM_ARRAY_TASK_COUNT"])
    if "SLURM_STEP_NODELIST" in environment:  # else it is the script, of which there is one
        tasks = int(environment.get("SLURM_NTASKS", 1))
        number, count = number * tasks + int(environment.get("SLURM_PROCID", 0)), count * tasks
    check(
        number < count,
        f"the job array has gaps: this is task {number + 1} of {count}, counted from the lowest number on; number them "
        "without gaps, as in --array=0-15, or name the job by --job and --jobs",
    )
    return Job(number, count)


def named_job(number: int | None, count: int | None) -> Job:
    """The job of the command's options. Raises ValueError unless both are there and fit each other."""
    if number is None or count is None:
        raise ValueError("--job and --jobs go together: which job this is, from 0 on, and how many there are")
    return _job(number, count, "--job")


def _job(number: int | str, count: int | str, name: str) -> Job:
    if not (str(number).isdigit() and str(count).isdigit() and int(number) < int(count)):
        raise ValueError(f"{name} must be from 0 to the number of jobs less 1, found {number!r} of {count!r} jobs")
    return Job(int(number), int(count))


def _built(data: DataConfig, tasks: Sequence[_PieceOrder], workers: int) -> Iterator[None]:
    """Builds pieces in processes of their own, unless one is enough; a step for each that is done.

    The first error ends all of them, an interrupt at once. Raises OSError when the system ended one, most likely for
    its memory.
    """
    count = min(workers, len(tasks))
    if count < 2:
        _tokenizers[:] = [load_tokenizer(data)]
        yield from map(_build_one, tasks)
        return
    # Not forked: a process with threads cannot be.
    context = multiprocessing.get_context("spawn")
    with _threads(workers // count), ProcessPoolExecutor(count, context, _begin, (data,)) as pool:
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
                f"one of {count} workers was ended from outside, perhaps for want of memory; --workers takes fewer, "
                "and what is built is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C comes at the end, and never to processes that are started in between: whoever started them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for the tokenizer's library in each process that is started."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = before or str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]


_tokenizers: list[Tokenizer] = []


def _begin(data: DataConfig) -> None:
    """In a new process: the tokenizer, and an end with the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizers.append(load_tokenizer(data))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _build_one(task: _PieceOrder) -> None:
    build_piece(task.piece, task.text_key, _tokenizers[0], folder_at(task.folder), print)
