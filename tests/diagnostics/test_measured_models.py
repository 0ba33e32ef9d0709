"""The diagnostics of whole decoders, layer by layer."""

import numpy as np
import pytest
from flax import nnx
from refusals import refused

import posjax as pj
from posjax.diagnostics import absolute_share, capture, measure, rotary_anomaly
from posjax.nn import Decoder, DecoderConfig

SHAPE = {"vocab_size": 11, "model_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 16}
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 12)).astype(np.int32)


def two(first, second="t5"):
    """A first layer of some scheme, and one of another kind."""
    t5 = pj.scheme("t5", num_buckets=8, max_distance=10)
    return pj.Layers((((first, t5 if second == "t5" else pj.scheme(second)), 1),))


def decoder(scheme):
    config = DecoderConfig(num_layers=2, scheme=scheme, scan_layers=False, **SHAPE)
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def rope():
    return decoder(two(pj.scheme("rope")))


@pytest.fixture(scope="module")
def slack_and_fox():
    return decoder(two(pj.scheme("coca-slack"), "fox"))


def test_each_layer_is_measured_with_its_norm_and_mask(rope):
    window = pj.scheme("rope", norm={"name": "key-norm"}, mask=pj.masks.Window(4))
    model = rope.with_scheme(two(window))
    first = next(capture(model, TOKENS))
    np.testing.assert_allclose(np.square(first.k).mean(-1), 1, rtol=1e-3)
    found = measure(model, TOKENS)
    assert found.layers.tolist() == [0]
    np.testing.assert_allclose(found.radians, [10_000.0 ** -(np.arange(4) / 4)], rtol=1e-9)
    want = rotary_anomaly(first.q, first.k, pj.rotary.Plain(), mask=pj.masks.Window(4))
    np.testing.assert_allclose(np.stack(found.anomaly)[:, 0], np.stack(want))
    assert found.absolute_share is None
    assert found.queries.tolist() == [0, 1, 3, 7, 11]
    refused("queries", lambda: measure(model, TOKENS, queries=np.array([12])))
    assert found.entropy.shape == (2, 4, 5)
    assert (found.entropy[0, :, -1] <= np.log(4) + 1e-6).all()
    assert (found.entropy[1, :, -1] > np.log(4)).any()


def test_the_current_length_of_a_rule_and_layers_without_rotated_queries_or_softmax(rope):
    """Dynamic NTK at twice the training length divides the lowest frequency by two."""
    rule = {"name": "dynamic-ntk", "original_length": 6}
    changed = {"rope": {"frequencies": rule}, "vo-rope": {}, "linear-elu": {}}
    models = [rope.with_scheme(two(pj.scheme(name, **options))) for name, options in changed.items()]
    dynamic, values, linear = (measure(model, TOKENS, queries=np.array([0, 11])) for model in models)
    np.testing.assert_allclose(dynamic.radians[:, [0, -1]], [[1, 5e-4]], rtol=1e-9)
    assert (values.layers.size, values.anomaly) == (0, None)
    np.testing.assert_allclose(values.entropy[0, :, 0], 0, atol=1e-6)
    assert linear.layers.tolist() == [0]
    assert np.isnan(linear.entropy).all((1, 2)).tolist() == [True, False]


def test_coca_and_the_gates_of_the_tokens(slack_and_fox):
    found = measure(slack_and_fox, TOKENS)
    first, layer = capture(slack_and_fox, TOKENS)
    np.testing.assert_allclose(found.absolute_share, [absolute_share(first.q)])
    assert found.anomaly.fraction.any()
    c = np.asarray(layer.gates["bias"], np.float64)
    logits = np.einsum("bhd,bshd->bhs", layer.q[:, -1], np.repeat(layer.k, 2, axis=2)) / 8**0.5 + c[:, :, -1:] - c
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.entropy[1, :, -1], -(p * np.log(p)).sum(-1).mean(0), rtol=1e-5)


def test_coca_in_some_planes_has_no_anomaly_there_and_that_of_rope_elsewhere(rope):
    slow = {"name": "default", "base": 100.0}
    some = pj.scheme("coca-planes", planes=(1, 3), pairing="interleaved", frequencies=slow)
    model = rope.with_scheme(two(some))
    found = measure(model, TOKENS, queries=np.array([11]))
    first = next(capture(model, TOKENS))
    of_rope = rotary_anomaly(first.q, first.k, pj.rotary.Plain(100.0), pairing="interleaved")
    for name in ("fraction", "weighted", "in_zone", "in_zone_weighted", "zone"):
        in_layer = getattr(found.anomaly, name)[0]
        assert not in_layer[..., 1:3].any()
        assert in_layer[..., [0, 3]].all()
        np.testing.assert_allclose(in_layer[..., [0, 3]], getattr(of_rope, name)[..., [0, 3]])
    np.testing.assert_allclose(found.radians, [100.0 ** -(np.arange(4) / 4)], rtol=1e-9)
