"""The file of results, by which what is known is not measured again, and the tables of all results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from posjax._checks import check
from train.lab.gpu.config import GpuConfig
from train.lab.gpu.jobs import BACKWARD, DECODE, ERRORS, FORWARD, LIBRARIES, OURS, TILES, Job, Shape
from train.runtime.chips import GPUS

_FIXED = ("device", "jax", "jaxlib", "torch", "tokamax")
"""What must be the same for all results of a file."""

_BANDWIDTH = {gpu.kind: gpu.bandwidth for gpu in GPUS.values()}
"""GB/s of a card's memory by its data sheet, by the name that JAX gives the kind of its devices."""
_NONE = "-"


class Results:
    """The results in a file: one JSON object a line, the machine first, each written as soon as it is known.

    A problem is a result too: who wants to try again deletes its line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.machine: dict[str, str] = {}
        self.found: dict[Job, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            values = json.loads(line)
            if "machine" in values:
                self.machine |= values["machine"]
                return
            job = Job(values.pop("what"), values.pop("library"), Shape(**values.pop("shape")))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path}, line {number}: not a result of this bench; delete the line") from None
        self.found[job] = values

    def claim(self, machine: dict[str, str]) -> None:
        """Writes on which machine results are measured from now on.

        Raises ValueError if the file has results of another device, or of other versions. A library that was not
        installed before may be added.
        """
        for name in _FIXED:
            known = self.machine.get(name)
            found = machine.get(name, known)
            check(
                known in (None, found),
                f"name: {self.path} has results of {name} {known}, found {found}; another name would work, as in "
                "name=gpu-2",
            )
        if machine.keys() - self.machine.keys():
            self._write({"machine": machine})
        self.machine |= machine

    def add(self, job: Job, result: dict[str, Any]) -> None:
        """Writes a result: numbers, or a problem."""
        self._write(dataclasses.asdict(job) | result)
        self.found[job] = result

    def _write(self, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def tables(config: GpuConfig, results: Results) -> Iterator[Table | Text]:
    """One table for every length and size of heads, one of errors, one of decoding; then all problems."""
    for length in dict.fromkeys((*config.lengths, config.loop_length)):
        for size in config.sizes:
            yield from _times(config, results, length, size)
    yield from _errors(config, results)
    yield from _steps(config, results)
    yield from _generations(config, results)
    yield from _decoding(config, results)
    yield from _other_tiles(config, results)
    for job in config.jobs:
        problem = results.found.get(job, {}).get("problem")
        if problem:
            yield Text(f"{job}: {problem}")


def _times(config: GpuConfig, results: Results, length: int, size: int) -> Iterator[Table]:
    """Milliseconds of every form, forward / forward and backward, by library, for the libraries that have any."""

    def found(library: str, form: str) -> list[float | None]:
        shape = config.shape(form, length, size)
        jobs = [Job(direction, library, shape) for direction in (FORWARD, BACKWARD)]
        return [results.found.get(job, {}).get("ms") for job in jobs]

    forms = [form for form in config.forms if any(found(OURS, form))]
    others = [name for name in (*LIBRARIES, "blockwise") if name != OURS]
    others = [name for name in others if any(any(found(name, form)) for form in config.forms)]
    if not forms and not others:
        return
    title = f"{length:,} tokens, {config.heads} heads of {size}: ms, forward / forward + backward"
    grid = Table("form", OURS, "posjax over cuDNN causal", *others, title=title)
    anchor = found("cudnn", "causal")
    for form in config.forms:
        ours = found(OURS, form)
        rows = [found(name, form) for name in others]
        if any(map(any, (ours, *rows))):
            grid.add_row(form, _pair(ours), _pair(map(_over, ours, anchor)), *map(_pair, rows))
    yield grid


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _pair(numbers: Any) -> str:
    """Two numbers in one cell."""
    return " / ".join(_NONE if number is None else f"{number:.3g}" for number in numbers)


def _errors(config: GpuConfig, results: Results) -> Iterator[Table]:
    """The error of the output and of every gradient."""
    jobs = [job for job in config.jobs if job.what == ERRORS]
    rows = [(job.shape, results.found[job]) for job in jobs if "out" in results.found.get(job, {})]
    if not rows:
        return
    columns = list(rows[0][1])
    title = f"Errors against dense float32, {config.error_length:,} tokens, 8 heads over 2: norm over norm"
    grid = Table("form", "size", "out", *(f"gradient of {name}" for name in columns[1:]), title=title)
    for shape, errors in rows:
        grid.add_row(shape.form, str(shape.size), *(f"{errors[name]:.1e}" for name in columns))
    yield grid


def _steps(config: GpuConfig, results: Results) -> Iterator[Table]:
    """Time, speed and memory of training steps; then the longest kernels of the first."""
    found = {job: results.found[job] for job in config.steps if "ms" in results.found.get(job, {})}
    if not found:
        return
    steps = Table("step", "library", "ms", "tokens/s", "GiB", title=f"A training step of {config.step}")
    for job, result in found.items():
        numbers = (result[name] for name in ("ms", "tokens_per_second", "gibibytes"))
        steps.add_row(job.shape.form, job.library, *(f"{number:,.1f}" for number in numbers))
    yield steps
    job = next((job for job in found if job.library == OURS), None)
    if job is not None:
        kernels = Table("kernel", "ms of a step", "calls", title=f"The longest kernels of a step, {job.shape.form}")
        for name, ms, calls in found[job]["kernels"]:
            kernels.add_row(name, f"{ms:.2f}", str(calls))
        yield kernels


def _generations(config: GpuConfig, results: Results) -> Iterator[Table]:
    """Milliseconds of a token, and tokens of all rows a second."""
    table = Table("texts", "library", "ms", "tokens/s", title=f"Greedy tokens of {config.generation}")
    for job in config.generations:
        if "ms" in results.found.get(job, {}):
            numbers = (results.found[job][name] for name in ("ms", "tokens_per_second"))
            table.add_row(job.shape.form, job.library, *(f"{number:,.2f}" for number in numbers))
    if table.row_count:
        yield table


def _decoding(config: GpuConfig, results: Results) -> Iterator[Table]:
    """Time and bandwidth of one layer, by library."""
    found = {job: results.found[job] for job in config.jobs if job.what == DECODE and job in results.found}
    if not found:
        return
    bandwidth = _BANDWIDTH.get(results.machine.get("device", ""))
    libraries = list(dict.fromkeys(job.library for job in found))
    share = ", and their share of the card's" if bandwidth else ""
    title = f"One query over {config.decode_length:,} keys: ms, GB/s of keys and values{share}"
    grid = Table("heads", "over", "size", *libraries, title=title)
    for shape in dict.fromkeys(job.shape for job in found):
        cells = [_decoded(found.get(Job(DECODE, name, shape), {}), bandwidth) for name in libraries]
        grid.add_row(str(shape.heads), str(shape.kv_heads), str(shape.size), *cells)
    yield grid


def _other_tiles(config: GpuConfig, results: Results) -> Iterator[Table]:
    """Milliseconds forward and backward, by form and size of heads, for other sizes of tiles."""
    found = {job: results.found[job] for job in config.jobs if job.what == TILES and job in results.found}
    if not found:
        return
    shapes = list(dict.fromkeys(job.shape for job in found))
    columns = (f"{shape.form}, {shape.size}" for shape in shapes)
    title = f"posjax with other tiles, {shapes[0].length:,} tokens: ms, forward + backward"
    grid = Table("tiles", *columns, title=title)
    for name in dict.fromkeys(job.library for job in found):
        times = (found.get(Job(TILES, name, shape), {}).get("ms") for shape in shapes)
        grid.add_row(name, *(_NONE if ms is None else f"{ms:.3g}" for ms in times))
    yield grid


def _decoded(result: dict[str, Any], bandwidth: float | None) -> str:
    if "ms" not in result:
        return _NONE
    speed = result["gigabytes_per_second"]
    share = f", {speed / bandwidth:.0%}" if bandwidth else ""
    return f"{result['ms']:.3g} ms, {speed:,.0f} GB/s{share}"
