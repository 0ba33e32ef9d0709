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
CASES = {
    "llama": FAMILIES["llama"],
    "gpt_neox": FAMILIES["gpt_neox"],
    "gpt2": FAMILIES["gpt2"],
    "phi3": FAMILIES["phi3"],
    "falcon": FAMILIES["falcon"],
    # Three key heads cannot be split in two, so each device has all of them. Half of the queries cuts a group of two.
    "llama, three": FAMILIES["llama"] | THREE,
    "phi3, three": FAMILIES["phi3"] | THREE,
    "falcon, three": FAMILIES["falcon"] | THREE,
    # One layer differs, so that there are two stacks.
    "gemma3": FAMILIES["gemma3_text"],
}
SPLITS = {
    "grid": {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "fsdp": {"embed": ("data", "tensor")},
    "tensor": {"heads": ("data", "tensor"), "kv_heads": ("data", "tensor"), "mlp": ("data", "tensor")},
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
        "stacks/0/0/attention/k": (2, 24, 1, 12),
        "stacks/0/0/attention/k_bias": (2, 1, 12),
        "stacks/0/0/attention/o": (2, 2, 12, 24),
        "stacks/0/0/attention/o_bias": (2, 24),
        "stacks/0/0/attention_norm/gain": (2, 24),
        "stacks/0/0/mlp/gate": (2, 24, 48),
        "stacks/0/0/mlp/down": (2, 48, 24),
        "stacks/0/0/mlp/up_bias": (2, 48),
        "embed": (51, 24),
        "head": (24, 51),
        "norm/gain": (24,),
    },
    ("llama", "fsdp"): {
        "stacks/0/0/attention/q": (2, 12, 4, 12),
        "stacks/0/0/attention/o": (2, 4, 12, 12),
        "embed": (102, 12),
    },
    ("llama", "tensor"): {
        "stacks/0/0/attention/q": (2, 48, 1, 12),
        "stacks/0/0/attention/k": (2, 48, 2, 12),
        "stacks/0/0/mlp/up": (2, 48, 24),
    },
    ("llama, three", "grid"): {
        "stacks/0/0/attention/q": (2, 24, 3, 8),
        "stacks/0/0/attention/k": (2, 24, 3, 8),
        "stacks/0/0/attention/v_bias": (2, 3, 8),
    },
    ("phi3, three", "grid"): {"stacks/0/0/attention/q": (2, 24, 3, 8), "stacks/0/0/attention/v": (2, 24, 3, 8)},
    ("falcon", "grid"): {"stacks/0/0/attention/q": (2, 24, 2, 12), "stacks/0/0/attention/k": (2, 24, 1, 12)},
    ("falcon", "tensor"): {"stacks/0/0/attention/q": (2, 48, 1, 12), "stacks/0/0/attention/k": (2, 48, 2, 12)},
    ("falcon, three", "grid"): {"stacks/0/0/attention/q": (2, 24, 3, 8), "stacks/0/0/attention/k": (2, 24, 3, 8)},
    ("gpt_neox", "grid"): {"stacks/0/0/attention/q_bias": (2, 2, 12), "stacks/0/0/mlp/up_bias": (2, 48)},
    ("gpt2", "grid"): {"stacks/0/0/attention/v": (2, 24, 2, 12), "embedding/embedding/embedding": (64, 48)},
}


def assert_shapes(decoder, wanted):
    named = dict(named_parameters(released.parameters(decoder)))
    for name, shape in wanted.items():
        assert {shard.data.shape for shard in named[name].addressable_shards} == {shape}, name


# Every model, every split, and all shapes from above.
COVERING = [*SHAPES, ("phi3", "fsdp"), ("gemma3", "fsdp"), ("llama, three", "tensor"), ("gpt2", "tensor")]


def with_wide(few, every):
    """The cases in ``few``; the other cases of ``every`` are marked as wide."""
    return [*few, *(pytest.param(*each, marks=pytest.mark.wide) for each in every if each not in few)]


@pytest.mark.parametrize(
    ("case", "split"), with_wide(COVERING, itertools.product(CASES, SPLITS)), indirect=["case"], scope="module"
)
def test_every_shard_is_that_of_one_device_and_the_files_are_the_same(case, split, tmp_path):
    name, folder, wanted = case
    decoder = from_pretrained(folder, sharding=sharding(split))
    assert_shapes(decoder, SHAPES.get((name, split), {}))
    jax.tree.map(assert_shards, *(released.parameters(each) for each in (decoder, wanted)))
    save_pretrained(decoder, tmp_path / "back", like=folder, max_file_bytes=50_000)
    assert_same_files(tmp_path / "back", folder)


REST = [name for name in FAMILIES if name not in CASES and name != "gemma3_text"]


BOTH = list(itertools.product(REST, ("grid", "fsdp")))


@pytest.mark.parametrize(("name", "split"), with_wide([BOTH[2 * n + n % 2] for n in range(len(REST))], BOTH))
def test_other_families_too(name, split, tmp_path):
    values = FAMILIES[name]
    wanted = released.random_decoder(values)
    save_pretrained(wanted, tmp_path / "one", family=values["model_type"], max_file_bytes=50_000)
    decoder = from_pretrained(tmp_path / "one", sharding=sharding(split))
    jax.tree.map(assert_shards, *(released.parameters(each) for each in (decoder, wanted)))
    save_pretrained(decoder, tmp_path / split, like=tmp_path / "one", max_file_bytes=50_000)
    assert_same_files(tmp_path / split, tmp_path / "one")


FEW = [("llama", "grid"), ("gpt_neox", "fsdp")]


@pytest.mark.parametrize(("name", "split"), with_wide(FEW, itertools.product(FAMILIES, ("grid", "fsdp"))))
def test_a_split_model_gives_the_logits_and_the_greedy_text_of_one_device(name, split, tmp_path):
    values = FAMILIES[name]
    one = released.random_decoder(values)
    save_pretrained(one, tmp_path / "one", family=values["model_type"])
    tokens = np.random.default_rng(0).integers(3, 100, (2, 40))
    wanted, wanted_text = released.logits_and_greedy_tokens(one, tokens)
    with jax.set_mesh(mesh()):
        split_model = from_pretrained(tmp_path / "one", sharding=sharding(split))
        found, found_text = released.logits_and_greedy_tokens(split_model, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found_text, wanted_text)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_mesh_may_be_in_use(kind, tmp_path):
    """Also when the model is read onto one device."""
    decoder = released.random_decoder(CASES["falcon"])
    save_pretrained(decoder, tmp_path / "one", max_file_bytes=50_000)
    with jax.set_mesh(mesh(kind)):
        split = from_pretrained(tmp_path / "one", sharding=sharding("grid", kind))
        alone = from_pretrained(tmp_path / "one")
        save_pretrained(split, tmp_path / "split", max_file_bytes=50_000)
        save_pretrained(alone, tmp_path / "alone", max_file_bytes=50_000)
        assert jax.sharding.get_abstract_mesh() == mesh(kind).abstract_mesh
    jax.tree.map(assert_shards, *(released.parameters(each) for each in (split, decoder)))
    for name in ("split", "alone"):
        assert_same_files(tmp_path / name, tmp_path / "one")


def test_layers_cannot_be_split(tmp_path):
    decoder = released.random_decoder(CASES["gpt2"])
    save_pretrained(decoder, tmp_path / "one")
    with pytest.raises(ValueError, match="sharding: the axis of layers must be whole on every device"):
        from_pretrained(tmp_path / "one", sharding=lambda axes, shape: NamedSharding(mesh(), P("data")))


def test_parameters_have_the_requested_sharding(tmp_path):
    """The function gets the axis names and the whole shape of every parameter."""
    save_pretrained(released.random_decoder(CASES["gpt2"]), tmp_path / "one")
    calls = []

    def record(axes, shape):
        calls.append((axes, shape, sharding("grid")(axes, shape)))
        return calls[-1][-1]

    named = dict(named_parameters(released.parameters(from_pretrained(tmp_path / "one", sharding=record))))
    assert [(shape, given) for _, shape, given in calls] == [(leaf.shape, leaf.sharding) for leaf in named.values()]
    found = dict(zip(named, [axes for axes, _, _ in calls], strict=True))
    assert found["stacks/0/0/attention/q"] == ("layers", "embed", "heads", "head_dim")
    assert found["stacks/0/0/mlp/down_bias"] == ("layers", "embed")
    assert found["embed"] == ("vocab", "embed")
    assert found["embedding/embedding/embedding"] == (None, None)
