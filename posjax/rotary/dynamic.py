"""Rules whose frequencies follow the current length l: s(l) = max(1, l / L), L the training length.

Up to L they are plain RoPE, bit for bit. A length known on the host (a Python int, a NumPy array) gives exact
frequencies. With a traced length one program works for every length, but the frequencies that the length changes are
float32: their relative error is up to 1e-6, the same for all positions. One length per row or token gives one set of
frequencies per row or token. All keys must have the frequencies of the current length: cache keys before rotation, or
keep the length fixed.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._angles import Frequencies, exact, fixed_point
from posjax._checks import check, check_choice, check_length
from posjax.rotary.ntk import ntk_exponents
from posjax.rotary.rules import FrequencyRule, Length, check_number, is_host, per_token
from posjax.rotary.scalings import NTKByParts

_BOUNDARIES = 31  # L 2^31 is past int32


def scaled(plain: Float[np.ndarray, "half"], multipliers: np.ndarray | Float[Array, "*lengths #half"]) -> Frequencies:
    """``plain * multipliers``: exact on the host; in float32 when traced, but exact where the multiplier is 1."""
    if not isinstance(multipliers, jax.Array):
        return exact(plain * multipliers)
    changed = fixed_point(plain.astype(np.float32) * multipliers)
    return jax.tree.map(lambda same, other: jnp.where(multipliers == 1, same, other), exact(plain), changed)


def excess(length: Length, original_length: float) -> np.ndarray | Float[Array, "*lengths"]:
    """max(0, l / L - 1): float64 for a length known on the host, else float32."""
    if is_host(length):
        return np.asarray(np.maximum(length, original_length) - original_length, np.float64) / original_length
    beyond = jnp.maximum(length, original_length) - original_length
    return beyond.astype(jnp.float32) / np.float32(original_length)


@dataclass(frozen=True)
class _Dynamic(FrequencyRule):
    """theta_t times ``_multipliers(s)[t]``, with s the scale of the current length.

    original_length: L, the length in tokens that the model was trained on.
    """

    original_length: int

    reads_length: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_number("original_length", self.original_length, at_least=1)

    def _scale(self, length):
        """s(l), exactly 1 up to L."""
        return 1 + excess(length, self.original_length)

    def _factor(self, scale):
        """The factor of cos and sin."""
        return self.table_factor

    def at_length(
        self, length: Length | None = None, *, head_dim: int | None = None
    ) -> tuple[Frequencies, float | Float[Array, "*lengths 1 1"]]:
        """As :meth:`FrequencyRule.at_length`; ``length`` None means ``original_length``."""
        check_length(length)
        scale = self._scale(self.original_length if length is None else length)
        plain = self.inverse_frequencies(head_dim)
        return scaled(plain, self._multipliers(scale[..., None], plain)), self._factor(scale)


@dataclass(frozen=True)
class DynamicLinear(_Dynamic):
    """Position interpolation by the current length: theta_t / s, s = max(1, l / original_length) (kexue.fm 9948)."""

    def _multipliers(self, scale, plain):
        return 1 / scale


@dataclass(frozen=True)
class DynamicNTK(_Dynamic):
    """NTK-aware scaling whose factor follows the current length l (emozilla, 2023; Hugging Face's "dynamic").

        s(l) = factor * max(l, L) / L - (factor - 1),    theta_t * s^(-2t/(w-2)),    L = original_length

    factor = 1 gives s = l/L.

    factor: how much s grows for every L tokens past L, at least 1.
    schedule: ``"continuous"``, as above; or ``"qwen"``, the steps of Qwen-1, whose frequencies change only where the
        length passes L, 2L, 4L, ...: s = 2^(k+1) - 1 with k = ceil(log2(l / L)), so 1, 3, 7, 15. ``factor`` must be 1.
    """

    factor: float = 1.0
    schedule: str = "continuous"

    hf_type: ClassVar[str] = "dynamic"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor", "original_length": "original_max_position_embeddings"}

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)
        check_choice("schedule", self.schedule, ("continuous", "qwen"))
        check(
            self.schedule == "continuous" or self.factor == 1,
            f"factor must be 1 for the schedule 'qwen', whose scale is fixed by the length; found {self.factor!r}",
        )

    def _scale(self, length):
        if self.schedule == "continuous":
            return 1 + self.factor * excess(length, self.original_length)
        powers = 2 ** np.arange(_BOUNDARIES)
        starts = np.minimum(np.floor(self.original_length * powers), np.iinfo(np.int32).max).astype(np.int32)
        length, dtype = (np.asarray(length), np.float64) if is_host(length) else (jnp.asarray(length), np.float32)
        # 2^(k+1) - 1 = 1 + 2 + 4 + ... + 2^k, a term for every boundary passed, compared in integers
        return 1 + ((length[..., None] > starts) * (2 * powers).astype(dtype)).sum(-1)

    def _multipliers(self, scale, plain):
        exponents = ntk_exponents(2 * plain.size).astype(scale.dtype)
        xp = jnp if isinstance(scale, jax.Array) else np
        return xp.exp(exponents * xp.log(scale))

    def to_hf(self):
        """Hugging Face's "dynamic". Raises ValueError for a schedule that Hugging Face does not have."""
        check(self.schedule == "continuous", f"to_hf: Hugging Face has no schedule {self.schedule!r}")
        return super().to_hf()


@dataclass(frozen=True)
class DynamicYaRN(_Dynamic):
    """YaRN whose factor is s = max(1, l / original_length): both frequencies and temperature follow the length.

        theta_t ((1 - gamma_t) / s + gamma_t),    cos and sin times 0.1 ln s + 1

    (arXiv:2309.00071, section 3.3; kexue.fm 9948.) gamma_t does not depend on s; see :class:`NTKByParts`.

    beta_fast: pairs that make more rotations than this over L keep their frequency.
    beta_slow: pairs that make fewer rotations than this over L are interpolated.
    ramp: how gamma_t falls between them, ``"index"`` or ``"rotations"``; see :class:`NTKByParts`.
    truncate: round the range of the index ramp outwards (gpt-oss does not).
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: str = "index"

    def __post_init__(self):
        super().__post_init__()
        self._by_parts()

    def _by_parts(self) -> NTKByParts:
        ramp = (self.beta_fast, self.beta_slow, self.truncate, self.ramp)
        return NTKByParts(1.0, self.original_length, *ramp, base=self.base)

    def _multipliers(self, scale, plain):
        kept = self._by_parts()._kept(plain).astype(scale.dtype)
        xp = jnp if isinstance(scale, jax.Array) else np
        return xp.where(scale == 1, xp.ones_like(scale), (1 - kept) / scale + kept)  # (1 - kept) + kept may round

    def _factor(self, scale):
        xp = jnp if isinstance(scale, jax.Array) else np
        return per_token(1 + 0.1 * xp.log(scale))
