"""The cache of decoding: keys, values and positions of earlier tokens.

A cache has a slot for every token. If a mask hides all tokens except the first few and the recent ones, the cache is a
ring buffer: it has slots for the first few, and ``recent`` more that are reused. Rows of a batch may differ in length.
Every row counts its own tokens, and padding, on either side, takes no slot. Masks read the positions stored with the
keys, so the order of the slots does not matter.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of one layer.

    Args:
        k: keys as returned by ``Scheme.cache_entries``.
        v: values.
        positions: the position of every slot's token.
        ids: 0 for a slot that holds a token, -1 for an empty one.
        gates: cumulative gates of every slot's token (FoX), or None.
        total: the gates of the row's last token, ``[batch, heads]``, or None.
        first: how many first tokens keep their slots while the others share a ring buffer; None without a ring.
        chunk: the most tokens that may be written at once.
    """

    k: Float[Array, "batch slots kv_heads size"]
    v: Float[Array, "batch slots kv_heads value_size"]
    positions: Int[Array, "batch slots"]
    ids: Int[Array, "batch slots"]
    gates: Float[Array, "batch heads slots"] | None
    total: Float[Array, "batch heads"] | None
    first: int | None = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """How many tokens of a row it can hold."""
        return self.k.shape[1]

    def slot(self, index: Int[Array, "batch tokens"], valid: Bool[Array, "batch tokens"]) -> Int[Array, "batch tokens"]:
        """The slot of the ``index``-th token of a row; for padding, the index after the last slot."""
        if self.first is not None:
            ring = self.first + (index - self.first) % (self.slots - self.first)
            index = jnp.where(index < self.first, index, ring)
        return jnp.where(valid, index, self.slots)

    def write(self, k, v, positions, index, valid, gates=None) -> "Cache":
        """The cache with new tokens; tokens without a slot (padding, or beyond the last slot) are dropped.

        Args:
            k, v: stored keys and values ``[batch, tokens, kv_heads, ...]``.
            positions: ``[batch, tokens]``.
            index: how many tokens of the row come before each.
            valid: False for padding.
            gates: cumulative gates ``[batch, heads, tokens]``.

        Raises:
            ValueError: for more tokens than ``chunk`` at once.
        """
        tokens = k.shape[1]
        check(
            tokens <= self.chunk,
            f"tokens: this cache was made for {self.chunk} tokens at a time, found {tokens}; pass the length of the "
            "longest part of a prompt as init_cache(chunk=)",
        )
        at = jnp.arange(k.shape[0])[:, None], self.slot(index, valid)

        def put(old, new):
            return old.at[at].set(new.astype(old.dtype), mode="drop")

        kept_gates, total = self.gates, self.total
        if gates is not None:
            total = gates[..., -1]
            kept_gates = jnp.moveaxis(put(jnp.moveaxis(self.gates, 1, 2), jnp.moveaxis(gates, 1, 2)), 2, 1)
        return dataclasses.replace(
            self,
            k=put(self.k, k),
            v=put(self.v, v),
            positions=put(self.positions, jnp.broadcast_to(positions, index.shape)),
            ids=put(self.ids, jnp.zeros_like(index)),
            gates=kept_gates,
            total=total,
        )


def ring(kept_keys: tuple[int, int] | None, capacity: int, chunk: int) -> tuple[int | None, int]:
    """``Cache.first`` and the number of slots, for rows of up to ``capacity`` tokens.

    Args:
        kept_keys: ``(first, recent)``, the only tokens that a query can see; None if it can see all. With a pair, a
            ring of ``recent + chunk - 1`` slots follows the ``first``, enough for the first query of a chunk.
        capacity: the most tokens of a row.
        chunk: the most tokens that are written at once.
    """
    if kept_keys is None:
        return None, capacity
    first, recent = kept_keys
    # A mask that shows only the first tokens still needs a ring for the tokens that are being written.
    slots = first + max(recent, 1) + chunk - 1
    return (first, slots) if slots < capacity else (None, capacity)
