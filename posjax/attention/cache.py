"""The cache of decoding: keys, values and positions of earlier tokens.

Heads come before slots, so that attention reads the keys of a head side by side, and nothing is copied to be read. A
stack of layers is one `Cache` whose arrays have an axis of layers in front: new tokens are written into the stack, for
a layer that was taken out of it and put back would be copied, with all its tokens, for each new one.

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
    """Keys and values of one layer, or of one layer of a stack.

    Args:
        k: keys as returned by ``Scheme.cache_entries``, with heads before slots.
        v: values; None if they are computed from the keys (latent attention).
        positions: the position of every slot's token.
        ids: 0 for a slot that holds a token, -1 for an empty one.
        gates: what the bias reads of every slot's token, or None: cumulative gates ``[*layers, batch, heads, slots]``
            (FoX), states with a further axis (PaTH).
        total: the gates of the row's last token, ``[batch, heads]``, or None.
        first: how many first tokens keep their slots while the others share a ring buffer; None without a ring.
        chunk: the most tokens that may be written at once.
        layer: which layer of a stack it is; None without an axis of layers.
    """

    k: Float[Array, "*layers batch kv_heads slots size"]
    v: Float[Array, "*layers batch kv_heads slots value_size"] | None
    positions: Int[Array, "*layers batch slots"]
    ids: Int[Array, "*layers batch slots"]
    gates: Float[Array, "..."] | None
    total: Float[Array, "*layers batch heads"] | None
    first: int | None = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    layer: Int[Array, ""] | None = None

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return self.positions.shape[-2]

    @property
    def slots(self) -> int:
        """How many tokens of a row it can hold."""
        return self.positions.shape[-1]

    @property
    def own(self) -> "Cache":
        """The cache without the other layers of its stack."""
        if self.layer is None:
            return self
        arrays = dataclasses.replace(self, layer=None)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), arrays)

    @property
    def keys(self) -> Float[Array, "batch slots kv_heads size"]:
        """The keys of a single layer as attention takes them."""
        return jnp.swapaxes(self.k, 1, 2)

    @property
    def values(self) -> Float[Array, "batch slots kv_heads value_size"]:
        """The values of a single layer as attention takes them."""
        return jnp.swapaxes(self.v, 1, 2)

    def slot(self, index: Int[Array, "batch tokens"], valid: Bool[Array, "batch tokens"]) -> Int[Array, "batch tokens"]:
        """The slot of the ``index``-th token of a row; for padding, the index after the last slot."""
        if self.first is not None:
            ring = self.first + (index - self.first) % (self.slots - self.first)
            index = jnp.where(index < self.first, index, ring)
        return jnp.where(valid, index, self.slots)

    def write(self, k, v, positions, index, valid, gates=None) -> "Cache":
        """The cache with new tokens; tokens without a slot (padding, or beyond the last slot) are dropped.

        Args:
            k, v: stored keys and values ``[batch, tokens, kv_heads, ...]``; ``v`` is not read by a cache of keys only.
            positions: ``[batch, tokens]``.
            index: how many tokens of the row come before each.
            valid: False for padding.
            gates: cumulative gates ``[batch, heads, tokens]``, or states ``[batch, heads, tokens, size]``.

        Raises:
            ValueError: for more tokens than ``chunk`` at once.
        """
        tokens = k.shape[1]
        check(
            tokens <= self.chunk,
            f"tokens: this cache was made for {self.chunk} tokens at a time, found {tokens}; pass the length of the "
            "longest part of a prompt as init_cache(chunk=)",
        )
        layer = () if self.layer is None else (self.layer,)
        rows, slots = jnp.arange(k.shape[0])[:, None], self.slot(index, valid)

        def put(old, new, *heads):
            """The array with new values ``[batch, tokens, ...]``; ``heads`` is a slice if it has an axis of them."""
            return old.at[(*layer, rows, *heads, slots)].set(new.astype(old.dtype), mode="drop")

        kept_gates, total = self.gates, self.total
        if total is not None:
            total = total.at[layer].set(gates[..., -1])
        if gates is not None:
            kept_gates = put(self.gates, jnp.moveaxis(gates, 1, 2), slice(None))
        return dataclasses.replace(
            self,
            k=put(self.k, k, slice(None)),
            v=None if self.v is None else put(self.v, v, slice(None)),
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
