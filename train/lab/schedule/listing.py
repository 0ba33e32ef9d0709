"""Reads the compiler's bundle listings: the loops and branches of a kernel, and the bundles of each.

A listing has one bundle per line, ``0x1d LB: >> { ... }``: its number, a label if it is the target of a branch, one
``>`` for every loop around it, and its instructions. Branches are relative, ``sbr.rel (!%p6) target = $region145``, and
comments mark the starts of regions. A backward branch closes a loop; a forward branch skips the bundles before its
target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from posjax._checks import check

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) (?: *([A-Z]{2}))? *: *(>*)", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%p\w+)\) )?target (?:= \$region(\d+)|bundleno = (\d+))")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_EXIT = "exit bundle"
_EMPTY = re.compile(r"\{ *\}")


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


def parse(text: str, branch_slots: int) -> Region:
    """The control flow of a kernel from its listing; `branch_slots` bundles still run after every branch."""
    bundles = list(_bundles(text))
    return _nest(Region("kernel", 0, len(bundles)), sorted(_regions(bundles, branch_slots), key=_outer_first))


def _outer_first(region: Region) -> tuple:
    # A loop's guard skips exactly the loop, so it is the outer of the two regions.
    return region.start, -region.stop, region.kind


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
