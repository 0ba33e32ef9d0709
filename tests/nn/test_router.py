"""How tokens choose their experts, and what that gives, against a float64 loop over tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from posjax.nn import DecoderConfig, Experts, Router
from posjax.nn.experts import ExpertsMLP, route

DEEPSEEK = Router("sigmoid", correction=True, groups=4, groups_kept=2, group_best=2, scale=2.5)
ROUTERS = {
    "mixtral": Router(),
    "qwen": Router(normalized=False),
    "deepseek v2": Router(normalized=False, groups=4, groups_kept=2, scale=16.0),
    "deepseek v3": DEEPSEEK,
    "ernie": Router(correction=True, least_sum=0.5),
    "llama 4": Router("sigmoid", normalized=False, on_input=True),
}


def chosen_by_loop(router, count, logits, correction):
    """The experts of one token and their weights: sorts are stable, so that of equal experts the first is chosen."""
    shifted = np.exp(logits - logits.max())
    scores = shifted / shifted.sum() if router.score == "softmax" else 1 / (1 + np.exp(-logits))
    ranked = (scores + correction).reshape(router.groups, -1)
    of_group = np.sort(ranked, 1)[:, -router.group_best :].sum(1)
    left_out = np.argsort(-of_group, kind="stable")[router.groups_kept :]
    ranked[left_out] = -np.inf
    chosen = np.argsort(-ranked.reshape(-1), kind="stable")[:count]
    weights = scores[chosen]
    weights = weights / max(weights.sum(), router.least_sum) if router.normalized else weights
    return chosen, router.scale * weights


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_chooses_and_weighs_as_its_formula_says(router):
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (50, 8)).astype(np.float32)
    correction = draw.normal(0, 0.3, 8).astype(np.float32) if router.correction else None
    chosen, weights = jax.jit(lambda z, c: route(Experts(8, 3, router), z, c))(logits, correction)
    wanted = [chosen_by_loop(router, 3, row, 0 if correction is None else correction) for row in np.float64(logits)]
    np.testing.assert_array_equal(chosen, [experts for experts, _ in wanted])
    np.testing.assert_allclose(weights, [shares for _, shares in wanted], rtol=3e-6)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_of_equal_experts_those_with_lower_numbers_are_chosen(router):
    logits = np.zeros((2, 8), np.float32)
    logits[1, [3, 6]] = 1.0
    correction = np.zeros(8, np.float32) if router.correction else None
    chosen, _ = route(Experts(8, 3, router), logits, correction)
    wanted = [chosen_by_loop(router, 3, np.float64(row), np.zeros(8))[0] for row in logits]
    np.testing.assert_array_equal(chosen, wanted)


CONFIG = DecoderConfig(20, 1, 16, 4, mlp_dim=12, experts=Experts(4, 2, shared_dim=20, shared_gate=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mlp(p, x):
    gate = x @ p["gate"]
    return (gate * sigmoid(gate) * (x @ p["up"])) @ p["down"]


def normed(p, name, x):
    """RMS norm, if the mixture has one of this name."""
    return x / np.sqrt(np.mean(x * x) + 1e-6) * p[name]["gain"] if name in p else x


def mixture_by_loop(config, p, x):
    router, out = config.experts.router, np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        asked, read = normed(p, "router_norm", x[place]), normed(p, "experts_norm", x[place])
        logits = asked @ p["router"] / (4 if config.experts.norms else 1)
        chosen, weights = chosen_by_loop(router, config.experts.per_token, logits, p.get("correction", np.zeros(4)))
        for e, weight in zip(chosen, weights * p.get("scales", np.ones(4))[chosen], strict=True):
            own = {name: p[name][e] for name in ("gate", "up", "down")}
            out[place] += mlp(own, weight * read) if router.on_input else weight * mlp(own, read)
        out[place] = normed(p, "experts_after", out[place])
        if "shared" in p:
            gate = sigmoid(x[place] @ p["shared_gate"]) if "shared_gate" in p else 1
            out[place] += gate * normed(p, "shared_after", mlp(p["shared"], normed(p, "shared_norm", x[place])))
    return out


def parameters_of(config, wanted=None):
    """The graph, random parameters, and the same in float64; the router can be made to prefer some experts."""
    graph, state = nnx.split(nnx.eval_shape(lambda: ExpertsMLP(config, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: np.float32(draw.normal(0, 0.4, leaf.shape)), state)
    arrays = nnx.to_pure_dict(state)
    if wanted is not None:
        arrays["correction"] = np.float32(wanted)
        nnx.replace_by_pure_dict(state, arrays)
    return graph, state, jax.tree.map(np.float64, arrays)


CASES = {
    "a gated shared MLP": ({}, None),
    "weights on the inputs": ({"per_token": 1, "router": Router("sigmoid", normalized=False, on_input=True)}, None),
    "an expert without tokens": ({"router": Router("sigmoid", correction=True)}, [0, -9, 0, 0]),
    "all tokens to one expert": ({"per_token": 1, "router": Router("sigmoid", correction=True)}, [0, 0, 9, 0]),
    "norms apart": ({"norms": True, "shared_gate": False, "router": Router(learned_scale=True)}, None),
    "no shared MLP": ({"shared_dim": None, "shared_gate": False, "router": Router(normalized=False)}, None),
}


@pytest.mark.parametrize(("changes", "wanted"), CASES.values(), ids=CASES)
def test_a_mixture_gives_the_sum_over_its_tokens_experts_and_its_gradients(changes, wanted):
    """The gradient is that of a random direction, against differences of the float64 loop."""
    config = dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, **changes))
    graph, state, exact = parameters_of(config, wanted)
    x = np.random.default_rng(2).normal(size=(3, 5, 16))
    run = jax.jit(lambda state, x: nnx.merge(graph, state).with_load(x))
    found, load = run(state, np.float32(x))
    expected = mixture_by_loop(config, exact, x)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    assert load.tokens.sum() == 15 * config.experts.per_token
    if wanted is not None:
        assert load.tokens[np.argmin(wanted)] == 0
        assert min(wanted) < 0 or load.tokens.max() == 15

    factors = np.cos(x)

    def loss(state, x):
        return (run(state, x)[0] * np.float32(factors)).sum()

    of_state, of_x = jax.jit(jax.grad(loss, (0, 1)))(state, np.float32(x))
    gradients = jax.tree.map(np.float64, (nnx.to_pure_dict(of_state), of_x))
    assert np.all(gradients[0].get("correction", np.zeros(1)) == 0)
    draw = np.random.default_rng(3)
    ways = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), (exact, x))
    ways[0].pop("correction", None)

    def after(step):
        p, y = exact | jax.tree.map(lambda leaf, way: leaf + step * way, _moved(exact), ways[0]), x + step * ways[1]
        return (mixture_by_loop(config, p, y) * factors).sum()

    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, way: (g * way).sum(), (_moved(gradients[0]), of_x), ways)))
    np.testing.assert_allclose(slope, (after(1e-6) - after(-1e-6)) / 2e-6, rtol=2e-4)


def _moved(p):
    return {name: leaf for name, leaf in p.items() if name != "correction"}
