"""The strategy by which an attention layer splits a sequence: the best one, and why another cannot be used."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from posjax._checks import check
from posjax.layout import CONTIGUOUS, Layout

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
