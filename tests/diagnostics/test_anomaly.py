"""The rotary anomaly and slack CoCA's absolute share, against float64 loops and closed forms."""

import chex
import numpy as np
import pytest

import posjax as pj
from posjax import masks, rotary
from posjax.coca import Coca
from posjax.diagnostics import Anomaly, absolute_share, coca_anomaly, pooled, rotary_anomaly

PLAIN = rotary.Plain(100.0)
THETA = 100.0 ** -(np.arange(4) / 4)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(query, key, theta, sees):
    """The definition, pair by pair: complex ``query`` and ``key`` ``[batch, length, heads, planes]``, float64."""
    length, heads, planes = query.shape[1:]
    rows = {name: np.zeros((heads, planes)) for name in ("pairs", "strength", *Anomaly._fields)}
    for b, h, t, m, n in np.ndindex(query.shape[0], heads, planes, length, length):
        if not sees(m, n):
            continue
        z = query[b, m, h, t] * np.conj(key[b, n, h * key.shape[2] // heads, t])
        start = np.angle(z) % (2 * np.pi)
        rises = start > np.pi if m >= n else 0 < start < np.pi
        tau = (2 * np.pi - start if m >= n else start) / theta[t]
        in_zone = rises and abs(m - n) < tau
        counts = {"pairs": 1, "strength": abs(z), "fraction": rises, "weighted": rises * abs(z), "in_zone": in_zone}
        counts |= {"in_zone_weighted": in_zone * abs(z), "zone": rises * min(tau, length)}
        for name, value in counts.items():
            rows[name][h, t] += value
    denominators = {"weighted": "strength", "in_zone_weighted": "strength", "zone": "fraction"}
    return Anomaly(*(rows[name] / rows[denominators.get(name, "pairs")] for name in Anomaly._fields))


def as_complex(x, pairing):
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:] if pairing == "half" else x[..., 0::2] + 1j * x[..., 1::2]


@pytest.mark.parametrize(("pairing", "causal", "mask"), [("interleaved", True, masks.Window(4)), ("half", False, None)])
def test_rotary_against_the_definition(pairing, causal, mask):
    q, k = draw(2, 9, 2, 8), draw(2, 9, 1, 8, seed=1)
    found = rotary_anomaly(q, k, PLAIN, pairing=pairing, causal=causal, mask=mask)
    want = by_hand(
        as_complex(q, pairing),
        as_complex(k, pairing),
        THETA,
        lambda m, n: (m >= n or not causal) and (mask is None or abs(m - n) < 4),
    )
    chex.assert_trees_all_close(found, want, rtol=1e-5)
    half = rotary_anomaly(q, k, rotary.Proportional(0.5, base=100.0), pairing=pairing, causal=causal, mask=mask)
    assert not half.fraction[:, 2:].any(), "planes that do not turn have no anomaly"
    np.testing.assert_allclose(half.fraction[:, :2], want.fraction[:, :2], rtol=1e-5)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_features_that_do_not_rotate_have_no_part_in_the_anomaly(pairing):
    """Partial rotary: the first half of a head is a head of its own."""
    q, k = draw(1, 9, 2, 16), draw(1, 9, 2, 16, seed=1)
    partly = rotary_anomaly(q, k, rotary.Plain(100.0, partial_rotary_factor=0.5), pairing=pairing)
    chex.assert_trees_all_equal(partly, rotary_anomaly(q[..., :8], k[..., :8], PLAIN, pairing=pairing))


@pytest.mark.parametrize(("variant", "width"), [("strict", 8), ("tied", 4)])
def test_strict_and_tied_coca_have_no_anomaly_by_construction(variant, width):
    found = coca_anomaly(draw(1, 7, 2, width), draw(1, 7, 1, 4, seed=1), Coca(variant, frequencies=PLAIN))
    assert not any(found[name].any() for name in range(5))
    assert (found.strength > 0).all()


def test_the_relative_part_of_coca_against_the_definition():
    """A key of zero has no angle. NumPy gives 0, which is not counted as rising."""
    q, t = draw(2, 9, 2, 8), draw(2, 9, 2, 4, seed=1)
    x, y = q[..., :4].astype(np.float64), q[..., 4:].astype(np.float64)
    u, w = (x + y) / np.sqrt(2), (y - x) / np.sqrt(2)
    want = by_hand(u * (u + 1j * w), np.maximum(t, 0) + 0j, THETA, lambda m, n: m >= n)
    for variant in ("slack", "relative"):
        chex.assert_trees_all_close(coca_anomaly(q, t, Coca(variant, frequencies=PLAIN)), want, rtol=1e-5)
    table = pj.rotary_table(np.arange(9), THETA)
    phi, psi = pj.coca.features(q, np.abs(t), table, variant="relative")
    z = (np.abs(t[0, 0, 0]) * u[0, 1, 0] * (u + 1j * w)[0, 1, 0] * np.exp(1j * THETA)).real.sum()
    np.testing.assert_allclose((phi[0, 1, 0] * psi[0, 0, 0]).sum(), z, rtol=1e-5)


def test_the_absolute_share_is_half_for_no_direction_none_for_tied_all_for_opposed():
    q = draw(2, 400, 2, 8)
    np.testing.assert_allclose(absolute_share(q), np.full((2, 4), 0.5), atol=0.06)
    np.testing.assert_allclose(absolute_share(np.concatenate([q, q], -1)), 0, atol=1e-12)
    np.testing.assert_allclose(absolute_share(np.concatenate([q, -q], -1)), 1, atol=1e-12)
    np.testing.assert_allclose(absolute_share(np.repeat(q, 2, -1), pairing="interleaved"), 0, atol=1e-12)


def test_pooling_is_the_statistic_of_all_pairs():
    """Compares three heads of one row with one head of three rows."""
    q, k = draw(1, 8, 3, 4), draw(1, 8, 3, 4, seed=1)
    apart = pooled(rotary_anomaly(q, k, PLAIN), axis=-2)
    together = rotary_anomaly(*(np.moveaxis(x, 2, 0).reshape(3, 8, 1, 4) for x in (q, k)), PLAIN)
    chex.assert_trees_all_close(apart, Anomaly(*(x[0] for x in together)), rtol=1e-6)
