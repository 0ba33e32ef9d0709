"""The optimizers: their updates, decay, schedules and moments, against closed forms and torch."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused

from posjax.nn import logical_axes
from posjax.nn.huggingface.load import named_parameters
from train.config import TrainConfig, parse
from train.loop.optimizer import kept_moments, learning_rate, make_optimizer
from train.model.build import Setup


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_warms_up_and_then_falls_to_its_last_share_or_stays(schedule, warmup):
    config = TrainConfig(steps=110, warmup_steps=warmup, learning_rate=2.0, final_learning_rate=0.1, schedule=schedule)
    passed = np.arange(1, 111 - warmup) / (110 - warmup)
    share = {"cosine": (1 + np.cos(np.pi * passed)) / 2, "linear": 1 - passed, "constant": np.ones(len(passed))}
    expected = [*(0.2 * np.arange(1, warmup + 1)), *(0.2 + 1.8 * share[schedule])]
    rate = learning_rate(config)
    np.testing.assert_allclose([rate(step) for step in range(110)], expected, rtol=1e-5)


def updated(config, axes, gradients, start=1.0):
    """Parameters that are equal at first, after an update by each of the gradients; and the optimizer's last state."""
    optimizer = make_optimizer(config, axes)
    parameters = jax.tree.map(lambda gradient: jnp.full(gradient.shape, start), gradients[0])
    state = optimizer.init(parameters)
    for each in gradients:
        each = jax.tree.map(jnp.float32, each)
        updates, state = optimizer.update(each, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters, state


PLAIN = {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "clip_norm": 1e9, "steps": 100}


MATRICES = {"a": ("embed", "mlp"), "b": ("embed", "mlp")}


def test_gradients_are_clipped_to_their_global_norm():
    """The first moments of AdamW are then ``(1 - beta1)`` times gradients with a norm of 1."""
    gradients = {"a": np.full((3, 2), 100.0), "b": np.full((3, 8), 100.0)}
    _, state = updated(TrainConfig(clip_norm=1.0), MATRICES, [gradients])
    moments = jax.tree.leaves(optax.tree_utils.tree_get(state, "mu"))
    np.testing.assert_allclose(np.sqrt(sum(np.square(m).sum() for m in moments)), 0.1, rtol=1e-5)


def test_a_schedule_restarts_when_moments_are_kept():
    gradients = {name: np.full((2, 3), 0.3) for name in MATRICES}
    config = TrainConfig(**{**PLAIN, "schedule": "linear"}, trainable=("a",))
    _, last = updated(config, MATRICES, [gradients] * 3)
    kept = kept_moments(last, make_optimizer(config, MATRICES).init(jax.tree.map(jnp.float32, gradients)))
    chex.assert_trees_all_equal_shapes_and_dtypes(kept, last)
    counts = dict(optax.tree_utils.tree_get_all_with_path(kept, "count"))
    assert sorted(map(int, counts.values())) == [0, 3]
    for moment in ("mu", "nu"):
        chex.assert_trees_all_equal(*(optax.tree_utils.tree_get(state, moment) for state in (kept, last)))


SHAPES = {
    "up": (2, 4, 6),
    "o": (2, 2, 3, 4),
    "down": (2, 3, 5, 4),
    "router": (2, 4, 3),
    "gain": (2, 4),
    "embed": (7, 4),
}
AXES = {
    "up": ("layers", "embed", "mlp"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "down": ("layers", "experts", "mlp", "embed"),
    "router": ("layers", "embed", "experts"),
    "gain": ("layers", "embed"),
    "embed": ("vocab", "embed"),
}
SPLIT = {"up": (2, 4, 6), "o": (2, 6, 4), "down": (6, 5, 4)}  # into the matrices that Muon updates


def random_gradients(steps=3):
    random = np.random.default_rng(0)
    return [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(steps)]


def test_muon_sets_the_singular_values_of_every_matrix_of_a_block_or_expert():
    """Five Newton-Schulz steps map a singular value s of ``X`` by ``s <- a s + b s^3 + c s^5`` (Jordan 2024)."""
    config = TrainConfig(**{**PLAIN, "clip_norm": 1.0}, optimizer="muon", beta2=0.9, weight_decay=0.2)
    found, _ = updated(config, AXES, gradients := random_gradients())
    norms = [np.sqrt(sum(np.square(g).sum() for g in each.values())) for each in gradients]
    for name, shape in SPLIT.items():
        expected, moment = np.ones(shape), np.zeros(shape)
        for each, norm in zip(gradients, norms, strict=True):
            gradient = each[name].reshape(shape) / norm
            moment = 0.9 * moment + gradient
            left, sizes, right = np.linalg.svd(gradient + 0.9 * moment, full_matrices=False)
            sizes /= np.linalg.norm(sizes, axis=-1, keepdims=True)
            for _ in range(5):
                sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
            direction = 0.2 * np.sqrt(max(shape[1:])) * (left * sizes[:, None]) @ right
            expected -= 0.1 * (direction + 0.2 * expected)
        np.testing.assert_allclose(found[name].reshape(shape), expected, atol=1e-5)


@pytest.mark.parity
def test_muon_is_that_of_torch():
    """torch multiplies matrices in bfloat16 there, so elements of updates, of about 0.02, are some percent off."""
    torch = pytest.importorskip("torch")
    config = TrainConfig(**PLAIN, optimizer="muon", weight_decay=0.2)
    found, _ = updated(config, AXES, gradients := random_gradients())
    matrices = {name: [torch.ones(shape[1:]) for _ in range(shape[0])] for name, shape in SPLIT.items()}
    every = [part for parts in matrices.values() for part in parts]
    optimizer = torch.optim.Muon(every, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for each in gradients:
        for name, parts in matrices.items():
            for part, gradient in zip(parts, each[name].reshape(SPLIT[name]), strict=True):
                part.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    for name, parts in matrices.items():
        np.testing.assert_allclose(found[name].reshape(SPLIT[name]), torch.stack(parts), atol=4e-3)


@pytest.mark.parity
def test_parameters_that_are_no_matrices_of_a_block_have_the_adamw_of_torch():
    torch = pytest.importorskip("torch")
    config = TrainConfig(**PLAIN, optimizer="muon", weight_decay=0.2)
    found, _ = updated(config, AXES, gradients := random_gradients())
    for name, decay in {"embed": 0.2, "gain": 0.0, "router": 0.0}.items():
        leaf = torch.ones(SHAPES[name])
        optimizer = torch.optim.AdamW([leaf], lr=0.1, betas=(0.9, 0.95), weight_decay=decay)
        for each in gradients:
            leaf.grad = torch.tensor(each[name], dtype=torch.float32)
            optimizer.step()
        np.testing.assert_allclose(found[name], leaf, rtol=1e-5)


OPTIMIZERS = ["adamw", "muon", "adafactor"]


@pytest.mark.parametrize(
    "model",
    [
        {"scheme": {"name": "t5"}, "model": {"experts": {"count": 2, "per_token": 1}, "tied_head": False}},
        {"scheme": {"name": "performer"}, "model": {"biases": ["qkv", "output", "mlp"]}},
    ],
)
def test_every_optimizer_decays_matrices_only(model):
    """With gradients of 0, every element of a matrix goes from 1 to ``1 - rate * decay``, and nothing else changes."""
    shapes = Setup(parse(model)).abstract
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), nnx.to_pure_dict(nnx.state(shapes)))
    zeros = jax.tree.map(np.zeros_like, ones)
    matrix = re.compile("(embed|head|.*/attention/[qkvo]|.*/mlp/(up|gate|down))$")
    names = [name for name, _ in named_parameters(ones)]
    expected = {name: 1 - 0.1 * 0.5 if matrix.match(name) else 1.0 for name in names}
    for optimizer in OPTIMIZERS:
        config = TrainConfig(**PLAIN, optimizer=optimizer, weight_decay=0.5)
        transform = make_optimizer(config, logical_axes(shapes))
        updates, _ = jax.jit(transform.update)(zeros, transform.init(ones), ones)
        found = dict(zip(names, jax.tree.leaves(optax.apply_updates(ones, updates)), strict=True))
        chex.assert_trees_all_close({name: leaf.min() for name, leaf in found.items()}, expected)
        chex.assert_trees_all_close({name: leaf.max() for name, leaf in found.items()}, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_factors_and_frozen_parameters_of_every_optimizer(optimizer):
    """Factors are multiplied; a frozen parameter neither moves nor decays, and has no moments."""
    gradients = random_gradients(1)
    plain = {**PLAIN, "optimizer": optimizer}
    whole, _ = updated(TrainConfig(**plain), AXES, gradients)
    factored, _ = updated(TrainConfig(**plain, learning_rate_factors={"*": 2.0, "[!u]*": 0.25}), AXES, gradients)
    frozen, state = updated(
        TrainConfig(**plain, trainable=["up", "gain"], learning_rate_factors={"*": 0.5}), AXES, gradients
    )
    for name in SHAPES:
        factor = 2.0 if name == "up" else 0.5
        np.testing.assert_allclose(factored[name] - 1, factor * (whole[name] - 1), rtol=1e-4, atol=1e-6)
        assert (name in ("up", "gain")) == bool((frozen[name] != 1).any())
    assert {leaf.shape for leaf in jax.tree.leaves(state)} <= {(), (1,), SHAPES["up"], SHAPES["gain"]}
    unknown = TrainConfig(**plain, learning_rate_factors={"c": 2.0})
    refused("train.learning_rate_factors", lambda: make_optimizer(unknown, AXES))


def test_updates_of_adafactor_are_clipped_to_the_size_of_their_parameter():
    """After a first gradient near 0, each element of the second update is ``g / sqrt(2^-0.8 g^2)`` = 2^0.4 = 1.32."""
    config = TrainConfig(optimizer="adafactor", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, steps=10**6)
    sizes = [{"w": np.full((2, 3), size)} for size in (1e-6, 0.1)]
    before, after = (updated(config, {"w": ("embed", "mlp")}, sizes[:n], start=0.5)[0]["w"] for n in (1, 2))
    np.testing.assert_allclose(after - before, -0.1 * before, rtol=1e-5)
