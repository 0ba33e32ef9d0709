"""How the tokens of a sequence are ordered over the shards of a mesh axis.

All shards hold the same number of tokens. Under a causal mask a query sees only earlier tokens, so with the tokens in
their original order (``"contiguous"``) the last shard does nearly all the work of a ring, and the first almost none.
With ``"zigzag"`` all have the same work: of ``2 n`` chunks shard ``r`` holds chunk ``r`` and chunk ``2 n - 1 - r``.

A model is a function of tokens and their positions, so its losses and gradients do not depend on the layout, if
everything that belongs to a token (its position, segment, label, ...) is reordered with it: see ``apply``.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posjax._checks import check, check_choice, check_count
from posjax.positions import Range

KINDS = ("contiguous", "zigzag")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """The order of a sequence's tokens over ``shards`` shards; shard ``r`` holds the ``r``-th part of the new order.

    Args:
        kind: ``"contiguous"`` or ``"zigzag"``.
        shards: ``n``, along the axis over which the sequence is split.
    """

    kind: Literal["contiguous", "zigzag"] = field(default="contiguous", metadata={"static": True})
    shards: int = field(default=1, metadata={"static": True})

    def __post_init__(self):
        check_choice("layout kind", self.kind, KINDS)
        check_count("layout shards", self.shards)

    @property
    def reorders(self) -> bool:
        """Whether the order of the tokens changes."""
        return self.kind != "contiguous" and self.shards > 1

    @property
    def chunks(self) -> int:
        """The number of pieces of a shard: runs of consecutive tokens."""
        return 2 if self.kind == "zigzag" else 1

    def check(self, length: int) -> None:
        """Raises ValueError unless a sequence of ``length`` tokens can be laid out."""
        unit = self.shards * self.chunks
        near = max(1, round(length / unit)) * unit
        check(
            length > 0 and length % unit == 0,
            f"length must be a multiple of {unit} for a {self.kind} layout over {self.shards} shards, "
            f"found {length}; {near} would work",
        )

    def order(self, length: int) -> Int[np.ndarray, "length"]:
        """The original index of each token in the new order, int32.

        Shard r holds the entries ``[r length/n, (r + 1) length/n)``.
        """
        self.check(length)
        index = np.arange(length, dtype=np.int32)
        if self.kind == "zigzag":
            chunks = index.reshape(2 * self.shards, -1)
            return np.stack([chunks[: self.shards], chunks[: self.shards - 1 : -1]], axis=1).reshape(-1)
        return index

    def apply(self, x, axis: int = -1):
        """``x``, whose tokens along ``axis`` are in the original order, in the new order."""
        return self._reordered(x, axis, self._applied)

    def restore(self, x, axis: int = -1):
        """The inverse of ``apply``."""
        return self._reordered(x, axis, self._restored)

    def _reordered(self, x, axis: int, move):
        """``x`` with runs of tokens moved by reshapes, which are cheaper than a gather, especially in the transpose."""
        self.check(x.shape[axis])
        if not self.reorders:
            return x
        xp = np if isinstance(x, np.ndarray) else jnp
        front = xp.moveaxis(x, axis, 0)
        return xp.moveaxis(move(xp, front).reshape(front.shape), 0, axis)

    def _applied(self, xp, x):
        first, last = x.reshape(2, self.shards, -1, *x.shape[1:])
        return xp.stack([first, last[::-1]], axis=1)

    def _restored(self, xp, x):
        chunks = x.reshape(self.shards, 2, -1, *x.shape[1:])
        return xp.concatenate([chunks[:, 0], chunks[::-1, 1]], axis=0)

    def positions(self, length: int) -> Range | Int[Array, "length"]:
        """The positions of the tokens in the new order, for a sequence that counts from 0."""
        self.check(length)
        return jnp.asarray(self.order(length)) if self.reorders else Range(0, length)

    def local(self, length: int, shard: int | Int[Array, ""]) -> tuple[Range, ...]:
        """The positions of one shard's tokens in the new order: its pieces in turn.

        Args:
            length: tokens of the whole sequence.
            shard: the index of the shard, which may be traced (``jax.lax.axis_index``).
        """
        self.check(length)
        return tuple(self.piece(length, shard, n) for n in range(self.chunks))

    def piece(self, length: int, shard: int | Int[Array, ""], n: int | Int[Array, ""]) -> Range:
        """Piece ``n`` of ``local``, where ``n`` may be traced too."""
        size = length // (self.shards * self.chunks)
        # Zigzag: chunk ``shard`` for the first piece, ``2 shards - 1 - shard`` for the second.
        return Range((shard + n * (2 * self.shards - 1 - 2 * shard)) * size, size)


CONTIGUOUS = Layout()
"""The original order."""
