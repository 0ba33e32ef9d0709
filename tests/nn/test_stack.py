"""The stack of layers of a decoder: its parameters, their names and first values, and what is recomputed."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from decoders import LENGTH, VOCAB, config, made, preset
from flax import nnx

import posjax as pj
from posjax import masks, norms
from posjax.nn import Decoder, Experts, Norm, Residual, logical_axes
from posjax.nn.specs import BIASES

# --- rematerialisation ------------------------------------------------------------------------------------------------


def logits_and_state(remat):
    graph, state = made(
        config(preset("rope"), remat=remat, scan_layers=False, implementation="blockwise", num_layers=1)
    )
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    return lambda state: nnx.merge(graph, state)(tokens), state


def test_remat_saves_less_for_the_backward_pass():
    def saved(remat):
        logits, state = logits_and_state(remat)
        _, residuals = jax.eval_shape(lambda state: jax.vjp(logits, state), state)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    assert saved("full") < saved("attention") < saved("dots") < saved("none")


def test_remat_runs_attention_again_only_when_asked():
    """Blockwise attention is a loop over blocks of keys."""

    def loops(remat):
        logits, state = logits_and_state(remat)
        gradient = jax.jit(jax.grad(lambda state: logits(state).sum()))
        return gradient.lower(state).as_text().count("stablehlo.while")

    assert loops("attention") < loops("full")


# --- parameters -------------------------------------------------------------------------------------------------------


def shapes(settings):
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    return jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model)))


def test_parameter_shapes():
    found = shapes(config(preset("rope"), tied_head=False))
    block = {
        "attention": {"q": (2, 32, 4, 8), "k": (2, 32, 2, 8), "v": (2, 32, 2, 8), "o": (2, 4, 8, 32)},
        "attention_norm": {"gain": (2, 32)},
        "mlp": {"up": (2, 32, 24), "gate": (2, 32, 24), "down": (2, 24, 32)},
        "mlp_norm": {"gain": (2, 32)},
    }
    outside = {"embed": (VOCAB, 32), "head": (32, VOCAB), "norm": {"gain": (32,)}}
    assert found == outside | {"stacks": {0: {0: block}}}


def test_parameters_that_a_scheme_adds_or_narrows():
    projections = shapes(config(preset("coca-tied")))["stacks"][0][0]["attention"]
    assert (projections["q"], projections["k"], projections["v"]) == ((2, 32, 4, 4), (2, 32, 2, 4), (2, 32, 2, 8))
    learned = pj.scheme("alibi", learned=True, norm=norms.QKNorm())
    found = shapes(config(learned))["stacks"][0][0]["attention"]["learned"]
    assert found == {"bias": {"slopes": (2, 4)}, "norm": {"q": (2, 8), "k": (2, 8)}}


def test_a_shared_bias_is_one_parameter_outside_the_stacks():
    t5 = preset("t5")
    for scheme in (t5, pj.Layers((((dataclasses.replace(t5, mask=masks.Window(3)),), 2), ((t5,), 1)))):
        found = shapes(config(scheme, num_layers=3))
        assert found["shared"] == {0: {"bias": {"table": (8, 4)}}}
        assert "learned" not in found["stacks"][0][0]["attention"]


WHOLE = {
    "norm": Norm("layer", bias=True),
    "residual": Residual("both"),
    "biases": BIASES,
    "attention_gate": "head",
    "embedding_norm": True,
    "tied_head": False,
}


def test_matrices_start_at_the_inverse_root_of_their_inputs():
    """What is added to the residual stream also counts the 2 x 3 branches that are added up."""
    sizes = {"vocab_size": 500, "model_dim": 64, "mlp_dim": 96, "num_layers": 3}
    settings = config(preset("rope"), experts=Experts(4, 2), **WHOLE, **sizes)
    start = nnx.to_pure_dict(nnx.state(nnx.jit(lambda: Decoder(settings, rngs=nnx.Rngs(0)))()))
    deviations = dict.fromkeys(("embed", "head", "q", "k", "v", "up", "gate", "router", "weight"), 1 / 8)
    deviations |= {"o": (64 * 2 * 3) ** -0.5, "down": (96 * 2 * 3) ** -0.5}
    for path, leaf in jax.tree.leaves_with_path(start):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name in deviations:
            size = 5 / leaf.size**0.5  # five standard errors
            np.testing.assert_allclose(
                [leaf.mean() / deviations[name], leaf.std() / deviations[name]], [0, 1], atol=size
            )
        else:
            np.testing.assert_array_equal(leaf, float(name == "gain"))
    up, gate = (start["stacks"][0][0]["mlp"][name] for name in ("up", "gate"))
    assert np.abs(up - gate).max() > 0.1


def test_axes_have_names():
    """A trainer splits parameters by these names."""
    settings = config(pj.scheme("alibi", learned=True), projection_norm=True, **WHOLE)
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    names = logical_axes(model)
    jax.tree.map(lambda leaf, axes: chex.assert_rank(leaf, len(axes)), nnx.to_pure_dict(nnx.state(model)), names)
    block = names["stacks"][0][0]
    attention, mlp = block["attention"], block["mlp"]
    assert (names["embed"], names["head"], names["head_bias"]) == (("vocab", "embed"), ("embed", "vocab"), ("vocab",))
    assert names["embedding_norm"]["gain"] == names["norm"]["bias"] == ("embed",)
    assert attention["q"] == ("layers", "embed", "heads", "head_dim")
    assert attention["k"] == attention["v"] == ("layers", "embed", "kv_heads", "head_dim")
    assert attention["o"] == ("layers", "heads", "head_dim", "embed")
    assert attention["q_bias"] == attention["q_norm"]["gain"] == ("layers", "heads", "head_dim")
    assert attention["v_bias"] == attention["k_norm"]["gain"] == ("layers", "kv_heads", "head_dim")
    assert attention["learned"]["bias"]["slopes"] == ("layers", None)
    assert mlp["up"] == mlp["gate"] == ("layers", "embed", "mlp")
    assert mlp["down"] == ("layers", "mlp", "embed")
    assert mlp["up_bias"] == mlp["gate_bias"] == ("layers", "mlp")
    assert attention["o_bias"] == mlp["down_bias"] == block["attention_after"]["gain"] == ("layers", "embed")
