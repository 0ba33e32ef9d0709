"""The rotary anomaly: where a score rises with distance, although rotation is meant to make it fall.

Plane ``t`` of query ``m`` and key ``n`` adds ``|z| cos(Theta + (m - n) theta_t)`` to the score, with

    z = (q_a + i q_b) conj(k_a + i k_b),    Theta = arg z in [0, 2 pi)

For ``Theta <= pi`` this term falls until the angle reaches ``pi``. For ``Theta > pi`` it first *rises* with distance,
over the nearest ``tau = (2 pi - Theta) / theta_t`` tokens: the anomaly that collinear constrained attention removes
(Zhu et al., arXiv 2309.08646, section 2). Here it is counted over the queries and keys of a model. For keys ahead of a
bidirectional query the two cases are swapped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check, check_choice, check_rank
from posjax._numbers import at_least_float32
from posjax.coca import Coca, half_width
from posjax.coca.planes import split
from posjax.diagnostics.rotation import Rule, radians
from posjax.masks import Causal, Mask
from posjax.rotary.rotation import PAIRINGS


class Anomaly(NamedTuple):
    """Statistics per head and plane, float64 ``[..., heads, planes]``; see ``rotary_anomaly``.

    ``fraction``: share of the (query, key) pairs with ``Theta > pi``. ``weighted``: the same, each pair weighted by
    ``|z|``. ``in_zone`` and ``in_zone_weighted``: share of the pairs that are also less than ``tau`` apart, where the
    score still rises with distance. ``zone``: mean of ``min(tau, N)`` over the pairs with ``Theta > pi``, in tokens,
    for a context of ``N``. ``strength``: mean of ``|z|``.
    """

    fraction: Float[np.ndarray, "*b heads planes"]
    weighted: Float[np.ndarray, "*b heads planes"]
    in_zone: Float[np.ndarray, "*b heads planes"]
    in_zone_weighted: Float[np.ndarray, "*b heads planes"]
    zone: Float[np.ndarray, "*b heads planes"]
    strength: Float[np.ndarray, "*b heads planes"]


def pooled(anomaly: Anomaly, axis: int | tuple[int, ...] | None = None) -> Anomaly:
    """The statistics of all pairs over the given axes (all when left out); weighted statistics by strength."""
    ones = np.ones_like(anomaly.fraction)
    weights = Anomaly(ones, anomaly.strength, ones, anomaly.strength, anomaly.fraction, ones)

    def mean(values, weight):
        return _share((values * weight).sum(axis), weight.sum(axis))

    return Anomaly(*map(mean, anomaly, weights))


def rotary_anomaly(
    q: Float[Array, "batch length heads size"],
    k: Float[Array, "batch length kv_heads size"],
    rule: Rule,
    *,
    pairing: str = "half",
    causal: bool = True,
    mask: Mask | None = None,
    positions: Int[Array, "length"] | None = None,
    length: int | None = None,
) -> Anomaly:
    """The anomaly of RoPE's queries and keys, counted over all pairs that attention sees.

    For independent normal queries and keys half of the pairs have ``Theta > pi``. Planes of frequency zero (p-RoPE)
    have no anomaly. Time grows with the square of the length, memory does not.

    Args:
        q: queries before rotation, after any norm.
        k: keys before rotation; may have fewer heads (GQA).
        rule: a frequency rule, or frequencies in radians per position; the first planes of a head are the rotated ones.
        pairing: which features form a plane; see ``rotary.apply_rotary``.
        causal: whether a query sees only keys at or before it.
        mask: a further mask, such as a window.
        positions: of the tokens, the same for all sequences; ``0, 1, 2, ...`` when left out.
        length: the current length, for rules that read it; the number of tokens when left out.

    Raises:
        ValueError: for an unknown pairing and shapes that do not fit.
    """
    _check(q, k)
    tokens = q.shape[1]
    size = q.shape[-1]
    theta = radians(rule, size, tokens if length is None else length)
    query, key = (jax.lax.complex(*_planes(x, theta.size, pairing)) for x in (q, k))
    return _count(query, key, theta, causal, mask, positions)


def coca_anomaly(
    q: Float[Array, "batch length heads size"],
    t: Float[Array, "batch length kv_heads half"],
    features: Coca,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    positions: Int[Array, "length"] | None = None,
    length: int | None = None,
) -> Anomaly:
    """The anomaly of CoCA: zero by construction for strict and tied, that of the relative part for slack and relative.

    The relative part is ``t |u| |u + i w| cos((m - n) theta + psi)`` with ``psi = arg(u^2 + i u w)``, where
    ``u = (x + y) / sqrt(2)``, ``w = (y - x) / sqrt(2)``: it first rises where ``u w < 0``. Arguments as for
    ``rotary_anomaly``; ``absolute_share`` measures slack's absolute part.
    """
    _check(q, t)
    tokens = t.shape[1]
    planes = t.shape[-1]
    theta = radians(features.frequencies, 2 * planes, tokens if length is None else length)
    if features.variant == "tied":
        query = 2 * jnp.square(q) + 0j
    else:
        x, y = _planes(q, planes, features.pairing)
        u = (x + y) / np.sqrt(2)
        w = (y - x) / np.sqrt(2)
        query = (x * x + y * y) + 0j if features.variant == "strict" else jax.lax.complex(u * u, u * w)
    return _count(query, half_width(t) + 0j, theta, causal, mask, positions)


def absolute_share(
    q: Float[Array, "batch length heads size"], *, pairing: str = "half"
) -> Float[np.ndarray, "heads half"]:
    """The share ``sum w^2 / sum (u^2 + w^2)`` of slack CoCA's score that depends on absolute positions.

    In each plane the score is ``t u (u cos d - w sin d) + t w (w cos s + u sin s)`` with ``d = (m - n) theta`` and
    ``s = (m + n) theta``, of amplitudes ``t |u| r`` and ``t |w| r``: the second depends on absolute positions. The
    share of its energy is a half for queries without a preferred direction, 0 for tied ones and 1 for ``(a, -a)``.

    Args:
        q: queries before rotation.
        pairing: which features form a plane.

    Returns:
        float64, over all tokens.
    """
    x, y = (np.asarray(part, np.float64) for part in _planes(q, q.shape[-1] // 2, pairing))
    return ((y - x) ** 2).sum((0, 1)) / (2 * (x**2 + y**2)).sum((0, 1))


def _check(q, k) -> None:
    check_rank("q", q, 4, "[batch, length, heads, size]")
    check_rank("k", k, 4, "[batch, length, heads, size]")
    check(q.shape[:2] == k.shape[:2], f"k must have the batch and length of q, {q.shape[:2]}, found {k.shape}")
    check(q.shape[2] % k.shape[2] == 0, f"heads of q must be a multiple of those of k, {q.shape[2]} and {k.shape[2]}")


def _planes(x: Array, planes: int, pairing: str) -> tuple[Array, Array]:
    """The two components of the first ``planes`` planes, at least float32."""
    check_choice("pairing", pairing, PAIRINGS)
    x = jnp.asarray(x, at_least_float32(x.dtype))
    check(x.shape[-1] >= 2 * planes, f"{planes} planes need a head of {2 * planes}, found shape {x.shape}")
    return split(x[..., : 2 * planes], pairing)


def _count(query, key, theta, causal: bool, mask: Mask | None, positions) -> Anomaly:
    tokens = query.shape[1]
    positions = jnp.arange(tokens, dtype=jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32)
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    masks = [part for part in (Causal() if causal else None, mask) if part is not None]
    shared = positions, jnp.asarray(theta, jnp.float32), masks
    # One sequence and one query at a time; sums over keys are in float32, the others in float64.
    sequences = (np.asarray(_sums(*one, *shared), np.float64).sum(0) for one in zip(query, key, strict=True))
    pairs, strength, anomalous, weighted, in_zone, in_zone_weighted, zone = sum(sequences)
    return Anomaly(
        fraction=_share(anomalous, pairs),
        weighted=_share(weighted, strength),
        in_zone=_share(in_zone, pairs),
        in_zone_weighted=_share(in_zone_weighted, strength),
        zone=_share(zone, anomalous),
        strength=_share(strength, pairs),
    )


def _share(part, whole):
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


@jax.jit
def _sums(query, key, positions, theta, masks) -> Float[Array, "queries 7 heads planes"]:
    """Sums over the keys of every query, for ``[tokens, heads, planes]``."""

    def of_query(token):
        query, position = token
        distance = (position - positions)[:, None, None]
        z = query * key.conj()
        z = jnp.where(distance >= 0, z, z.conj())
        seen = jnp.ones(z.shape, bool)
        for mask in masks:
            seen &= _keys_first(mask.allowed(position[None], positions))
        rises = seen & (z.imag < 0) & (theta > 0)
        tau = -jnp.angle(z) / jnp.where(theta > 0, theta, 1)
        in_zone = rises & (jnp.abs(distance) < tau)
        strength = jnp.abs(z)
        zone = jnp.minimum(tau, positions.size)
        parts = (seen, seen * strength, rises, rises * strength, in_zone, in_zone * strength, rises * zone)
        return jnp.stack([part.astype(jnp.float32).sum(0) for part in parts])

    return jax.lax.map(of_query, (query, positions))


def _keys_first(allowed: Bool[Array, "*b heads 1 keys"]) -> Bool[Array, "keys heads 1"]:
    """A mask for one query, which may have a head axis, with the keys first."""
    per_head = allowed if allowed.ndim == 2 else allowed[0, :, 0]
    return per_head.T[:, :, None]
