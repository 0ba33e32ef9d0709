"""PoPE against its definition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.pope import PoPE, clip_delta
from posjax.positions import Range
from posjax.rotary import DynamicNTK, Plain, YaRN

D, HEADS, KV, N = 8, 4, 2, 5
SIZES = {"num_heads": HEADS, "num_kv_heads": KV, "head_dim": D}
Q, K = (np.asarray(jax.random.normal(jax.random.key(seed), (2, N, h, D))) for seed, h in ((0, HEADS), (1, KV)))
POSITIONS = np.array([0, 1, 7, 500, 70_000])
SLOT = PoPE(init_delta="uniform")
PARAMS = SLOT.init(jax.random.key(2), **SIZES)
THETA = 10_000.0 ** -(np.arange(D) / D)


def scores(slot=SLOT, params=PARAMS, positions=POSITIONS, **options):
    phi, psi = slot(Q, K, q_positions=positions, kv_positions=positions, head_dim=D, params=params, **options)
    chex.assert_shape([phi, psi], [(2, N, HEADS, 2 * D), (2, N, KV, 2 * D)])
    return jnp.einsum("btnd,bsnd->bnts", phi, jnp.repeat(psi, HEADS // KV, axis=2))


def closed_form(delta, theta=THETA):
    """sum_c softplus(q_c) softplus(k_c) cos((s - t) theta_c + delta_c), float64, s the key and t the query."""
    q, k = (np.log1p(np.exp(np.float64(x))) for x in (Q, np.repeat(K, HEADS // KV, axis=2)))
    delta = np.repeat(np.float64(delta), HEADS // KV, axis=0)
    expected = np.zeros((2, HEADS, N, N))
    for n, t, s in np.ndindex(HEADS, N, N):
        phase = np.cos((POSITIONS[s] - POSITIONS[t]) * theta + delta[n])
        expected[:, n, t, s] = (q[:, t, n] * k[:, s, n] * phase).sum(-1)
    return expected


def test_scores_equal_the_definition():
    np.testing.assert_allclose(scores(), closed_form(PARAMS["delta"]), rtol=1e-5, atol=1e-5)
    zeros = PoPE().init(jax.random.key(0), **SIZES)
    np.testing.assert_allclose(scores(PoPE(), zeros), closed_form(np.zeros((KV, D))), rtol=1e-5, atol=1e-5)


def test_initial_phases():
    chex.assert_shape(PARAMS["delta"], (KV, D))
    assert -2 * np.pi <= PARAMS["delta"].min() < PARAMS["delta"].max() <= 0
    assert PARAMS["delta"].std() > 1
    chex.assert_trees_all_equal(PoPE().init(jax.random.key(0), **SIZES), {"delta": jnp.zeros((KV, D))})


def test_phases_are_clipped_when_applied_but_never_stuck():
    outside = {"delta": jnp.full((KV, D), 0.7)}
    np.testing.assert_allclose(scores(params=outside), closed_form(np.zeros((KV, D))), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(clip_delta(jnp.array([-7.0, -1.0, 3.0])), [-2 * np.pi, -1.0, 0.0], rtol=1e-6)
    for delta in (0.0, 0.7, -9.0):
        gradient = jax.grad(lambda params: scores(params=params).sum())({"delta": jnp.full((KV, D), delta)})["delta"]
        assert np.abs(gradient).min() > 0


def test_shifting_all_positions_changes_nothing():
    near, far = (jax.jit(lambda start: scores(positions=Range(start, N)))(jnp.int32(p)) for p in (0, 1_000_003))
    np.testing.assert_allclose(far, near, atol=2e-5)


def test_rules_of_rope_apply():
    rule = YaRN(4.0, 64)
    slot = PoPE(rule, init_delta="uniform")
    expected = rule.table_factor**2 * closed_form(PARAMS["delta"], rule.inverse_frequencies(2 * D))
    np.testing.assert_allclose(scores(slot), expected, rtol=2e-5, atol=2e-5)
    dynamic = PoPE(DynamicNTK(64))
    assert dynamic.reads_length
    np.testing.assert_allclose(
        scores(dynamic, length=32), closed_form(np.clip(PARAMS["delta"], -7, 0)), rtol=1e-5, atol=1e-5
    )


def test_slot_describes_itself():
    assert (SLOT.query_size(D), SLOT.key_size(D), SLOT.head_dim(D), SLOT.softmax_scale) == (D, D, D, 1.0)
    assert SLOT.shift_invariant
    assert SLOT.query({}, Q.astype(np.float16), POSITIONS, head_dim=D).dtype == np.float16
    assert PoPE(Plain(head_dim=2 * D)).query_size(D) == D


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoPE(1e4), "frequencies must be a frequency rule"),
        (lambda: PoPE(init_delta="zero"), "init_delta: unknown value 'zero'; did you mean 'zeros'"),
        (lambda: PoPE(precision="fp32"), "precision: unknown value"),
        (lambda: PoPE(Plain(partial_rotary_factor=0.5)).query_size(D), "rotates every channel: 4 of 8 rotate"),
        (lambda: scores(params={}), "params must hold 'delta'"),
        (lambda: scores(params={"delta": jnp.zeros((HEADS, D))}), r"delta must have shape \(2, 8\), found \(4, 8\)"),
    ],
)
def test_bad_slots_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
