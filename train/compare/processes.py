"""Trainings in processes of their own: started, watched, and their errors read.

By default each has a process for itself, one after the other, so that speed and peak memory are measured separately.
With ``compare.processes`` that many processes share all trainings, at the same time: each starts, imports and reads the
text once, and has its own part of the cores, which a small model uses better than all of them.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

from rich.console import Console

from train.compare.training import ERROR, finished
from train.config import CompareConfig, Config, to_dict
from train.monitor.logs import read_metrics
from train.monitor.progress import show_share
from train.runtime.paths import is_local, look_anew, python_path

Group = Sequence[Config]
"""Trainings of one scheme that run as one program."""

_TRAINED = 0.8  # the share of a training's time that is over when its last step is done, and it is measured; a guess


def run_trainings(
    configs: Sequence[Config], settings: CompareConfig, console: Console, trials: bool = False
) -> dict[str, str]:
    """Finishes and measures trainings; returns the reasons of failures, by the names of the trainings."""
    asked = [config for config in configs if not finished(config)]
    for config in configs:
        if config not in asked:
            console.print(f"{config.name} (finished before)", style="bold", markup=False)
    groups, count = _groups(asked, settings.together), settings.processes
    if not groups:
        return {}
    if count:
        console.print(", ".join(map(_names, groups)), style="bold", markup=False)
        errors = run_processes([groups[n::count] for n in range(min(count, len(groups)))], trials, console)
    else:
        errors = _one_by_one(groups, trials, console)
    for error in dict.fromkeys(errors.values()):
        console.print(error, style="red", markup=False)
    return errors


def _groups(configs: Sequence[Config], together: int) -> list[Group]:
    """The trainings in groups of one scheme, of at most `together` each."""
    by_scheme = [list(same) for _, same in itertools.groupby(configs, key=lambda config: config.scheme)]
    return [same[first : first + together] for same in by_scheme for first in range(0, len(same), together)]


def _one_by_one(groups: Sequence[Group], trials: bool, console: Console) -> dict[str, str]:
    errors, began = {}, time.monotonic()
    for done, group in enumerate(groups):
        left = f", about {_rounded((time.monotonic() - began) / done * (len(groups) - done))} left" if done else ""
        which = f" ({done + 1} of {len(groups)}{left})" if len(groups) > 1 else ""
        console.print(_names(group) + which, style="bold", markup=False)
        errors |= run_processes([[group]], trials)
    return errors


def _names(group: Group) -> str:
    return ", ".join(config.name for config in group)


def run_processes(shares: Sequence[Sequence[Group]], trials: bool, console: Console | None = None) -> dict[str, str]:
    """Trains and measures each share's groups, one after the other, in a process for each share; returns the errors.

    An error is in one line, by the name of the training. If there is a `console` the progress of all trainings is shown
    on it; otherwise each process shows its own on standard output. Standard error goes to a file next to the first
    directory of the share, which is kept if the process failed. An interrupt reaches all processes; this one waits
    until the others have saved.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_log(share[0][0])) for share in shares]
        with _passing_on(signal.SIGTERM) as follow:
            processes = [
                follow(_started(share, trials, file, console is None))
                for share, (_, file) in zip(shares, logs, strict=True)
            ]
            try:
                if len(processes) > 1:
                    _split_cores(processes)
                if console is not None:
                    _watch(processes, [config for share in shares for group in share for config in group], console)
            finally:
                for process in processes:
                    process.wait()
    errors = {}
    for share, process, (log, _) in zip(shares, processes, logs, strict=True):
        errors |= _errors(share, process.returncode, log)
    return errors


def _started(share: Sequence[Group], trials: bool, stderr: IO[str], alone: bool) -> subprocess.Popen:
    share[0][0].directory.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.compare.training"], stdin=subprocess.PIPE, stderr=stderr, text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    groups = [[to_dict(each) for each in group] for group in share]
    with suppress(BrokenPipeError), process.stdin:  # a process that ended at once tells why in its log
        process.stdin.write(json.dumps({"groups": groups, "trials": trials, "alone": alone}))
    return process


def _split_cores(processes: Sequence[subprocess.Popen]) -> None:
    """Gives each process its own part of the cores, where the system can and there are enough."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= len(processes):
        for number, process in enumerate(processes):
            with suppress(ProcessLookupError):  # one that was asked to stop may have ended
                os.sched_setaffinity(process.pid, cores[number :: len(processes)])


def _watch(processes: Sequence[subprocess.Popen], configs: Sequence[Config], console: Console) -> None:
    """Shows how far all trainings are and how long they still take, until the processes have ended."""
    began = time.monotonic()
    with show_share(console) as report:
        while any(process.poll() is None for process in processes):
            time.sleep(1)
            done = sum(map(_share_done, configs)) / len(configs)
            seconds = time.monotonic() - began
            left = f"about {_rounded(seconds / done * (1 - done))} left" if done else "compiling"
            report(done, left)


def _share_done(config: Config) -> float:
    if finished(config):
        return 1.0
    lines = read_metrics(config.directory)
    return _TRAINED * lines[-1]["step"] / config.steps if lines else 0.0


def _rounded(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def _errors(share: Sequence[Group], status: int, log: Path) -> dict[str, str]:
    """Why trainings of a share have no results. The log of a process that did not fail is removed."""
    for group in share:
        for each in group:
            look_anew(each.directory)
    if status == 0:
        log.unlink(missing_ok=True)
        return {}
    text = log.read_text(encoding="utf-8", errors="replace")
    return {
        config.name: f"{_cause(text, _names(group))} (status {status}, see {log})"
        for group in share
        for config in group
        if not finished(config)
    }


def _cause(stderr: str, names: str) -> str:
    """The error that the process wrote for a group; else its last error, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    own = [line.removeprefix(f"{names}: ") for line in errors if line.startswith(f"{names}: ")]
    return (own or errors or lines or ["no message"])[-1]


@contextmanager
def _log(training: Config) -> Iterator[tuple[Path, IO[str]]]:
    """A training's log and an open local file for it; in an object store it is written at the end."""
    location = training.directory.with_name(f"{training.name}.log")
    if is_local(location):
        location.parent.mkdir(parents=True, exist_ok=True)
        with location.open("w", encoding="utf-8") as file:
            yield location, file
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        try:
            yield location, file
        finally:
            file.seek(0)
            location.write_text(file.read(), encoding="utf-8")


@contextmanager
def _passing_on(number: int) -> Iterator[Callable[[subprocess.Popen], subprocess.Popen]]:
    """Forwards signals of this process to others, so that no training keeps running alone.

    Yields a function that adds a process and returns it; one that started while a signal came gets that signal then.
    Raises KeyboardInterrupt at the end if there was a signal, so that nothing more is started.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda process: process
        return
    received: list[int] = []
    processes: list[subprocess.Popen] = []
    told: set[int] = set()

    def pass_on(*_) -> None:
        received.append(number)
        for process in processes:
            told.add(process.pid)
            process.send_signal(number)

    def follow(process: subprocess.Popen) -> subprocess.Popen:
        processes.append(process)
        if received and process.pid not in told:
            process.send_signal(number)
        return process

    usual = signal.signal(number, pass_on)
    try:
        yield follow
    finally:
        signal.signal(number, usual)
    if received:
        raise KeyboardInterrupt
