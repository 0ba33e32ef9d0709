"""Programs that ``jax.export`` serializes and deserializes, with pytrees of the library as arguments and results."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import posjax as pj
from posjax._serial import _plain, _restored
from posjax.layout import Layout
from posjax.masks import Causal, FirstTokens, Segments, Window
from posjax.positions import Range


def reloaded(exported):
    """The program, serialized and deserialized."""
    return export.deserialize(exported.serialize())


def arrays(batch=2, length=8):
    return np.random.default_rng(0).normal(size=(3, batch, length, 4, 8)).astype(np.float32)


BIASES = {
    "alibi": pj.bias.ALiBi(learned=True),
    "t5": pj.bias.T5(num_buckets=8, max_distance=16),
    "kerple": pj.bias.Kerple("weighted-power"),
    "fire": pj.bias.FIRE(),
    "sandwich": pj.bias.Sandwich(),
    "scale-invariant": pj.bias.ScaleInvariant(),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bound_bias_is_an_argument(name):
    spec = BIASES[name]
    bound = spec.bind(spec.init(jax.random.key(0), 4), num_heads=4)
    run = jax.jit(lambda bias, q, k, v: pj.attention(q, k, v, bias=bias, mask=Causal()))
    values = arrays()
    chex.assert_trees_all_close(reloaded(export.export(run)(bound, *values)).call(bound, *values), run(bound, *values))


IDS = np.array([[0] * 3 + [1] * 5, [0] * 6 + [-1] * 2], np.int32)


@pytest.mark.parametrize(
    "mask",
    [Causal() & (Window(jnp.int32(3)) | FirstTokens(1)), ~Window(2) & Segments(IDS), Causal() & jnp.ones((8, 8), bool)],
    ids=["sizes", "segments", "an array"],
)
def test_a_mask_and_positions_are_arguments(mask):
    def run(mask, where, q, k, v):
        return pj.attention(
            q, k, v, mask=mask, bias=pj.bias.ALiBi(symmetric=True), q_positions=where, kv_positions=where
        )

    given = mask, Range(jnp.int32(5), 8), *arrays()
    run = jax.jit(run)
    chex.assert_trees_all_close(reloaded(export.export(run)(*given)).call(*given), run(*given))


def test_a_rotary_table_comes_out():
    run = jax.jit(lambda at: pj.rotary_table(at, pj.rotary.inverse_frequencies(16)))
    at = jnp.arange(5)
    found = reloaded(export.export(run)(at)).call(at)
    assert isinstance(found, pj.RotaryTable)
    chex.assert_trees_all_close(found, run(at))


def test_a_layout_goes_in_and_comes_out():
    run = jax.jit(lambda layout, x: (layout, layout.apply(x)))
    given = Layout("zigzag", 2), jnp.arange(8)
    found, moved = reloaded(export.export(run)(*given)).call(*given)
    assert found == given[0]
    np.testing.assert_array_equal(moved, [0, 1, 6, 7, 2, 3, 4, 5])


@pytest.mark.parametrize("name", ["rope", "linear-elu"])
def test_a_cache_goes_in_and_comes_out(name):
    config = pj.nn.DecoderConfig(vocab_size=16, num_layers=1, model_dim=16, num_heads=2, scheme=pj.scheme(name))
    decoder = pj.nn.Decoder(config, rngs=nnx.Rngs(0))
    cache = decoder.init_cache(batch=1, capacity=8, chunk=2)
    run = jax.jit(lambda tokens, cache: decoder.decode(tokens, cache, length=8))
    tokens = jnp.array([[3, 5]])
    exported, wanted = reloaded(export.export(run)(tokens, cache)), cache
    for _ in range(2):
        (got, cache), (want, wanted) = exported.call(tokens, cache), run(tokens, wanted)
        chex.assert_trees_all_close((got, cache), (want, wanted), atol=1e-6)


def test_structure_is_text_that_names_dataclasses_of_the_library_alone():
    spec = pj.bias.ScaleInvariant(tau=np.float64(3))
    structure = (spec, 2, None, (True, "name"))
    assert _restored(json.loads(json.dumps(_plain(structure)))) == structure
    with pytest.raises(ValueError, match=r"jax\.export: .*object.* in the structure of a pytree cannot be written"):
        _plain((1, object()))
    for name in ("os:system", "posjax._serial:register"):
        with pytest.raises(ValueError, match=f"{name} is no dataclass of posjax"):
            _restored({"class": name, "fields": {}})


@pytest.mark.parametrize("length", [8, 1024])
def test_a_symbolic_batch_and_several_platforms(length):
    """Gradients with a symbolic batch; short rows are attended densely, long ones in tiles."""

    def loss(q, k, v):
        return jnp.square(pj.attention(q, k, v, bias=pj.bias.ALiBi(), mask=Causal())).sum()

    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, length, 4, 8), jnp.float32)] * 3
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    exported = reloaded(export.export(run, platforms=("cpu", "cuda", "tpu"))(*shapes))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    for size in (1, 3) if length == 8 else (1,):
        values = arrays(size, length)
        chex.assert_trees_all_close(exported.call(*values), run(*values), atol=1e-5, rtol=1e-5)


def test_with_a_static_batch_the_program_for_tpus_has_the_kernel():
    run = jax.jit(lambda q, k, v: pj.attention(q, k, v, mask=Causal()))
    shapes = [jax.ShapeDtypeStruct((8, 1024, 4, 64), jnp.bfloat16)] * 3
    text = export.export(run, platforms=("cpu", "tpu"))(*shapes).mlir_module()
    assert text.count("tpu_custom_call") == 1
