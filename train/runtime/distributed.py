"""The processes of a run: how they find each other, agree with each other, stop together and fail together.

A pod runs one process a host, each the same command. On one host all of this does nothing.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.runtime.lines import in_a_line
from train.runtime.paths import is_store_error

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Variables for processes without a cluster: the address of process 0 (host:port), the number of processes, and
this process's number."""

LOST = "another process ended or cannot be reached"
_SIGNS_OF_LOSS = ("closed by peer", "Connection reset", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_INTERRUPTED, _WRONG_INPUT, _FAILED = 130, 2, 1
_SILENCE = 30  # seconds without a heartbeat after which jax ends all processes
_GRACE = 1.0  # seconds in which other processes may report the same error
_leaving = threading.Lock()


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes of this run, if the environment names any. Call it before anything uses jax's devices.

    In this order: `EXPLICIT` variables; a TPU pod slice, several slices or GKE; SLURM; Open MPI; else one process.
    Raises ValueError when only some of the `EXPLICIT` variables are set.
    """
    if jax.distributed.is_initialized():
        return
    present = [name for name in EXPLICIT if environment.get(name)]
    if present and (len(present) == len(EXPLICIT) or not _in_cluster(environment)):
        address, count, index = _explicit(environment)
        explicit = {"cluster_detection_method": "deactivate"}
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=_SILENCE, **explicit)
    elif _in_cluster(environment):
        jax.distributed.initialize(heartbeat_timeout_seconds=_SILENCE)


def _explicit(environment: Mapping[str, str]) -> tuple[str, int, int]:
    missing = [name for name in EXPLICIT if not environment.get(name)]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not set; a process of several needs {', '.join(EXPLICIT)}")
    address, count, index = (environment[name] for name in EXPLICIT)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(f"JAX_PROCESS_ID must be from 0 to JAX_NUM_PROCESSES - 1, found {index!r} of {count!r}")
    if not address.rpartition(":")[2].isdigit():
        raise ValueError(f"JAX_COORDINATOR_ADDRESS must be host:port, found {address!r}")
    return address, int(count), int(index)


def _in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a cluster that jax detects started this process; a TPU VM of one host counts too."""
    on_cpu = environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    return (
        (_has_tpu(environment) and not on_cpu)
        or (int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in environment)
        or int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
        or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    )


def _has_tpu(environment: Mapping[str, str]) -> bool:
    """Whether this is a host of TPUs: it has chips as devices, and GKE's list of hosts or Google Cloud's metadata
    server."""
    chips = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
    listed = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & environment.keys()
    return chips and (bool(listed) or "TPU_SKIP_MDS_QUERY" not in environment)


_SHARED_ERRORS = (FileNotFoundError, OSError, ValueError)
"""Kinds of errors that are raised on all processes; a subclass comes before its base class."""


def gather(text: str) -> list[str]:
    """The texts of all processes, in their order, returned on every process. All processes must call it."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(encoded.size))
    padded = np.zeros(max(lengths.max(), 1), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def decide(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 alone and returns its result on every process; it must be a JSON value.

    A ValueError or OSError that it raises is raised on all processes, so that none waits for another.
    """
    return collect(function if jax.process_index() == 0 else lambda: None)[0]


def decided(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that all processes call together, and only process 0 executes; see `decide`."""
    return wraps(function)(lambda *given, **named: decide(lambda: function(*given, **named)))


def collect(function: Callable[[], Any]) -> list[Any]:
    """Calls `function` on every process and returns all results, in process order, on each; they must be JSON values.

    A ValueError or OSError of any of them is raised on all, so that none waits for another.
    """
    if jax.process_count() == 1:
        return [function()]
    try:
        outcome = None, function()
    except _SHARED_ERRORS as error:
        outcome = next(n for n, kind in enumerate(_SHARED_ERRORS) if isinstance(error, kind)), str(error)
    outcomes = [json.loads(each) for each in gather(json.dumps(outcome))]
    for kind, value in outcomes:
        if kind is not None:
            raise _SHARED_ERRORS[kind](value)
    return [value for _, value in outcomes]


def print_once() -> Callable[[str], Any]:
    """A function that prints a line on process 0, and does nothing on the other processes."""
    return partial(print, flush=True) if jax.process_index() == 0 else lambda _: None


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one has its usual effect. Works in the main thread only.

    With several processes jax itself listens for SIGTERM, notifies the others and lets all stop after the same step. So
    SIGINT becomes a SIGTERM here; ask `reached_preemption`, not the event.
    """
    stop, is_joined = threading.Event(), jax.distributed.is_initialized()
    numbers = (signal.SIGINT,) if is_joined else (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, _: Any) -> None:
        signal.signal(number, usual[number])
        if is_joined:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stop.set()

    in_main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.signal(number, ask) for number in numbers if in_main}
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def reached_preemption(step: int, stop: threading.Event) -> bool:
    """Whether to save after `step` updates and stop, because a process got a signal; the same answer on all processes.

    All processes must ask after every step, and before the first one, with `listen`. The process with the signal
    continues until the step after the furthest that any process has reached. Once the answer is yes, `stop` is set and
    the answer stays yes.
    """
    if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(step):
        stop.set()
    return stop.is_set()


def listen(step: int, stop: threading.Event) -> None:
    """Asks for the first time, when a process resumes after `step` updates; call it on all processes.

    jax answers yes at one step only, the one after the furthest step that any process has asked for. A process that
    got the signal before its first question would wait for step 1, and a resumed run never asks for step 1.
    """
    reached_preemption(1, stop)
    reached_preemption(max(step, 1), stop)


@contextmanager
def processes() -> Iterator[None]:
    """Joins the other processes for the duration of a `with`. If this process fails, it exits at once, with one line.

    Waiting for the others, as jax does at the end of a program, would hang: they wait for this one inside a step. They
    notice the broken connection, or its missing heartbeats, and end too. On one host errors propagate.
    """
    start()
    if jax.process_count() == 1:
        yield
        return
    try:
        yield
    except BaseException as error:
        _leave(error)


def _leave(error: BaseException) -> None:
    """Ends this process, with one line for a wrong input or a lost process, and a traceback for anything else."""
    _leaving.acquire()  # never released: only one thread may end the process
    this_process = f"process {jax.process_index()} of {jax.process_count()}"
    if isinstance(error, KeyboardInterrupt):
        message, status = f"{this_process} stopped; the same command resumes from the newest checkpoint", _INTERRUPTED
    elif is_loss(error):
        detail = str(error).splitlines()[0][:200]
        message, status = f"error: {this_process}: {LOST}; start all of them again to resume ({detail})", _FAILED
    elif isinstance(error, ValueError | OSError) or is_store_error(error):
        message, status = f"error: {this_process}: {in_a_line(error)}", _WRONG_INPUT
    else:
        message, status = f"error: {this_process} failed\n{''.join(traceback.format_exception(error))}", _FAILED
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if not is_loss(error):
        time.sleep(_GRACE)  # the others may be about to report the same error
    os._exit(status)


def is_loss(error: BaseException | None) -> bool:
    """Whether an error's message says that another process died."""
    runtime = isinstance(error, jax.errors.JaxRuntimeError | TimeoutError)
    return (runtime and any(sign in str(error) for sign in _SIGNS_OF_LOSS)) or "Gloo" in str(error)
