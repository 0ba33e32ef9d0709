"""A parameter as a view of a named tensor, to read and write a device's part at a time."""

import dataclasses
import math
import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from posjax._checks import check

Index = tuple[slice, ...]
AxisSizes = Mapping[str, int]
"""Sizes of axes by their names in patterns."""


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter, or one layer of it, as a view of a tensor in a file.

    The pattern names the axes of the tensor and, after ``->``, those of the parameter. Brackets split an axis, the
    slower part first: ``"(heads size) embed -> embed heads size"`` is a projection whose rows are the heads' channels.
    If several parameters share a tensor one axis is a number, ``"3"``, or a sum, ``"heads+kv_heads+kv_heads"``, and
    ``part`` is the index of this parameter. The axis disappears if it is a number, or if the part of the sum is ``1``.
    Brackets on the right join axes, at most once in a pattern. ``-2`` is an axis of two parts in the other order.

    Args:
        name: of the tensor; ``{layer}`` is the number of the layer. With ``{expert}``, every expert has a tensor of its
            own; the pattern is that of one expert, and the parameter has an axis of experts in front. The same with
            ``{head}`` for every head.
        pattern: the axes, by names of sizes.
        part: the index along the number or sum axis.
    """

    name: str
    pattern: str
    part: int | None = None

    @property
    def of_expert(self) -> bool:
        """Whether it is the view of one expert, or of one head."""
        return "{expert}" in self.name or "{head}" in self.name

    def tensor_shape(self, sizes: AxisSizes) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(math.prod(_size(atom, sizes) for atom in axis) for axis in self._sides[0])

    def read(self, tensor: np.ndarray, sizes: AxisSizes, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of the parameter, copied out of the tensor.

        Raises ValueError for a finite number that would be infinite in the dtype.
        """
        part = self._split(tensor, sizes)[self._place(sizes, index)]
        check_fits(self.name, overflow(part, dtype), dtype)
        return np.array(part, dtype, order="C")

    def write(self, tensor: np.ndarray, sizes: AxisSizes, index: Index, values: np.ndarray) -> None:
        """Writes a part of the parameter into the tensor."""
        self._split(tensor, sizes)[self._place(sizes, index)] = values

    def _place(self, sizes: AxisSizes, index: Index) -> tuple:
        """The index of a part of the parameter in the split tensor: arrays for joined axes, slices for the others."""
        indices = []
        for axis, part in zip(self._sides[1], index, strict=True):
            counts = [_size(atom, sizes) for atom in axis]
            indices += [part] if len(axis) == 1 else np.unravel_index(np.arange(math.prod(counts))[part], counts)
        return tuple(indices)

    def _split(self, tensor: np.ndarray, sizes: AxisSizes) -> np.ndarray:
        """The tensor with one axis for every name on the right, in the order of the names. Nothing is copied."""
        left, right = self._sides
        names = [atom for axis in left for atom in axis]
        split = tensor.reshape([_size(atom, sizes) for atom in names])
        chosen = split[(*(self._selection(atom, sizes) for atom in names), ...)]  # an array, also of one number
        remaining = [self._remaining(atom) for atom in names if self._remaining(atom)]
        return chosen.transpose([remaining.index(atom) for axis in right for atom in axis])

    def _selection(self, atom: str, sizes: AxisSizes) -> int | slice:
        """The index of the parameter along one axis."""
        if atom.isdigit():
            return self.part
        if atom.startswith("-"):
            return slice(None, None, -1)
        parts = atom.split("+")
        if len(parts) == 1:
            return slice(None)
        start = sum(_size(part, sizes) for part in parts[: self.part])
        name = parts[self.part]
        return start if name.isdigit() else slice(start, start + sizes[name])

    def _remaining(self, atom: str) -> str:
        """The name of an axis after selection; empty if it disappears."""
        name = atom.split("+")[self.part] if "+" in atom else atom
        return "" if name.isdigit() else name

    @property
    def _sides(self) -> tuple[list[list[str]], list[list[str]]]:
        left, right = self.pattern.split("->")
        return _axes(left), _axes(right)


def check_shape(view: View, sizes: AxisSizes, name: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor whose shape differs from the shape in the config."""
    wanted = view.tensor_shape(sizes)
    check(tuple(shape) == wanted, f"tensor {name!r} has shape {tuple(shape)}; by config.json it must have {wanted}")


def overflow(values: np.ndarray, dtype: np.dtype) -> float:
    """The largest magnitude of the finite numbers if it would be infinite in the dtype, else 0."""
    if np.can_cast(values.dtype, dtype):
        return 0.0
    finite = np.isfinite(values)
    least, most = (float(end(values, where=finite, initial=0)) for end in (np.min, np.max))
    largest = max(-least, most)
    with np.errstate(over="ignore"):
        return largest if np.isinf(np.float64(largest).astype(dtype)) else 0.0


def check_fits(name: str, largest: float, dtype: np.dtype) -> None:
    """Raises ValueError if a tensor has an ``overflow``; infinities and NaN that it holds already are kept."""
    most = float(jnp.finfo(dtype).max)
    works = "float32" if dtype == jnp.bfloat16 else "bfloat16 or float32"
    problem = f"tensor {name!r} holds {largest:g}, which would be infinite in {dtype}, whose largest number is {most:g}"
    check(not largest, f"{problem}; choose the dtype {works}")


def _axes(side: str) -> list[list[str]]:
    return [(group or single).split() for group, single in re.findall(r"\(([^)]*)\)|(\S+)", side)]


def _size(atom: str, sizes: AxisSizes) -> int:
    return sum(int(part) if part.isdigit() else sizes[part] for part in atom.removeprefix("-").split("+"))
