"""Decoders whose layers differ in more than their schemes."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import posjax as pj
from posjax import masks, nn
from posjax.scheme import Layers, Scheme

LOCAL, GLOBAL = Scheme(mask=masks.Window(4)), Scheme()


def small(**options):
    sizes = {"num_layers": 4, "model_dim": 24, "num_heads": 4, "head_dim": 8, "tied_head": True}
    return nn.DecoderConfig(17, **sizes | options)


def test_sizes_by_layer_decode_as_the_whole_forward_pass():
    scheme = Layers((((LOCAL, GLOBAL), 2),))
    config = small(
        scheme=scheme, head_dim=(8, 12, 8, 12), num_kv_heads=(2, 1, 2, 1), mlp_dim=(16, 16, 16, 32), num_layers=4
    )
    model = nn.Decoder(config, rngs=nnx.Rngs(0))
    chex.assert_shape([stack[0].attention.k[...] for stack in model.stacks[:1]], (1, 24, 2, 8))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, 17)
    whole = model(tokens)
    cache = model.init_cache(2, 11, chunk=4)
    parts = []
    for part in (tokens[:, :4], tokens[:, 4:8], tokens[:, 8:]):
        logits, cache = model.decode(part, cache, length=11)
        parts.append(logits)
    chex.assert_trees_all_close(jnp.concatenate(parts, 1), whole, atol=2e-5)


def test_equal_layers_are_stacked():
    dense_first = small(num_layers=7, mlp_dim=8, experts=nn.Experts(4, 2, dense=(0, 1), dense_dim=20))
    assert [(len(layers), repeats) for layers, repeats in dense_first.patterns] == [(1, 2), (1, 5)]
    assert [layer.mlp_dim for layer in dense_first.every_layer] == [20, 20, 8, 8, 8, 8, 8]
    alternating = small(num_layers=7, experts=nn.Experts(4, 2, dense=(0, 2, 4, 6)))
    assert [(len(layers), repeats) for layers, repeats in alternating.patterns] == [(2, 3), (1, 1)]
    without_first_norm = small(num_layers=4, residual=nn.Residual(first_norm=False))
    assert [(len(layers), repeats) for layers, repeats in without_first_norm.patterns] == [(1, 1), (1, 3)]


def test_one_number_and_the_same_number_for_every_layer_are_equal():
    assert small(head_dim=(8, 8, 8, 8)) == small(head_dim=8)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"head_dim": (8, 8)}, "head_dim"),
        ({"num_kv_heads": (1, 2, 3, 4)}, "num_kv_heads"),
        ({"mlp_dim": (8, 8, 0, 8)}, "mlp_dim"),
        ({"experts": nn.Experts(4, 2, dense=(4,))}, "experts.dense"),
        ({"keys_as_values": (True, False)}, "keys_as_values"),
        ({"keys_as_values": (True, False, 1, False)}, "keys_as_values"),
        ({"keys_as_values": True, "scheme": pj.scheme("coca-slack")}, "keys_as_values"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, names):
    with pytest.raises(ValueError, match=names):
        small(**options)
    with pytest.raises(ValueError, match="layer"):
        small().of_layer(4)
