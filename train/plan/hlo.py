"""Reads the text of an optimised XLA program: its computations, their calls, and the trip counts of loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Bytes of one number; of types that are not listed, 8-bit floats (``f8...``) have one byte and the others four."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ONE_CALL = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HOST = 5
"""The number of the host's memory space, which is reached through HBM."""


@dataclass(frozen=True)
class Array:
    """The type of an array."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0  # the memory space it is in

    @property
    def bytes(self) -> int:
        """Its size, without padding."""
        size = BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 4)
        return math.prod(self.shape) * size

    @property
    def in_hbm(self) -> bool:
        """Whether it is in HBM or reached through HBM, not in a memory of the cores."""
        return self.space in (0, _HOST)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    arguments: str  # the text in the parentheses after the opcode
    attributes: str
    is_root: bool

    @property
    def results(self) -> list[Array]:
        """The arrays it produces; for a tuple all of them."""
        return arrays(self.type)

    @property
    def op_name(self) -> str:
        """Its name in the traced function, ``jit(update)/jvp()/while/body/dot_general``; empty if it has none."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The cycles that the compiler expects, on all cores of a device at once; None if it gives no estimate."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def calls(self) -> list[str]:
        """The computations it runs: a loop's body, all branches of a conditional, the inside of a fusion."""
        branches = _BRANCHES.search(self.attributes)
        if branches:
            return [name.strip().lstrip("%") for name in branches[1].split(",")]
        return _ONE_CALL.findall(self.attributes)

    def attribute(self, pattern: str) -> str | None:
        """The value of an attribute, matched by a pattern with one group."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclass(frozen=True)
class Module:
    """A program. A computation is the list of its instructions, in the order in which they start."""

    entry: str
    computations: dict[str, list[Instruction]]

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: as stated by the compiler, or derived from a counter that runs up to a constant.

        None if neither is available.
        """
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known[1])
        condition = self.named.get(loop.attribute(r"condition=%?([\w.\-]+)"), {})
        bound, index = _bound(condition)
        if bound is None:
            return None
        step = self._step(loop.attribute(r"body=%?([\w.\-]+)"), index)
        return max(1, math.ceil(bound / step))

    @cached_property
    def named(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of every computation by name."""
        return {name: {line.name: line for line in lines} for name, lines in self.computations.items()}

    def called(self, line: Instruction) -> list[str]:
        """The computations that an instruction runs, if the text contains them."""
        return [name for name in line.calls if name in self.computations]

    def _step(self, body: str, index: int | None) -> int:
        """The increment per trip of the counter at this index of the loop's state: the sum of what is added to it."""
        lines = self.named[body]
        root = next(line for line in lines.values() if line.is_root)
        if index is None or root.opcode != "tuple":
            return 1
        step, line = 0, lines.get(root.operands[index])
        while line is not None and line.opcode in ("add", "copy"):
            parts = [lines.get(name) for name in line.operands]
            constants = [number for part in parts if part and (number := _constant(part)) is not None]
            step += sum(constants)
            line = next((part for part in parts if part and _constant(part) is None), None)
        return step or 1


def _bound(condition: dict[str, Instruction]) -> tuple[int | None, int | None]:
    """The constant that a loop's counter is compared with, and the counter's index in the loop's state."""
    numbers = [number for line in condition.values() if (number := _constant(line)) is not None]
    indices = [line.attribute(r"index=(\d+)") for line in condition.values() if line.opcode == "get-tuple-element"]
    if len(numbers) != 1:
        return None, None
    return numbers[0], int(indices[0]) if len(indices) == 1 else None


def _constant(line: Instruction) -> int | None:
    is_number = line.opcode == "constant" and re.fullmatch(r"-?\d+", line.arguments)
    return int(line.arguments) if is_number else None


def arrays(text: str) -> list[Array]:
    """The types of arrays that appear in a text, in order."""
    return [
        Array(dtype, tuple(map(int, filter(None, shape.split(",")))), int(space or 0))
        for dtype, shape, space in _ARRAY.findall(text)
    ]


def parse(text: str) -> Module:
    """The program of `Compiled.as_text()`.

    Raises ValueError for a text without a program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = None
    for line in _lines(text):
        head = _HEAD.match(line)
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif computations and (found := _instruction(line)):
            current.append(found)
    if entry is None:
        raise ValueError("no program found in the compiler's text; its format may have changed")
    return Module(entry, computations)


def _lines(text: str) -> Iterator[str]:
    """The lines of a program. The metadata of a kernel may span several lines, which are joined."""
    whole: list[str] = []
    for line in text.splitlines():
        if whole and (not line or line == "}" or _NAME.match(line) or _HEAD.match(line)):
            yield "".join(whole)
            whole.clear()
        whole.append(line)
    yield "".join(whole)


def _instruction(line: str) -> Instruction | None:
    """The instruction of a line ``  %name = type opcode(arguments), attributes``; None for other lines."""
    name = _NAME.match(line)
    if not name:
        return None
    start = name.end()
    stop = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", stop)
    closing = _closing(line, opening)
    arguments = line[opening + 1 : closing - 1]
    operands = tuple(_OPERAND.findall(arguments))
    opcode = line[stop:opening].strip()
    return Instruction(name[2], opcode, line[start:stop], operands, arguments, line[closing:], bool(name[1]))


def _closing(line: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(line, opening):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    raise ValueError(f"a parenthesis is never closed in the compiler's text: {line[:80]!r}")


def inside(module: Module, computation: str) -> Iterator[Instruction]:
    """All instructions of a computation and of the computations that it calls."""
    for line in module.computations[computation]:
        yield line
        for name in module.called(line):
            yield from inside(module, name)
