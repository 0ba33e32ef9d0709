"""A parameter as a view of a named tensor, to read and write a device's part at a time."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

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
    ``part`` is the index of this parameter. An axis of one number disappears. Brackets on the right join axes.

    Args:
        name: of the tensor; ``{layer}`` is the number of the layer.
        pattern: the axes, by names of sizes.
        part: the index along the number or sum axis.
    """

    name: str
    pattern: str
    part: int | None = None

    def tensor_shape(self, sizes: AxisSizes) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(math.prod(_size(atom, sizes) for atom in axis) for axis in self._sides[0])

    def parameter_shape(self, sizes: AxisSizes) -> tuple[int, ...]:
        """The shape of the parameter."""
        return tuple(math.prod(_size(atom, sizes) for atom in axis) for axis in self._sides[1])

    def read(self, tensor: np.ndarray, sizes: AxisSizes, index: Index, dtype: np.dtype) -> np.ndarray:
        """A part of the parameter, copied out of the tensor."""
        shape = self.parameter_shape(sizes)
        out = np.empty([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], dtype)
        for source, target in self._pieces(tensor, sizes, index):
            out[target] = source
        return out

    def write(self, tensor: np.ndarray, sizes: AxisSizes, index: Index, values: np.ndarray) -> None:
        """Writes a part of the parameter into the tensor."""
        for source, target in self._pieces(tensor, sizes, index):
            source[...] = values[target]

    def _pieces(self, tensor: np.ndarray, sizes: AxisSizes, index: Index) -> Iterator[tuple[np.ndarray, tuple]]:
        """Views of the tensor, and the index of each in the part: several if axes are joined."""
        view, right = self._split(tensor, sizes), self._sides[1]
        shape = self.parameter_shape(sizes)
        axes = [_axis_pieces(axis, range(*s.indices(n)), sizes) for axis, s, n in zip(right, index, shape, strict=True)]
        for pieces in itertools.product(*axes):
            yield view[tuple(at for source, _ in pieces for at in source)], tuple(target for _, target in pieces)

    def _split(self, tensor: np.ndarray, sizes: AxisSizes) -> np.ndarray:
        """The tensor with an axis for every name on the right, in their order: no copy."""
        left, right = self._sides
        names = [atom for axis in left for atom in axis]
        split = tensor.reshape([_size(atom, sizes) for atom in names])
        chosen = split[tuple(self._selection(atom, sizes) for atom in names)]
        left_over = [self._remaining(atom) for atom in names if self._remaining(atom)]
        return chosen.transpose([left_over.index(atom) for axis in right for atom in axis])

    def _selection(self, atom: str, sizes: AxisSizes) -> int | slice:
        """The index of the parameter along one axis."""
        if atom.isdigit():
            return self.part
        parts = atom.split("+")
        if len(parts) == 1:
            return slice(None)
        start, name = sum(_size(part, sizes) for part in parts[: self.part]), parts[self.part]
        return start if name.isdigit() else slice(start, start + sizes[name])

    def _remaining(self, atom: str) -> str:
        """The name of an axis after selection; empty if it disappears."""
        name = atom.split("+")[self.part] if "+" in atom else atom
        return "" if name.isdigit() else name

    @property
    def _sides(self) -> tuple[list[list[str]], list[list[str]]]:
        left, right = self.pattern.split("->")
        return _axes(left), _axes(right)


def check_shape(view: View, sizes: AxisSizes, name: str, found: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor whose shape differs from that of the config."""
    wanted = view.tensor_shape(sizes)
    check(tuple(found) == wanted, f"tensor {name!r} has shape {tuple(found)}; by config.json it must have {wanted}")


def _axes(side: str) -> list[list[str]]:
    return [(group or single).split() for group, single in re.findall(r"\(([^)]*)\)|(\S+)", side)]


def _size(atom: str, sizes: AxisSizes) -> int:
    return sum(int(part) if part.isdigit() else sizes[part] for part in atom.split("+"))


def _axis_pieces(axis: list[str], wanted: range, sizes: AxisSizes) -> list[tuple[tuple, slice]]:
    """For an axis of the parameter, the pieces of its wanted part: index in the split view, and index in the part."""
    if len(axis) == 1:
        return [((slice(wanted.start, wanted.stop),), slice(None))]
    inner = sizes[axis[1]]
    found = []
    for group in range(wanted.start // inner, -(-wanted.stop // inner)):
        low, high = max(wanted.start, group * inner), min(wanted.stop, (group + 1) * inner)
        source = (group, slice(low - group * inner, high - group * inner))
        found.append((source, slice(low - wanted.start, high - wanted.start)))
    return found
