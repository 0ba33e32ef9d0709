"""Layers of Gated DeltaNet beside others: extensions, diagnostics, and what is refused; and output gates."""

import dataclasses

import chex
import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import refused

import posjax as pj
from posjax import linear, masks, norms, rotary
from posjax.diagnostics import measure
from posjax.nn import Attention, DecoderConfig, DeltaMixer

MIXED = decoders.preset("qwen3-next")
DELTA = pj.scheme("gated-delta", num_heads=4, key_dim=8)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)), jnp.float32)


def test_extensions_leave_layers_of_gated_delta_as_they_are():
    changes = {"frequencies": {"name": "dynamic-ntk", "original_length": 8}, "scale": {"name": "log-n", "length": 8}}
    extended = MIXED.extend(**changes, sinks={"name": "plus-one"}, mask={"name": "window", "size": 4})
    assert extended.schemes[:3] == MIXED.schemes[:3]
    assert all(getattr(extended.schemes[3], slot) is not None for slot in ("scale", "sinks", "mask"))
    assert extended.schemes[3].features.frequencies.original_length == 8


def test_the_entropy_of_gated_delta_is_not_a_number_and_other_layers_have_theirs():
    decoder = nnx.merge(*decoders.made(decoders.config(MIXED)))
    found = measure(decoder, jnp.asarray(decoders.separate()[0]))
    assert np.isnan(found.entropy[:3]).all()
    assert np.isfinite(found.entropy[3]).all()
    np.testing.assert_array_equal(found.layers, [3])


def attention(gate, weight=None, bias=None):
    """The output of attention with a gate of these parameters, which have an axis of heads or of heads and channels."""
    biases = ("gate",) if gate else ()
    module = Attention(decoders.config(pj.scheme("rope"), attention_gate=gate, biases=biases), rngs=nnx.Rngs(3))
    if gate:
        module.gate.weight[...], module.gate.bias[...] = weight, bias
    return module(X, positions=pj.positions.Range(0, 6))


def test_gates_let_through_the_share_that_their_sigmoid_says():
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(32, 4)).astype(np.float32), np.full(4, 40, np.float32)
    chex.assert_trees_all_close(attention("head", 0 * weight, bias), attention(None), atol=1e-6)
    chex.assert_trees_all_close(attention("head", 0 * weight, 0 * bias), attention(None) / 2, atol=1e-6)
    wide = np.repeat(weight[..., None], 8, -1), np.zeros((4, 8), np.float32)
    chex.assert_trees_all_close(attention("elementwise", *wide), attention("head", weight, 0 * bias), atol=1e-6)


MIXER = {"vocab_size": 11, "num_layers": 1, "model_dim": 32, "num_heads": 4}


def mixed(mask):
    return lambda: DeltaMixer(DecoderConfig(**MIXER, scheme=DELTA), rngs=nnx.Rngs(0))(X, mask=mask)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("norm", lambda: dataclasses.replace(DELTA, norm=norms.KeyNorm())),
        ("features", lambda: dataclasses.replace(DELTA, features=rotary.Rotary())),
        ("scale", lambda: DELTA.replace(scale={"name": "log-n", "length": 8})),
        ("linear", lambda: DELTA.attend(*[X.reshape(2, 6, 4, 8)] * 3)),
        ("linear", lambda: DecoderConfig(**MIXER, scheme=DELTA, causal=False)),
        ("mask", mixed(masks.Window(3))),
        ("attention_gate", lambda: DecoderConfig(**MIXER, attention_gate="channel")),
        ("biases", lambda: DecoderConfig(**MIXER, biases=("gate",))),
        ("num_heads", lambda: linear.GatedDelta(0, 8)),
    ],
)
def test_refusals(name, call):
    refused(name, call)


def test_a_cache_is_as_large_for_any_capacity():
    decoder = nnx.eval_shape(lambda: pj.nn.Decoder(decoders.config(DELTA), rngs=nnx.Rngs(0)))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(decoder.init_cache(2, n, chunk=n))) for n in (16, 4096)]
    assert sizes[0] == sizes[1]
