"""The general solution: commuting generators, their planes, and the part that a projection can absorb."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.rotary import GeneralRotary, commute, decompose, grid_coordinates

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


def generators(omega):
    """B_a = O diag(omega_at J) O^T with planes (2t, 2t + 1) of a random basis."""
    basis = np.linalg.qr(RNG.standard_normal((D, D)))[0]
    return np.stack([basis @ np.kron(np.diag(row), J) @ basis.T for row in omega])


OMEGAS = {
    "one axis": RNG.standard_normal((1, 4)),
    "three axes": RNG.standard_normal((3, 4)),
    "kernel": np.array([[1.0, 0.3, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0]]),
    "equal planes": np.array([[0.5, 0.5, -0.5, 0.5], [0.1, 0.1, -0.1, 0.7]]),
    "nothing turns": np.zeros((2, 4)),
    "an axis of nothing, scales apart": np.array([[30.0, 1.0, 2.0, 3.0], [0.0] * 4, [1e-7, 2e-7, 0.0, 1e-7]]),
}


@pytest.mark.parametrize("name", OMEGAS)
def test_planes_and_frequencies_are_found(name):
    matrices = generators(OMEGAS[name])
    assert commute(matrices)
    basis, omega = decompose(matrices)
    assert basis.dtype == omega.dtype == np.float64
    np.testing.assert_allclose(basis.T @ basis, np.eye(D), atol=1e-12)
    x = RNG.standard_normal(len(omega))
    angle = x @ omega
    rotation = np.kron(np.eye(2), np.diag(np.cos(angle))) + np.kron(J, np.diag(np.sin(angle)))
    np.testing.assert_allclose(basis @ rotation @ basis.T, expm(np.tensordot(x, matrices, 1)), atol=1e-8)
    # Planes in the order of their frequencies, with the sign that turns them forwards at x.
    found, wanted = (row * np.sign(x @ row) for row in (omega, OMEGAS[name]))
    found, wanted = (row[:, np.lexsort(np.round(row, 6))] for row in (found, wanted))
    scale = np.abs(wanted).max(axis=1, keepdims=True) + 1e-300
    np.testing.assert_allclose(found / scale, wanted / scale, atol=1e-7)


B = generators(RNG.standard_normal((2, 4)))
GRID = grid_coordinates(2, 3)
Q, K = (np.asarray(jax.random.normal(jax.random.key(s), (1, 6, h, D))) for s, h in ((0, 2), (1, 1)))


def test_scores_are_those_of_the_matrix_exponential():
    """q^T R_i^T R_j k = q^T exp(sum_a (j - i)_a B_a) k."""
    expected = np.zeros((1, 2, 6, 6))
    for n, i, j in np.ndindex(2, 6, 6):
        expected[0, n, i, j] = Q[0, i, n] @ expm(np.tensordot(GRID[j] - GRID[i], B, 1)) @ K[0, j, 0]
    slot = jax.jit(lambda at: GeneralRotary(B)(Q, K, q_positions=at, kv_positions=at, head_dim=D))
    for coordinates in (GRID, GRID + np.array([1_000_003, -77_777])):
        phi, psi = (np.asarray(x, np.float64) for x in slot(coordinates))
        np.testing.assert_allclose(np.einsum("btnd,bsd->bnts", phi, psi[:, :, 0]), expected, atol=1e-5)


def test_quaternions_do_not_commute():
    units = np.stack([I_UNIT, J_UNIT])
    assert not commute(units)
    assert commute(units[:1])
    for refuses in (decompose, GeneralRotary):
        with pytest.raises(ValueError, match=r"generators 0 and 1 do not commute, \|AB - BA\| = 1 \|A\| \|B\|"):
            refuses(units)


def test_the_slot_is_static_keeps_dtypes_and_reads_text_on_every_axis():
    slot = GeneralRotary(B)
    assert hash(slot) == hash(GeneralRotary(B.tolist()))
    assert slot == GeneralRotary(B.copy()) != GeneralRotary(2 * B)
    run = jax.jit(lambda slot, q, at: slot.query({}, q, at, head_dim=D), static_argnums=0)
    assert run(slot, jnp.asarray(Q, jnp.bfloat16), GRID).dtype == jnp.bfloat16
    text = run(slot, Q, np.arange(6))
    np.testing.assert_allclose(text, run(slot, Q, np.stack([np.arange(6)] * 2, axis=1)), atol=1e-6)
