"""Rules that change the radix of RoPE: neural-tangent-kernel scaling and its relatives.

theta_t = beta^-t with beta = base^(2/w) reads a position as a number in radix beta, one digit for each pair
(kexue.fm 9675). To fit k times as many positions into the digits, these rules change the radix instead of scaling all
digits equally.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from posjax._checks import check
from posjax.rotary.rules import OfFactor, check_number


def ntk_exponents(width: int) -> Float[np.ndarray, "width/2"]:
    """-2t/(width - 2): scaling the base by s^(width/(width-2)) multiplies theta_t by s^(-2t/(width-2)).

    The first frequency is then untouched and the last divided by exactly s. Raises ValueError below a width of 4.
    """
    check(width >= 4, f"NTK scaling needs a rotary width of at least 4, found {width}")
    return -np.arange(0, width, 2, dtype=np.float64) / (width - 2)


@dataclass(frozen=True)
class _Radix(OfFactor):
    """theta_t times ``_multipliers(w/2)[t]``, which depend only on ``factor`` and the index.

    factor: the target length divided by the training length, at least 1.
    """

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies * self._multipliers(inverse_frequencies.size)


@dataclass(frozen=True)
class NTKFixed(_Radix):
    """NTK scaling whose lowest frequency is divided by exactly k: theta_t k^(-2(t+1)/w), k = factor (kexue.fm 9706).

    Every digit's radix grows by k^(2/w), that of the first digit too, so even the highest frequency changes a little.
    """

    def _multipliers(self, half):
        return self.factor ** (-np.arange(1, half + 1) / half)


@dataclass(frozen=True)
class NTKMixed(_Radix):
    """Radices that grow more for the first digits: theta_t e^(-a (t+1)^exponent), a (w/2)^exponent = ln factor.

    (kexue.fm 9706.) ``exponent`` 1 is NTKFixed and 0 is position interpolation; the article takes 0.625, and the code
    of the rerope repository 0.75 (with a factor of 12).

    exponent: how the digits share the growth, in [0, 1]: at 1 equally, at 0 all of it in the first digit.
    """

    exponent: float = 0.625

    def __post_init__(self):
        super().__post_init__()
        check_number("exponent", self.exponent)
        check(0 <= self.exponent <= 1, f"exponent must be in [0, 1], found {self.exponent!r}")

    def _multipliers(self, half):
        rate = math.log(self.factor) / half**self.exponent
        return np.exp(-rate * np.arange(1, half + 1) ** self.exponent)


@dataclass(frozen=True)
class NTKOld(_Radix):
    """The first form of NTK scaling: base' = base * factor, so theta_t factor^(-2t/w) (kexue.fm 9675).

    The highest frequency is kept and the lowest divided by factor^((w-2)/w), a little less than ``factor``.
    """

    hf_type: ClassVar[str] = "default"

    def _multipliers(self, half):
        return self.factor ** (-np.arange(half) / half)

    def to_hf(self):
        """Plain rope_parameters with the scaled base, because Hugging Face does not have this type."""
        return super().to_hf() | {"rope_theta": self.base * self.factor}


@dataclass(frozen=True)
class NTKAware(_Radix):
    """NTK-aware scaling: base' = base * factor^(w/(w-2)), so theta_t * factor^(-2t/(w-2)) (bloc97, 2023).

    The highest frequency is kept and the lowest divided by ``factor``. The context grows by less than ``factor``: set
    ``factor`` to about twice the wanted extension.
    """

    hf_type: ClassVar[str] = "default"

    def _multipliers(self, half):
        return self.factor ** ntk_exponents(2 * half)

    def to_hf(self):
        """Plain rope_parameters with the scaled base: Hugging Face does not have this type. Needs ``head_dim``."""
        check(self.head_dim is not None, "NTKAware.to_hf: set head_dim, on which the scaled base depends")
        width = self.rotary_dim()
        return super().to_hf() | {"rope_theta": self.base * self.factor ** (width / (width - 2))}
