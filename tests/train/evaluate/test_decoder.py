"""Reading prompts: the chunks that each step gets, and the size of the cache."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from train.evaluate.decoder import _CHUNK, cache_for, read


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
