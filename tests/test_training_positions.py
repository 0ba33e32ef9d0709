"""Drawn positions: their distributions against closed forms, and what they give in evaluation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.training_positions import ClexPositions, EqualMean, PoSE, Randomised, sorted_subset

KEY = jax.random.key(0)
EXAMPLES = [Randomised(64), EqualMean("beta"), ClexPositions(8, 4), ClexPositions(4, 4), PoSE(64, chunks=3)]
NOTHING = (None, None, None)


@pytest.mark.parametrize("rule", EXAMPLES, ids=repr)
def test_drawn_is_a_pure_function_of_the_key(rule):
    eager = rule.draw(KEY, 3, 8)
    chex.assert_trees_all_equal(eager, jax.jit(rule.draw, static_argnums=(1, 2))(KEY, 3, 8))
    other = rule.draw(jax.random.key(1), 3, 8)
    assert not np.array_equal(*(np.asarray(jax.tree.leaves(drawn)[0]) for drawn in (eager, other)))
    values = eager.positions if eager.coordinates is None else eager.coordinates[..., 0]
    chex.assert_shape(values, (3, 8))
    chex.assert_type(values, jnp.int32 if eager.coordinates is None else jnp.float32)
    assert (np.diff(values, axis=1) > 0).all(), "causal order"
    assert not np.array_equal(values[0], values[1]), "rows differ"
    assert rule in {type(rule)(**vars(rule))}


def test_subsets_are_uniform():
    """Each of the 10 subsets of two out of five ids comes up equally often."""
    pairs = np.asarray(sorted_subset(KEY, 20_000, 2, 5))
    kinds, counts = np.unique(pairs @ [10, 1], return_counts=True)
    assert len(kinds) == 10
    np.testing.assert_allclose(counts / len(pairs), 0.1, atol=4 * (0.09 / len(pairs)) ** 0.5)


def test_randomised_ids_have_the_moments_of_order_statistics():
    """E[k-th of N] = k (Lmax + 1) / (N + 1) - 1, and the variance of order statistics without replacement."""
    n, limit, rows = 7, 30, 20_000
    ids = np.asarray(Randomised(limit).draw(KEY, rows, n).positions)
    k = np.arange(1, n + 1)
    variance = k * (n + 1 - k) * (limit + 1) * (limit - n) / ((n + 1) ** 2 * (n + 2))
    mean = k * (limit + 1) / (n + 1) - 1
    np.testing.assert_allclose(ids.mean(0), mean, atol=4 * (variance.max() / rows) ** 0.5)
    np.testing.assert_allclose(ids.var(0), variance, rtol=0.05)


@pytest.mark.parametrize(("limit", "length"), [(2048, 500), (31, 7), (5, 5), (9, 1)])
def test_randomised_ids_are_even_in_evaluation(limit, length):
    ids, *others = Randomised(limit).evaluate(length)
    assert others == [None, None]
    assert ids.tolist() == [k * (limit + 1) // (length + 1) - 1 for k in range(1, length + 1)]


def test_randomised_ids_may_be_random_in_evaluation():
    rule = Randomised(64, test="random")
    chex.assert_trees_all_equal(rule.evaluate(8, key=KEY, batch=3), rule.draw(KEY, 3, 8))


@pytest.mark.parametrize(
    ("rule", "variance"),
    # Exp(1), and factor^2 times the variance of Beta(1, factor - 1) = (factor - 1) / (factor + 1).
    [(EqualMean(), 1.0), (EqualMean("beta", factor=4.0), 3 / 5), (EqualMean("beta", 3.0, 2.0), 2 / 7)],
    ids=repr,
)
def test_equal_mean_grids(rule, variance):
    """Rows are grids from 0 whose mean is 0, 1, 2, ...; the step has the distribution's variance and support."""
    rows = 20_000
    grids = np.asarray(rule.draw(KEY, rows, 5).coordinates, np.float64)
    step = grids[:, 1:2]
    np.testing.assert_allclose(grids, step * np.arange(5)[None, :, None], rtol=1e-6)
    np.testing.assert_allclose(step.mean(), 1, atol=4 * (variance / rows) ** 0.5)
    np.testing.assert_allclose(step.var(), variance, rtol=0.1)
    assert rule.distribution != "beta" or step.max() <= rule.factor
    assert rule.evaluate(9) == NOTHING


def test_clex_ids_keep_both_ends_of_a_longer_text():
    rule, seen = ClexPositions(original_length=6, max_factor=4), {}
    draw = jax.jit(rule.draw, static_argnums=(1, 2))
    for seed in range(400):
        ids, _, length = draw(jax.random.key(seed), 2, 6)
        factor, left = divmod(int(length), 6)
        assert left == 0
        assert ids[:, [0, -1]].tolist() == [[0, 6 * factor - 1]] * 2
        seen.setdefault(factor, []).append(np.asarray(ids))
    assert sorted(seen) == [1, 2, 3, 4]
    assert all(60 < len(drawn) < 140 for drawn in seen.values()), "uniform over factors"
    assert (np.concatenate(seen[1]) == np.arange(6)).all()
    inside = np.concatenate(seen[4])[:, 1:-1]
    assert set(inside.ravel().tolist()) == set(range(1, 23))
    np.testing.assert_allclose(inside.mean(0), np.arange(1, 5) * 23 / 5, atol=1.5)


def test_clex_rows_of_several_original_lengths():
    """Rows of 3 L tokens: positions are multiples of 1/3 below t L, and the current length is t L."""
    _, coordinates, length = ClexPositions(original_length=4, max_factor=4).draw(KEY, 2, 12)
    values = np.asarray(coordinates[..., 0], np.float64)
    np.testing.assert_allclose(values * 3, np.round(values * 3), atol=1e-5)
    np.testing.assert_allclose(values[:, -1], int(length) - 1 / 3, rtol=1e-6)
    assert ClexPositions(4).evaluate(99) == NOTHING
    assert ClexPositions(original_length=2**31 - 1, max_factor=1).max_factor == 1


@pytest.mark.parametrize("chunks", [2, 3])
def test_pose_moves_chunks_ahead(chunks):
    rows, length, limit = 4000, 6, 20
    ids = np.asarray(PoSE(limit, chunks).draw(KEY, rows, length).positions)
    jumps = np.diff(ids, axis=1) - 1
    assert (jumps >= 0).all()
    assert ((jumps > 0).sum(1) <= chunks - 1).all()
    assert (ids[:, 0] == 0).all()
    assert set((ids[:, -1] - length + 1).tolist()) == set(range(limit - length + 1))
    if chunks == 2:
        assert set(np.nonzero(jumps)[1].tolist()) == set(range(length - 1))
        np.testing.assert_allclose(jumps.sum(1).mean(), 7, atol=4 * (((15**2 - 1) / 12) / rows) ** 0.5)
    assert PoSE(limit).draw(KEY, 1, limit).positions.tolist() == [list(range(limit))]
    assert PoSE(limit).evaluate(99) == NOTHING
