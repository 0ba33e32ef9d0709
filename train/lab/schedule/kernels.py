"""The kernels of one compiled program, read from the directory into which the compiler wrote its schedules.

A listing has one bundle per line, ``0x1d LB: >> { ... }``: its number, a label if it is the target of a branch, one
``>`` for every loop around it, and its instructions. Branches are relative, ``sbr.rel (!%p6) target = $region145``, and
comments mark the starts of regions. A backward branch closes a loop; a forward branch skips the bundles before its
target.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posjax._checks import check

_FINAL = re.compile(r"^(\d+)-(.+)-\d+-final_bundles\.txt$")
_CUSTOM = re.compile(r"/\* entry bundle.*= custom-call\(")
_SLOTS = {"VLOAD:FILL": "FILL", "VSTORE:SPILL": "SPILL"}
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) (?: *([A-Z]{2}))? *: *(>*)", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%p\w+)\) )?target (?:= \$region(\d+)|bundleno = (\d+))")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_EXIT = "exit bundle"
_EMPTY = re.compile(r"\{ *\}")


@dataclass(frozen=True)
class KernelPart:
    """One region of a kernel and its contents, without nested regions."""

    kind: str  # kernel, loop or branch
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
    """One kernel that is written by hand: its parts in program order, the whole kernel first."""

    name: str
    parts: tuple[KernelPart, ...]


def read_kernels(directory: Path, branch_slots: int, part: str = "") -> tuple[Kernel, ...]:
    """Every kernel whose final schedule was dumped, or those with `part` in their names, without XLA's own fusions.

    If a name was compiled twice, the last one is taken.
    """
    found = {}
    for path in sorted(directory.iterdir()):
        match = _FINAL.match(path.name)
        if match and part in match[2] and _CUSTOM.search(text := path.read_text()):
            found[match[2]] = _read_kernel(path, text, match[1], match[2], branch_slots)
    return tuple(found.values())


def _read_kernel(path: Path, text: str, stamp: str, name: str, branch_slots: int) -> Kernel:
    def sibling(kind: str) -> str:
        found = list(path.parent.glob(f"{stamp}-{glob.escape(name)}-*-{kind}.txt"))
        check(len(found) == 1, f"{name}: expected one listing of the kind {kind} in the dump, found {len(found)}")
        return found[0].read_text()

    final, scheduled = parse_listing(text, branch_slots), parse_listing(sibling("packed-bundles-post-ra"), branch_slots)
    names, rows = _utilization(sibling("final_hlo-static-per-bundle-utilization"))
    check(len(rows) == final.stop, f"{name}: {final.stop} bundles listed, {len(rows)} rows of utilization")
    return Kernel(name, tuple(_parts(final, scheduled, names, rows, name)))


def _shape(whole: Region) -> list[tuple[int, str]]:
    """The loops and branches of a listing, and how deep each is."""
    return [(depth, region.kind) for depth, region in whole.walk()]


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
        yield KernelPart(region.kind, parent, region.trips, region.bundles, clocked.bundles, slots)
        above.append(index)


@dataclass(frozen=True)
class Region:
    """A kernel, or one loop or conditional of it: the bundles [start, stop), and the regions nested in them."""

    kind: Literal["kernel", "loop", "branch"]
    start: int
    stop: int
    trips: int | None = None  # the trips of a loop that counts up to a constant
    parts: tuple[Region, ...] = field(default=())

    @property
    def bundles(self) -> int:
        """Its own bundles, without those of nested regions."""
        return self.stop - self.start - sum(part.stop - part.start for part in self.parts)

    def own(self, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The rows of the bundles that are not in nested regions; `rows` has one row for each bundle of the listing."""
        edges = [self.start, *(edge for part in self.parts for edge in (part.start, part.stop)), self.stop]
        return [row for start, stop in zip(edges[::2], edges[1::2], strict=True) for row in rows[start:stop]]

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Region]]:
        """Every region with its depth, in program order."""
        yield depth, self
        for part in self.parts:
            yield from part.walk(depth + 1)


@dataclass(frozen=True)
class _Bundle:
    label: str
    depth: int
    text: str

    @property
    def is_empty(self) -> bool:
        return bool(_EMPTY.search(self.text))


def parse_listing(text: str, branch_slots: int) -> Region:
    """The control flow of a kernel from its listing; `branch_slots` bundles still run after every branch."""
    bundles = list(_bundles(text))

    def outer_first(region: Region) -> tuple:
        # A loop's guard skips exactly the loop, so it is the outer of the two regions.
        return region.start, -region.stop, region.kind

    return _nest(Region("kernel", 0, len(bundles)), sorted(_regions(bundles, branch_slots), key=outer_first))


def _bundles(text: str) -> Iterator[_Bundle]:
    """The bundles in order. Comments may run over several lines."""
    marks = list(_BUNDLE.finditer(text))
    check(bool(marks), "listing: no bundles found; libtpu's format may have changed")
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        body = text[mark.end() : following.start() if following else None]
        yield _Bundle(mark[2] or "", len(mark[3]), body)


def _regions(bundles: Sequence[_Bundle], branch_slots: int) -> Iterator[Region]:
    """Every loop, and every range that a branch skips."""
    starts = _starts(bundles)
    for index, bundle in enumerate(bundles):
        for predicate, name, number in _BRANCH.findall(bundle.text):
            target = int(number) if number else starts.get(name, starts.get(_EXIT))
            check(target is not None, f"listing: a branch to region {name}, which starts nowhere")
            if target <= index:
                yield Region("loop", target, _behind(bundles, index), _trips(bundles, target, index, predicate))
            else:
                start = _behind_slots(bundles, index, branch_slots)
                if start < target:
                    yield Region("branch", start, target)


def _starts(bundles: Sequence[_Bundle]) -> dict[str, int]:
    """Where each region starts. A branch out of the kernel goes to a region without a name, the exit."""
    starts = {}
    for index, bundle in enumerate(bundles):
        for name in _START.findall(bundle.text):
            starts.setdefault(name, index)
        if _EXIT in bundle.text:
            starts[_EXIT] = index
    return starts


def _behind(bundles: Sequence[_Bundle], branch: int) -> int:
    """The bundle after a loop's closing branch: the first one outside, or the start of the next loop.

    An empty bundle shows no depth.
    """
    depth = max(bundle.depth for bundle in bundles[max(0, branch - 8) : branch + 1])
    for index in range(branch + 1, len(bundles)):
        if bundles[index].label or (not bundles[index].is_empty and bundles[index].depth < depth):
            return index
    return len(bundles)


def _behind_slots(bundles: Sequence[_Bundle], branch: int, slots: int) -> int:
    """Where execution continues if a forward branch is not taken: after its slots; a listing may omit empty ones."""
    for index in range(branch + 1, min(branch + 1 + slots, len(bundles))):
        if bundles[index].label:
            return index
    return branch + 1 + slots


def _trips(bundles: Sequence[_Bundle], start: int, stop: int, predicate: str) -> int | None:
    """How often a loop runs that counts from zero up to a constant, ``%p = scmp.ge.s32.totalorder %s, 66``."""
    body = "".join(bundle.text for bundle in bundles[start : stop + 1])
    test = re.findall(rf"{re.escape(predicate.lstrip('!'))} = scmp\.ge\.s32\.totalorder (%s\w+), (\d+)\b", body)
    if not predicate.startswith("!") or not test:
        return None
    counter, bound = test[-1]
    step = re.findall(rf"{re.escape(counter)} = sadd\.s32 (\d+),", body)
    return math.ceil(int(bound) / int(step[-1] if step else 1))


def _nest(outer: Region, inner: Sequence[Region]) -> Region:
    """`outer` with the regions `inner` nested in it and in each other; `inner` has outer regions first."""
    parts, rest = [], list(inner)
    while rest:
        head, tail = rest[0], rest[1:]
        check(
            outer.start <= head.start and head.stop <= outer.stop,
            f"listing: the {head.kind} of bundles {head.start} to {head.stop} crosses the {outer.kind} of bundles "
            f"{outer.start} to {outer.stop}; only nested control flow is understood",
        )
        within = [region for region in tail if region.start < head.stop]
        parts.append(_nest(head, within))
        rest = tail[len(within) :]
    return Region(outer.kind, outer.start, outer.stop, outer.trips, tuple(parts))
