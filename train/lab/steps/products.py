"""Matrix products of a compiled program: their sizes, and the FLOPs that they execute."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from train.plan.hlo import Instruction, Module

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_SETTING = re.compile(r"(\w+)=([\d_x\-]+)")


@dataclass(frozen=True)
class Product:
    """One product; the compiler for TPUs writes most of them as convolutions."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    flops: int  # two for each multiply-add
    looks_up: bool = False  # whether an operand has only zeros and ones: the product selects rows


def products_of(module: Module, computation: str, line: Instruction) -> Iterator[Product]:
    """The products that an instruction executes, by itself or inside a fusion."""
    if line.opcode in ("dot", "convolution"):
        yield _product(module.named[computation], line)
    elif line.opcode == "fusion":
        for name in module.called(line):
            for part in module.computations[name]:
                yield from products_of(module, name, part)


def _product(named: dict[str, Instruction], line: Instruction) -> Product:
    left, right = (_shape(named.get(name)) for name in line.operands[:2])
    result = line.results[0].shape
    count = _of_dot if line.opcode == "dot" else _of_convolution
    looks_up = any(_is_of_ones(named, name) for name in line.operands[:2])
    return Product(left, right, result, 2 * count(line, left, right, result), looks_up)


def _is_of_ones(named: dict[str, Instruction], name: str) -> bool:
    """Whether an operand is a comparison, or a comparison converted to numbers."""
    line = named.get(name)
    while line is not None and line.opcode in ("convert", "bitcast", "reshape") and line.operands:
        line = named.get(line.operands[0])
    return line is not None and bool(line.results) and line.results[0].dtype == "pred"


def _shape(line: Instruction | None) -> tuple[int, ...]:
    return line.results[0].shape if line and line.results else ()


def _of_dot(line: Instruction, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    """Multiply-adds: elements of the result x sizes of the contracted dimensions."""
    contracted = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return math.prod(result) * math.prod(left[int(n)] for n in contracted.split(",") if n)


def _of_convolution(line: Instruction, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    """Multiply-adds of actual numbers,

        result's batch x result's features x kernel's inputs x product over window dimensions of  places hit

    where padding and the holes of a dilated operand are not hit. The compiler uses these for batched matrix products.
    """
    labels = _LABELS.search(line.attributes)
    if labels is None:
        return 0
    of_left, of_right, of_result = labels.groups()
    count = result[of_result.index("b")] * result[of_result.index("f")] * right[of_right.index("i")]
    window = dict(_SETTING.findall(found[1])) if (found := _WINDOW.search(line.attributes)) else {}
    for number in range(len(of_result) - 2):
        digit = str(number)
        sizes = (left[of_left.index(digit)], right[of_right.index(digit)], result[of_result.index(digit)])
        count *= _hits(*sizes, {name: values.split("x")[number] for name, values in window.items()})
    return count


def _hits(left: int, window: int, result: int, setting: dict[str, str]) -> int:
    """How many pairs of an index of the result and an index of the window meet a number of the left operand.

    Index o and tap t meet  p = o stride + t dilation - padding. This is a number if p is a multiple of the left
    operand's dilation and within its size.
    """
    stride, of_left, of_right = (int(setting.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = int(setting.get("pad", "0_0").split("_")[0])
    begins = np.arange(window) * of_right - padding
    if stride == of_left == 1:
        return int(np.clip(np.minimum(left - begins, result) - np.maximum(-begins, 0), 0, None).sum())
    indices = begins[:, None] + np.arange(result) * stride
    return int(((indices >= 0) & (indices % of_left == 0) & (indices < left * of_left)).sum())
