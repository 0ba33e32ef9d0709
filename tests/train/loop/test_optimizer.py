"""Schedules, learning-rate factors and the dtype of moments, against closed forms and optax's own optimizers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.config import TrainConfig
from train.loop.optimizer import FROZEN, TRAINED, _as_matrix, kept_moments, learning_rate, make_optimizer, param_labels


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(("schedule", "last"), [("linear", 0.2), ("constant", 2.0)])
def test_learning_rate_warms_up_and_then_decays_linearly_or_is_constant(schedule, last, warmup):
    config = TrainConfig(steps=110, warmup_steps=warmup, learning_rate=2.0, final_learning_rate=0.1, schedule=schedule)
    rate = learning_rate(config)
    knots = {0: 2.0} | ({0: 0.0, warmup: 2.0} if warmup else {}) | {110: last}
    expected = np.interp(np.arange(1, 111), list(knots), list(knots.values()))
    np.testing.assert_allclose([rate(step) for step in range(110)], expected, rtol=1e-5)


MATRICES = {"a": ("embed", "mlp"), "b": ("embed", "mlp")}


def updated(config, gradients, steps=1):
    """Two parameters that start as ones, and the state of the optimizer, after `steps` updates."""
    optimizer = make_optimizer(config, MATRICES)
    parameters = jax.tree.map(jnp.ones_like, gradients)
    state = optimizer.init(parameters)
    for _ in range(steps):
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters, state


PLAIN = {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "clip_norm": 1e9, "steps": 100}


def test_factors_multiply_the_rate_of_the_parameters_that_they_name():
    """With a constant gradient, an update of AdamW is the rate times the sum of the gradient's sign and the decay."""
    gradients = {"a": jnp.full((2, 3), 0.3), "b": jnp.full((2, 3), -0.2)}
    factors = {"a": 0.5, "[ab]": 0.25}
    found, _ = updated(TrainConfig(**PLAIN, weight_decay=0.2, learning_rate_factors=factors), gradients, steps=2)
    for name, rate in (("a", 0.1 * 0.5 * 0.25), ("b", 0.1 * 0.25)):
        expected = 1.0
        for _ in range(2):
            expected -= rate * (np.sign(gradients[name][0, 0]) + 0.2 * expected)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)
    frozen, _ = updated(TrainConfig(**PLAIN, trainable=("b",), learning_rate_factors=factors), gradients)
    np.testing.assert_array_equal(frozen["a"], 1.0)
    assert (np.asarray(frozen["b"]) != 1.0).all()
    with pytest.raises(ValueError, match=r"^train.learning_rate_factors: 'c' names no parameter; the names are a, b"):
        make_optimizer(TrainConfig(learning_rate_factors={"c": 2.0}), MATRICES)


def test_first_moments_in_bfloat16_are_those_of_optax():
    random = np.random.default_rng(0)
    gradients = {name: jnp.asarray(random.normal(size=(2, 3)), jnp.float32) for name in MATRICES}
    found, state = updated(TrainConfig(**PLAIN, weight_decay=0.0, moment_dtype="bfloat16"), gradients, steps=3)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree_utils.tree_get(state, "mu"))} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree_utils.tree_get(state, "nu"))} == {jnp.dtype("float32")}
    optimizer = optax.adam(0.1, 0.9, 0.95, mu_dtype=jnp.bfloat16)
    wanted = jax.tree.map(jnp.ones_like, gradients)
    state = optimizer.init(wanted)
    for _ in range(3):
        updates, state = optimizer.update(gradients, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_a_schedule_restarts_when_moments_are_kept():
    gradients = {name: jnp.full((2, 3), 0.3) for name in MATRICES}
    config = TrainConfig(**{**PLAIN, "schedule": "linear"}, trainable=("a",))
    optimizer = make_optimizer(config, MATRICES)
    _, last = updated(config, gradients, steps=3)
    kept = kept_moments(last, optimizer.init(gradients))
    chex.assert_trees_all_equal_shapes_and_dtypes(kept, last)
    counts = dict(optax.tree_utils.tree_get_all_with_path(kept, "count"))
    assert sorted(map(int, counts.values())) == [0, 3]
    for moment in ("mu", "nu"):
        chex.assert_trees_all_equal(*(optax.tree_utils.tree_get(state, moment) for state in (kept, last)))


def test_a_parameter_is_trained_if_any_pattern_names_it():
    axes = {"a": ("embed", "mlp"), "b": ("embed", "mlp"), "c": ("embed", "mlp")}
    assert param_labels(TrainConfig(trainable=("a", "[bd]")), axes) == {"a": TRAINED, "b": TRAINED, "c": FROZEN}
    assert set(param_labels(TrainConfig(), axes).values()) == {TRAINED}


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("layers", "embed", "heads", "head_dim"), ((1,), (2, 3))),
        (("layers", "embed", "kv_heads", "head_dim"), ((1,), (2, 3))),
        (("layers", "heads", "head_dim", "embed"), ((1, 2), (3,))),
        (("layers", "embed", "mlp"), ((1,), (2,))),
        (("layers", "mlp", "embed"), ((1,), (2,))),
        (("embed", "mlp"), None),
        (("layers", "embed"), None),
        (("layers", "heads", "head_dim"), None),
        (("vocab", "embed"), None),
        ((None, None), None),
    ],
)
def test_muon_takes_the_input_and_output_axes_of_the_matrices_of_blocks(names, axes):
    found = _as_matrix(names)
    assert (found and (found.reduction_axis, found.output_axis)) == axes


def test_an_update_of_muon_has_a_fifth_per_element():
    """Times the rate. The update of a matrix with equal singular values is a multiple of this matrix."""
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 4)))[0].T
    gradients = {"up": jnp.asarray(np.stack([rows, -3 * rows]), jnp.float32)}
    config = TrainConfig(**PLAIN, optimizer="muon", weight_decay=0.0)
    optimizer = make_optimizer(config, {"up": ("layers", "embed", "mlp")})
    parameters = jax.tree.map(jnp.ones_like, gradients)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    for found, sign in zip(np.asarray(updates["up"]), (-1, 1), strict=True):
        size = np.sqrt(np.square(found).mean())
        assert 0.7 < size / (0.1 * 0.2) < 1.2, "the singular values that it aims at"
        np.testing.assert_allclose(found, sign * size / np.sqrt(np.square(rows).mean()) * rows, atol=1e-5)


def test_updates_of_adafactor_are_clipped_to_the_size_of_their_parameter():
    """After a first gradient near 0, each element of the second update is ``g / sqrt(2^-0.8 g^2)`` = 2^0.4 = 1.32."""
    config = TrainConfig(optimizer="adafactor", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, steps=10**6)
    parameters = {"w": jnp.full((2, 3), 0.5)}
    optimizer = make_optimizer(config, {"w": ("embed", "mlp")})
    state = optimizer.init(parameters)
    for size in (1e-6, 0.1):
        updates, state = optimizer.update({"w": jnp.full((2, 3), size)}, state, parameters)
    np.testing.assert_allclose(updates["w"], -0.1 * 0.5, rtol=1e-5)
