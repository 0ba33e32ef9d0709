"""Which base a context length needs, and which context length a base supports (arXiv:2405.14591; kexue.fm 10122).

If the components of queries and keys are independent and identically distributed, a similar token at distance m scores
higher than a random one by 2 sigma^2 f_b(m), with f_b(m) = sum_t cos(m b^(-2t/d)). RoPE of base b distinguishes them
over a whole context of length L if f_b(m) >= 0 for m = 0 .. L - 1.
"""

import math

import numpy as np
from jaxtyping import Float, Int

from posjax._checks import check, check_count, check_even
from posjax.rotary.rules import check_number, inverse_powers

_RESOLUTION = 1e-10  # the step of ln b across the end of an infeasible interval
_WITNESSES = 8  # distances that are followed at once
_LIMIT = 2**31  # positions are int32


def smallest_base(context_length: int, head_dim: int) -> float:
    """b*, the smallest base above 1 with sum_t cos(m b^(-2t/d)) >= 0 for every integer m in [0, context_length - 1].

    A base above a feasible one may be infeasible: at d = 128, b = 630,000 supports 32,768 tokens, but b = 1,000,000
    only 27,115. So bisection may find another boundary, and a grid may step over a feasible interval. This search skips
    only bases that are proved infeasible: where some f(m) < 0, Taylor's theorem with a bound on the second derivative
    in ln b gives an interval to the right on which f(m) stays negative, and the search moves to its end.

    Guarantee for head sizes of 8 or more: the returned base is feasible, and no smaller base is, up to the rounding of
    float64. The search may miss a feasible interval narrower than 1e-10 of the base directly after an infeasible one.
    (For head sizes 4 and 6, f touches zero so flatly at m = 355 that rounding moves the result by 1e-7.)

    As d tends to infinity, b* tends to context_length / 0.616505, the zero of the cosine integral. Time grows about as
    context_length^1.5: 0.1 s for 4,096, 2 s for 65,536. A rule that rotates at most half of the head supports any
    length: each unrotated pair adds 1, each rotated one at least -1.

    Raises:
        ValueError: for a context of fewer than 3 tokens (every base supports it), or a head_dim that is odd or below 4.
    """
    check_count("context_length", context_length)
    check(context_length >= 3, f"context_length must be at least 3, found {context_length}: every base supports that")
    check_even("head_dim", head_dim)
    check(head_dim >= 4, f"head_dim must be at least 4, found {head_dim}: one pair has frequency 1 at every base")
    powers = np.arange(0, head_dim, 2) / head_dim
    log_base = 0.0
    while True:
        sums = _sums(np.exp(-log_base * powers), 0, context_length)
        negative = np.flatnonzero(sums < 0)
        if not negative.size:
            return math.exp(log_base)
        farthest = np.argsort(sums[negative] / negative.astype(np.float64) ** 2)[:_WITNESSES]
        log_base = _last_negative(log_base, negative[farthest], powers) + _RESOLUTION


def largest_context(base: float, head_dim: int) -> int:
    """The longest context that a base supports: the first integer m with sum_t cos(m base^(-2t/d)) < 0.

    So the sum is non-negative at all distances 0 .. m - 1. For base 10,000 and d = 128, m is 1,707. The search stops at
    2^31.

    Raises:
        ValueError: for a base that is not above 1, or an odd head_dim.
    """
    check_number("base", base)
    check(base > 1, f"base must be greater than 1, found {base!r}")
    check_even("head_dim", head_dim)
    inverse_frequencies = inverse_powers(base, head_dim)
    start, stop = 0, 1024
    while start < _LIMIT:
        negative = np.flatnonzero(_sums(inverse_frequencies, start, stop) < 0)
        if negative.size:
            return start + int(negative[0])
        start = stop
        stop = min(stop + min(stop, 2**20), _LIMIT)
    return _LIMIT


def _sums(inverse_frequencies: Float[np.ndarray, "half"], start: int, stop: int) -> Float[np.ndarray, "distances"]:
    """f(m) = sum_t cos(m theta_t) for m = start .. stop - 1, in float64.

    With m = a + c, cos(m theta) = cos(a theta) cos(c theta) - sin(a theta) sin(c theta): one product of two matrices
    and 2 sqrt(n) cosines instead of n.
    """
    columns = math.isqrt(stop - start) + 1
    coarse = np.outer(np.arange(start, stop, columns), inverse_frequencies)
    fine = np.outer(np.arange(columns), inverse_frequencies)
    left = np.concatenate([np.cos(coarse), -np.sin(coarse)], axis=1)
    right = np.concatenate([np.cos(fine), np.sin(fine)], axis=1)
    return (left @ right.T).ravel()[: stop - start]


def _last_negative(
    log_base: float, distances: Int[np.ndarray, "witnesses"], powers: Float[np.ndarray, "half"]
) -> float:
    """The largest ln b up to which f is proved to stay negative at one of the distances, from ``log_base`` on.

    With x = ln b and p_t = m e^(-x u_t): f = sum cos p_t, f' = sum u_t p_t sin p_t and |f''| <= sum u_t^2 (p_t^2 + p_t)
    =: M, which decreases with x. So f(x + h) <= f + f' h + M h^2 / 2, which is negative up to the positive root.
    Repeating the step from each root is Newton's method from the left: it converges to the end of the interval and
    never passes it.
    """
    x = np.full(len(distances), log_base)
    for _ in range(6):
        phase = distances[:, None] * np.exp(-np.outer(x, powers))
        value = np.minimum(np.cos(phase).sum(-1), 0)
        slope = (powers * phase * np.sin(phase)).sum(-1)
        bend = (powers**2 * (phase**2 + phase)).sum(-1)
        x = x + np.maximum(np.sqrt(slope**2 - 2 * bend * value) - slope, 0) / bend * (value < 0)
    return float(x.max())
