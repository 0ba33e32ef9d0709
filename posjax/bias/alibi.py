"""ALiBi: attention with linear biases (Press et al., arXiv 2108.12409)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_count
from posjax._slots import with_head_axis
from posjax.bias.base import Bias, distance, heads_first
from posjax.positions import Positions, as_array


def alibi_slopes(num_heads: int) -> Float[Array, "heads"]:
    """The slopes of Press et al. for any number of heads, float32 ``[heads]``.

    For ``H`` a power of two, ``m_h = 2^(-8 h / H)`` for ``h = 1..H``. Otherwise the slopes of the largest power of two
    ``c < H``, followed by every second slope (the first, the third, ...) of ``2 c`` heads.

    Computed in float64 on the host and rounded once.

    Raises:
        ValueError: if ``num_heads`` is not positive.
    """
    check_count("num_heads", num_heads)
    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = _geometric(power)
    extra = _geometric(2 * power)[::2][: num_heads - power]
    return jnp.asarray(np.concatenate([slopes, extra]), jnp.float32)


def _geometric(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)


def alibi_bias(
    num_heads: int, q_positions: Positions, k_positions: Positions, *, symmetric: bool = False
) -> Float[Array, "*b heads q k"]:
    """The whole ALiBi bias as an array, quadratic; ``attention(..., bias=ALiBi())`` never makes it.

    ``b_h(i, j) = -m_h (i - j)``, or ``-m_h |i - j|`` when symmetric. It is added after the ``1 / sqrt(d)`` scale.

    Args:
        num_heads: number of query heads.
        q_positions: ``[q]`` or ``[batch, q]``.
        k_positions: ``[k]`` or ``[batch, k]``.
        symmetric: for bidirectional attention.

    Returns:
        float32 ``[heads, q, k]`` or ``[batch, heads, q, k]``.
    """
    bound = ALiBi(symmetric=symmetric).bind(num_heads=num_heads)
    return bound.values(with_head_axis(as_array(q_positions)), with_head_axis(as_array(k_positions)))


@partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=["symmetric"])
@dataclasses.dataclass(frozen=True)
class LinearBias(Bias):
    """``b_h(i, j) = -m_h (i - j)``, or ``-m_h |i - j|`` when symmetric, with slopes ``m`` of shape ``[heads]``."""

    slopes: Float[Array, "heads"]
    symmetric: bool = False

    def values(self, q_positions, kv_positions):
        # The distance is an exact integer before it meets the slope, so the bias keeps its bits at any position.
        r = distance(q_positions, kv_positions)
        r = jnp.abs(r) if self.symmetric else r
        slopes = self.slopes.astype(jnp.promote_types(self.slopes.dtype, jnp.float32))
        return -heads_first(slopes) * r.astype(slopes.dtype)


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """Spec of ALiBi (Press et al., arXiv 2108.12409): ``b_h(i, j) = -m_h (i - j)``.

    Args:
        symmetric: ``-m_h |i - j|``, for bidirectional attention. Such a model cannot tell left from right.
        learned: the slopes are parameters, initialised to Press et al.'s.
    """

    symmetric: bool = False
    learned: bool = False
    shared_across_layers = False
    shift_invariant = True

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``{"slopes": [heads]}`` when learned, otherwise nothing."""
        return {"slopes": alibi_slopes(num_heads)} if self.learned else {}

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> LinearBias:
        """The bias with its slopes.

        Raises:
            ValueError: if the slopes are learned and ``params`` does not hold them.
        """
        if not self.learned:
            return LinearBias(alibi_slopes(num_heads), self.symmetric)
        check(
            bool(params) and "slopes" in params, "params must hold 'slopes': ALiBi(learned=True).init(...) makes them"
        )
        slopes = params["slopes"]
        check(slopes.shape == (num_heads,), f"slopes must have shape {(num_heads,)}, found {slopes.shape}")
        return LinearBias(slopes, self.symmetric)
