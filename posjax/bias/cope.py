"""CoPE: contextual position encoding, a bias that is a function of the scores (Golovneva et al., arXiv 2405.18719)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._checks import check, check_count, params_of
from posjax._lowered import full_varying_like
from posjax._numbers import at_least_float32, widened
from posjax._shapes import in_blocks
from posjax.bias.base import BiasSpec, Contextual


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextualBias(Contextual):
    """``z_ij + interpolate(q_i . table, p_ij)`` with the contextual position ``p_ij = sum_{k=j..i} sigmoid(z_ik)``.

    The sum runs over the keys that ``i`` may see, itself included: with all gates open ``p_ij = i - j + 1``. It has no
    ``values``, because it reads the scores; ``posjax.attention.contextual`` computes it.
    """

    table: Float[Array, "max_position head_dim"]

    differs_between_heads: ClassVar[bool] = False

    def check_size(self, size: int) -> None:
        """Raises ValueError unless the table has the head size of the queries."""
        shape = self.table.shape
        check(shape[1] == size, f"table must have the head size of q, {size}, found shape {shape}")

    def tiles(self, k, size: int):
        """The keys of each tile."""
        return in_blocks(k, 2, size)

    def start(self, raw, scaled):
        """The scaled queries and the levels of the raw ones, which stay, and counts of 0."""
        counts = full_varying_like(scaled.shape[:-1], at_least_float32(scaled.dtype), scaled)
        return (scaled, self.levels(raw)), counts

    def step(self, fixed, carry, tile, allowed, product):
        """Logits of a tile of keys, and the counts at its first key."""
        q, levels = fixed
        return self.add(product(q, tile), allowed, levels, carry)

    def levels(self, q: Float[Array, "*b q head_dim"]) -> Float[Array, "*b q max_position"]:
        """``q_i . e[p]`` at every whole position. ``q`` is the query as projected, *not* divided by ``sqrt(d)``."""
        table = widened(self.table)
        return jnp.einsum("...qd,pd->...qp", q.astype(table.dtype), table, precision="highest")

    def add(
        self,
        scores: Float[Array, "*b q k"],
        allowed: Bool[Array, "*#b q k"],
        levels: Float[Array, "*b q max_position"],
        carried: Float[Array, "*b q"],
    ) -> tuple[Float[Array, "*b q k"], Float[Array, "*b q"]]:
        """Logits of a tile of scaled scores, and the count at its first key.

        ``carried`` is the count at the first key of the tile to the right, 0 if there is none: tiles are visited from
        the last key to the first, and keys must be in the order of their positions.
        """
        gates = jnp.where(allowed, jax.nn.sigmoid(scores), 0)
        count = carried[..., None] + jax.lax.cumsum(gates, gates.ndim - 1, reverse=True)
        return scores + interpolate(levels, count).astype(scores.dtype), count[..., 0]


def interpolate(levels: Float[Array, "*b q n"], positions: Float[Array, "*b q k"]) -> Float[Array, "*b q k"]:
    """``levels`` at real positions >= 0, interpolated linearly; the last level at ``n - 1`` and above."""
    last = levels.shape[-1] - 1
    positions = jnp.minimum(positions, last)
    lower = jax.lax.stop_gradient(jnp.minimum(jnp.floor(positions), last - 1))
    index = lower.astype(jnp.int32)
    start, end = (jnp.take_along_axis(levels, index + step, axis=-1, mode="clip") for step in (0, 1))
    return start + (positions - lower).astype(levels.dtype) * (end - start)


@dataclasses.dataclass(frozen=True)
class CoPE(BiasSpec):
    """Spec of CoPE (Golovneva et al., arXiv 2405.18719): positions that count tokens by a gate of the score.

    ``g_ij = sigmoid(z_ij)``, ``p_ij = min(sum_{k=j..i} g_ik, max_position - 1)``, and
    ``logit_ij = z_ij + q_i . e[p_ij]``, with ``e`` interpolated linearly between whole positions. ``z`` is the scaled
    score, ``q`` the query before the scale. The heads of a layer share one table.

    The count runs from the query backwards, so attention visits the tiles of keys in order, from the last to the first.
    For causal attention only; with keys ahead the count would start at the last of them.

    Args:
        max_position: rows of the table. Counts of ``max_position - 1`` and above share the last row.
    """

    max_position: int = 64
    contextual: ClassVar[bool] = True
    shift_invariant = True

    def __post_init__(self):
        check_count("max_position", self.max_position)
        check(self.max_position >= 2, f"max_position must be at least 2 to interpolate, found {self.max_position}")

    @property
    def one_sided(self) -> str | None:
        """``""``: there is no option for bidirectional attention."""
        return ""

    def init(self, key: Array, num_heads: int, head_dim: int) -> dict[str, Array]:
        """``{"table": [max_position, head_dim]}``, float32 zeros: at the start it adds nothing."""
        return {"table": jnp.zeros((self.max_position, head_dim), jnp.float32)}

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> ContextualBias:
        """The bias with its table.

        Raises:
            ValueError: if ``params`` does not hold a table of ``max_position`` rows.
        """
        (table,) = params_of(params, self, table=(self.max_position, "head_dim"))
        return ContextualBias(table)
