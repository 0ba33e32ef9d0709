"""FoPE, Fourier position embedding: every plane turns by a Fourier series of many frequencies (arXiv:2412.17739)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_count, check_even, check_flags, check_number, params_of
from posjax._slots import Features
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import inverse_powers
from posjax.rotary.tables import RotaryTable, rotary_table


@dataclass(frozen=True)
class FoPE(Features):
    """Fourier position embedding (Hua et al., arXiv:2412.17739): RoPE whose cosines and sines are sums of many.

        cos_c(p) = sum_t a_{h,t,c} cos(p theta_t),    sin_c(p) = sum_t b_{h,t,c} sin(p theta_t)

    for the T frequencies theta_t = base^(-2t/d) that complete a turn in training, theta_t >= 2 pi / L. Plane c of key
    head h becomes (x cos_c - y sin_c, x sin_c + y cos_c). The coefficients are drawn for each layer and kept: 1 where
    plane c is that of theta_t in RoPE, else 0, plus noise of standard deviation gain sqrt(2 / ((T + heads) planes)),
    Xavier's for three axes, in a and in b. The planes without a series do not turn with the position: their cosine and
    sine are both 1, a turn by 45 degrees and a factor of sqrt(2), as the authors intend (issue 6 of their repository).
    Scores depend on both positions, not only on their distance.

    original_length: L, the length in tokens that the model is trained on, at least 7.
    base: b of theta_t.
    planes: how many planes have a series; None is one for each of the T frequencies, as in Intern-S1-Pro. The authors'
        code has at most d / 4, whose e is at every ceil(T / planes)-th frequency.
    gain: of the noise; 0.3 to 0.6 in the article, growing with the model, 0.5 in Intern-S1-Pro.
    learned: whether the coefficients are trained; the authors keep them as drawn.
    pairing: see :func:`posjax.rotary.apply_rotary`.

    Raises ValueError for numbers out of range, and more planes than frequencies.
    """

    original_length: int
    base: float = 10_000.0
    planes: int | None = None
    gain: float = 0.3
    learned: bool = False
    pairing: str = "half"

    shift_invariant = False

    def __post_init__(self):
        check_number("original_length", self.original_length, at_least=7)
        check_number("base", self.base)
        check(self.base > 1, f"base must be greater than 1, found {self.base!r}")
        if self.planes is not None:
            check_count("planes", self.planes)
        check_number("gain", self.gain, at_least=0)
        check_flags(self)
        check_choice("pairing", self.pairing, PAIRINGS)

    def inverse_frequencies(self, head_dim: int) -> Float[np.ndarray, "kept"]:
        """The frequencies that complete a turn in training, float64 radians per position."""
        check_even("head_dim", head_dim)
        theta = inverse_powers(self.base, head_dim)
        return theta[theta >= 2 * np.pi / self.original_length]

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """``{"cosines", "sines"}``: the coefficients ``[kv_heads, frequencies, planes]``, float32."""
        kept, planes = self._sizes(head_dim)
        first = np.zeros((kept, planes), np.float32)
        step = math.ceil(kept / planes)
        own = np.arange(0, kept, step)
        first[own, np.arange(own.size)] = 1
        stddev = self.gain * math.sqrt(2 / ((kept + num_kv_heads) * planes))
        noise = stddev * jax.random.normal(key, (2, num_kv_heads, kept, planes), jnp.float32)
        return {"cosines": first[None] + noise[0], "sines": first[None] + noise[1]}

    def _sizes(self, head_dim: int) -> tuple[int, int]:
        """How many frequencies and planes there are."""
        kept = self.inverse_frequencies(head_dim).size
        planes = kept if self.planes is None else self.planes
        check(planes <= kept, f"planes must be at most the {kept} frequencies of head_dim={head_dim}, found {planes}")
        return kept, planes

    def query_size(self, head_dim: int) -> int:
        """``head_dim``, which must be even."""
        self._sizes(head_dim)
        return head_dim

    def heads(self, params, which):
        """The coefficients of some key heads."""
        return {name: array[which] for name, array in params.items()}

    def table(self, params, positions, *, head_dim: int) -> RotaryTable:
        """The sums at these positions, float32 ``[batch or 1, length, kv_heads, head_dim / 2]``."""
        shape = ("kv_heads", *self._sizes(head_dim))
        coefficients = params_of(params, self, cosines=shape, sines=shape)
        if not self.learned:
            coefficients = jax.lax.stop_gradient(coefficients)
        table = rotary_table(positions, self.inverse_frequencies(head_dim))
        return RotaryTable(*(_series(*each, head_dim // 2) for each in zip(table, coefficients, strict=True)))

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """The turned queries, with the dtype of ``q``."""
        return apply_rotary(q, self.table(params, positions, head_dim=head_dim), pairing=self.pairing)

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """The turned keys, with the dtype of ``k``."""
        return self.query(params, k, positions, head_dim=head_dim)


def _series(waves: Float[Array, "*batch n kept"], coefficients: Array, planes: int) -> Array:
    """The sums of the waves, ``[batch or 1, n, heads, planes]``; 1 in the planes that have none."""
    waves = waves if waves.ndim == 3 else waves[None]
    sums = jnp.einsum("bnt,htc->bnhc", waves, coefficients.astype(jnp.float32), precision="highest")
    rest = planes - sums.shape[-1]
    return jnp.pad(sums, ((0, 0),) * 3 + ((0, rest),), constant_values=1)
