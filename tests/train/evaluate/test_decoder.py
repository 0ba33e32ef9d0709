"""Reading prompts: the chunks that each step gets, and the size of the cache."""

from contextlib import nullcontext
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from posjax.layout import Layout
from posjax.training_positions import Drawn
from train.evaluate import decoder as module
from train.evaluate.decoder import _CHUNK, _at, _check_reach, _placed, cache_for, decoding, read
from train.evaluate.mesh import on
from train.evaluate.predictor import RowLayout
from train.model.mesh import AXES, mesh_from_sizes


@pytest.mark.parametrize(("size", "chunk"), [(5, 5), (_CHUNK, _CHUNK), (2 * _CHUNK + 3, _CHUNK)])
def test_chunks_are_no_longer_than_the_prompt(size, chunk):
    shapes = []

    def step(parameters, cache, tokens, valid):
        shapes.append(tokens.shape)
        return jnp.where(valid, tokens, -1)[..., None] * parameters, cache + valid.sum()

    prompts = np.random.default_rng(0).integers(0, 100, (2, size))
    logits, read_tokens = read(step, jnp.asarray([1, 2]), jnp.zeros((), jnp.int32), jnp.asarray(prompts))
    assert set(shapes) == {(2, chunk)}
    np.testing.assert_array_equal(logits, prompts[:, -1:] * [1, 2])
    assert read_tokens == prompts.size


@pytest.mark.parametrize(("size", "chunk"), [(5, 5), (2 * _CHUNK, _CHUNK)])
def test_the_cache_has_room_for_the_chunks_of_the_prompt(size, chunk):
    scheme = pj.scheme("rope", mask={"name": "window", "size": 4})
    config = pj.nn.DecoderConfig(vocab_size=8, num_layers=1, model_dim=8, num_heads=2, mlp_dim=8, scheme=scheme)
    graph, state = nnx.split(nnx.eval_shape(lambda: pj.nn.Decoder(config, rngs=nnx.Rngs(0))))
    cache = jax.eval_shape(
        lambda state, prompts: cache_for(graph, state, prompts, 500), state, jnp.ones((2, size), int)
    )
    wanted = jax.eval_shape(lambda state: nnx.merge(graph, state).init_cache(2, 500, chunk=chunk), state)
    chex.assert_trees_all_equal_shapes(cache, wanted)
    longest = max(length for leaf in jax.tree.leaves(cache) for length in leaf.shape)
    assert longest < 4 + chunk + 10


ROPE = pj.scheme("rope")


@pytest.mark.parametrize(
    ("scheme", "size", "chunk", "capacity"),
    [(ROPE, 5, 5, 504), (ROPE, 300, 256, 504), (pj.scheme("learned", max_length=500), 5, 5, 500)],
)
def test_on_a_mesh_chunks_are_longer_and_the_cache_is_a_multiple_of_the_shards(scheme, size, chunk, capacity):
    """Except beyond a learned embedding: no token has a place there."""
    config = pj.nn.DecoderConfig(vocab_size=8, num_layers=1, model_dim=8, num_heads=2, scheme=scheme)
    graph, state = nnx.split(nnx.eval_shape(lambda: pj.nn.Decoder(config, rngs=nnx.Rngs(0))))
    mesh = mesh_from_sizes(dict.fromkeys(AXES, 1) | {"context": 8}, jax.devices())
    prompts = jnp.ones((2, size), int)
    with on(mesh):
        cache = jax.eval_shape(lambda state: cache_for(graph, state, prompts, 500, mesh), state)
    wanted = jax.eval_shape(lambda state: nnx.merge(graph, state).init_cache(2, capacity, chunk=chunk), state)
    chex.assert_trees_all_equal_shapes(cache, wanted)


@pytest.mark.parametrize("positions", [[5, 7, 9, 11], [[5, 7, 9, 11]], [[5, 7, 9, 11], [15, 17, 19, 21]]])
def test_drawn_positions_are_those_of_the_tokens_of_each_row(positions):
    index = np.array([[1, 3], [0, 2]])
    found = _at(Drawn(positions=jnp.asarray(positions)), jnp.asarray(index), 4)
    rows = np.broadcast_to(positions, (2, 4))
    np.testing.assert_array_equal(found["positions"], [rows[0][index[0]], rows[1][index[1]]])
    assert _at(Drawn(length=jnp.asarray(8)), jnp.asarray(index), 4) == {"length": 8}


def test_a_step_of_decoding_has_the_positions_after_those_in_the_cache(monkeypatch):
    """Padding beyond the end has the last position."""
    given = {}
    model = SimpleNamespace(decode=lambda tokens, cache, **named: given.update(named))
    monkeypatch.setattr(module.nnx, "merge", lambda graph, parameters: model)
    step = decoding(None, Drawn(positions=jnp.arange(0, 60, 10)), 6)
    step(None, SimpleNamespace(used=jnp.array([0, 4])), jnp.zeros((2, 3), int), "valid")
    np.testing.assert_array_equal(given.pop("positions"), [[0, 10, 20], [40, 50, 50]])
    assert given == {"valid": "valid", "length": 6}


def test_padding_has_the_position_of_the_last_token():
    """In the order of the layout; a value that is not of single tokens stays as it is."""
    row = RowLayout(5, Layout("zigzag", 2))
    ids = jnp.arange(10, 15)[None]
    found = _placed(row, {"positions": ids, "coordinates": ids[..., None] / 2, "length": jnp.asarray(5)})
    wanted = np.array([[10, 11, 14, 14, 12, 13, 14, 14]])
    np.testing.assert_array_equal(found["positions"], wanted)
    np.testing.assert_array_equal(found["coordinates"], wanted[..., None] / 2)
    assert found["length"] == 5


@pytest.mark.parametrize(("length", "rule", "refused"), [(8, None, False), (9, None, True), (9, "drawn", False)])
def test_a_text_is_refused_beyond_the_learned_positions_unless_they_are_drawn(length, rule, refused):
    layers = SimpleNamespace(embedding=SimpleNamespace(reach=8), training_positions=rule)
    model = SimpleNamespace(config=SimpleNamespace(layers=layers))
    with pytest.raises(ValueError, match="the model has 8 learned positions") if refused else nullcontext():
        _check_reach(model, length)
