"""The kernels of one compiled program, read from the directory into which the compiler wrote its schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posjax._checks import check
from train.lab.schedule.listing import Region, parse

_FINAL = re.compile(r"^(\d+)-(.+)-\d+-final_bundles\.txt$")
_OPERAND = re.compile(r"inlined_call_operand\.vmem \[shape: (\S+?),? index")
_SLOTS = {"VLOAD:FILL": "FILL", "VSTORE:SPILL": "SPILL"}


@dataclass(frozen=True)
class KernelPart:
    """One region of a kernel and its contents, without nested regions."""

    kind: str  # kernel, loop or branch
    depth: int
    parent: int | None  # its index among the kernel's parts
    trips: int | None  # of a loop that counts to a constant
    bundles: int
    cycles: int  # with the scheduler's empty bundles for latencies and busy units
    slots: dict[str, int]  # how many of each unit's issue slots are used; FILL and SPILL move spilled registers

    @property
    def is_hot(self) -> bool:
        """Whether it uses the matrix units."""
        return self.slots.get("MXU", 0) > 0


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one of XLA's own fusions: its parts in program order, the whole kernel first."""

    name: str
    is_custom: bool  # written by hand: a Pallas kernel
    parts: tuple[KernelPart, ...]
    resident: tuple[str, ...]  # operands that the compiler moved into VMEM whole, before the kernel starts

    @property
    def bundles(self) -> int:
        """The number of all its bundles."""
        return sum(part.bundles for part in self.parts)


def read_kernels(directory: Path, branch_slots: int, part: str = "") -> tuple[Kernel, ...]:
    """Every kernel whose final schedule was dumped, or those with `part` in their names.

    If a name was compiled twice, the last one is taken.
    """
    found = {}
    for path in sorted(directory.iterdir()):
        match = _FINAL.match(path.name)
        if match and match[2] != "TLP" and not match[2].startswith("<") and part in match[2]:
            found[match[2]] = _read_kernel(path, match[1], match[2], branch_slots)
    return tuple(found.values())


def _read_kernel(path: Path, stamp: str, name: str, branch_slots: int) -> Kernel:
    def sibling(kind: str) -> str:
        return _only(path.parent, re.compile(rf"{stamp}-{re.escape(name)}-\d+-{kind}\.txt")).read_text()

    text = path.read_text()
    final, scheduled = parse(text, branch_slots), parse(sibling("packed-bundles-post-ra"), branch_slots)
    names, rows = _utilization(sibling("final_hlo-static-per-bundle-utilization"))
    check(len(rows) == final.stop, f"{name}: {final.stop} bundles listed, {len(rows)} rows of utilization")
    head = text[: text.find("\n", text.find("/* entry bundle"))]
    is_custom = "= custom-call(" in head.rpartition("/* entry bundle")[2]
    if not is_custom and _shape(final) != _shape(scheduled):
        # XLA's own operations, such as `reverse` for 7x, may lose a loop between the two listings; their stalls are
        # unknown.
        scheduled = final
    parts = tuple(_parts(final, scheduled, names, rows, name))
    return Kernel(name, is_custom, parts, tuple(_OPERAND.findall(head)))


def _shape(whole: Region) -> list[tuple[int, str]]:
    """The loops and branches of a listing, and how deep each is."""
    return [(depth, region.kind) for depth, region in whole.walk()]


def _only(directory: Path, pattern: re.Pattern) -> Path:
    found = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    check(len(found) == 1, f"{pattern.pattern}: expected one such file in the dump, found {len(found)}")
    return found[0]


def _utilization(text: str) -> tuple[list[str], list[list[int]]]:
    """The names of the issue slots, and how many of each slot every bundle uses."""
    head, _, body = text.partition("== UTILIZATION:")
    names = next(line for line in head.splitlines() if "MXU" in line).split(",")
    rows = [[int(number) for number in line.split()] for line in body.splitlines() if line.strip()]
    return [_SLOTS.get(name.strip(), name.strip()) for name in names], rows


def _parts(
    final: Region, scheduled: Region, names: list[str], rows: list[list[int]], kernel: str
) -> Iterator[KernelPart]:
    """The regions of the final listing, each with its cycles from the listing before empty bundles were dropped."""
    same = _shape(final) == _shape(scheduled)
    check(same, f"{kernel}: the scheduled and the final listing have different loops and branches")
    above: list[int] = []
    for index, ((depth, region), (_, clocked)) in enumerate(zip(final.walk(), scheduled.walk(), strict=True)):
        del above[depth:]
        slots = dict(zip(names, map(sum, zip(*region.own(rows), strict=True)), strict=False))
        parent = above[-1] if above else None
        yield KernelPart(region.kind, depth, parent, region.trips, region.bundles, clocked.bundles, slots)
        above.append(index)
