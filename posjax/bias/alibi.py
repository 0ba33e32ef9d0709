"""ALiBi: attention with linear biases (Press et al., arXiv 2108.12409)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import (
    check,
    check_choice,
    check_count,
    check_flags,
    check_number,
    check_positive,
    describe,
    params_of,
)
from posjax._numbers import widened
from posjax._slots import with_head_axis
from posjax.bias.base import Bias, BiasSpec, distance, heads_first
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
    return jnp.asarray(_press_slopes(num_heads), jnp.float32)


def _press_slopes(num_heads: int) -> np.ndarray:
    power = 1 << (int(num_heads).bit_length() - 1)
    extra = _geometric(2 * power)[::2][: num_heads - power]
    return np.concatenate([_geometric(power), extra])


def _geometric(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)


def alibi_bias(
    num_heads: int, q_positions: Positions, k_positions: Positions, *, symmetric: bool = False
) -> Float[Array, "*b heads q k"]:
    """The whole ALiBi bias as an array of quadratic size; ``attention(..., bias=ALiBi())`` never makes it.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias(Bias):
    """``b_h(i, j) = -m_h (i - j)``, or ``-m_h |i - j|`` when symmetric, with slopes ``m`` of shape ``[heads]``.

    A symmetric bias may distinguish left from right: ``ahead`` holds other slopes for keys ahead of the query, and
    ``offset`` shortens the distance of keys behind it, ``-m_h (|i - j| - offset)``.
    """

    slopes: Float[Array, "heads"]
    symmetric: bool = dataclasses.field(default=False, metadata={"static": True})
    ahead: Float[Array, "heads"] | None = None
    offset: float = dataclasses.field(default=0.0, metadata={"static": True})

    axes: ClassVar = {"slopes": ("heads",), "ahead": ("heads",)}
    by_distance: ClassVar[bool] = True

    def __post_init__(self):
        check_flags(self)
        check_number("offset", self.offset)

    @property
    def grows_ahead(self):
        """True unless the bias is symmetric."""
        return not self.symmetric

    def values(self, q_positions, kv_positions):
        """``-m_h (i - j)``, or the symmetric forms of it; ``[heads, q, k]`` for positions that the batch shares."""
        # The distance is exact before it is multiplied, so the bias has the same bits at any position.
        slopes = widened(self.slopes)
        r = distance(q_positions, kv_positions, slopes.dtype)
        slopes = heads_first(slopes, r)
        if not self.symmetric:
            return -slopes * r
        if self.ahead is not None:
            slopes = jnp.where(r < 0, heads_first(widened(self.ahead), r), slopes)
        return -slopes * (jnp.abs(r) - jnp.where(r > 0, self.offset, 0.0).astype(r.dtype))


@dataclasses.dataclass(frozen=True)
class ALiBi(BiasSpec):
    """Spec of ALiBi (Press et al., arXiv 2108.12409): ``b_h(i, j) = -m_h (i - j)``.

    Args:
        symmetric: ``-m_h |i - j|``, for bidirectional attention. It does not distinguish left from right.
        learned: the slopes are parameters, initialised to Press et al.'s. At ten times the learning rate of the
            matrices they were as good as fixed slopes with ``steepest=4.0`` (docs/results.md).
        direction: lets a symmetric bias distinguish left from right. ``"offset"``: keys behind the query count as half
            a position nearer, ``-m_h (|i - j| - 1/2)``, as in the encoders of Ruoss et al. (arXiv 2305.16843).
            ``"slopes"``: keys ahead have their own learned slopes, which start equal.
        factor: ``s >= 1`` divides the slopes, which interpolates positions for a context ``s`` times as long
            (Al-Khateeb et al., arXiv 2310.13017).
        steepest: the largest slope. The others keep their ratios to it. None is Press et al.'s, ``2^(-8 / H)`` if
            the number of heads ``H`` is a power of two; with few heads it is so small that no head is limited to the
            nearest tokens. For four heads 4.0 was better by 0.18 nats per byte at every length, and about as good as
            RoPE (docs/results.md).
        ladder: the slopes of this number of heads are repeated; it must divide the number of heads. None gives every
            head its own slope.
    """

    symmetric: bool = False
    learned: bool = False
    direction: str | None = None
    factor: float = 1.0
    steepest: float | None = None
    ladder: int | None = None
    shift_invariant = True

    def __post_init__(self):
        check(
            not isinstance(self.symmetric, jax.Array | np.ndarray),
            f"symmetric must be True or False, found {describe(self.symmetric)}; for other slopes use bias.LinearBias",
        )
        check_flags(self)
        check_positive("factor", self.factor)
        if self.steepest is not None:
            check_positive("steepest", self.steepest)
        if self.ladder is not None:
            check_count("ladder", self.ladder)
        check(self.factor >= 1, f"factor must be at least 1, found {self.factor!r}")
        if self.direction is not None:
            check_choice("direction", self.direction, ("offset", "slopes"))
            check(self.symmetric, f"direction={self.direction!r} is for a symmetric bias; use symmetric=True with it")
            fixed = self.direction == "slopes" and not self.learned
            check(not fixed, "direction='slopes' learns the slopes; use learned=True with it")

    @property
    def one_sided(self) -> str | None:
        """``"symmetric=True"``, or None if it is set."""
        return None if self.symmetric else "symmetric=True"

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``{"slopes": [heads]}`` when learned, with ``"ahead"`` if each direction has its own; otherwise ``{}``."""
        return {name: self.slopes(num_heads) for name in self._learned}

    def slopes(self, num_heads: int) -> Float[Array, "heads"]:
        """The slopes before ``factor`` divides them: ``alibi_slopes(ladder)``, scaled to ``steepest`` and repeated.

        Raises:
            ValueError: if the number of heads is not positive, or ``ladder`` does not divide it.
        """
        return jnp.asarray(self._fixed_slopes(num_heads))

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> LinearBias:
        """The bias with its slopes. Fixed ones are a NumPy array, which is known when a program is traced.

        Raises:
            ValueError: if the slopes are learned and ``params`` does not hold them.
        """
        learned = params_of(params, self, **dict.fromkeys(self._learned, (num_heads,)))
        slopes = learned or (self._fixed_slopes(num_heads),)
        slopes, ahead = ([m / float(self.factor) for m in slopes] + [None])[:2]
        return LinearBias(slopes, self.symmetric, ahead, 0.5 if self.direction == "offset" else 0.0)

    def _fixed_slopes(self, num_heads: int) -> np.ndarray:
        """``slopes`` in NumPy."""
        check_count("num_heads", num_heads)
        rungs = self.ladder or num_heads
        check(num_heads % rungs == 0, f"ladder must divide the number of heads ({num_heads}), found {rungs}")
        slopes = _press_slopes(rungs)
        if self.steepest is not None:
            slopes = slopes * (self.steepest / slopes.max())
        return np.tile(slopes, num_heads // rungs).astype(np.float32)

    @property
    def _learned(self) -> tuple[str, ...]:
        return ("slopes", "ahead")[: self.learned + (self.direction == "slopes")]
