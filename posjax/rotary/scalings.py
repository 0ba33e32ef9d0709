"""Rules that carry RoPE beyond its training length by changing its frequencies."""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from posjax._checks import check, check_positive
from posjax.angles import Frequencies, exact, fixed_point
from posjax.rotary.rules import FrequencyRule, Length


def _check_factor(factor: float) -> None:
    check(
        isinstance(factor, int | float) and math.isfinite(factor) and factor >= 1,
        f"factor must be a number of at least 1, found {factor!r}",
    )


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
        _check_factor(self.factor)

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
        _check_factor(self.factor)

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
    3e-7 of themselves, the same for all positions. Keys must be cached before rotation, or the length frozen.
    """

    original_length: int
    factor: float = 1.0

    reads_length: ClassVar[bool] = True
    hf_type: ClassVar[str] = "dynamic"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor", "original_length": "original_max_position_embeddings"}

    def __post_init__(self):
        super().__post_init__()
        _check_factor(self.factor)
        check_positive("original_length", self.original_length)

    def frequencies(self, length: Length | None = None, *, head_dim: int | None = None) -> tuple[Frequencies, float]:
        """As :meth:`FrequencyRule.frequencies`; ``length`` None means ``original_length``."""
        length = self.original_length if length is None else length
        plain = self.inverse_frequencies(head_dim)
        exponents = ntk_exponents(2 * plain.size)
        if _is_host(length):
            ratio = self.factor * np.maximum(length, self.original_length) / self.original_length - (self.factor - 1)
            return exact(plain * np.asarray(ratio, np.float64)[..., None] ** exponents), self.table_factor
        excess = jnp.maximum(length - self.original_length, 0).astype(jnp.float32)
        ratio = 1 + excess * np.float32(self.factor / self.original_length)
        scaled = jnp.exp(exponents.astype(np.float32) * jnp.log(ratio)[..., None])
        return fixed_point(plain.astype(np.float32) * scaled), self.table_factor
