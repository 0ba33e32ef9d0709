"""Biases and masks as a user would write them: only what the protocol requires."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import posjax as pj


def static(**options):
    return dataclasses.field(metadata={"static": True}, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows(pj.bias.Bias):
    """``rows[h, min(|i - j|, n - 1)]``: a row of ``n`` entries for each head."""

    rows: jax.Array

    def values(self, q_positions, kv_positions):
        distance = jnp.abs(q_positions[..., :, None] - kv_positions[..., None, :])
        distance = distance[:, 0] if distance.ndim == 4 else distance
        return jnp.moveaxis(self.rows[:, jnp.minimum(distance, self.rows.shape[1] - 1)], 0, -3)


@dataclasses.dataclass(frozen=True)
class LearnedRows(pj.bias.BiasSpec):
    """The spec of ``Rows``."""

    entries: int = 4

    def init(self, key, num_heads):
        return {"rows": jax.random.normal(key, (num_heads, self.entries))}

    def bind(self, params=None, *, num_heads):
        return Rows(params["rows"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fading(Rows):
    """Multiplies the scores by the rows."""

    def apply(self, scores, q_positions, kv_positions):
        return scores * self.values(q_positions, kv_positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted(pj.bias.Bias):
    """``b_h(i, j) = asks_hi weights_hj``: arrays over rows, heads and tokens."""

    asks: jax.Array
    weights: jax.Array

    axes: ClassVar = {"asks": ("batch", "heads", "queries"), "weights": ("batch", "heads", "keys")}

    def values(self, q_positions, kv_positions):
        return self.asks[..., :, None] * self.weights[..., None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Strided(pj.masks.Mask):
    """The last ``recent`` keys and every ``stride``-th."""

    recent: int = static(default=5)
    stride: int = static(default=7)

    def pairs(self, i, j):
        far = i - j >= self.recent
        return ~far | (j % self.stride == 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SameGroup(pj.masks.Mask):
    """Tokens of one group; ``groups`` is an array over positions."""

    groups: jax.Array

    def pairs(self, i, j):
        return self.groups[i] == self.groups[j]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EachHead(pj.masks.Mask):
    """A stride for each head."""

    strides: tuple[int, ...] = static()

    def pairs(self, i, j):
        return (i - j) % np.reshape(self.strides, (1, -1, 1, 1)) == 0
