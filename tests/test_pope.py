"""PoPE against its definition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from posjax.pope import PoPE
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


def defined(delta, theta=THETA, factor=1.0):
    """sum_c softplus(q_c) softplus(k_c) cos((s - t) theta_c + delta_c), float64, s the key and t the query."""
    q, k = (np.log1p(np.exp(np.float64(x))) for x in (Q, np.repeat(K, HEADS // KV, axis=2)))
    angle = (POSITIONS - POSITIONS[:, None])[..., None] * theta
    phase = np.cos(angle + np.repeat(np.float64(delta), HEADS // KV, axis=0)[:, None, None])
    return factor * np.einsum("btnc,bsnc,ntsc->bnts", q, k, phase)


def test_scores_are_those_of_the_definition():
    np.testing.assert_allclose(scores(), defined(PARAMS["delta"]), rtol=1e-5, atol=1e-5)
    assert -2 * np.pi <= PARAMS["delta"].min() < PARAMS["delta"].max() <= 0
    assert PARAMS["delta"].std() > 1
    zeros = PoPE().init(jax.random.key(0), **SIZES)
    np.testing.assert_allclose(scores(PoPE(), zeros), defined(np.zeros((KV, D))), rtol=1e-5, atol=1e-5)


def test_phases_are_clipped_where_they_are_applied_but_never_stuck():
    for delta, applied in ((0.7, 0.0), (-7.0, -2 * np.pi)):
        given = {"delta": jnp.full((KV, D), delta)}
        np.testing.assert_allclose(scores(params=given), defined(np.full((KV, D), applied)), rtol=1e-5, atol=1e-5)
        assert np.abs(jax.grad(lambda params: scores(params=params).sum())(given)["delta"]).min() > 0


def test_shifting_all_positions_changes_nothing():
    near, far = (jax.jit(lambda start: scores(positions=Range(start, N)))(jnp.int32(p)) for p in (0, 1_000_003))
    np.testing.assert_allclose(far, near, atol=2e-5)
    assert SLOT.shift_invariant


def test_rules_of_rope_apply():
    rule = YaRN(4.0, 64)
    want = defined(PARAMS["delta"], rule.inverse_frequencies(2 * D), rule.table_factor**2)
    np.testing.assert_allclose(scores(PoPE(rule)), want, rtol=2e-5, atol=2e-5)
    dynamic = PoPE(DynamicNTK(64))
    assert dynamic.reads_length
    np.testing.assert_allclose(scores(dynamic, length=32), defined(PARAMS["delta"]), rtol=1e-5, atol=1e-5)
    assert PoPE(Plain(head_dim=2 * D)).query_size(D) == SLOT.key_size(D) == SLOT.head_dim(D) == D


def test_the_dtype_of_queries_is_kept():
    chex.assert_type(SLOT.query({}, Q.astype(np.float16), POSITIONS, head_dim=D), np.float16)
