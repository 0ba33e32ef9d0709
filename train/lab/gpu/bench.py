"""Measures what a file of results lacks, within a time, and prints all results as tables."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from posjax._checks import check
from train.lab.gpu.config import GpuConfig
from train.lab.gpu.jobs import WHOLE_MODELS, Job
from train.lab.gpu.results import Results, tables
from train.lab.gpu.worker import Worker
from train.runtime.machine import processor, versions

_WIDTH = 160  # of tables that go into a file
_PACKAGES = ("jax", "jaxlib", "torch", "tokamax")


def bench_gpu(config: GpuConfig, directory: Path) -> Results:
    """Measures what ``gpu.jsonl`` in the run's directory lacks, and prints its tables.

    What libraries print is in ``gpu.log``. Raises ValueError without a GPU, unless `config.implementation` needs none,
    and if the file is of another device or of other versions.
    """
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    directory.mkdir(parents=True, exist_ok=True)
    results = Results(directory / "gpu.jsonl")
    wanted = _installed([job for job in config.jobs if job not in results.found], console)
    if wanted and config.seconds:
        _measure(config, wanted, results, console)
    for table in tables(config, results):
        console.print(table)
    console.print(" · ".join(f"{name} {found}" for name, found in results.machine.items()))
    console.print(f"numbers: {results.path}")
    return results


def _installed(jobs: Sequence[Job], console: Console) -> list[Job]:
    """The jobs whose library is installed; a line says which one is not."""
    absent = {job.package for job in jobs if importlib.util.find_spec(job.package) is None}
    for name in sorted(absent):
        console.print(f"{name} is not installed, and is left out")
    return [job for job in jobs if job.package not in absent]


def _measure(config: GpuConfig, jobs: Sequence[Job], results: Results, console: Console) -> None:
    """Measures one job after the other, until the time is over."""
    until = time.monotonic() + config.seconds
    workers = _Workers(config, jobs, results.path.with_suffix(".log"))
    try:
        results.claim(_machine(workers, config))
        while workers.jobs and time.monotonic() < until:
            job = workers.jobs[0]
            found = workers.measure_next()
            if found is None:
                console.print(f"{job.process} is left out: {workers.why[job.process]}", markup=False)
                continue
            results.add(job, found)
            console.print(f"{job}: {_words(found)}", highlight=False, markup=False)
    finally:
        workers.close()
    if workers.jobs:
        console.print(f"{len(workers.jobs)} measurements are left after {config.seconds} s; the same command goes on")


def _machine(workers: _Workers, config: GpuConfig) -> dict[str, str]:
    """What the results depend on: device, driver, processor, versions. Raises ValueError if there is no GPU."""
    about = workers.about("jax")
    check("problem" not in about, f"gpu: jax does not start: {about.get('problem')}; {workers.log} may say more")
    workers.platform = about["platform"]
    is_gpu = workers.platform == "gpu"
    check(
        is_gpu or config.implementation != "gpu",
        f"gpu.implementation: 'gpu' found no NVIDIA GPU, only {about['device']}; 'blockwise' or 'dense' would work",
    )
    driver = {"driver": _driver()} if is_gpu else {}
    return {"device": about["device"], **driver, "processor": processor(), **versions(_PACKAGES)}


def _driver() -> str:
    """The version of NVIDIA's driver, if its tool is installed."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout.split() or ["unknown"])[0]


def _words(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in found.items()
        if name != "kernels"
    )


class _Workers:
    """The processes that measure some jobs. All start at once; one that ends starts again with the jobs that remain.

    Args:
        jobs: those that remain, in their order.
        log: for what libraries print.
    """

    def __init__(self, config: GpuConfig, jobs: Sequence[Job], log: Path):
        self._config = config
        self.jobs = list(jobs)
        self.log = log
        self.platform = ""  # that of all results
        self.why: dict[str, str] = {}  # processes that are left out, and why
        self._about: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, Worker] = {}
        for name in sorted({"jax", *(job.process for job in jobs)}):
            self._start(name)

    def _start(self, name: str) -> None:
        jobs = [job for job in self.jobs if job.process == name]
        self._workers[name] = Worker(name, jobs, self._config.options, self.log)

    def about(self, name: str) -> dict[str, Any]:
        """What a process says about its device, or the problem; it starts again if it has ended."""
        if name in self._about and not self._workers[name].runs:
            self._start(name)
            del self._about[name]
        if name not in self._about:
            self._about[name] = self._workers[name].answer(self._config.timeout)
        return self._about[name]

    def measure_next(self) -> dict[str, Any] | None:
        """The result of the first job that remains. None if its process cannot run: then its jobs are dropped."""
        job = self.jobs[0]
        about = self.about(job.process)
        if "problem" in about:
            self._drop(job.process, about["problem"])
            return None
        if about["platform"] != self.platform:
            self._drop(job.process, f"it computes on the {about['platform']}, jax on the {self.platform}")
            return None
        del self.jobs[0]
        limit = self._config.model_timeout if job.what in WHOLE_MODELS else self._config.timeout
        found = self._workers[job.process].measure(job, limit)
        if job.process not in {each.process for each in self.jobs}:
            self._workers[job.process].close()  # its memory is for the others
        return found

    def _drop(self, name: str, why: str) -> None:
        self.why[name] = why
        self.jobs = [job for job in self.jobs if job.process != name]

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers.values():
            worker.close()
