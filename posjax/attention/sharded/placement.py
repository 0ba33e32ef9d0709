"""Which axes of a mesh hold the batch, the sequence and the heads, and the way into it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from posjax._checks import check, check_choice, check_count
from posjax.attention.sharded.choice import STRATEGIES, Sizes, choose, prefer
from posjax.layout import CONTIGUOUS, Layout
from posjax.positions import Positions, Range, as_array

Strategy = Literal["auto", "ring", "all-gather", "ulysses", "ring-ulysses", "neighbour"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How attention lies over the mesh in use (``jax.set_mesh``).

    Args:
        batch: axes over which the rows are split.
        context: the axis over which the sequence is split.
        heads: the axis over which query and key heads are split.
        strategy: how queries meet the keys of other shards: one for all layers; a tuple in order of preference, of
            which each layer takes the first that can split it; or ``"auto"``, ``choice.choose`` for each layer. That
            one weighs them all itself and is never refused, so it does not stand in a tuple.
        layout: order of the tokens over the shards of ``context``; its shards are those of the axis, except that a
            contiguous one fits any.
        ulysses: how many neighbouring shards of ``context`` form a group that exchanges heads, in ``"ring-ulysses"``.

    Raises:
        ValueError: for an unknown strategy, for none, for ``"auto"`` among several, or for an axis that is named twice.
    """

    batch: tuple[str, ...] = ()
    context: str | None = None
    heads: str | None = None
    strategy: Strategy | tuple[Strategy, ...] = "auto"
    layout: Layout = CONTIGUOUS
    ulysses: int = 1

    def __post_init__(self):
        _check_names(self.strategy)
        check_count("ulysses", self.ulysses)
        check(len(set(self.axes)) == len(self.axes), f"placement: every axis can hold one thing, found {self.axes}")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes it names."""
        return (*self.batch, *(axis for axis in (self.context, self.heads) if axis is not None))

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The names in ``strategy``, the preferred one first."""
        return (self.strategy,) if isinstance(self.strategy, str) else self.strategy

    def layout_over(self, shards: int) -> Layout:
        """The layout over ``shards`` shards.

        Raises:
            ValueError: if it was made for another number of them.
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
        window: int | None = None,
        scheme: Any = None,
    ) -> None:
        """Refuses, before anything compiles, what cannot be split so.

        Args:
            mesh: size of every axis.
            batch: rows of the whole batch.
            length: tokens of a row.
            heads: query heads of the whole model.
            kv_heads: key heads of the whole model.
            window: the most keys a query sees, all of them recent, where that is known; that of the scheme's mask
                otherwise.
            scheme: the layer's ``Scheme``, where it is known.

        Raises:
            ValueError: with the reason, and what would work.
        """
        self.check_axes(mesh)
        devices = math.prod(mesh[axis] for axis in self.batch)
        where = f"{devices} devices along {self.batch}"
        check(batch % devices == 0, f"a batch of {batch} rows cannot be shared evenly by {where}")
        self._check_heads(mesh.get(self.heads, 1), heads, kv_heads)
        shards = mesh.get(self.context, 1)
        if shards == 1:
            return
        layout, split = self.layout_over(shards), mesh.get(self.heads, 1)
        layout.check(length)
        sizes = Sizes(batch // devices, length, heads // split, kv_heads // split, shards, window=window)
        sizes = sizes._replace(layout=layout, ulysses=self.ulysses)
        if scheme is not None:
            self.check_scheme(scheme, shards)
            sizes = _with_scheme(sizes, scheme)
        if scheme is not None or window is not None or "neighbour" not in self.strategies:
            self.chosen(sizes)

    def check_scheme(self, scheme: Any, shards: int | None = None) -> None:
        """Raises ValueError for a scheme whose rows cannot be split over several shards, those at hand by default."""
        shards = self.shards if shards is None else shards
        check(
            scheme.linear is None or shards == 1,
            f"placement: linear attention carries a state along the row, which cannot be split over the {shards} "
            f"shards of axis {self.context!r}; give that axis one device, or use softmax attention",
        )

    def check_axes(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError if the mesh lacks an axis that is named here."""
        unknown = [axis for axis in self.axes if axis not in mesh]
        check(not unknown, f"placement: the mesh in use has no axis {unknown}; it has {list(mesh)}")

    def _check_heads(self, split: int, heads: int, kv_heads: int) -> None:
        for name, count in (("query heads", heads), ("key heads", kv_heads)):
            fitting = math.gcd(heads, kv_heads)
            check(
                count % split == 0,
                f"placement: axis {self.heads!r} splits heads over {split} devices, which {count} {name} do not fill "
                f"evenly; an axis whose size divides {fitting} would work",
            )

    def chosen(self, sizes: Sizes) -> Strategy:
        """The strategy of a layer. Raises ValueError if none that is named here can split it, with the reasons."""
        return choose(sizes) if self.strategy == "auto" else prefer(self.strategies, sizes)

    # What follows is for use inside ``shard_map``, where an axis that is not at hand counts as one device.

    @property
    def shards(self) -> int:
        """Devices that share a row."""
        return _size(self.context)

    def whole(self, tokens: int) -> int:
        """Tokens of a row of which this device holds ``tokens``."""
        return tokens * self.shards

    def all_heads(self, heads: int) -> int:
        """Heads of the model of which this device holds ``heads``."""
        return heads * _size(self.heads)

    def first_head(self, heads: int) -> int | Int[Array, ""]:
        """The first of the ``heads`` heads that this device holds."""
        return 0 if _size(self.heads) == 1 else jax.lax.axis_index(self.heads) * heads

    def local(self, positions: Positions | None, tokens: int) -> Positions:
        """The positions of the ``tokens`` tokens at hand.

        Args:
            positions: a ``Range`` or a one-dimensional array over the whole row; an array over the tokens at hand; or
                None for a row that counts from 0.
            tokens: how many are at hand.
        """
        whole = self.whole(tokens)
        if positions is None or isinstance(positions, Range):
            return self._counted(Range(0, whole) if positions is None else positions, tokens)
        if self.shards > 1 and positions.ndim == 1 and positions.shape[0] == whole:
            return jax.lax.dynamic_slice_in_dim(positions, jax.lax.axis_index(self.context) * tokens, tokens)
        return positions

    def _counted(self, row: Range, tokens: int) -> Positions:
        whole = self.whole(tokens)
        check(row.length == whole, f"positions must cover the whole row of {whole} tokens, found {row}")
        if self.shards == 1:
            return row.start + self.layout.positions(whole) if self.layout.moves else row
        shard = jax.lax.axis_index(self.context)
        pieces = self.layout_over(self.shards).local(whole, shard)
        if len(pieces) == 1 and isinstance(pieces[0], Range):
            return Range(row.start + pieces[0].start, tokens)
        return row.start + jnp.concatenate([as_array(piece) for piece in pieces])

    def lowest(self, positions: Positions | None):
        """The lowest position of every row, over all its shards."""
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
        f"strategy: 'auto' weighs all strategies for each layer and stands alone, found {strategy!r}; give 'auto', or "
        "a tuple without it",
    )


def _size(axis: str | None) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if axis is None or axis not in mesh.manual_axes else mesh.shape[axis]


def _with_scheme(sizes: Sizes, scheme) -> Sizes:
    bounds = scheme.retained
    recent = bounds is not None and bounds[0] == 0
    counts = scheme.bias is not None and scheme.bias.contextual
    return sizes._replace(window=bounds[1] if sizes.window is None and recent else sizes.window, counts=counts)


def attend_on_mesh(
    function: Callable[..., Any], placement: Placement, replicated: Any, projected: Any, per_row: Mapping[str, Any]
) -> Any:
    """``function(replicated, projected, per_row)`` on every device's own rows, tokens and heads.

    One ``shard_map`` over all axes of the mesh in use, so that kernels which no compiler splits are taken. Axes that
    the placement does not name hold copies. The gradients of replicated arrays are summed over the devices.

    Args:
        function: for instance ``Scheme.attend`` with ``across=placement``. Called as it is without a mesh in use, or
            inside a ``shard_map`` over the placement's axes.
        placement: which axes hold what.
        replicated: a tree whose arrays are the same on all devices.
        projected: queries, keys and values, ``[batch, length, heads, size]``.
        per_row: trees by name. ``"gates"`` are ``[batch, heads, length]``, ``"length"`` is ``[batch]``, and the arrays
            of all others ``[batch, length, ...]``.

    Returns:
        What the function returns, ``[batch, length, heads, ...]`` again.

    Raises:
        ValueError: if the mesh in use lacks an axis, or its devices cannot share rows, tokens or heads evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not placement.axes or mesh.empty or set(placement.axes) <= set(mesh.manual_axes):
        return function(replicated, projected, per_row)
    q, k, *_ = projected
    placement.check(mesh.shape, batch=q.shape[0], length=q.shape[1], heads=q.shape[2], kv_heads=k.shape[2])
    rows, context, heads = placement.batch or None, placement.context, placement.heads
    named = {"gates": PartitionSpec(rows, heads, context), "length": PartitionSpec(rows)}
    of_rows = {name: named.get(name, PartitionSpec(rows, context)) for name in per_row}
    tokens = PartitionSpec(rows, context, heads)
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    inside = jax.shard_map(function, in_specs=(PartitionSpec(), tokens, of_rows), out_specs=tokens, axis_names=axes)
    # Outside of ``jit`` jax runs no custom gradient with symbolic zeros under ``shard_map``.
    return jax.jit(inside)(replicated, projected, dict(per_row))
