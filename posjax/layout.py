"""How a sequence lies over the shards of an axis of devices, and what follows from it.

A shard holds equally many places. Under a causal mask a query sees only what stands before it, so with the tokens in
their own order (``"contiguous"``) the last shard has nearly all the work of a ring and the first almost none. Two other
orders give every shard the same work:

* ``"zigzag"``: of ``2 n`` chunks shard ``r`` holds chunk ``r`` and chunk ``2 n - 1 - r``;
* ``"striped"``: shard ``r`` holds the tokens ``r, r + n, r + 2 n, ...`` (Brandon et al., arXiv 2311.09431).

A model is a function of tokens and their positions, so its losses and gradients do not depend on the layout, provided
that everything that belongs to a token (its position, segment, label, ...) goes where the token goes: see ``apply``.
"""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posjax._checks import check, check_choice, check_count
from posjax.positions import Range

KINDS = ("contiguous", "zigzag", "striped")


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["kind", "shards"])
@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of a sequence's tokens over ``shards`` shards, of which shard ``r`` holds the ``r``-th part of places.

    Args:
        kind: ``"contiguous"``, ``"zigzag"`` or ``"striped"``.
        shards: ``n``, along the axis over which the sequence is split.
    """

    kind: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    shards: int = 1

    def __post_init__(self):
        check_choice("layout kind", self.kind, KINDS)
        check_count("layout shards", self.shards)

    @property
    def moves(self) -> bool:
        """Whether any token leaves its place."""
        return self.kind != "contiguous" and self.shards > 1

    @property
    def chunks(self) -> int:
        """Runs of consecutive tokens that every shard holds, striped tokens apart."""
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
        """The true index of the token at each place, int32; places ``[r length/n, (r + 1) length/n)`` are shard r's."""
        self.check(length)
        index = np.arange(length, dtype=np.int32)
        if self.kind == "striped":
            return index.reshape(-1, self.shards).T.reshape(-1)
        if self.kind == "zigzag":
            chunks = index.reshape(2 * self.shards, -1)
            return np.stack([chunks[: self.shards], chunks[: self.shards - 1 : -1]], axis=1).reshape(-1)
        return index

    def apply(self, x, axis: int = -1):
        """``x`` with the tokens along ``axis``, which stand in their true order, put in their places."""
        return self._moved(x, axis, self._placed)

    def restore(self, x, axis: int = -1):
        """The inverse of ``apply``."""
        return self._moved(x, axis, self._restored)

    def _moved(self, x, axis: int, move):
        """``x`` with whole runs of tokens moved: cheaper than to gather them one by one, above all in the transpose."""
        self.check(x.shape[axis])
        if not self.moves:
            return x
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.moveaxis(move(xp, xp.moveaxis(x, axis, 0)).reshape(x.shape[axis], *_others(x, axis)), 0, axis)

    def _placed(self, xp, x):
        if self.kind == "striped":
            return x.reshape(-1, self.shards, *x.shape[1:]).swapaxes(0, 1)
        first, last = x.reshape(2, self.shards, -1, *x.shape[1:])
        return xp.stack([first, last[::-1]], axis=1)

    def _restored(self, xp, x):
        if self.kind == "striped":
            return x.reshape(self.shards, -1, *x.shape[1:]).swapaxes(0, 1)
        chunks = x.reshape(self.shards, 2, -1, *x.shape[1:])
        return xp.concatenate([chunks[:, 0], chunks[::-1, 1]], axis=0)

    def positions(self, length: int) -> Range | Int[Array, "length"]:
        """The positions of the tokens in all places, for a sequence that counts from 0."""
        self.check(length)
        return jnp.asarray(self.order(length)) if self.moves else Range(0, length)

    def local(self, length: int, shard: int | Int[Array, ""]) -> tuple[Range | Int[Array, "tokens"], ...]:
        """The positions of one shard's tokens, in their places: pieces one after the other, ranges where they are.

        Args:
            length: tokens of the whole sequence.
            shard: its number, which may be traced (``jax.lax.axis_index``).
        """
        self.check(length)
        return tuple(self.piece(length, shard, n) for n in range(self.chunks))

    def piece(self, length: int, shard: int | Int[Array, ""], n: int | Int[Array, ""]) -> Range | Int[Array, "tokens"]:
        """Piece ``n`` of ``local``, where ``n`` may be traced too."""
        size = length // (self.shards * self.chunks)
        if self.kind == "striped" and self.moves:
            return jnp.asarray(shard, jnp.int32) + self.shards * jnp.arange(size, dtype=jnp.int32)
        # Zigzag: chunk ``shard`` for the first piece, ``2 shards - 1 - shard`` for the second.
        return Range((shard + n * (2 * self.shards - 1 - 2 * shard)) * size, size)


CONTIGUOUS = Layout()
"""Every token in its own place."""


def _others(x, axis: int) -> tuple[int, ...]:
    """The sizes of all axes but one."""
    axis %= x.ndim
    return (*x.shape[:axis], *x.shape[axis + 1 :])
