"""Effects of a frequency rule on scores and angles, without training: decay, turns, exactness."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._angles import Frequencies, angles, as_frequencies
from posjax._checks import check, check_count, check_positive
from posjax.rotary import FrequencyRule, rotary_table

Rule = FrequencyRule | Frequencies | Float[np.ndarray, "half"]


def decay_indicator(
    rule: Rule, distances: Int[Array, "n"], *, head_dim: int | None = None, **options
) -> Float[np.ndarray, "n"]:
    """RoPE's long-range decay, the bound of RoFormer (arXiv 2104.09864, section 3.4.3) over the pairs.

        B(r) = mean over j = 1 .. d/2 of |sum_{t < j} exp(i r theta_t)|

    By Abel summation the score at distance ``r`` is at most a constant times ``B(r)``. ``B(0) = (d/2 + 1) / 2``.

    Args:
        rule: a frequency rule, or frequencies in radians per position ``[d/2]``.
        distances: integers ``r``.
        head_dim: size of a head, for a rule that does not have one.
        options: passed to the rule's ``table``, such as ``length`` for rules that read it.

    Returns:
        float64 ``[n]``, without the rule's attention factor.
    """
    return np.abs(_phasors(rule, distances, head_dim, options).cumsum(-1)).mean(-1)


def mean_score(
    rule: Rule, distances: Int[Array, "n"], *, head_dim: int | None = None, **options
) -> Float[np.ndarray, "n"]:
    """``mean_t cos(r theta_t)``: the score at distance ``r`` of a key like the query, as a share of the score at 0.

    It is ``E[q . R_r (q + e)] / E[q . q]`` for independent components of equal variance and independent noise ``e``
    (arXiv 2405.14591). The base is large enough for a context if this is positive at all its distances. Arguments as
    for ``decay_indicator``.
    """
    return _phasors(rule, distances, head_dim, options).real.mean(-1)


def turns(rule: Rule, length: int, *, head_dim: int | None = None) -> Float[np.ndarray, "half"]:
    """``length * theta_t / (2 pi)``: how often each pair turns within ``length`` positions, float64.

    If a pair makes less than one turn, the model has not seen all its angles in training. With ``head_dim=128``, base
    10,000 and 4,096 positions, 46 of 64 pairs complete a turn.

    Args:
        rule: a frequency rule, whose frequencies for ``length`` are used, or frequencies ``[d/2]``.
        length: the training length, in positions.
        head_dim: size of a head, for a rule that does not have one.
    """
    check_positive("length", length)
    return radians(rule, head_dim, length) * length / (2 * np.pi)


def incomplete(rule: Rule, length: int, *, head_dim: int | None = None) -> int:
    """The number of pairs without a full turn within ``length`` positions; see ``turns``."""
    return int((turns(rule, length, head_dim=head_dim) < 1).sum())


class Exactness(NamedTuple):
    """Largest errors of the angles near each position, in radians modulo a turn; see ``exactness``."""

    positions: Int[np.ndarray, "n"]
    float32: Float[np.ndarray, "n"]
    bfloat16: Float[np.ndarray, "n"]
    exact: Float[np.ndarray, "n"]


def exactness(rule: Rule, *, head_dim: int | None = None, powers: range = range(4, 32), samples: int = 16) -> Exactness:
    """The errors of angles at positions up to ``2^p``, in three arithmetics, against integer arithmetic.

    ``float32`` is the float32 product of position and frequency; ``bfloat16`` the same with the position rounded to
    bfloat16, as in a model that is cast to it; ``exact`` is posjax's fixed point. Random angles have errors up to pi.

    Args:
        rule: a frequency rule, or float64 frequencies in radians per position ``[d/2]``.
        head_dim: size of a head, for a rule that does not have one.
        powers: the exponents ``p``, at most 31.
        samples: the number of odd positions tried between ``2^(p-1)`` and ``2^p``, including ``2^p - 1``.

    Returns:
        One row per power: ``positions = 2^p - 1``, and the largest error over samples and frequencies.
    """
    check_count("samples", samples)
    check(len(powers) > 0 and min(powers) >= 1 and max(powers) <= 31, f"powers must be in [1, 31], found {powers}")
    frequencies = _frequencies(rule, head_dim, None)
    check(frequencies.is_exact, "rule: learned frequencies are only known in float32, so they have no exact angles")
    rows = [_errors(_spread(power, samples), frequencies) for power in powers]
    return Exactness(np.array([2**power - 1 for power in powers]), *np.array(rows).T)


def _spread(power: int, samples: int) -> Int[np.ndarray, "samples"]:
    """Odd positions from 2^(p-1) to 2^p, including the last: bfloat16 would represent round numbers exactly."""
    share = np.arange(samples) * (np.sqrt(5) - 1) / 2 % 1
    return (2**power - 1 - share * (2 ** (power - 1) - 1)).astype(np.int64) | 1


def _errors(positions: Int[np.ndarray, "n"], frequencies: Frequencies) -> tuple[float, float, float]:
    single = np.asarray(frequencies.value)
    rounded = positions.astype(jnp.bfloat16)
    computed_angles = (
        positions.astype(np.float32)[:, None] * single,
        rounded.astype(np.float32)[:, None] * single,
        angles(jnp.asarray(positions, jnp.int32), frequencies),
    )
    # Unsigned products wrap, so this is the angle modulo one turn in units of 2^-64 turn.
    wanted = (positions.astype(np.uint64)[:, None] * _words(frequencies)).astype(np.float64) * _UNIT
    return tuple(float(np.abs(np.angle(np.exp(1j * (np.float64(angle) - wanted)))).max()) for angle in computed_angles)


_UNIT = 2 * np.pi / 2**64


def _words(frequencies: Frequencies) -> np.ndarray:
    high, low = (np.asarray(word, np.uint64) for word in (frequencies.high, frequencies.low))
    return (high << np.uint64(32)) | low


def _frequencies(rule: Rule, head_dim: int | None, length: int | None) -> Frequencies:
    return rule.at_length(length, head_dim=head_dim)[0] if isinstance(rule, FrequencyRule) else as_frequencies(rule)


def radians(rule: Rule, head_dim: int | None = None, length: int | None = None) -> Float[np.ndarray, "half"]:
    """The frequencies of a rule in radians per position, float64 if they are known on the host."""
    frequencies = _frequencies(rule, head_dim, length)
    return _words(frequencies) * _UNIT if frequencies.is_exact else np.asarray(frequencies.value, np.float64)


def _phasors(rule: Rule, distances, head_dim: int | None, options) -> np.ndarray:
    """``exp(i r theta_t)``, complex ``[n, half]``, from the table of a rule."""
    distances = jnp.asarray(distances, jnp.int32)
    if isinstance(rule, FrequencyRule):
        table = rule.table(distances, head_dim=head_dim, **options)
    else:
        table = rotary_table(distances, rule)
    scaled = np.asarray(table.cos, np.float64) + 1j * np.asarray(table.sin, np.float64)
    return scaled / np.abs(scaled)
