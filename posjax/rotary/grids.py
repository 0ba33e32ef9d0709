"""Frequency rules over positions with several axes: axial grids, M-RoPE and RoPE-Tie.

Each pair of features rotates with the coordinate of one axis. A text token has the same position on every axis, so it
gets RoPE in one dimension. See :func:`posjax.rotary.coordinates.by_axis` for the forms of coordinates.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posjax._angles import as_real_positions
from posjax._checks import check, check_choice, check_count
from posjax.positions import Positions
from posjax.rotary.coordinates import by_axis
from posjax.rotary.feature import Rotary
from posjax.rotary.rules import FrequencyRule, Length, OverRule, check_number, inverse_powers
from posjax.rotary.tables import RotaryTable


class SeveralAxes(FrequencyRule):
    """A rule whose pairs each read one of ``num_axes`` coordinates."""

    num_axes: int

    def pair_axes(self, head_dim: int | None = None) -> Int[np.ndarray, "w/2"]:
        """The coordinate that each pair rotates with."""
        raise TypeError(f"{type(self).__name__} does not define pair_axes")

    def axis_table(self, positions: Positions, **options) -> RotaryTable:
        """The table of all pairs at the positions of one axis."""
        return super().table(positions, **options)

    def table(
        self,
        positions: Positions | Array,
        *,
        head_dim: int | None = None,
        length: Length | None = None,
        params: dict[str, Array] | None = None,
        precision: str = "exact",
    ) -> RotaryTable:
        """As :meth:`FrequencyRule.table`, for coordinates too; each pair uses the table of its axis."""
        options = {"head_dim": head_dim, "length": length, "params": params, "precision": precision}
        first, *others = (self.axis_table(axis, **options) for axis in by_axis(positions, self.num_axes))
        pair_axes = self.pair_axes(head_dim)
        for axis, table in enumerate(others, 1):
            first = RotaryTable(*(jnp.where(pair_axes == axis, b, a) for a, b in zip(first, table, strict=True)))
        return first

    def to_hf(self):
        """Raises ValueError: Hugging Face's ``rope_parameters`` have no form for these settings."""
        raise ValueError(f"{type(self).__name__} has no form in Hugging Face's rope_parameters")


@dataclass(frozen=True)
class Axial(SeveralAxes):
    """N-dimensional RoPE: the pairs in one block per axis (kexue.fm 8397; rope-vit, arXiv:2403.13298).

    order: the coordinate each block reads; its length is the number of axes. ``(1, 0)`` puts x first when coordinates
        are (row, column).
    split: the frequencies of the m = w / (2 num_axes) pairs of a block. ``"repeated"``: the same in every block,
        base^(-t/m). ``"strided"``: block a takes every num_axes-th frequency of a 1-D rule,
        base^(-2 (a + num_axes t) / w).
    offset: added to every coordinate. unit: radians by which a coordinate of 1 rotates the first pair of a block.

    Raises ValueError for an order that does not name every axis once, and a width that the blocks cannot share evenly.
    """

    base: float = 100.0
    order: tuple[int, ...] = (0, 1)
    split: str = "repeated"
    offset: int = 0
    unit: float = 1.0

    def __post_init__(self):
        check(sorted(self.order) == list(range(len(self.order))), f"order must name every axis once: {self.order!r}")
        check(len(self.order) > 1, f"order must name two axes or more, found {self.order!r}")
        check_choice("split", self.split, ("repeated", "strided"))
        check(isinstance(self.offset, int), f"offset must be a whole number, found {self.offset!r}")
        check_number("unit", self.unit)
        super().__post_init__()

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.order)

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """w, which ``2 num_axes`` must divide."""
        width = super().rotary_dim(head_dim)
        check(
            width % (2 * self.num_axes) == 0,
            f"{self.num_axes} axes need a rotary width divisible by {2 * self.num_axes}: {width}",
        )
        return width

    def inverse_frequencies(self, head_dim: int | None = None):
        """theta of every pair, block after block, in float64 on the host, radians per unit of its coordinate."""
        width = self.rotary_dim(head_dim)
        if self.split == "repeated":
            return self.unit * np.tile(inverse_powers(self.base, width // self.num_axes), self.num_axes)
        return self.unit * inverse_powers(self.base, width).reshape(-1, self.num_axes).T.ravel()

    def pair_axes(self, head_dim: int | None = None):
        """The axis of each pair: blocks of equal size, in ``order``."""
        return np.repeat(self.order, self.rotary_dim(head_dim) // (2 * self.num_axes))

    def axis_table(self, positions: Positions, **options) -> RotaryTable:
        """The table at ``positions + offset``."""
        return super().axis_table(as_real_positions(positions) + self.offset if self.offset else positions, **options)


AXIAL_LAYOUTS: dict[str, Rotary] = {
    "rope-vit": Rotary(Axial(100.0, (1, 0)), pairing="interleaved"),
    "llama4-vision": Rotary(Axial(10_000.0, (1, 0), offset=1), pairing="interleaved"),
    "pixtral": Rotary(Axial(10_000.0, split="strided")),
    "dinov3": Rotary(Axial(100.0, unit=2 * math.pi)),
}
"""The four public layouts of 2-D RoPE; all read (row, column), as ``grid_coordinates`` gives it.

They are four different functions: a checkpoint works only with its own layout. DINOv3 reads ``patch_centres``. A class
token is not rotated: its coordinates are (0, 0), but (-1, -1) for Llama 4, which counts patches from 1.
"""


@dataclass(frozen=True)
class _OneDimensional(OverRule, SeveralAxes):
    """Frequencies of a rule in one dimension, distributed over the axes."""

    def _check_width(self) -> None:
        rule = self._rule  # if this makes a new rule, its own checks run
        if rule.head_dim is not None:
            self.pair_axes()

    @property
    def reads_length(self) -> bool:
        """Whether the rule reads the current length."""
        return self._rule.reads_length

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions, on all axes, by one constant changes nothing."""
        return self._rule.shift_invariant

    def at_length(self, length: Length | None = None, *, head_dim: int | None = None):
        """The result of the rule's ``at_length``."""
        return self._rule.at_length(length, head_dim=head_dim)

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """The rule's learned parameters, if it has any."""
        return self._rule.init(key, head_dim)

    def axis_table(self, positions: Positions, **options) -> RotaryTable:
        """The rule's table."""
        return self._rule.table(positions, **options)


@dataclass(frozen=True)
class MRoPE(_OneDimensional):
    """Multimodal RoPE over (time, row, column) (Qwen2-VL, arXiv:2409.12191, section 2.1).

    sections: how many pairs each axis has, w/2 in total. Qwen2-VL: (16, 24, 24). Qwen3-VL: (24, 20, 20).
    layout: ``"chunked"``, Qwen2-VL: axis a has the next sections[a] frequencies, time the highest. ``"interleaved"``,
        Qwen3-VL: of k axes, axis a > 0 has pairs a, a + k, a + 2k, ..., and the first axis has the rest.

    Raises ValueError for sections that do not add up to w/2, or that cannot be interleaved.
    """

    sections: tuple[int, ...] = (16, 24, 24)
    layout: str = "chunked"

    def __post_init__(self):
        object.__setattr__(self, "sections", tuple(self.sections))
        check(len(self.sections) > 1, f"sections must name two axes or more, found {self.sections}")
        for section in self.sections:
            check_count("a section of sections", section)
        check_choice("layout", self.layout, ("chunked", "interleaved"))
        super().__post_init__()

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.sections)

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """w, which must be twice the sum of the sections."""
        width = super().rotary_dim(head_dim)
        total = sum(self.sections)
        check(
            width == 2 * total,
            f"sections {self.sections} add up to {total} pairs, but a width of {width} has {width // 2}",
        )
        return width

    def pair_axes(self, head_dim: int | None = None):
        """The axis of each pair: runs of ``sections`` pairs, or every k-th pair if interleaved."""
        pairs = self.rotary_dim(head_dim) // 2
        if self.layout == "chunked":
            return np.repeat(np.arange(self.num_axes), self.sections)
        axes = np.zeros(pairs, int)
        for axis in range(1, self.num_axes):
            axes[axis : self.num_axes * self.sections[axis] : self.num_axes] = axis
        counts = tuple(np.bincount(axes, minlength=self.num_axes).tolist())
        check(counts == self.sections, f"sections {self.sections} cannot be interleaved: that would give {counts}")
        return axes

    def to_hf(self):
        """The rule's ``rope_parameters`` with ``mrope_section`` and ``mrope_interleaved``."""
        extra = {"mrope_interleaved": True} if self.layout == "interleaved" else {}
        return self._rule.to_hf() | {"mrope_section": list(self.sections)} | extra


@dataclass(frozen=True)
class RoPETie(_OneDimensional):
    """RoPE-Tie (kexue.fm 10040): pair t rotates with coordinate t mod num_axes, at its frequency in one dimension.

    Text at (n, n) is exactly 1-D RoPE, so a language model computes the same as before;
    :func:`posjax.rotary.tie_positions` places images.

    num_axes: how many coordinates a position has, at least 2.
    """

    num_axes: int = 2

    def __post_init__(self):
        check_count("num_axes", self.num_axes)
        check(self.num_axes > 1, f"num_axes must be at least 2, found {self.num_axes}")
        super().__post_init__()

    def pair_axes(self, head_dim: int | None = None):
        """The axis of each pair: the axes in turn."""
        return np.arange(self.rotary_dim(head_dim) // 2) % self.num_axes
