"""The diagnostics of whole decoders, layer by layer."""

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from posjax.diagnostics import absolute_share, capture, measure, rotary_anomaly
from posjax.nn import Decoder, DecoderConfig

SHAPE = {"vocab_size": 11, "model_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 16}
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 12)).astype(np.int32)
T5 = pj.scheme("t5", num_buckets=8, max_distance=10)


def layers(scheme):
    """The scheme and T5, twice: a pattern that repeats, and parameters that layers share."""
    return pj.Layers((((scheme, T5), 2),))


def decoder(scheme):
    config = DecoderConfig(num_layers=len(scheme.schemes), scheme=scheme, scan_layers=False, **SHAPE)
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def rope():
    return decoder(layers(pj.scheme("rope")))


@pytest.fixture(scope="module")
def slack_and_fox():
    return decoder(pj.Layers((((pj.scheme("coca-slack"),), 1), ((pj.scheme("fox"),), 1))))


def test_each_layer_is_measured_with_its_norm_and_mask(rope):
    window = pj.scheme("rope", norm={"name": "key-norm"}, mask=pj.masks.Window(4))
    model = rope.with_scheme(layers(window))
    last = list(capture(model, TOKENS))[2]
    np.testing.assert_allclose(np.square(last.k).mean(-1), 1, rtol=1e-3)
    found = measure(model, TOKENS)
    assert found.layers.tolist() == [0, 2]
    chex.assert_shape(found.anomaly.fraction, (2, 4, 4))
    np.testing.assert_allclose(found.radians, np.tile(10_000.0 ** -(np.arange(4) / 4), (2, 1)), rtol=1e-9)
    want = rotary_anomaly(last.q, last.k, pj.rotary.Plain(), mask=pj.masks.Window(4))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[1], found.anomaly), want)
    assert found.absolute_share is None
    chex.assert_shape(found.entropy, (4, 4, 5))
    assert found.queries.tolist() == [0, 1, 3, 7, 11]
    assert (found.entropy[0, :, -1] <= np.log(4) + 1e-6).all()
    assert (found.entropy[1, :, -1] > np.log(4)).any()


def test_queries_of_zero_attend_evenly(rope):
    graph, state = nnx.split(rope)
    zeroed = jax.tree.map_with_path(lambda path, x: x * (0 if "'q'" in jax.tree_util.keystr(path) else 1), state)
    found = measure(nnx.merge(graph, zeroed), TOKENS, queries=np.array([2, 11]))
    want = np.broadcast_to(np.log([3, 12]), (2, 4, 2))
    np.testing.assert_allclose(found.entropy[::2], want, atol=1e-5)


def test_the_current_length_of_a_rule(rope):
    """Dynamic NTK at twice the training length divides the lowest frequency by two."""
    rule = {"name": "dynamic-ntk", "original_length": 6}
    model = rope.with_scheme(layers(pj.scheme("rope", frequencies=rule)))
    found = measure(model, TOKENS, queries=np.array([11]))
    np.testing.assert_allclose(found.radians[:, [0, -1]], [[1, 5e-4]] * 2, rtol=1e-9)


def test_layers_without_rotated_queries_and_without_softmax(rope):
    found = measure(rope.with_scheme(layers(pj.scheme("vo-rope"))), TOKENS)
    assert found.layers.size == 0
    assert found.anomaly is None
    np.testing.assert_allclose(found.entropy[0, :, 0], 0, atol=1e-6)
    linear = measure(rope.with_scheme(layers(pj.scheme("linear-elu"))), TOKENS)
    assert linear.layers.tolist() == [0, 2]
    assert np.isnan(linear.entropy).all((1, 2)).tolist() == [True, False, True, False]


def test_coca(slack_and_fox):
    found = measure(slack_and_fox, TOKENS)
    assert found.absolute_share.shape == found.anomaly.fraction.shape == (1, 4, 4)
    first, _ = capture(slack_and_fox, TOKENS)
    np.testing.assert_allclose(found.absolute_share[0], absolute_share(first.q))
    assert found.anomaly.fraction.any()
    strict = pj.Layers((((pj.scheme("coca-strict"),), 1), ((pj.scheme("fox"),), 1)))
    found = measure(slack_and_fox.with_scheme(strict), TOKENS)
    assert not found.anomaly.fraction.any()
    assert found.absolute_share is None


def test_coca_in_some_planes_has_no_anomaly_there_and_that_of_rope_elsewhere(rope):
    slow = {"name": "default", "base": 100.0}
    some = pj.scheme("coca-planes", planes=(1, 3), pairing="interleaved", frequencies=slow)
    model = rope.with_scheme(layers(some))
    found = measure(model, TOKENS)
    first = next(capture(model, TOKENS))
    of_rope = rotary_anomaly(first.q, first.k, pj.rotary.Plain(100.0), pairing="interleaved")
    inside, outside = np.array([1, 2]), np.array([0, 3])
    for name in ("fraction", "weighted", "in_zone", "in_zone_weighted", "zone"):
        in_layer = getattr(found.anomaly, name)
        assert not in_layer[..., inside].any()
        assert in_layer[..., outside].all()
        np.testing.assert_allclose(in_layer[0][..., outside], getattr(of_rope, name)[..., outside])
    assert (found.anomaly.strength > 0).all()
    np.testing.assert_allclose(found.radians, np.tile(100.0 ** -(np.arange(4) / 4), (2, 1)), rtol=1e-9)


def test_gates_of_the_tokens_reach_the_entropy(slack_and_fox):
    _, layer = capture(slack_and_fox, TOKENS)
    c = np.asarray(layer.gates, np.float64)
    logits = np.einsum("bhd,bshd->bhs", layer.q[:, -1], np.repeat(layer.k, 2, axis=2)) / 8**0.5 + c[:, :, -1:] - c
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want = -(p * np.log(p)).sum(-1).mean(0)
    np.testing.assert_allclose(measure(slack_and_fox, TOKENS).entropy[1, :, -1], want, rtol=1e-5)


def test_queries_outside_the_rows_are_refused(rope):
    with pytest.raises(ValueError, match="queries"):
        measure(rope, TOKENS, queries=np.array([12]))
