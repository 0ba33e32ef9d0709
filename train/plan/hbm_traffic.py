"""Bytes that an instruction of a compiled program moves between HBM and the cores."""

from __future__ import annotations

from collections.abc import Iterator

from train.plan.hlo import Instruction, Module, inside

LOOKUPS = ("gather", "scatter", "sort")
"""Opcodes for which the compiler gives no cycles."""

_PUT = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that put a part into an array, and which operand is the part."""

_SAME = ("bitcast", "reshape", "convert", "copy", "transpose")
"""Opcodes whose result is their whole operand in another form: of a sliced result, only a slice is read."""


def is_lookup(module: Module, line: Instruction) -> bool:
    """Whether an instruction gathers, scatters or sorts, by itself or in a computation that it calls."""
    parts = (part for name in module.called(line) for part in inside(module, name))
    return line.opcode in LOOKUPS or any(part.opcode in LOOKUPS for part in parts)


def moved_bytes(module: Module, computation: str, line: Instruction) -> float:
    """The bytes that an instruction reads from HBM and writes to it,

        sum over operands of what is read of them + sum over results of what is written of them.

    If an operand is only sliced or gathered from, only the part taken counts as read. If a result is an operand with a
    part put in (dynamic-update-slice, scatter), only that part counts as written; a scatter also reads it first. Arrays
    in a memory of the cores, ``S(1)`` in the type, are not moved. Padding and intermediate results of a fusion are not
    counted, so this is a lower bound.
    """
    named = module.named[computation]
    read = sum(_read_of(module, line, named.get(name), index) for index, name in enumerate(line.operands))
    return read + _written(module, named, line)


def _size(line: Instruction) -> int:
    return sum(array.bytes for array in line.results if array.in_hbm)


def _read_of(module: Module, line: Instruction, operand: Instruction | None, index: int) -> float:
    """The bytes read of the operand at this index."""
    if operand is None or not _size(operand):
        return 0
    taken = _taken(module, line, index)
    return _size(operand) if taken is None else min(taken, _size(operand))


def _taken(module: Module, line: Instruction, index: int) -> float | None:
    """The bytes that an instruction takes of its operand at this index; None for all."""
    if line.opcode in ("gather", "dynamic-slice", "slice"):
        return sum(array.bytes for array in line.results) if index == 0 else None
    if line.opcode == "dynamic-update-slice":
        return 0 if index == 0 else None
    if line.opcode == "scatter":
        return None if index else 0  # the target is counted with the writes
    if line.opcode == "fusion" and module.called(line):
        return _taken_inside(module, module.called(line)[0], index)
    return None


def _taken_inside(module: Module, computation: str, index: int) -> float | None:
    """The bytes that a fusion takes of its parameter with this number."""
    lines = module.computations[computation]
    number = str(index)
    names = {line.name for line in lines if line.opcode == "parameter" and line.arguments == number}
    total = 0.0
    for line in lines:  # operands come before their users
        at = next((n for n, name in enumerate(line.operands) if name in names), None)
        if at is None:
            continue
        if line.opcode in _SAME and not line.is_root:
            names.add(line.name)
            continue
        taken = _taken(module, line, at)
        if taken is None:
            return None
        total += taken
    return total


def _written(module: Module, named: dict[str, Instruction], line: Instruction) -> float:
    """The bytes written of the results, and those that scatters read first."""
    written = _size(line)
    for name, part in _puts(module, line):
        whole = sum(array.bytes for array in part.results)
        if whole <= written:
            written += _put(module.named[name] if name else named, part) - whole
    return written


def _puts(module: Module, line: Instruction) -> Iterator[tuple[str | None, Instruction]]:
    """The instructions that put a part into an existing array, each with the name of its computation.

    They are the instruction itself, with None, or those inside a fusion.
    """
    if line.opcode in _PUT:
        yield None, line
    if line.opcode == "fusion":
        for name in module.called(line):
            for part in module.computations[name]:
                if part.opcode in _PUT and _is_given(module.named[name], part.operands[0]):
                    yield name, part
                elif part.opcode == "fusion":
                    yield from ((within or name, found) for within, found in _puts(module, part))


def _put(named: dict[str, Instruction], line: Instruction) -> int:
    """Bytes written to memory, and read from it before, for the part that is put in."""
    part = named.get(line.operands[_PUT[line.opcode]])
    size = sum(array.bytes for array in part.results) if part else 0
    return 2 * size if line.opcode == "scatter" else size


def _is_given(named: dict[str, Instruction], name: str) -> bool:
    """Whether an array of a fusion comes from outside it, and so is in memory."""
    line = named.get(name)
    while line is not None and line.opcode in _SAME and line.operands:
        line = named.get(line.operands[0])
    return line is not None and line.opcode == "parameter"
