"""The mesh axes over which the batch, the sequence and the heads are split."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Int

from posjax._checks import check, check_choice, check_count
from posjax.attention.sharded.choice import STRATEGIES, Sizes, choose, copies, prefer
from posjax.layout import CONTIGUOUS, Layout
from posjax.positions import Positions, Range, as_array

Strategy = Literal["auto", "ring", "all-gather", "ulysses", "ring-ulysses", "neighbour"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How attention is split over the mesh in use (``jax.set_mesh``).

    Args:
        batch: axes over which the batch is split.
        context: the axis over which the sequence is split.
        heads: the axis, or axes, over which query and key heads are split.
        strategy: how queries attend to the keys of other shards: one strategy for all layers; a tuple in order of
            preference, where each layer uses the first that can split it; or ``"auto"``, which is ``choice.choose`` for
            each layer. ``"auto"`` always finds a strategy, so it cannot be in a tuple.
        layout: order of the tokens over the shards of ``context``. It must be made for their number, but a contiguous
            layout fits any number.
        ulysses: how many neighbouring shards of ``context`` form a group that exchanges heads, in ``"ring-ulysses"``.
        repeats: how often every key head was repeated so that ``heads`` splits them; ``for_key_heads`` sets it.

    Raises:
        ValueError: for an unknown strategy, an empty tuple, ``"auto"`` in a tuple, or an axis that is named twice.
    """

    batch: tuple[str, ...] = ()
    context: str | None = None
    heads: str | tuple[str, ...] | None = None
    strategy: Strategy | tuple[Strategy, ...] = "auto"
    layout: Layout = CONTIGUOUS
    ulysses: int = 1
    repeats: int = 1

    def __post_init__(self):
        _check_names(self.strategy)
        check_count("ulysses", self.ulysses)
        check(len(set(self.axes)) == len(self.axes), f"placement: every axis can be named only once, found {self.axes}")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes of the placement."""
        return tuple(itertools.chain(*self.split_axes))

    @property
    def split_axes(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The axes over which batch, sequence and heads are split."""
        return self.batch, _names(self.context), _names(self.heads)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The names in ``strategy``, the preferred one first."""
        return (self.strategy,) if isinstance(self.strategy, str) else self.strategy

    def is_open(self, mesh: AbstractMesh) -> bool:
        """Whether the placement has axes, and the caller is not inside a ``shard_map`` over any of them."""
        return bool(self.axes) and not set(self.axes) & set(mesh.manual_axes)

    def layout_over(self, shards: int) -> Layout:
        """The layout over ``shards`` shards.

        Raises:
            ValueError: if the layout was made for another number of shards.
        """
        if self.layout.kind == "contiguous":
            return Layout("contiguous", shards)
        fits = self.layout.shards == shards
        check(fits, f"layout is made for {self.layout.shards} shards, but axis {self.context!r} has {shards}")
        return self.layout

    def check(
        self,
        mesh: Mapping[str, int],
        *,
        batch: int,
        length: int,
        heads: int,
        kv_heads: int,
        scheme: Any = None,
    ) -> None:
        """Raises ValueError, before anything compiles, for a model that cannot be split in this way.

        Args:
            mesh: size of every axis.
            batch: rows of the whole batch.
            length: tokens of a sequence.
            heads: query heads of the whole model.
            kv_heads: key heads of the whole model.
            scheme: the layer's ``Scheme``, if it is known.

        Raises:
            ValueError: with the reason, and what would work.
        """
        self.check_axes(mesh)
        devices = math.prod(mesh[axis] for axis in self.batch)
        devices_text = f"{devices} devices along {self.batch}"
        check(batch % devices == 0, f"a batch of {batch} rows cannot be split evenly over {devices_text}")
        split, shards = self.split_of_heads(mesh), mesh.get(self.context, 1)
        check(
            heads % split == 0,
            f"placement: axis {self.heads!r} splits heads over {split} devices, which do not divide {heads} query "
            f"heads; an axis whose size divides {heads} would work",
        )
        if shards == 1:
            return
        layout = self.layout_over(shards)
        layout.check(length)
        local_kv_heads = kv_heads * self.for_key_heads(mesh, kv_heads).repeats // split
        sizes = Sizes(batch // devices, length, heads // split, local_kv_heads, shards)
        sizes = sizes._replace(layout=layout, ulysses=self.ulysses)
        if scheme is not None:
            self.check_scheme(scheme, shards)
            sizes = _with_scheme(sizes, scheme)
        if scheme is not None or "neighbour" not in self.strategies:
            self.chosen(sizes)

    def check_scheme(self, scheme: Any, shards: int | None = None) -> None:
        """Raises ValueError for a scheme whose sequence cannot be split over ``shards`` (default: that of the mesh)."""
        shards = self.shards if shards is None else shards
        check(
            scheme.linear is None or shards == 1,
            f"placement: linear attention carries a state along the sequence, which cannot be split over the {shards} "
            f"shards of axis {self.context!r}; give that axis one device, or use softmax attention",
        )

    def check_axes(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError if the mesh lacks an axis of the placement."""
        unknown = [axis for axis in self.axes if axis not in mesh]
        check(not unknown, f"placement: the mesh in use has no axis {unknown}; it has {list(mesh)}")

    def split_of_heads(self, mesh: Mapping[str, int]) -> int:
        """The number of devices of a mesh over which the heads are split."""
        return math.prod(mesh[axis] for axis in _names(self.heads))

    def for_key_heads(self, mesh: Mapping[str, int], kv_heads: int) -> "Placement":
        """The placement for a model with ``kv_heads`` key heads, each repeated so that ``heads`` can split them.

        ``lcm(kv_heads, devices)`` is the smallest number of heads such that every query head has its key head on its
        own device; query heads, a multiple of both, are a multiple of it too.
        """
        self.check_axes(mesh)
        return dataclasses.replace(self, repeats=copies(kv_heads, self.split_of_heads(mesh)))

    def chosen(self, sizes: Sizes) -> Strategy:
        """The strategy of a layer. Raises ValueError if no strategy of the placement can split it, with reasons."""
        return choose(sizes) if self.strategy == "auto" else prefer(self.strategies, sizes)

    # The rest is for use inside ``shard_map``; an axis that does not exist counts as one device.

    @property
    def shards(self) -> int:
        """Devices that share a sequence."""
        return _size(self.context)

    def whole(self, tokens: int) -> int:
        """How many tokens a sequence has if each device holds ``tokens``."""
        return tokens * self.shards

    def all_heads(self, heads: int) -> int:
        """How many heads the model has if each device holds ``heads``."""
        return heads * _size(self.heads)

    def first_head(self, heads: int) -> int | Int[Array, ""]:
        """The index in the model of the first of this device's ``heads`` heads."""
        return 0 if _size(self.heads) == 1 else jax.lax.axis_index(self.heads) * heads

    def key_heads(self, heads: int) -> Int[Array, "heads"] | None:
        """The key head of the model for each of this device's ``heads`` key heads; None if it holds all of them."""
        if self.all_heads(heads) == heads and self.repeats == 1:
            return None
        return (self.first_head(heads) + jnp.arange(heads, dtype=jnp.int32)) // self.repeats

    def local(self, positions: Positions | None, tokens: int) -> Positions:
        """The positions of this device's ``tokens`` tokens.

        Args:
            positions: a ``Range`` or a one-dimensional array over the whole sequence; an array over this device's
                tokens; or None for positions from 0.
            tokens: how many tokens this device has.
        """
        whole = self.whole(tokens)
        if positions is None or isinstance(positions, Range):
            return self._counted(Range(0, whole) if positions is None else positions, tokens)
        if self.shards > 1 and positions.ndim == 1 and positions.shape[0] == whole:
            return jax.lax.dynamic_slice_in_dim(positions, jax.lax.axis_index(self.context) * tokens, tokens)
        return positions

    def _counted(self, row: Range, tokens: int) -> Positions:
        whole = self.whole(tokens)
        check(row.length == whole, f"positions must cover the whole sequence of {whole} tokens, found {row}")
        if self.shards == 1:
            return row.start + self.layout.positions(whole) if self.layout.reorders else row
        shard = jax.lax.axis_index(self.context)
        pieces = self.layout_over(self.shards).local(whole, shard)
        if len(pieces) == 1:
            return Range(row.start + pieces[0].start, tokens)
        return row.start + jnp.concatenate([as_array(piece) for piece in pieces])

    def lowest(self, positions: Positions | None):
        """The lowest position of every sequence, over all its shards."""
        if positions is None or isinstance(positions, Range):
            return 0 if positions is None else positions.start
        least = positions.min(-1, keepdims=True)
        return least if self.shards == 1 else jax.lax.pmin(least, self.context)


def _check_names(strategy: Any) -> None:
    names = (strategy,) if isinstance(strategy, str) else strategy
    named = isinstance(names, tuple) and bool(names)
    check(named, f"strategy must be a name, or a tuple of names in order of preference, found {strategy!r}")
    for name in names:
        check_choice("strategy", name, ("auto", *STRATEGIES))
    check(
        isinstance(strategy, str) or "auto" not in names,
        f"strategy: 'auto' compares all strategies for each layer and cannot be in a tuple, found {strategy!r}; give "
        "'auto', or a tuple without it",
    )


def _names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def _size(axis: str | tuple[str, ...] | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _names(axis) if name in mesh.manual_axes)


def _with_scheme(sizes: Sizes, scheme) -> Sizes:
    bounds = scheme.kept_keys
    recent = bounds is not None and bounds[0] == 0
    counts = scheme.bias is not None and scheme.bias.contextual
    return sizes._replace(window=bounds[1] if recent else None, counts=counts)
