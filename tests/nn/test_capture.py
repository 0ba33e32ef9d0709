"""The captured queries and keys of every layer are those that the running model gives to attention."""

import chex
import jax
import numpy as np
from decoders import VOCAB, config
from flax import nnx

import posjax as pj
from posjax.nn import Decoder
from posjax.nn.capture import capture

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)


def test_the_layers_are_those_that_the_model_runs(monkeypatch):
    """RoPE and T5, twice: a pattern that repeats, and parameters that layers share."""
    schemes = (pj.scheme("rope"), pj.scheme("t5", num_buckets=8, max_distance=10))
    settings = config(pj.Layers(((schemes, 2),)), scan_layers=False)
    model = nnx.jit(lambda: Decoder(settings, rngs=nnx.Rngs(0)))()
    calls, attend = [], pj.Scheme.attend

    def record(self, q, k, v, **options):
        calls.append((q, k))
        return attend(self, q, k, v, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pj.Scheme, "attend", record)
        _, want = jax.jit(lambda tokens: (model(tokens), calls))(TOKENS)
    found = list(capture(model, TOKENS))
    chex.assert_trees_all_close([(layer.q, layer.k) for layer in found], want, atol=1e-5)
    chex.assert_shape(want[2], [(2, 12, 4, 8), (2, 12, 2, 8)])
    assert [layer.scheme for layer in found] == list(model.config.layers.schemes)
    assert found[1].params["bias"].keys() == {"table"}
