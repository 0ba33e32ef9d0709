"""How parameters, moments and batches are placed on the devices of a mesh."""

import math
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from train.config import MeshConfig
from train.model.mesh import AXES, make_mesh
from train.model.sharding import cast_matrices, global_batch, named_sharding, optimizer_shardings, replicated


def abstract(**sizes):
    """A mesh of these sizes without devices; the other axes have one."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, context=2), 4)


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("length",), ("context",)),
        (("embed", "heads"), (("fsdp", "context"), "tensor")),
        ((None, "layers", "no rule"), (None, None, None)),
        (("batch", "length"), (("replica", "data", "fsdp"), "context")),
    ],
)
def test_names_choose_the_axes_of_the_mesh(axes, spec):
    assert named_sharding(abstract(), axes).spec == PartitionSpec(*spec)


@pytest.mark.parametrize(("size", "reported"), [(2**25 - 3, False), (2**25 - 1, True)])
def test_an_excess_of_64_mib_is_the_least_that_is_reported(size, reported):
    """Of an odd number of float32 two devices cannot hold half each: the excess is 2 (size + 1) bytes."""
    found = replicated(abstract(fsdp=2), {"x": ("embed",)}, {"x": shape(size)})
    assert ("holds 64 MiB" in found) == reported


def test_the_excess_is_the_sum_over_parameters_and_the_largest_is_named():
    """Half of each odd axis: 8 and 24 Mi numbers of 4 bytes, and 24 Mi of 2 bytes."""
    axes = {"a": ("embed",), "b": ("embed", None), "c": ("embed",), "d": ("embed",)}
    shapes = {"a": shape(2**24 - 1), "b": shape(2**24 - 1, 3), "c": shape(2**24)}
    found = replicated(abstract(fsdp=2), axes, shapes | {"d": shape(3 * 2**24 - 1, dtype=np.float16)})
    assert f"holds {8 * 4 + 24 * 4 + 24 * 2} MiB" in found
    assert "most of b, of shape (16777215, 3)" in found


def test_only_matrices_are_cast_and_only_to_another_dtype(mesh):
    names = {"matrix": ("embed", "mlp"), "half": ("embed", "mlp"), "gain": ("embed",)}
    values = {"matrix": jnp.ones((4, 2)), "half": jnp.ones((4, 2), jnp.float16), "gain": jnp.ones(4)}
    with jax.set_mesh(mesh):
        found = jax.jit(lambda tree: cast_matrices(tree, names, jnp.float16, mesh))(values)
    assert {name: leaf.dtype for name, leaf in found.items()} == {
        "matrix": np.float16,
        "half": np.float16,
        "gain": np.float32,
    }
    assert found["matrix"].sharding.is_equivalent_to(named_sharding(mesh, names["matrix"], (4, 2)), 2)
    kept = {"half": values["half"], "gain": values["gain"]}
    assert cast_matrices(kept, {name: names[name] for name in kept}, jnp.float16, mesh)["half"] is kept["half"]


def test_moments_are_sharded_like_their_parameters_and_all_else_is_replicated():
    mesh = abstract(fsdp=2, tensor=2)
    parameters = {"q": {"w": shape(4, 2)}, "w": shape(4)}
    split, whole = named_sharding(mesh, ("embed", "heads")), named_sharding(mesh, ())
    shardings = {"q": {"w": split}, "w": named_sharding(mesh, ("embed",))}
    rows = {"q": {"w": shape(4)}, "w": shape(1)}  # as in Adafactor
    state = {"count": shape(), "mu": parameters, "rows": rows, "inner": {"nu": parameters}}
    found = optimizer_shardings(mesh, state, parameters, shardings)
    unsplit = {"q": {"w": whole}, "w": whole}
    assert found == {"count": whole, "mu": shardings, "rows": unsplit, "inner": {"nu": shardings}}


def test_a_batch_lies_over_rows_and_columns(mesh):
    batch = {"tokens": np.arange(4 * 6, dtype=np.int32).reshape(4, 6)}
    found = global_batch(mesh, batch, 4, slice(0, 4))["tokens"]
    chex.assert_shape(found, (4, 6))
    np.testing.assert_array_equal(found, batch["tokens"])
    for shard in found.addressable_shards:
        chex.assert_shape(shard.data, (1, 3))
        np.testing.assert_array_equal(shard.data, batch["tokens"][shard.index])


def test_a_process_gives_the_pieces_of_its_own_rows(mesh, monkeypatch):
    """Rows 4 to 7 of 8; the first of them is number 0 in the process."""
    asked = SimpleNamespace()
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *arguments: vars(asked).update(given=arguments))
    own = np.arange(4 * 6).reshape(4, 6)
    global_batch(mesh, own, 8, slice(4, 8))
    size, sharding, piece = asked.given
    assert size == (8, 6)
    assert math.prod(sharding.shard_shape(size)) == 8 * 6 / 8
    np.testing.assert_array_equal(piece((slice(6, 8), slice(0, 3))), own[2:, :3])
    np.testing.assert_array_equal(piece((slice(4, None), slice(None))), own)
