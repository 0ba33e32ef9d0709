"""Which tensors a parameter is read from, and where its numbers are put."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from posjax import masks
from posjax.nn import Decoder, DecoderConfig
from posjax.nn.huggingface import FAMILIES, load
from posjax.nn.huggingface.files import Entry
from posjax.nn.huggingface.views import View
from posjax.scheme import Layers, Scheme

A, B, C = (Scheme(mask=masks.Window(n)) for n in (3, 4, 5))
STACKS = DecoderConfig(
    vocab_size=5,
    num_layers=11,
    model_dim=8,
    num_heads=2,
    scheme=Layers((((A, B), 3), ((C,), 2), ((A, B, C), 1))),
)


@pytest.mark.parametrize(
    ("pattern", "number", "layers"),
    [(0, 0, [0, 2, 4]), (0, 1, [1, 3, 5]), (1, 0, [6, 7]), (2, 0, [8]), (2, 2, [10])],
)
def test_a_stack_holds_every_layer_of_its_place_in_the_period(pattern, number, layers):
    name, found = load._name_and_layers(f"stacks/{pattern}/{number}/attention/q/norm", STACKS)
    assert (name, list(found)) == ("block/attention/q/norm", layers)


def test_other_parameters_are_in_no_layer():
    assert load._name_and_layers("embed", STACKS) == ("embed", None)


class Tensors(dict):
    """Tensors in memory, in place of a folder."""

    tensor = dict.__getitem__

    @property
    def entries(self):
        """The place of every tensor, one after the other."""
        return {name: Entry("memory", n, x.dtype, x.shape) for n, (name, x) in enumerate(self.items())}


def family(**options):
    views = {"embed": View("model.embed", "vocab embed -> vocab embed"), "head": View("lm_head", "vocab embed -> ...")}
    return SimpleNamespace(
        **{"model_type": "llama", "prefix": "model.", "renamed": {}, "ignored": ("inv_freq",)}
        | {"tensors": lambda _: views}
        | options
    )


TABLE = np.arange(14.0).reshape(7, 2)
TIED = DecoderConfig(vocab_size=7, num_layers=1, model_dim=2, num_heads=1)


def found(family, *names, name="model.embed"):
    return load._find(Tensors(dict.fromkeys(names, TABLE)), family, TIED, name)


def test_a_tensor_is_found_with_or_without_its_prefix_or_by_another_name():
    assert found(family(), "embed", "model.embed") == "model.embed"
    assert found(family(), "embed") == "embed"
    assert found(family(renamed={"model.norm": "ln"}), "ln", name="model.norm") == "ln"
    with pytest.raises(ValueError, match=r"tensor 'model.embed' is missing"):
        found(family(), "other")


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("inv_freq", True), ("layers.0.inv_freq", True), ("my_inv_freq", False), ("layers", False)],
)
def test_buffers_are_ignored(name, ignored):
    assert load._is_ignored(name, family(ignored=("masked_bias", "inv_freq"))) == ignored


@pytest.mark.parametrize("rows", [2, 3, 7, 100])
def test_a_head_that_is_tied_must_equal_the_embedding(rows, monkeypatch):
    """Rows are compared a few at a time; every row counts."""
    monkeypatch.setattr(load, "_ROWS", rows)
    load._check_tied(Tensors({"model.embed": TABLE}), family(), TIED)
    load._check_tied(Tensors({"model.embed": TABLE, "lm_head": TABLE.copy()}), family(), TIED)
    others = [np.vstack([TABLE, TABLE[-1:]])]
    for row in range(7):
        others.append(TABLE.copy())
        others[-1][row, 1] += 1
    for other in others:
        with pytest.raises(ValueError, match="lm_head differs from the embedding"):
            load._check_tied(Tensors({"model.embed": TABLE, "lm_head": other}), family(), TIED)


def test_a_head_of_its_own_may_differ_from_the_embedding():
    own = DecoderConfig(vocab_size=7, num_layers=1, model_dim=2, num_heads=1, tied_head=False)
    load._check_tied(Tensors({"model.embed": TABLE, "lm_head": TABLE + 1}), family(), own)


def test_parameters_are_on_the_default_device():
    struct = jax.ShapeDtypeStruct((2,), np.float32)
    assert load._sharding(struct) == SingleDeviceSharding(jax.local_devices()[0])
    with jax.default_device(jax.local_devices()[3]):
        assert load._sharding(struct) == SingleDeviceSharding(jax.local_devices()[3])
    other = SingleDeviceSharding(jax.local_devices()[2])
    assert load._sharding(jax.ShapeDtypeStruct((2,), np.float32, sharding=other)) == other


def test_a_layer_is_sharded_as_its_stack():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for stack, layer in (((None, "x", "y"), ("x", "y")), ((None, None, "x"), (None, "x")), ((), ())):
        found = load._of_layer(NamedSharding(mesh, PartitionSpec(*stack)))
        assert found == NamedSharding(mesh, PartitionSpec(*layer))
    one = SingleDeviceSharding(jax.devices()[1])
    assert load._of_layer(one) == one
    with pytest.raises(ValueError, match="the axis of layers must be whole"):
        load._of_layer(NamedSharding(mesh, PartitionSpec("x", None)))


def test_layers_are_stacked_in_order():
    place = SingleDeviceSharding(jax.devices()[1])
    struct = jax.ShapeDtypeStruct((3, 2), np.float32, sharding=place)
    found = load._stacked(lambda one, name: jnp.full(one.shape, float(name), one.dtype, device=place), struct, "512")
    np.testing.assert_array_equal(found, [[5, 5], [1, 1], [2, 2]])
    assert (found.sharding, found.dtype) == (place, np.float32)


def test_the_array_of_a_stack_is_used_again():
    """Otherwise a second stack would need memory."""
    stack, layer = jnp.zeros((3, 2)), jnp.ones(2)
    load._put(stack.sharding)(stack, layer, 1, 0)
    assert (stack.is_deleted(), layer.is_deleted()) == (True, False)


def test_dtypes_of_tensors():
    for dtype in (None, "float32", "bfloat16", "float16"):
        load.check_dtype(dtype)
    with pytest.raises(ValueError, match="dtype: unknown value 'float64'"):
        load.check_dtype("float64")


def test_unexpected_tensors_are_named():
    source = Tensors({"embed": TABLE, "lm_head": TABLE, "layers.0.inv_freq": TABLE})
    embed = load.Stored(TABLE, family().tensors(TIED)["embed"], ["model.embed"], None)
    load.check_tensors(source, family(), TIED, [embed])
    for extra, words in (("a", "unexpected tensors: a;"), ("abcd", "a, b, c and 1 more;")):
        with pytest.raises(ValueError, match=words):
            load.check_tensors(Tensors(source | dict.fromkeys(extra, TABLE)), family(), TIED, [embed])
    own = DecoderConfig(vocab_size=7, num_layers=1, model_dim=2, num_heads=1, tied_head=False)
    with pytest.raises(ValueError, match="unexpected tensors: lm_head"):
        load.check_tensors(source, family(), own, [embed])


def test_parameters_are_named_by_their_paths():
    """A tuple is a leaf: the logical axes of a parameter."""
    tree = {"stacks": [{"q": ("embed", None)}, {"q": ()}], "embed": 2}
    found = [("embed", 2), ("stacks/0/q", ("embed", None)), ("stacks/1/q", ())]
    assert sorted(load.named_parameters(tree)) == found


def test_a_parameter_outside_the_layers_is_its_tensor():
    source, wanted = Tensors({"model.embed_tokens.weight": TABLE}), jax.ShapeDtypeStruct((7, 2), jnp.bfloat16)
    found = load.read_parameters(source, {"model_type": "llama"}, TIED, {"embed": wanted})
    np.testing.assert_array_equal(found["embed"], TABLE)
    assert found["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("dtype", "wanted"), [(None, "float16"), ("bfloat16", "bfloat16")])
def test_parameters_have_the_requested_dtype_or_that_of_the_files(dtype, wanted):
    model = nnx.eval_shape(lambda: Decoder(TIED, rngs=nnx.Rngs(0)))
    llama, abstract, asked = FAMILIES["llama"], nnx.to_pure_dict(nnx.state(model)), []
    source = Tensors({each.tensors[0]: np.zeros(0, np.float16) for each in load.stored(llama, TIED, abstract)})
    found = load._wanted(source, llama, model, dtype, lambda *given: asked.append(given))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(wanted)}
    chex.assert_trees_all_equal_shapes(found, abstract)
    assert (("vocab", "embed"), (7, 2)) in asked
    assert len(asked) == len(source)
