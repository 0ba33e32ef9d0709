"""How a call is split over a mesh: the axes of batch, sequence and heads, and the strategy that shares a sequence."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Int

from posjax._checks import check, check_choice, check_count
from posjax.layout import CONTIGUOUS, Layout
from posjax.positions import Positions, Range, as_array

Strategy = Literal["auto", "ring", "all-gather", "ulysses", "ring-ulysses", "neighbour"]
STRATEGIES = ("ring", "all-gather", "ulysses", "ring-ulysses", "neighbour")

GATHER_BYTES = 2**30
"""The most bytes of keys and values of whole sequences that are gathered on every device."""


class Sizes(NamedTuple):
    """The sizes that decide the strategy. Batch and heads are those of one device, the length is of whole sequences.

    Args:
        batch: batch rows.
        length: tokens of a sequence.
        heads: query heads.
        kv_heads: key heads.
        shards: devices that share a sequence.
        features: numbers of a key and its value together, for one head.
        query_features: numbers of a query and its output together, for one head.
        itemsize: bytes of a number.
        window: the most keys a query sees, itself included, if they are all recent; or None.
        counts: whether the bias counts along whole sequences (CoPE).
        layout: order of the tokens.
        ulysses: shards that form one group in ``"ring-ulysses"``.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    shards: int
    features: int = 256
    query_features: int = 256
    itemsize: int = 2
    window: int | None = None
    counts: bool = False
    layout: Layout = CONTIGUOUS
    ulysses: int = 1

    @property
    def chunk(self) -> int:
        """Consecutive tokens that a shard holds."""
        return self.length // (self.shards * self.layout.chunks)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How attention is split over the mesh in use (``jax.set_mesh``).

    Inside ``shard_map``, where ``sharded.attend_on_mesh`` calls its function, it is the argument ``placement`` of
    ``attention`` and of ``Scheme.attend``. Arguments with an axis of tokens then hold the tokens of this device, in
    the order of ``layout``; a ``Range`` of positions is over the whole sequence, with a known start; ``sinks``, and
    the head axes of mask, bias and scale, are those of all heads of the model (bias and scale may be those of this
    device).

    Args:
        batch: axes over which the batch is split.
        context: the axis over which the sequence is split.
        heads: the axis, or axes, over which query and key heads are split.
        strategy: how queries attend to the keys of other shards: one strategy for all layers; a tuple in order of
            preference, where each layer uses the first that can split it; or ``"auto"``, which is ``choose`` for
            each layer. ``"auto"`` always finds a strategy, so it cannot be in a tuple.
        layout: order of the tokens over the shards of ``context``. It must be made for their number, but a contiguous
            layout fits any number.
        ulysses: how many neighbouring shards of ``context`` form a group that exchanges heads, in ``"ring-ulysses"``.
        repeats: how often every key head was repeated so that ``heads`` splits them; ``for_key_heads`` sets it.
        experts: the axis of ``batch`` over which experts of a mixture are split, if it divides their number; tokens
            then go to the devices of their experts and back. Attention does not read it.

    Raises:
        ValueError: for an unknown strategy, an empty tuple, ``"auto"`` in a tuple, an axis that is named twice, or
            ``experts`` outside ``batch``.
    """

    batch: tuple[str, ...] = ()
    context: str | None = None
    heads: str | tuple[str, ...] | None = None
    strategy: Strategy | tuple[Strategy, ...] = "auto"
    layout: Layout = CONTIGUOUS
    ulysses: int = 1
    repeats: int = 1
    experts: str | None = None

    def __post_init__(self):
        _check_names(self.strategy)
        splits_rows = self.experts is None or self.experts in self.batch
        check(splits_rows, f"placement: experts must be an axis of batch, {self.batch}, found {self.experts!r}")
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
    def is_empty(self) -> bool:
        """Whether it splits nothing and keeps the order of the tokens."""
        return not (self.axes or self.layout.reorders)

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
        split = self.split_of_heads(mesh)
        shards = mesh.get(self.context, 1)
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


def copies(kv_heads: int, shards: int) -> int:
    """How often key heads are repeated so that ``shards`` devices have equally many: ``n / gcd(kv heads, n)``."""
    return shards // math.gcd(kv_heads, shards)


def strategy_refusal(strategy: str, sizes: Sizes) -> str | None:
    """Why a strategy cannot split a layer, with what would work; or None."""
    if strategy in ("ring", "ring-ulysses") and sizes.counts:
        return (
            "CoPE counts along whole sequences, which a ring splits; use strategy 'all-gather', or 'ulysses' with "
            "enough heads"
        )
    if strategy == "ring-ulysses":
        group = sizes.ulysses
        if not 1 < group < sizes.shards or sizes.shards % group:
            return (
                f"'ring-ulysses' needs groups of shards: ulysses must divide the {sizes.shards} shards, and be neither "
                f"1 nor all of them, found {group}; use 'ring' or 'ulysses' for those"
            )
        return _too_few_heads(sizes.heads, group)
    if strategy == "ulysses":
        return _too_few_heads(sizes.heads, sizes.shards)
    return _no_neighbour(sizes) if strategy == "neighbour" else None


def prefer(strategies: Sequence[str], sizes: Sizes) -> str:
    """The first of the strategies that can split a layer. Raises ValueError if none can, with the reason of each."""
    why = {name: strategy_refusal(name, sizes) for name in strategies}
    fitting = [name for name in strategies if why[name] is None]
    check(bool(fitting), "; ".join(f"strategy={name!r}: {reason}" for name, reason in why.items()))
    return fitting[0]


def _too_few_heads(heads: int, shards: int) -> str | None:
    if heads % shards == 0:
        return None
    fitting = math.gcd(heads, shards)
    remedy = f"'ring-ulysses' with ulysses={fitting}" if fitting > 1 else "'ring' or 'all-gather'"
    return (
        f"Ulysses splits the {heads} query heads of a device over {shards} shards, which do not divide them; use "
        f"{remedy}"
    )


def _no_neighbour(sizes: Sizes) -> str | None:
    if sizes.counts:
        return "CoPE counts along whole sequences; use 'all-gather'"
    if sizes.window is None:
        return (
            "'neighbour' needs a mask that shows only recent keys, such as Window(w) with a Python int; with sinks, or "
            "without a window, use 'ring' or 'all-gather'; if only some layers have a window, give both names, "
            "'neighbour' and then 'ring'"
        )
    if sizes.window - 1 > sizes.chunk:
        return (
            f"a window of {sizes.window} reaches beyond the chunk of {sizes.chunk} tokens next to it; use a window of "
            f"at most {sizes.chunk + 1}, fewer shards, or 'ring'"
        )
    return None


def bytes_gathered(sizes: Sizes) -> int:
    """Bytes of keys and values that a device receives: ``(n - 1) batch length/n kv_heads features``, in a ring too."""
    tokens = sizes.batch * (sizes.length // sizes.shards)
    return (sizes.shards - 1) * tokens * sizes.kv_heads * sizes.features * sizes.itemsize


def bytes_exchanged(sizes: Sizes) -> int:
    """Bytes that a device receives with Ulysses: ``(n - 1) / n`` of its own queries, outputs, keys and values."""
    tokens = sizes.batch * (sizes.length // sizes.shards)
    keys = sizes.kv_heads * copies(sizes.kv_heads, sizes.shards) * sizes.features
    share = (sizes.heads * sizes.query_features + keys) * sizes.itemsize
    return tokens * share * (sizes.shards - 1) // sizes.shards


def choose(sizes: Sizes) -> str:
    """The strategy of a layer, by the bytes that each moves per device and by whether compute can hide them.

    1. ``"neighbour"`` if the window fits: it moves ``window - 1`` tokens once, whatever the length.
    2. ``"ulysses"`` if there are enough heads and it moves no more than a gather (``bytes_exchanged`` against
       ``bytes_gathered``): its bytes do not grow with the number of shards, and the work is even in any layout.
    3. ``"all-gather"`` if keys and values of whole sequences take at most ``GATHER_BYTES``: one collective, and no
       kernel is cut into parts, but nothing hides the transfer.
    4. ``"ring"`` otherwise: the same bytes, hidden behind attention to keys already received, in memory for two shards.

    A strategy with a ``strategy_refusal`` is skipped; ``"all-gather"`` never has one.
    """
    if strategy_refusal("neighbour", sizes) is None:
        return "neighbour"
    if strategy_refusal("ulysses", sizes) is None and bytes_exchanged(sizes) <= bytes_gathered(sizes):
        return "ulysses"
    whole = bytes_gathered(sizes) * sizes.shards // max(1, sizes.shards - 1)
    return "all-gather" if whole <= GATHER_BYTES or strategy_refusal("ring", sizes) else "ring"


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
