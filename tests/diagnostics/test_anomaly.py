"""The rotary anomaly and slack CoCA's absolute share, against float64 loops and closed forms."""

import chex
import numpy as np
import pytest

import posjax as pj
from posjax import masks, rotary
from posjax.coca import Coca
from posjax.diagnostics import Anomaly, absolute_share, coca_anomaly, pooled, rotary_anomaly

PLAIN = rotary.Plain(100.0)


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


@pytest.mark.parametrize(
    ("pairing", "causal", "mask"),
    [("half", True, None), ("interleaved", True, masks.Window(4)), ("half", False, None)],
)
def test_rotary_against_the_definition(pairing, causal, mask):
    q, k = draw(2, 9, 2, 8), draw(2, 9, 1, 8, seed=1)
    found = rotary_anomaly(q, k, PLAIN, pairing=pairing, causal=causal, mask=mask)
    theta = 100.0 ** -(np.arange(4) / 4)
    want = by_hand(
        as_complex(q, pairing),
        as_complex(k, pairing),
        theta,
        lambda m, n: (m >= n or not causal) and (mask is None or abs(m - n) < 4),
    )
    chex.assert_trees_all_close(found, want, rtol=1e-5)
    chex.assert_tree_shape_prefix(found, (2, 4))


def test_the_score_rises_with_distance_exactly_inside_the_zone():
    """The derivative of |z| cos(Theta + r theta) itself, for one query and keys at growing distance."""
    length, theta = 40, 0.21
    q, key = draw(1, 1, 1, 2), draw(1, 1, 1, 2, seed=3)
    z = complex(*q.ravel()) * np.conj(complex(*key.ravel()))
    if z.imag >= 0:
        key = key * [1, -1]
        z = complex(*q.ravel()) * np.conj(complex(*key.ravel()))
    assert z.imag < 0
    reach = 2 * np.pi - np.angle(z) % (2 * np.pi)
    r = np.arange(length)
    slope = -np.sin(np.angle(z) + r * theta)
    first_zone = r * theta < reach
    assert (slope[first_zone] > 0).all()
    assert slope[first_zone.sum()] < 0
    q, k = (np.broadcast_to(x, (1, length, 1, 2)).astype(np.float32) for x in (q, key))
    found = rotary_anomaly(q, k, np.array([theta]))
    pairs = length - r  # number of pairs at distance r
    np.testing.assert_allclose(found.in_zone, pairs[first_zone].sum() / pairs.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.zone, min(reach / theta, length), rtol=1e-5)
    assert found.fraction == 1


def test_random_queries_and_keys_give_the_expected_baselines():
    """Half of the pairs. At d = 64 and 512 tokens the mean zone is 0.216 of the length; in 14 planes it can be longer.

    The literature has no numbers. At d = 128 and 2048 tokens they are 0.146 and 18 planes.
    """
    theta = 10_000.0 ** -(np.arange(32) / 32)
    angle = np.linspace(0, np.pi, 2001)[1:, None]
    zone = np.minimum(angle / theta, 512)
    assert zone.mean() / 2 / 512 == pytest.approx(0.2161, abs=1e-4)
    assert (np.pi / theta > 512).sum() == 14
    found = pooled(rotary_anomaly(draw(1, 512, 1, 64), draw(1, 512, 1, 64, seed=1), theta))
    assert found.fraction == pytest.approx(0.5, abs=0.005)
    assert found.weighted == pytest.approx(0.5, abs=0.01)
    assert found.strength == pytest.approx(np.pi / 2, abs=0.02)
    assert found.zone == pytest.approx(zone.mean(), rel=0.01)


def test_planes_that_do_not_turn_have_no_anomaly():
    found = rotary_anomaly(draw(1, 6, 1, 8), draw(1, 6, 1, 8, seed=1), rotary.Proportional(0.5, base=100.0))
    assert (found.fraction[:, 2:] == 0).all()
    assert (found.zone[:, 2:] == 0).all()
    assert (found.fraction[:, :2] > 0).all()


@pytest.mark.parametrize("variant", ["strict", "tied"])
def test_strict_and_tied_coca_have_no_anomaly_by_construction(variant):
    width = 4 if variant == "tied" else 8
    found = coca_anomaly(draw(1, 7, 2, width), draw(1, 7, 1, 4, seed=1), Coca(variant, frequencies=PLAIN))
    assert not any(found[name].any() for name in range(5))
    assert (found.strength > 0).all()


@pytest.mark.parametrize("variant", ["slack", "relative"])
def test_slack_and_relative_coca_against_the_definition(variant):
    q, t = draw(2, 9, 2, 8), draw(2, 9, 2, 4, seed=1)
    found = coca_anomaly(q, t, Coca(variant, frequencies=PLAIN))
    x, y = q[..., :4].astype(np.float64), q[..., 4:].astype(np.float64)
    u, w = (x + y) / np.sqrt(2), (y - x) / np.sqrt(2)
    want = by_hand(u * (u + 1j * w), np.maximum(t, 0) + 0j, 100.0 ** -(np.arange(4) / 4), lambda m, n: m >= n)
    # A key of zero has no angle. NumPy gives 0, which is not counted as rising.
    chex.assert_trees_all_close(found, want, rtol=1e-5)


def test_the_relative_part_is_what_relative_coca_scores():
    q, t = draw(1, 2, 1, 2), np.abs(draw(1, 2, 1, 1, seed=1))
    u, w = (q[0, 1, 0, 0] + q[0, 1, 0, 1]) / 2**0.5, (q[0, 1, 0, 1] - q[0, 1, 0, 0]) / 2**0.5
    phi, psi = pj.coca.features(q, t, pj.rotary_table(np.arange(2), np.array([0.3])), variant="relative")
    z = t[0, 0, 0, 0] * u * (u + 1j * w)
    np.testing.assert_allclose((phi[0, 1, 0] * psi[0, 0, 0]).sum(), (z * np.exp(0.3j)).real, rtol=1e-5)


def test_the_absolute_share_is_half_for_no_direction_none_for_tied_all_for_opposed():
    q = draw(2, 400, 2, 8)
    chex.assert_shape(absolute_share(q), (2, 4))
    np.testing.assert_allclose(absolute_share(q), 0.5, atol=0.06)
    same, opposed = np.concatenate([q, q], -1), np.concatenate([q, -q], -1)
    np.testing.assert_allclose(absolute_share(same), 0, atol=1e-12)
    np.testing.assert_allclose(absolute_share(opposed), 1, atol=1e-12)
    np.testing.assert_allclose(absolute_share(np.repeat(q, 2, -1), pairing="interleaved"), 0, atol=1e-12)


def test_pooling_is_the_statistic_of_all_pairs():
    """Compares three heads of one row with one head of three rows."""
    q, k = draw(1, 8, 3, 4), draw(1, 8, 3, 4, seed=1)
    apart = pooled(rotary_anomaly(q, k, PLAIN), axis=-2)
    together = rotary_anomaly(*(np.moveaxis(x, 2, 0).reshape(3, 8, 1, 4) for x in (q, k)), PLAIN)
    chex.assert_trees_all_close(apart, Anomaly(*(x[0] for x in together)), rtol=1e-6)


def test_bad_arguments():
    q = draw(1, 4, 2, 8)
    with pytest.raises(ValueError, match="pairing"):
        rotary_anomaly(q, q, PLAIN, pairing="halves")
    with pytest.raises(ValueError, match="heads"):
        rotary_anomaly(q, draw(1, 4, 3, 8), PLAIN)
    with pytest.raises(ValueError, match="batch and length"):
        rotary_anomaly(q, draw(1, 5, 2, 8), PLAIN)
    with pytest.raises(ValueError, match="5 planes"):
        rotary_anomaly(q, q, np.ones(5))
