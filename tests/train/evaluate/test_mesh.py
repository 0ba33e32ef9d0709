"""Evaluation on many devices: the same numbers as on one device, and a share of the memory on each."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import refused

import posjax as pj
from posjax import nn
from train.config import parse
from train.evaluate.decoder import empty_cache, predictor_of, to_decode
from train.evaluate.generate import SamplingOptions, tokens_after
from train.evaluate.mesh import mesh_for, sizes_for, use_mesh, whole
from train.evaluate.predictor import next_at, next_nll
from train.model.mesh import AXES, mesh_from_sizes
from train.model.sharding import tree_shardings

CASES = {
    "fox": ({}, "replicas"),
    "randomised": ({"max_length": 128}, "sequence"),
    "learned": ({"max_length": 51}, "all"),
}
WIDE = {
    "rope": ({}, "all"),
    "coca-slack": ({}, "sequence"),
    "hwfa": ({"num_layers": 2, "length": 32, "window": 6}, "all"),
}
MESHES = {"sequence": (1, 1, 1, 8, 1), "all": (1, 1, 2, 2, 2), "replicas": (2, 1, 2, 2, 1)}
LENGTH, ROWS = 51, 4  # no mesh divides the length evenly
TOKENS = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)
AT = np.tile(np.array([[3, 20, LENGTH - 1]]), (ROWS, 1))


def mesh(name: str):
    return mesh_from_sizes(dict(zip(AXES, MESHES[name], strict=True)), jax.devices())


def decoder(scheme: pj.Scheme, **changes) -> nn.Decoder:
    shape = {"vocab_size": 64, "num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2} | changes
    return nn.Decoder(nn.DecoderConfig(scheme=scheme, **shape), rngs=nnx.Rngs(0))


def answers(model: nn.Decoder, where=None) -> dict:
    """The loss of each token, the most likely tokens, and the greedy continuation of a prompt."""
    predictor, parameters = predictor_of(model, 0, where)

    def found(parameters):
        return {
            "nll": next_nll(predictor, parameters, TOKENS, LENGTH),
            "likeliest": next_at(predictor, parameters, TOKENS, AT, LENGTH)[0],
        }

    with use_mesh(where):
        numbers = jax.device_get(jax.jit(lambda p: jax.tree.map(whole, found(p)))(parameters))
        following = tokens_after(model, TOKENS[0, :20], SamplingOptions(tokens=7, temperature=0), set(), where)
        return {**numbers, "greedy": list(following)}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)])
def test_answers_are_those_of_one_device(name):
    options, where = (CASES | WIDE)[name]
    model = decoder(pj.scheme(name, **options))
    one, many = answers(model), answers(model, mesh(where))
    chex.assert_trees_all_close(many["nll"], one["nll"], atol=5e-6)
    chex.assert_trees_all_equal(many["likeliest"], one["likeliest"])
    chex.assert_trees_all_equal(many["greedy"], one["greedy"])


def test_linear_attention_splits_rows_alone():
    model = decoder(pj.scheme("linear-elu"))
    config = parse({"scheme": "linear-elu", "evaluate": {"batch_tokens": 512}})
    where = mesh_for(config, rows=1)
    assert (where.shape["fsdp"], where.shape["context"]) == (8, 1)
    predictor, parameters = predictor_of(model, 0, where)
    assert predictor.filled(1) == 8
    tokens = np.repeat(TOKENS, 2, axis=0)
    with use_mesh(where):
        found = jax.jit(lambda p: whole(next_nll(predictor, p, tokens, LENGTH)))(parameters)
    want = answers(model)["nll"]
    chex.assert_trees_all_close(found[::2], want, atol=5e-6)


@pytest.mark.parametrize(
    ("rows", "devices", "slices", "scheme", "sizes"),
    [
        (1, 8, 1, "rope", (1, 1, 8)),
        (7, 8, 1, "rope", (1, 4, 2)),
        (64, 8, 1, "rope", (1, 8, 1)),
        (5, 6, 1, "rope", (1, 3, 2)),
        (1, 8, 2, "rope", (2, 1, 4)),
        (4, 8, 2, "rope", (2, 2, 2)),
        (1, 8, 2, "linear-elu", (2, 4, 1)),
    ],
)
def test_rows_are_split_over_as_many_devices_as_they_fill(rows, devices, slices, scheme, sizes):
    """And every slice has rows of its own."""
    found = sizes_for(parse({"scheme": scheme}), rows, devices, slices)
    assert (found["data"], found["tensor"]) == (1, 1)
    assert tuple(found[name] for name in ("replica", "fsdp", "context")) == sizes


def test_the_mesh_that_is_asked_for():
    found = mesh_for(parse({"evaluate": {"mesh": {"data": 1, "context": 4, "tensor": 2}}}), 64)
    assert (found.shape["data"], found.shape["context"], found.shape["tensor"]) == (1, 4, 2)
    assert mesh_for(parse({"evaluate": {"mesh": {"data": 1}}}), 64) is None, "one device needs no mesh"


def asked(scheme="rope", devices=None, **sizes):
    return lambda: mesh_for(parse({"scheme": scheme, "evaluate": {"mesh": {"data": 1, **sizes}}}), 1, devices)


OF_TWO_PROCESSES = [SimpleNamespace(process_index=number // 2) for number in range(4)]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("evaluate.mesh", asked(context=3, tensor=5)),
        ("evaluate.mesh.context", asked("linear-elu", context=8)),
        ("evaluate.mesh", asked(devices=OF_TWO_PROCESSES)),  # the second process would have no device
    ],
)
def test_meshes_that_cannot_be_made_are_refused(name, call):
    refused(name, call)


LAYERS = 24
LARGE = {"num_layers": LAYERS, "model_dim": 128, "mlp_dim": 512, "num_heads": 8, "num_kv_heads": 8}


def peak_bytes(compiled) -> int:
    """The largest number of bytes that a device holds while a program runs."""
    found = compiled.memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


def shapes_on(model: nn.Decoder, where, parameters):
    shardings = tree_shardings(where, nn.logical_axes(model), parameters)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), parameters, shardings)


def sizes(parameters) -> tuple[int, int, int]:
    """Bytes of all parameters, of a layer and of the embedding."""
    count = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    return count(parameters), count(parameters["stacks"]) // LAYERS, count(parameters["embed"])


def test_a_device_reads_a_text_with_its_share_of_the_model():
    """Plus at most two layers and the embedding; the activations of a few tokens are small beside them."""
    model = nnx.eval_shape(lambda: decoder(pj.scheme("rope"), **LARGE))
    where = mesh("sequence")
    predictor, parameters = predictor_of(model, 0, where)
    tokens = jax.ShapeDtypeStruct((1, 65), jnp.int32)
    with use_mesh(where):
        nll = jax.jit(lambda p, tokens: whole(next_nll(predictor, p, tokens, 64)))
        program = nll.lower(shapes_on(model, where, parameters), tokens).compile()
    everything, layer, embedding = sizes(parameters)
    assert peak_bytes(program) < everything / 8 + 2 * layer + embedding
    assert everything / 8 + 2 * layer + embedding < everything / 3


def test_a_device_keeps_its_share_of_the_tokens_seen():
    """The cache of a long prompt takes most of the memory of decoding."""
    model = nnx.eval_shape(lambda: decoder(pj.scheme("rope"), **LARGE | {"num_layers": 4}))
    where = mesh("all")
    _, parameters = predictor_of(model, 0, where)
    prompts = jax.ShapeDtypeStruct((2, 4000), jnp.int32)
    graph = nnx.split(model)[0]

    def after(p, prompts):
        decoder, make = to_decode(nnx.merge(graph, p), where), partial(empty_cache, mesh=where)
        return nn.generate(decoder, prompts, 8, init_cache=make)

    cache = jax.eval_shape(lambda p: empty_cache(nnx.merge(graph, p), 2, 4008, chunk=256), parameters)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    with use_mesh(where):
        program = jax.jit(after).lower(shapes_on(model, where, parameters), prompts).compile()
    logits = 2 * 8 * 256 * 4008 * 4 / 8  # of attention, for a chunk: two rows, eight heads
    assert peak_bytes(program) < 2.2 * kept / 8 + 2 * logits
