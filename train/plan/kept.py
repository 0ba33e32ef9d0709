"""A compiled step of any trainer, kept in a folder, so that steps can be compared without compiling.

    program.txt    the optimised program: ``compiled.as_text()``
    step.json      {"memory": sizes of ``compiled.memory_analysis()`` in bytes, by its names,
                    "axes":   ``dict(mesh.shape)``,
                    "places": ``[[*device.coords, device.core_on_chip], ...]``, of the mesh's devices in its order}
    schedules/     the compiler's dump of its kernels, if that is kept; used for kernels that are not ours

`step.json` may also have ``"tokens"``, of a step over all devices, and ``"flags"``, with which it was compiled.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posjax._checks import check
from train.plan.compiling import CompiledStep, Memory
from train.plan.pods import Pod

PROGRAM, STEP, SCHEDULES = "program.txt", "step.json", "schedules"

_SIZES = {
    "arguments": "argument_size_in_bytes",
    "temp": "temp_size_in_bytes",
    "program": "generated_code_size_in_bytes",
    "kept": "output_size_in_bytes",
}
"""Names of `Memory` and of ``compiled.memory_analysis()``; results that reuse an argument's memory are subtracted from
``kept``."""

_ALIAS = "alias_size_in_bytes"
_OWN = ("parameters", "optimizer", "batch")


@dataclass(frozen=True)
class Kept:
    """The content of a folder."""

    name: str
    step: CompiledStep
    tokens: int | None = None  # of a step, over all devices
    schedules: Path | None = None


def keep(folder: Path, step: CompiledStep, tokens: int) -> None:
    """Writes a step of ours. Raises OSError for a folder that cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(step.memory, own) for own, name in _SIZES.items()}
    own = {name: getattr(step.memory, name) for name in _OWN}
    told = {"memory": {**sizes, **own}, "axes": step.axes, "places": step.places, "tokens": tokens, "flags": step.flags}
    (folder / PROGRAM).write_text(step.text, encoding="utf-8")
    (folder / STEP).write_text(json.dumps(told), encoding="utf-8")


def read(folder: Path, on: Pod) -> Kept:
    """The step that a folder holds, compiled for a pod.

    Raises ValueError for a folder without a step, or with a step for another pod.
    """
    for name in (PROGRAM, STEP):
        check((folder / name).is_file(), f"--against: {folder}: expected {PROGRAM} and {STEP}, found no {name}")
    told = _json(folder / STEP)
    axes, places = _axes(told, folder), _places(told, folder)
    devices = on.devices // on.slices
    check(
        len(places) == devices,
        f"--against: {folder / STEP}: places: expected those of the {devices} devices of {on.slice_name}, found "
        f"{len(places)}; --topology must be the pod that the step was compiled for",
    )
    text = (folder / PROGRAM).read_text(encoding="utf-8")
    step = CompiledStep(text, _memory(told, folder), axes, places, _flags(told, folder))
    schedules = folder / SCHEDULES
    found = schedules if schedules.is_dir() else None
    return Kept(folder.name, step, _tokens(told, folder), found)


def _json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--against: {path}: expected JSON: {error}") from None
    check(isinstance(told, dict), f"--against: {path}: expected an object, found {type(told).__name__}")
    return told


def _memory(told: dict[str, Any], folder: Path) -> Memory:
    sizes = told.get("memory")
    check(
        isinstance(sizes, dict) and all(_is_number(sizes.get(name)) for name in _SIZES.values()),
        f"--against: {folder / STEP}: memory: expected the bytes of {', '.join(_SIZES.values())}, found {sizes!r:.200}",
    )
    found = {own: sizes[name] for own, name in _SIZES.items()}
    found["kept"] -= min(found["kept"], sizes.get(_ALIAS, 0))
    return Memory(**found, **{name: sizes.get(name, 0.0) for name in _OWN})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axes(told: dict[str, Any], folder: Path) -> dict[str, int]:
    axes = told.get("axes")
    check(
        isinstance(axes, dict) and all(isinstance(size, int) and size > 0 for size in axes.values()),
        f'--against: {folder / STEP}: axes: expected sizes by name, as in {{"fsdp": 256}}, found {axes!r:.200}',
    )
    return axes


def _places(told: dict[str, Any], folder: Path) -> tuple[tuple[int, ...], ...]:
    places, devices = told.get("places"), math.prod(_axes(told, folder).values())
    is_list = isinstance(places, list) and all(
        isinstance(place, list) and len(place) == 4 and all(isinstance(at, int) for at in place) for place in places
    )
    check(
        is_list and places and devices % len(places) == 0,
        f"--against: {folder / STEP}: places: expected [x, y, z, core] of each of the {devices} devices of the mesh, "
        f"or of those of a slice, found {len(places) if is_list else repr(places)[:200]}",
    )
    return tuple(map(tuple, places))


def _tokens(told: dict[str, Any], folder: Path) -> int | None:
    tokens = told.get("tokens")
    check(
        tokens is None or (isinstance(tokens, int) and tokens > 0),
        f"--against: {folder / STEP}: tokens: expected those of a step over all devices, found {tokens!r}",
    )
    return tokens


def _flags(told: dict[str, Any], folder: Path) -> str | None:
    flags = told.get("flags")
    check(
        flags is None or isinstance(flags, str),
        f"--against: {folder / STEP}: flags: expected a text, as in LIBTPU_INIT_ARGS, found {flags!r}",
    )
    return flags
