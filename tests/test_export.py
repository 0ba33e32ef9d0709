"""Programs that ``jax.export`` serializes and deserializes, with pytrees of the library as arguments and results."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import posjax as pj
from posjax.layout import Layout
from posjax.masks import Causal, FirstTokens, Segments, Window
from posjax.positions import Range


def reloaded(exported):
    """The program, serialized and deserialized."""
    return export.deserialize(exported.serialize())


def check_exported(run, *arguments):
    wanted = run(*arguments)
    found = reloaded(export.export(run)(*arguments)).call(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    chex.assert_trees_all_close(found, wanted, atol=1e-6)
    return found


def arrays(batch=2, length=8):
    return np.random.default_rng(0).normal(size=(3, batch, length, 4, 8)).astype(np.float32)


BIASES = [pj.bias.ALiBi(learned=True), pj.bias.T5(num_buckets=8, max_distance=16), pj.bias.Kerple("weighted-power")]
BIASES += [pj.bias.FIRE(), pj.bias.Sandwich(), pj.bias.ScaleInvariant()]
IDS = np.array([[0] * 3 + [1] * 5, [0] * 6 + [-1] * 2], np.int32)


def test_bound_biases_are_arguments():
    bound = [spec.bind(spec.init(jax.random.key(0), 4), num_heads=4) for spec in BIASES]
    run = jax.jit(lambda biases, q, k, v: [pj.attention(q, k, v, bias=bias, mask=Causal()) for bias in biases])
    check_exported(run, bound, *arrays())


@pytest.mark.parametrize(
    "mask", [Causal() & (Window(jnp.int32(3)) | FirstTokens(1)), ~Window(2) & Segments(IDS) & jnp.ones((8, 8), bool)]
)
def test_masks_and_positions_are_arguments(mask):
    @jax.jit
    def run(mask, where, q, k, v):
        bias = pj.bias.ALiBi(symmetric=True)
        return pj.attention(q, k, v, mask=mask, bias=bias, q_positions=where, kv_positions=where)

    check_exported(run, mask, Range(jnp.int32(5), 8), *arrays())


def test_tables_layouts_and_caches_come_out():
    run = jax.jit(lambda at, layout: (pj.rotary_table(at, pj.rotary.inverse_frequencies(16)), layout))
    table, layout = check_exported(run, jnp.arange(5), Layout("zigzag", 2))
    assert isinstance(table, pj.RotaryTable)
    assert layout == Layout("zigzag", 2)


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


@pytest.mark.parametrize("class_name", ["os:system", "posjax._serial:register"])
def test_a_file_can_name_only_dataclasses_of_the_library(class_name):
    """Deserializing runs nothing that a file names."""
    content = bytes(export.export(jax.jit(lambda bias: bias))(BIASES[-1].bind(num_heads=4)).serialize())
    name = b'"posjax.bias.scale_invariant:ScaleInvariant"'
    changed = content.replace(name, f'"{class_name}"'.encode().ljust(len(name)))
    assert changed != content
    with pytest.raises(ValueError, match=f"{class_name} is no dataclass of posjax"):
        export.deserialize(bytearray(changed))


@pytest.mark.parametrize("length", [8, 1024])
def test_gradients_with_a_symbolic_batch_for_several_platforms(length):
    """Short rows are attended densely, long ones in tiles."""

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
