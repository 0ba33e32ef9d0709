"""Released models read onto meshes of four devices and written back: every shard and every byte is compared."""

import itertools
import json
import math
from functools import cache

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nn.huggingface import released

from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface.load import named_parameters


def sized(values):
    """A config with an even vocabulary and one width for all models, so that they share compiled programs."""
    return values | {"vocab_size": 102} | ({"hidden_size": 48} if "hidden_size" in values else {})


FAMILIES = {name: sized(values) for name, values in released.CASES.items()}
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_kv_heads": 3, "head_dim": 8}
# Three key heads cannot be split in two, so each device has all of them. Half of the queries cuts a group of two.
CASES = FAMILIES | {f"{name}, three": FAMILIES[name] | THREE for name in ("llama", "phi3", "falcon")}
# One layer differs, so that there are two stacks.
CASES["gemma3"] = CASES.pop("gemma3_text")
SPLITS = {
    "grid": {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "fsdp": {"embed": ("data", "tensor")},
    "tensor": {"heads": ("data", "tensor"), "kv_heads": ("data", "tensor"), "mlp": ("data", "tensor")},
    "experts": {"experts": ("data",), "mlp": "tensor"},
}
"""The mesh axes of each logical axis of the parameters, where they divide it."""


@cache
def mesh(kind="auto"):
    types = {"axis_types": (AxisType.Auto,) * 2} if kind == "auto" else {}
    return jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4], **types)


def sharding(split, kind="auto"):
    """The function for the argument ``sharding`` of ``from_pretrained``."""

    def fits(axis, size):
        names = SPLITS[split].get(axis, ())
        count = math.prod(mesh().shape[name] for name in ((names,) if isinstance(names, str) else names))
        return names if names and size % count == 0 else None

    return lambda axes, shape: NamedSharding(mesh(kind), P(*map(fits, axes, shape)))


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """The name of a model, the folder that one device has written it to, and the model."""
    folder = tmp_path_factory.mktemp("one")
    values = CASES[request.param]
    decoder = released.random_decoder(values)
    save_pretrained(decoder, folder, family=values["model_type"], max_file_bytes=50_000)
    return request.param, folder, decoder


def assert_shards(found, wanted):
    """Every shard equals its part of the whole array, and the shards together cover the array."""
    chex.assert_equal_shape([found, wanted])
    assert found.dtype == wanted.dtype
    whole, covered = np.asarray(wanted), np.zeros(wanted.shape, bool)
    assert len(found.addressable_shards) == 4
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
        covered[shard.index] = True
    assert covered.all()


def assert_same_files(folder, other):
    names = sorted(path.name for path in other.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert len(names) > 3
    for name in names:
        found, wanted = (place.joinpath(name).read_bytes() for place in (folder, other))
        assert found == wanted or (name == "config.json" and json.loads(found) == json.loads(wanted)), name


# Shapes of shards: of parameters in the first stack, which has two layers, and of those outside of the stacks.
SHAPES = {
    ("llama", "grid"): {
        "stacks/0/0/attention/q": (2, 24, 2, 12),
        "stacks/0/0/attention/k_bias": (2, 1, 12),
        "stacks/0/0/mlp/down": (2, 48, 24),
        "embed": (51, 24),
        "head": (24, 51),
        "norm/gain": (24,),
    },
    ("llama, three", "grid"): {"stacks/0/0/attention/q": (2, 24, 3, 8), "stacks/0/0/attention/v_bias": (2, 3, 8)},
    ("falcon", "tensor"): {"stacks/0/0/attention/q": (2, 48, 1, 12), "stacks/0/0/attention/k": (2, 48, 2, 12)},
    ("mixtral", "experts"): {"stacks/0/0/mlp/up": (2, 3, 48, 48), "stacks/0/0/mlp/router": (2, 48, 3)},
    ("gpt2", "grid"): {"stacks/0/0/attention/v": (2, 24, 2, 12), "embedding/embedding/embedding": (64, 48)},
}
DEFAULT = [
    ("llama", "grid"),
    ("llama, three", "grid"),
    ("gpt2", "grid"),
    ("gemma3", "fsdp"),
    ("stablelm-norms", "grid"),
]
ALL = [pair for pair in itertools.product(CASES, SPLITS) if pair[1] != "experts" or pair[0] in released.MIXTURES]
REST = [pair for pair in ALL if pair not in DEFAULT]


@pytest.mark.parametrize(
    ("case", "split"),
    [*DEFAULT, *(pytest.param(*pair, marks=pytest.mark.wide) for pair in REST)],
    indirect=["case"],
    scope="module",
)
def test_every_shard_is_that_of_one_device_and_the_files_are_the_same(case, split, tmp_path):
    name, folder, wanted = case
    decoder = from_pretrained(folder, sharding=sharding(split))
    named = dict(named_parameters(released.parameters(decoder)))
    for path, shape in SHAPES.get((name, split), {}).items():
        assert {shard.data.shape for shard in named[path].addressable_shards} == {shape}, path
    jax.tree.map(assert_shards, *(released.parameters(each) for each in (decoder, wanted)))
    save_pretrained(decoder, tmp_path / "back", like=folder, max_file_bytes=50_000)
    assert_same_files(tmp_path / "back", folder)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_mesh_may_be_in_use(kind, tmp_path):
    """Also when the model is read onto one device, which is the default one."""
    decoder = released.random_decoder(FAMILIES["falcon"])
    save_pretrained(decoder, tmp_path / "one", max_file_bytes=50_000)
    with jax.set_mesh(mesh(kind)), jax.default_device(jax.devices()[3]):
        split = from_pretrained(tmp_path / "one", sharding=sharding("grid", kind))
        alone = from_pretrained(tmp_path / "one")
        save_pretrained(split, tmp_path / "split", max_file_bytes=50_000)
        save_pretrained(alone, tmp_path / "alone", max_file_bytes=50_000)
    assert alone.embed[...].devices() == {jax.devices()[3]}
    jax.tree.map(assert_shards, *(released.parameters(each) for each in (split, decoder)))
    for name in ("split", "alone"):
        assert_same_files(tmp_path / name, tmp_path / "one")


def test_parameters_have_the_requested_sharding(tmp_path):
    """The function gets the axis names and the whole shape of every parameter."""
    save_pretrained(released.random_decoder(FAMILIES["gpt2"]), tmp_path / "one")
    calls = []

    def record(axes, shape):
        calls.append((axes, shape, sharding("grid")(axes, shape)))
        return calls[-1][-1]

    named = dict(named_parameters(released.parameters(from_pretrained(tmp_path / "one", sharding=record))))
    assert [(shape, given) for _, shape, given in calls] == [(leaf.shape, leaf.sharding) for leaf in named.values()]
    axes = dict(zip(named, [axes for axes, _, _ in calls], strict=True))
    assert axes["stacks/0/0/attention/q"] == ("layers", "embed", "heads", "head_dim")
