"""The checked arguments of a call of a scheme: positions and new tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check, check_heads
from posjax.attention.cache import Cache
from posjax.attention.checks import checked_positions
from posjax.attention.sharded import Placement
from posjax.linear import LinearState
from posjax.positions import Positions, Range, as_array
from posjax.scheme.slots import FeatureSlot

Params = Mapping[str, Mapping[str, Array]]
LayerCache = Cache | LinearState
"""The cache of one layer."""


class Where(NamedTuple):
    """The positions of the queries and keys of a call.

    Args:
        placement: how sequences and heads are split over a mesh.
        q_positions: see ``attention``.
        kv_positions: see ``attention``.
        coordinates: positions for the features, if they differ from ``q_positions`` and ``kv_positions``.
        length: the current length.
        head_dim: size of a head.
    """

    placement: Placement
    q_positions: Positions
    kv_positions: Positions
    coordinates: Array | None
    length: int | Int[Array, "..."] | None
    head_dim: int

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of feature maps besides positions."""
        return {"head_dim": self.head_dim, "length": self.length}

    def queries(self, features: FeatureSlot, q: Array) -> Positions | Array:
        """Positions of the queries for the features, with an axis of coordinates if the features have several axes."""
        return self._for_features(features, q, self.q_positions)

    def keys(self, features: FeatureSlot, k: Array) -> Positions | Array:
        """Positions of the keys for the features, in the same form."""
        return self._for_features(features, k, self.kv_positions)

    def _for_features(self, features, x, positions):
        several, positions, given = features.num_axes > 1, self.placement.local(positions, x.shape[1]), self.coordinates
        if given is None:
            rows = several and not isinstance(positions, Range) and jnp.ndim(positions) == 2
            return as_array(positions)[..., None] if rows else positions
        return given[..., 0] if given.shape[-1] == 1 and not several else given


class NewTokens(NamedTuple):
    """The tokens of one call of decoding.

    Args:
        index: for each token, how many tokens of its row come before it.
        valid: False for padding.
        gates: the result of ``Scheme.prepare`` for these tokens.
    """

    index: Int[Array, "batch tokens"]
    valid: Bool[Array, "batch tokens"]
    gates: Float[Array, "batch heads tokens"] | None

    @property
    def ids(self) -> Int[Array, "batch tokens"]:
        """0 for a token, -1 for padding."""
        return jnp.where(self.valid, 0, -1)


def check_projections(q, k, v, widths: tuple[float, float]) -> None:
    """Raises ValueError for arrays without heads, and for queries and keys whose widths do not fit each other.

    ``widths`` are those of ``Features``.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    wanted = int(q.shape[-1] / widths[0] * widths[1])
    check(
        k.shape[-1] == wanted,
        f"k must be {wanted} wide for a q that is {q.shape[-1]} wide (see key_size), found shape {k.shape}",
    )


def check_rows(cache: LayerCache, q: Array) -> None:
    """Raises ValueError if tokens and cache differ in batch size."""
    rows = jax.tree.leaves(cache)[0].shape[0]
    check(rows == q.shape[0], f"q must have the {rows} rows of the cache, found a batch of {q.shape[0]}")


def row_positions(placement: Placement, name: str, positions: Positions | None, x) -> Positions:
    """The positions of queries or keys ``x``; if ``positions`` is None, 0, 1, 2, ... over the whole sequence.

    Raises ValueError unless there is one position for each token.
    """
    if positions is None:
        return Range(0, placement.whole(x.shape[1]))
    return positions if placement.shards > 1 else checked_positions(name, positions, x)
