"""Rules that extend RoPE beyond its training length by fixed changes of its frequencies.

Those that change its base are in ``ntk.py``, those that read the current length in ``dynamic.py`` and ``longrope.py``.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from posjax._checks import check, check_choice, check_flags, check_positive, describe
from posjax._numbers import align_ranks
from posjax.rotary.rules import FrequencyRule, OfFactor, OverRule, check_fixed, check_number
from posjax.rotary.tables import RotaryTable, rotary_table


@dataclass(frozen=True)
class Linear(OfFactor):
    """Position interpolation: theta_t / factor, the same as dividing every position (arXiv:2306.15595, section 3.2).

    factor: the target length divided by the training length, at least 1.
    """

    hf_type: ClassVar[str] = "linear"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor"}

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies / self.factor


@dataclass(frozen=True)
class HoPE(FrequencyRule):
    """Only the frequencies that complete a turn in training; those of a longer period are zero (arXiv:2410.21216).

        theta_t if 2 pi / theta_t <= L, else 0,    L = original_length

    For d = 128, b = 10,000, L = 4,096 it keeps 46 of 64 frequencies. It is for training from scratch. Other papers use
    the same name for other methods (2505.20444, 2509.05218).

    original_length: L, the length in tokens that the model was trained on.
    """

    original_length: int

    def __post_init__(self):
        super().__post_init__()
        check_number("original_length", self.original_length, at_least=1)

    def _scaled(self, inverse_frequencies):
        return np.where(2 * np.pi / inverse_frequencies <= self.original_length, inverse_frequencies, 0.0)


def correction_range(
    width: int, base: float, original_length: float, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, float]:
    """The pair indices (low, high) between which the released YaRN code blends.

    The pair that makes beta rotations over L positions has index w ln(L / (2 pi beta)) / (2 ln base); low is that of
    ``beta_fast``, high that of ``beta_slow``. ``truncate`` rounds them outwards. Clamped to [0, w - 1]; high is kept at
    least 0.001 above low, so that the ramp never inverts. (jquesnelle/yarn; arXiv:2309.00071 prints another ramp.)
    """
    low, high = (
        width * math.log(original_length / (2 * math.pi * b)) / (2 * math.log(base)) for b in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    return low, max(min(high, width - 1), low + 0.001)


@dataclass(frozen=True)
class NTKByParts(OfFactor):
    """Keep pairs that rotate often, interpolate those that rotate less than once (arXiv:2309.00071, section 3.2).

        theta_t ((1 - gamma_t) / factor + gamma_t)

    gamma_t falls from 1 to 0 along a ramp between ``beta_fast`` and ``beta_slow`` rotations over ``original_length``.

    factor: the target length divided by the training length, at least 1.
    original_length: L, the length in tokens that the model was trained on.
    beta_fast: pairs that make more rotations than this over L keep their frequency.
    beta_slow: pairs that make fewer rotations than this over L are interpolated.
    ramp: ``"index"``, the default, falls linearly in the pair index, as the released code and every checkpoint do (see
        :func:`correction_range`); ``"rotations"`` falls linearly in the number of rotations r_t = L theta_t / 2 pi, as
        the paper prints: gamma_t = (r_t - beta_slow) / (beta_fast - beta_slow). The two differ by up to 0.34.
    truncate: round the range of the index ramp outwards (gpt-oss does not).
    """

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: str = "index"

    hf_type: ClassVar[str] = "yarn"
    hf_keys: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
    }

    def __post_init__(self):
        super().__post_init__()
        check_number("original_length", self.original_length, at_least=1)
        check_flags(self)
        check_number("beta_slow", self.beta_slow)
        check_number("beta_fast", self.beta_fast)
        check(
            0 < self.beta_slow <= self.beta_fast,
            f"beta_fast must be at least beta_slow and both positive, found {self.beta_fast} and {self.beta_slow}",
        )
        check_choice("ramp", self.ramp, ("index", "rotations"))
        ramps = self.ramp == "index" or self.beta_slow < self.beta_fast
        check(ramps, f"beta_fast must be above beta_slow for the ramp 'rotations', found {self.beta_fast} for both")

    def _kept(self, inverse_frequencies: np.ndarray) -> np.ndarray:
        """gamma_t: the share of each frequency that is kept."""
        if self.ramp == "rotations":
            rotations = self.original_length * inverse_frequencies / (2 * np.pi)
            return np.clip((rotations - self.beta_slow) / (self.beta_fast - self.beta_slow), 0, 1)
        half = inverse_frequencies.size
        betas = (self.beta_fast, self.beta_slow)
        low, high = correction_range(2 * half, self.base, self.original_length, *betas, self.truncate)
        return 1 - np.clip((np.arange(half) - low) / (high - low), 0, 1)

    def _scaled(self, inverse_frequencies):
        kept = self._kept(inverse_frequencies)
        return inverse_frequencies * ((1 - kept) / self.factor + kept)

    def to_hf(self):
        """Hugging Face's "yarn" with attention_factor 1. Raises ValueError for the ramp ``"rotations"``."""
        check(self.ramp == "index", f"to_hf: Hugging Face has no ramp {self.ramp!r}, only 'index'")
        return super().to_hf() | {"attention_factor": self.table_factor}


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """0.1 m ln(s) + 1, and 1 for s <= 1: YaRN's sqrt(1/t) (arXiv:2309.00071, eq. 22; m is DeepSeek's mscale)."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class YaRN(NTKByParts):
    """NTK-by-parts with a temperature: cos and sin times 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4).

    attention_factor: if given, the multiplier of cos and sin.
    mscale, mscale_all_dim: as in DeepSeek. With both (and no attention_factor) the multiplier of cos and sin is
        m(factor, mscale) / m(factor, mscale_all_dim), with m = :func:`yarn_magnitude`, and the logits are also
        multiplied by ``softmax_scale`` = m(factor, mscale_all_dim)^2: in latent attention only a part of each head is
        rotary, and a factor of cos and sin would miss the rest. A table does not include ``softmax_scale``: pass
        ``attention(..., scale=rule.softmax_scale / sqrt(d))``, as a scheme does.
    """

    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    hf_keys: ClassVar[dict[str, str]] = NTKByParts.hf_keys | {
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    }

    def __post_init__(self):
        super().__post_init__()
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=0)

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin: as given, or from both mscales, or 0.1 ln(factor) + 1."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)

    @property
    def softmax_scale(self) -> float:
        """m(factor, mscale_all_dim)^2, or 1 without ``mscale_all_dim``: DeepSeek's factor of the logits."""
        return yarn_magnitude(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def to_hf(self):
        """Hugging Face's "yarn". Raises ValueError for the ramp ``"rotations"``."""
        values = super().to_hf()
        if self.attention_factor is None:
            del values["attention_factor"]
        return values


@dataclass(frozen=True)
class Llama3(OfFactor):
    """Llama 3.1's rule: interpolate long wavelengths, keep short ones, blend between (Meta, 2024).

    With the wavelength 2 pi / theta_t and L = original_length: below L / high_freq_factor theta_t is kept, above
    L / low_freq_factor it is divided by ``factor``, between them ((1 - u) / factor + u) theta_t with
    u = (L / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor). With equal factors nothing is
    blended (Llama 4 Scout: both 1, ``factor`` 16).

    factor: divides the frequencies of long wavelengths, at least 1.
    original_length: L, the length in tokens that the model was trained on.
    low_freq_factor: pairs that make fewer rotations than this over L are interpolated.
    high_freq_factor: pairs that make more rotations than this over L keep their frequency.
    """

    factor: float = 8.0
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    hf_type: ClassVar[str] = "llama3"
    hf_keys: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    }

    def __post_init__(self):
        super().__post_init__()
        check_number("original_length", self.original_length, at_least=1)
        check_number("low_freq_factor", self.low_freq_factor)
        check_number("high_freq_factor", self.high_freq_factor)
        check(
            0 < self.low_freq_factor <= self.high_freq_factor,
            f"high_freq_factor must be at least low_freq_factor and both positive, found {self.high_freq_factor} and "
            f"{self.low_freq_factor}",
        )

    def _scaled(self, inverse_frequencies):
        rotations = self.original_length * inverse_frequencies / (2 * np.pi)
        band = max(self.high_freq_factor - self.low_freq_factor, np.finfo(np.float64).eps)
        kept = np.clip((rotations - self.low_freq_factor) / band, 0, 1)
        return inverse_frequencies * ((1 - kept) / self.factor + kept)


@dataclass(frozen=True)
class Resonance(OverRule):
    """Resonance RoPE: another rule, its wavelengths rounded to whole numbers (Wang et al., arXiv:2403.00071).

        2 pi / round(2 pi / theta_t)

    A pair with a wavelength of at most the training length L has then had each of its angles in training, at whichever
    position. ``Resonance(YaRN(...))`` is Resonance YaRN, with YaRN's temperature. It is for training and fine-tuning:
    rounding turns the angles of a trained model far from its start. Frequencies of zero stay (HoPE, p-RoPE), and no
    wavelength is below 1.

    rule: the rule whose wavelengths are rounded; None is RoPE with this object's base, head_dim and partial rotary
        factor. If a rule is given, it sets those three.

    Raises ValueError for a rule that reads the length, or whose angles are more than position times frequency.
    """

    def __post_init__(self):
        super().__post_init__()
        check_fixed(self._rule, "rounded")

    def inverse_frequencies(self, head_dim: int | None = None) -> Float[np.ndarray, "w/2"]:
        """2 pi over the whole wavelengths, float64 on the host."""
        theta = super().inverse_frequencies(head_dim)
        turning = theta != 0
        wavelengths = np.maximum(1, np.rint(2 * np.pi / np.where(turning, theta, 1)))
        return np.where(turning, 2 * np.pi / wavelengths, 0.0)


@dataclass(frozen=True)
class Stretched(FrequencyRule):
    """Another rule with every position divided by ``factor``: theta_t / factor, exact on the host.

    Unlike :class:`Linear` it wraps any rule with fixed frequencies, and ``factor`` may be below 1: leaky ReRoPE uses it
    beyond its window, and inverse leaky ReRoPE with a factor below 1 (kexue.fm 9708, 9728). Base, head size, rotated
    share and temperature are those of the rule.

    Raises ValueError for a rule that reads the length, or whose angles are more than position times frequency.
    """

    rule: FrequencyRule
    factor: float
    base: float = field(init=False, repr=False)
    head_dim: int | None = field(init=False, repr=False)
    partial_rotary_factor: float = field(init=False, repr=False)

    def __post_init__(self):
        check(isinstance(self.rule, FrequencyRule), f"rule must be a frequency rule, found {describe(self.rule)}")
        check_fixed(self.rule, "stretched")
        check_number("factor", self.factor)
        check_positive("factor", self.factor)
        for name in ("base", "head_dim", "partial_rotary_factor"):
            object.__setattr__(self, name, getattr(self.rule, name))

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """The rule's rotary width."""
        return self.rule.rotary_dim(head_dim)

    def inverse_frequencies(self, head_dim: int | None = None) -> Float[np.ndarray, "w/2"]:
        """The rule's frequencies over ``factor``, float64 on the host."""
        return self.rule.inverse_frequencies(head_dim) / self.factor

    @property
    def table_factor(self) -> float:
        """The rule's factor of cos and sin."""
        return self.rule.table_factor

    @property
    def softmax_scale(self) -> float:
        """The rule's factor of the logits."""
        return self.rule.softmax_scale


@dataclass(frozen=True)
class Ahead(Stretched):
    """A stretched rule at shifted positions: angles ``(p + shift) theta_t / factor``.

    ``p + shift`` may leave int32, so the table is that of ``p``, rotated by the angles of ``shift``.
    """

    shift: int

    def __post_init__(self):
        super().__post_init__()
        check_number("shift", self.shift)

    def table(self, positions, *, head_dim=None, length=None, params=None, precision="exact") -> RotaryTable:
        """The stretched rule's table of ``positions + shift``."""
        cos, sin = super().table(positions, head_dim=head_dim, precision=precision)
        inverse_frequencies, _ = self.at_length(head_dim=head_dim)
        turn = rotary_table(np.array([self.shift]), inverse_frequencies, precision=precision)
        cos, sin, more_cos, more_sin = align_ranks(cos, sin, *turn)
        return RotaryTable(cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin)
