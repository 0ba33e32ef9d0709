"""A compiled step of any trainer, saved in a folder, so that steps can be compared without compiling.

    program.txt    the optimised program: ``compiled.as_text()``
    step.json      {"memory": sizes of ``compiled.memory_analysis()`` in bytes, by its names,
                    "axes":   ``dict(mesh.shape)``,
                    "coordinates": ``[[*device.coords, device.core_on_chip], ...]``, of the mesh's devices in its order}
    schedules/     the compiler's dump of its kernels, if there are some that are not ours

`step.json` may also have ``"tokens"``, the tokens of a step over all devices, and ``"flags"``, the compiler's flags.
Other keys are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from posjax._checks import check
from train.config.typed import section
from train.plan.compiling import CompiledStep, DeviceMemory
from train.plan.pods import Pod
from train.runtime.lines import in_a_line

PROGRAM, STEP, SCHEDULES = "program.txt", "step.json", "schedules"

_SIZES = {
    "arguments": "argument_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "program": "generated_code_size_in_bytes",
    "kept": "output_size_in_bytes",
}
"""Fields of `DeviceMemory`, and their names in ``compiled.memory_analysis()``. Results in the memory of an argument are
subtracted from ``kept``."""

_ALIAS = "alias_size_in_bytes"


@dataclass(frozen=True)
class SavedStep:
    """A compiled step, as a folder holds it."""

    name: str
    step: CompiledStep
    tokens: int | None = None  # of a step, over all devices
    schedules: Path | None = None


@dataclass(frozen=True)
class StepFile:
    """The content of ``step.json``."""

    memory: Mapping = field(default_factory=dict)
    axes: Mapping = field(default_factory=dict)
    coordinates: tuple[tuple[int, ...], ...] = ()
    tokens: int | None = None
    flags: str | None = None

    def __post_init__(self):
        check(
            all(type(self.memory.get(name)) in (int, float) for name in _SIZES.values()),
            f"step.memory: expected the bytes of {', '.join(_SIZES.values())}, found {self.memory!r:.200}",
        )
        check(
            bool(self.axes) and all(isinstance(size, int) and size > 0 for size in self.axes.values()),
            f'step.axes: expected sizes by name, as in {{"fsdp": 256}}, found {self.axes!r:.200}',
        )
        devices = math.prod(self.axes.values())
        check(
            bool(self.coordinates)
            and all(len(each) == 4 for each in self.coordinates)
            and devices % len(self.coordinates) == 0,
            f"step.coordinates: expected [x, y, z, core] of each of the {devices} devices of the mesh, or of those of "
            f"a slice, found {len(self.coordinates)}: {self.coordinates!r:.200}",
        )
        check(
            self.tokens is None or self.tokens > 0,
            f"step.tokens: expected those of a step over all devices, found {self.tokens}",
        )


def save(folder: Path, step: CompiledStep, tokens: int) -> None:
    """Writes a step of ours. Raises OSError for a folder that cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(step.memory, key) for key, name in _SIZES.items()}
    file = StepFile(sizes, step.axes, step.coordinates, tokens, step.flags)
    (folder / PROGRAM).write_text(step.text, encoding="utf-8")
    (folder / STEP).write_text(json.dumps(asdict(file)), encoding="utf-8")


def read(folder: Path, pod: Pod) -> SavedStep:
    """The step that a folder holds.

    Raises ValueError for a folder without a step, or with a step that was compiled for another pod than `pod`.
    """
    for name in (PROGRAM, STEP):
        check((folder / name).is_file(), f"--against: {folder}: expected {PROGRAM} and {STEP}, found no {name}")
    try:
        file = section(json.loads((folder / STEP).read_text(encoding="utf-8")), StepFile, "step")
    except ValueError as error:
        raise ValueError(f"--against: {folder / STEP}: {in_a_line(error, 400)}") from None
    devices = pod.devices // pod.slices
    check(
        len(file.coordinates) == devices,
        f"--against: {folder / STEP}: coordinates: expected those of the {devices} devices of {pod.slice_name}, found "
        f"{len(file.coordinates)}; --topology must be the pod that the step was compiled for",
    )
    text = (folder / PROGRAM).read_text(encoding="utf-8")
    step = CompiledStep(text, _memory(file.memory), dict(file.axes), file.coordinates, file.flags)
    schedules = folder / SCHEDULES
    return SavedStep(folder.name, step, file.tokens, schedules if schedules.is_dir() else None)


def _memory(sizes: Mapping[str, float]) -> DeviceMemory:
    """The memory of a step, without the kinds of its arguments."""
    found = {key: sizes[name] for key, name in _SIZES.items()}
    found["kept"] -= min(found["kept"], sizes.get(_ALIAS, 0))
    return DeviceMemory(parameters=0.0, optimizer=0.0, batch=0.0, **found)
