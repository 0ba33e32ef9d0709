"""Rules that carry RoPE beyond its training length by changing its frequencies."""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posjax._checks import check, check_choice
from posjax.angles import Frequencies, exact, fixed_point
from posjax.rotary.rules import FrequencyRule, Length, check_number


def _is_host(length: Length | None) -> bool:
    """Whether the length is known before tracing, so that float64 is at hand."""
    return isinstance(length, int | np.integer | np.ndarray)


@dataclass(frozen=True)
class Linear(FrequencyRule):
    """Position interpolation: theta_t / factor, the same as dividing every position (arXiv:2306.15595, section 3.2)."""

    factor: float

    hf_type: ClassVar[str] = "linear"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor"}

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies / self.factor


def ntk_exponents(width: int) -> np.ndarray:
    """-2t/(width - 2): scaling the base by s^(width/(width-2)) multiplies theta_t by s^(-2t/(width-2)).

    The first frequency is then untouched and the last divided by exactly s. Raises ValueError below a width of 4.
    """
    check(width >= 4, f"NTK scaling needs a rotary width of at least 4, found {width}")
    return -np.arange(0, width, 2, dtype=np.float64) / (width - 2)


@dataclass(frozen=True)
class NTKAware(FrequencyRule):
    """NTK-aware scaling: base' = base * factor^(w/(w-2)), so theta_t * factor^(-2t/(w-2)) (bloc97, 2023).

    The highest frequency is kept and the lowest divided by ``factor``. Reaches less far than its factor says: set it to
    about twice the wanted extension.
    """

    factor: float

    hf_type: ClassVar[str] = "default"

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies * self.factor ** ntk_exponents(2 * inverse_frequencies.size)

    def to_hf(self):
        """Plain rope_parameters with the scaled base, for Hugging Face has no such type. Needs ``head_dim``."""
        check(self.head_dim is not None, "NTKAware.to_hf: set head_dim, on which the scaled base depends")
        width = self.rotary_dim()
        return super().to_hf() | {"rope_theta": self.base * self.factor ** (width / (width - 2))}


@dataclass(frozen=True)
class DynamicNTK(FrequencyRule):
    """NTK-aware scaling whose factor follows the current length l (emozilla, 2023; Hugging Face's "dynamic").

        s(l) = factor * max(l, L) / L - (factor - 1),    theta_t * s^(-2t/(w-2)),    L = original_length

    factor = 1 gives s = l/L. Up to L it is plain RoPE. Frequencies of a traced length are float32: they err by up to
    1e-6 of themselves, the same for all positions. Keys must be cached before rotation, or the length frozen.
    """

    original_length: int
    factor: float = 1.0

    reads_length: ClassVar[bool] = True
    hf_type: ClassVar[str] = "dynamic"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor", "original_length": "original_max_position_embeddings"}

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)
        check_number("original_length", self.original_length, at_least=1)

    def frequencies(self, length: Length | None = None, *, head_dim: int | None = None) -> tuple[Frequencies, float]:
        """As :meth:`FrequencyRule.frequencies`; ``length`` None means ``original_length``."""
        length = self.original_length if length is None else length
        plain = self.inverse_frequencies(head_dim)
        exponents = ntk_exponents(2 * plain.size)
        if _is_host(length):
            ratio = self.factor * np.maximum(length, self.original_length) / self.original_length - (self.factor - 1)
            return exact(plain * np.asarray(ratio, np.float64)[..., None] ** exponents), self.table_factor
        excess = (jnp.maximum(length, self.original_length) - self.original_length).astype(jnp.float32)
        ratio = 1 + excess * np.float32(self.factor / self.original_length)
        scaled = jnp.exp(exponents.astype(np.float32) * jnp.log(ratio)[..., None])
        return fixed_point(plain.astype(np.float32) * scaled), self.table_factor


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
class NTKByParts(FrequencyRule):
    """Keep pairs that turn often, interpolate those that turn less than once (arXiv:2309.00071, section 3.2).

        theta_t ((1 - gamma_t) / factor + gamma_t)

    gamma_t falls from 1 to 0 along a ramp between ``beta_fast`` and ``beta_slow`` rotations over ``original_length``.

    ramp: ``"index"``, the default, falls linearly in the pair index, as the released code and every checkpoint do (see
        :func:`correction_range`); ``"rotations"`` falls linearly in the number of rotations r_t = L theta_t / 2 pi, as
        the paper prints: gamma_t = (r_t - beta_slow) / (beta_fast - beta_slow). They differ by up to 0.34.
    truncate: round the range of the index ramp outwards (gpt-oss does not).
    """

    factor: float
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
        check_number("factor", self.factor, at_least=1)
        check_number("original_length", self.original_length, at_least=1)
        check_number("beta_slow", self.beta_slow)
        check_number("beta_fast", self.beta_fast)
        check(
            0 < self.beta_slow < self.beta_fast,
            f"beta_fast must be above beta_slow and both positive, found {self.beta_fast} and {self.beta_slow}",
        )
        check_choice("ramp", self.ramp, ("index", "rotations"))

    def _kept(self, inverse_frequencies: np.ndarray) -> np.ndarray:
        """gamma_t: the share of each frequency that is left alone."""
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
        """Hugging Face's "yarn" with attention_factor 1. Raises ValueError for the ramp it does not have."""
        check(self.ramp == "index", f"to_hf: Hugging Face has no ramp {self.ramp!r}, only 'index'")
        return super().to_hf() | {"attention_factor": self.table_factor}


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """0.1 m ln(s) + 1, and 1 for s <= 1: YaRN's sqrt(1/t) (arXiv:2309.00071, eq. 22; m is DeepSeek's mscale)."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class YaRN(NTKByParts):
    """NTK-by-parts with a temperature: cos and sin times 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4).

    attention_factor: that multiplier, if given.
    mscale, mscale_all_dim: DeepSeek's. With both (and no attention_factor) the multiplier of cos and sin is
        m(factor, mscale) / m(factor, mscale_all_dim), with m = :func:`yarn_magnitude`, and the logits are also
        multiplied by ``softmax_scale`` = m(factor, mscale_all_dim)^2: in latent attention only a part of each head is
        rotary, and a factor of cos and sin would miss the rest. A table does not hold that factor: pass
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
        """Hugging Face's "yarn". Raises ValueError for the ramp it does not have."""
        values = super().to_hf()
        if self.attention_factor is None:
            del values["attention_factor"]
        return values


@dataclass(frozen=True)
class LongRoPE(FrequencyRule):
    """theta_t / lambda_t with searched factors, one list for short and one for long inputs (arXiv:2402.13753).

    short_factor, long_factor: lambda_t, w/2 numbers each. The long ones are used when the current length is greater
    than ``original_length``, for the whole row (Hugging Face: for the whole batch).
    factor: s, from which cos and sin are multiplied by sqrt(1 + ln s / ln original_length) (1 for s <= 1), for short
        inputs too; or give that multiplier itself as ``attention_factor``. One of the two is needed.
    select: ``"by_length"``, or ``"short"`` or ``"long"`` to fix the choice, as servers do; then no length is read.

    The first tokens that the paper leaves unscaled are zero in released models, and here. Switching changes all keys:
    cache them before rotation, or freeze the length. Exact for traced lengths too.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float | None = None
    attention_factor: float | None = None
    select: str = "by_length"

    hf_type: ClassVar[str] = "longrope"
    hf_keys: ClassVar[dict[str, str]] = {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_length": "original_max_position_embeddings",
        "factor": "factor",
        "attention_factor": "attention_factor",
    }

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            check(isinstance(values, list | tuple), f"{name} must be a list of numbers, found {values!r}")
            for value in values:
                check_number(f"every {name}", value)
                check(value > 0, f"every {name} must be positive, found {value!r}")
            object.__setattr__(self, name, tuple(values))
        check_number("original_length", self.original_length, at_least=2)
        check(
            self.factor is not None or self.attention_factor is not None,
            "LongRoPE needs factor (new length / original_length) or attention_factor",
        )
        for name, least in (("factor", 1), ("attention_factor", 0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=least)
        check_choice("select", self.select, ("by_length", "short", "long"))
        super().__post_init__()

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """The rotary width, which both lists must fit."""
        width = super().rotary_dim(head_dim)
        for name in ("short_factor", "long_factor"):
            found = len(getattr(self, name))
            check(
                found == width // 2, f"{name} must have {width // 2} numbers for a rotary width {width}, found {found}"
            )
        return width

    @property
    def reads_length(self) -> bool:
        """Whether the choice of the list depends on the length."""
        return self.select == "by_length"

    @property
    def table_factor(self) -> float:
        """sqrt(1 + ln factor / ln original_length), unless given."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def frequencies(self, length: Length | None = None, *, head_dim: int | None = None) -> tuple[Frequencies, float]:
        """As :meth:`FrequencyRule.frequencies`; ``length`` None means ``original_length``."""
        plain = self.inverse_frequencies(head_dim)
        short, long = (exact(plain / np.asarray(factors)) for factors in (self.short_factor, self.long_factor))
        if self.select != "by_length":
            return (short if self.select == "short" else long), self.table_factor
        is_long = (self.original_length if length is None else length) > self.original_length
        if isinstance(is_long, bool | np.bool):
            return (long if is_long else short), self.table_factor
        choice = jax.tree.map(lambda a, b: jnp.where(is_long[..., None], a, b), long, short)
        return choice, self.table_factor

    def to_hf(self):
        """Hugging Face's "longrope". Raises ValueError for a fixed choice, which it cannot express."""
        check(self.select == "by_length", f"to_hf: Hugging Face always selects by length, not {self.select!r}")
        return super().to_hf()


@dataclass(frozen=True)
class Llama3(FrequencyRule):
    """Llama 3.1's rule: interpolate long wavelengths, keep short ones, blend between (Meta, 2024).

    With the wavelength 2 pi / theta_t and L = original_length: below L / high_freq_factor theta_t is kept, above
    L / low_freq_factor it is divided by ``factor``, between them ((1 - u) / factor + u) theta_t with
    u = (L / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor).
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
        check_number("factor", self.factor, at_least=1)
        check_number("original_length", self.original_length, at_least=1)
        check_number("low_freq_factor", self.low_freq_factor)
        check_number("high_freq_factor", self.high_freq_factor)
        check(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"high_freq_factor must be above low_freq_factor and both positive, found {self.high_freq_factor} and "
            f"{self.low_freq_factor}",
        )

    def _scaled(self, inverse_frequencies):
        rotations = self.original_length * inverse_frequencies / (2 * np.pi)
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(smooth, 0, 1)
        return inverse_frequencies * ((1 - kept) / self.factor + kept)
