"""The general solution: commuting generators, their planes, and the part that a projection can absorb."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rotations import powers

from posjax.rotary import AXIAL_LAYOUTS, GeneralRotary, MixedRotary, commute, decompose, grid_coordinates

D = 8
RNG = np.random.default_rng(0)
J = np.array([[0.0, -1.0], [1.0, 0.0]])
# Left multiplication by the quaternions i and j on (1, i, j, k).
I_UNIT = np.array([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
J_UNIT = np.array([[0, 0, -1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, -1, 0, 0]])


def expm(a):
    """The exponential series, scaled and squared."""
    result = term = np.eye(len(a))
    for n in range(1, 25):
        term = term @ (a / 2**10) / n
        result = result + term
    return np.linalg.matrix_power(result, 2**10)


def generators(omega, basis=None):
    """B_a = O diag(omega_at J) O^T with planes (2t, 2t + 1) of ``basis``, random unless given."""
    size = 2 * omega.shape[1]
    basis = np.linalg.qr(RNG.standard_normal((size, size)))[0] if basis is None else basis
    return np.stack([basis @ np.kron(np.diag(row), J) @ basis.T for row in omega])


OMEGAS = {
    "one axis": RNG.standard_normal((1, 4)),
    "two axes": RNG.standard_normal((2, 4)),
    "three axes": RNG.standard_normal((3, 4)),
    "kernel": np.array([[1.0, 0.3, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0]]),
    "equal planes": np.array([[0.5, 0.5, -0.5, 0.5], [0.1, 0.1, -0.1, 0.7]]),
    "nothing turns": np.zeros((2, 4)),
    "an axis of nothing, scales apart": np.array([[30.0, 1.0, 2.0, 3.0], [0.0] * 4, [1e-7, 2e-7, 0.0, 1e-7]]),
}


@pytest.mark.parametrize("name", OMEGAS)
def test_planes_and_frequencies(name):
    matrices = generators(OMEGAS[name])
    assert commute(matrices)
    basis, omega = decompose(matrices)
    assert basis.dtype == omega.dtype == np.float64
    np.testing.assert_allclose(basis.T @ basis, np.eye(D), atol=1e-12)
    x = RNG.standard_normal(len(omega))
    angle = x @ omega
    rotation = np.kron(np.eye(2), np.diag(np.cos(angle))) + np.kron(J, np.diag(np.sin(angle)))
    np.testing.assert_allclose(basis @ rotation @ basis.T, expm(np.tensordot(x, matrices, 1)), atol=1e-8)
    found, wanted = (row * np.sign(x @ row) for row in (omega, OMEGAS[name]))
    scale = np.abs(wanted).max(axis=1, keepdims=True) + 1e-300
    np.testing.assert_allclose(_sorted(found) / scale, _sorted(wanted) / scale, atol=1e-7)


def _sorted(omega):
    """Planes in the order of their frequencies, independent of rounding."""
    return omega[:, np.lexsort(np.round(omega, 6))]


B = generators(OMEGAS["two axes"])
GRID = grid_coordinates(2, 3)
Q, K = (np.asarray(jax.random.normal(jax.random.key(s), (1, 6, h, D))) for s, h in ((0, 2), (1, 1)))


def scores(slot, coordinates, q=Q, k=K, **options):
    places = {"q_positions": coordinates, "kv_positions": coordinates, "head_dim": q.shape[-1]}
    phi, psi = slot(q, k, **places, **options)
    return np.einsum("btnd,bsd->bnts", np.asarray(phi, np.float64), np.asarray(psi, np.float64)[:, :, 0])


def test_scores_are_those_of_the_matrix_exponential_and_relative():
    """q^T R_i^T R_j k = q^T exp(sum_a (j - i)_a B_a) k = (P^T q)^T exp(sum_a (j - i)_a Lambda_a) (P^T k)."""
    expected = np.zeros((1, 2, 6, 6))
    basis, omega = decompose(B)
    planes = np.stack([np.kron(J, np.diag(row)) for row in omega])
    for n, i, j in np.ndindex(2, 6, 6):
        apart = GRID[j] - GRID[i]
        expected[0, n, i, j] = Q[0, i, n] @ expm(np.tensordot(apart, B, 1)) @ K[0, j, 0]
        absorbed = (basis.T @ Q[0, i, n]) @ expm(np.tensordot(apart, planes, 1)) @ (basis.T @ K[0, j, 0])
        np.testing.assert_allclose(absorbed, expected[0, n, i, j], atol=1e-10)
    slot = GeneralRotary(B)
    np.testing.assert_allclose(scores(slot, GRID), expected, atol=1e-5)
    np.testing.assert_allclose(scores(slot, GRID + np.array([1_000_003, -77_777])), expected, atol=1e-5)


def test_axial_rotation_is_a_special_case():
    theta = powers(100.0, D // 2)
    zero = np.zeros(D // 4)
    matrices = generators(np.stack([np.r_[zero, theta], np.r_[theta, zero]]), np.eye(D))
    np.testing.assert_allclose(
        scores(GeneralRotary(matrices), GRID), scores(AXIAL_LAYOUTS["rope-vit"], GRID), atol=1e-5
    )


def test_mixed_rotation_is_a_special_case():
    params = MixedRotary().init(jax.random.key(0), num_heads=2, num_kv_heads=1, head_dim=D)
    matrices = generators(np.asarray(params["frequencies"][0], np.float64), np.eye(D))
    np.testing.assert_allclose(
        scores(GeneralRotary(matrices), GRID), scores(MixedRotary(), GRID, params=params), atol=1e-5
    )


def test_quaternions_do_not_commute():
    units = np.stack([I_UNIT, J_UNIT])
    assert not commute(units)
    assert commute(units[:1])
    for refuses in (decompose, GeneralRotary):
        with pytest.raises(ValueError, match=r"generators 0 and 1 do not commute, \|AB - BA\| = 1 \|A\| \|B\|"):
            refuses(units)
    apart, back = expm(2.0 * I_UNIT + J_UNIT), expm(I_UNIT + 0.0 * J_UNIT)
    assert np.abs(apart @ back.T - expm(1.0 * I_UNIT + J_UNIT)).max() > 0.1


def test_the_four_by_four_family_of_the_article():
    """B_1 = (a = 1, b, c) and B_2 commute exactly when d = c f and e = -b f (kexue.fm 8397)."""

    def skew(a, b, c, d, e, f):
        upper = np.array([[0, a, b, c], [0, 0, d, e], [0, 0, 0, f], [0, 0, 0, 0]])
        return upper - upper.T

    b, c, f = 0.3, -0.7, 1.3
    first, second = skew(1.0, b, c, c, -b, 1.0), skew(f, b * f, c * f, c * f, -b * f, f)
    assert commute([first, second])
    assert commute([skew(1, 0, 0, 0, 0, 0), skew(0, 0, 0, 0, 0, 1)])
    assert not commute([skew(1, b, c, 0, 0, 0), skew(0, 0, 0, 0.5, 0, f)])


def test_a_norm_with_a_factor_per_channel_stops_the_absorption():
    """Without the factor, norm and P^T commute. With it, no factor after P^T gives the same result."""
    basis, _ = decompose(B)
    norm = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True))  # noqa: E731
    np.testing.assert_allclose(norm(Q @ basis), norm(Q) @ basis, atol=1e-6)
    gamma = np.linspace(0.5, 2.0, D)
    wanted, seen = (gamma * norm(Q)) @ basis, norm(Q @ basis)
    best = (wanted * seen).sum((0, 1, 2)) / (seen * seen).sum((0, 1, 2))
    assert np.abs(best * seen - wanted).max() > 0.1


def test_slot_is_static_and_keeps_dtypes():
    slot = GeneralRotary(B)
    assert slot == GeneralRotary(B.copy())
    assert hash(slot) == hash(GeneralRotary(B.tolist()))
    assert slot != GeneralRotary(2 * B)
    run = jax.jit(lambda slot, q: slot.query({}, q, GRID, head_dim=D), static_argnums=0)
    chex.assert_trees_all_close(run(slot, Q), slot.query({}, Q, GRID, head_dim=D), atol=1e-6)
    assert run(slot, jnp.asarray(Q, jnp.bfloat16)).dtype == jnp.bfloat16
    text = slot.query({}, Q, np.arange(6), head_dim=D)
    chex.assert_trees_all_equal(text, slot.query({}, Q, np.stack([np.arange(6)] * 2, axis=1), head_dim=D))


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (np.ones((1, 4, 4)), r"skew-symmetric, \|B \+ B\^T\| is 2"),
        (np.zeros((1, 3, 3)), "size of the generators must be a positive even"),
        (np.zeros((1, 2, 4)), r"square matrices .* found shape \(1, 2, 4\)"),
        (np.zeros((4, 4)), r"\[axes, d, d\], found shape \(4, 4\)"),
        (np.zeros((0, 4, 4)), "found shape"),
        (np.full((1, 2, 2), np.nan), "finite"),
    ],
)
def test_bad_generators_are_refused(matrices, message):
    for refuses in (commute, decompose, GeneralRotary):
        with pytest.raises(ValueError, match=message):
            refuses(matrices)


def test_head_dim_must_fit():
    with pytest.raises(ValueError, match="head_dim=16 but the generators have size 8"):
        GeneralRotary(B).query_size(16)
