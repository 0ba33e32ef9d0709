"""How parameters, moments and batches are placed on the devices of a mesh."""

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


SPECS = {
    (260, 48): ("tensor", ("fsdp", "context")),
    (263, 48): (None, ("fsdp", "context")),
    (260, 46): ("tensor", "context"),
    (260, 9): ("tensor", "fsdp"),
    (260, 7): ("tensor", None),
}


@pytest.mark.parametrize("shape", SPECS)
def test_an_axis_is_split_over_the_most_devices_that_divide_it(shape):
    """48 over 6, 46 over 2, 9 over 3."""
    found = named_sharding(abstract(fsdp=3, context=2, tensor=4), ("vocab", "embed"), shape)
    assert found.spec == PartitionSpec(*SPECS[shape])


def test_the_excess_is_the_sum_over_parameters_and_the_largest_is_named():
    """Half of each odd axis: 8 and 24 Mi numbers of 4 bytes, and 24 Mi of 2 bytes; less than 64 MiB is not reported."""
    axes = {"a": ("embed",), "b": ("embed", None), "c": ("embed",), "d": ("embed",)}
    shapes = {"a": shape(2**24 - 1), "b": shape(2**24 - 1, 3), "c": shape(2**24)}
    found = replicated(abstract(fsdp=2), axes, shapes | {"d": shape(3 * 2**24 - 1, dtype=np.float16)})
    assert f"holds {8 * 4 + 24 * 4 + 24 * 2} MiB" in found
    assert "most of b, of shape (16777215, 3)" in found
    reported = [replicated(abstract(fsdp=2), {"x": ("embed",)}, {"x": shape(2**25 - n)}) for n in (3, 1)]
    assert ["holds 64 MiB" in message for message in reported] == [False, True]


def test_only_matrices_are_cast_and_lie_as_before(mesh):
    names = {"matrix": ("embed", "mlp"), "half": ("embed", "mlp"), "gain": ("embed",)}
    values = {"matrix": jnp.ones((4, 2)), "half": jnp.ones((4, 2), jnp.float16), "gain": jnp.ones(4)}
    with jax.set_mesh(mesh):
        found = jax.jit(lambda tree: cast_matrices(tree, names, jnp.float16, mesh))(values)
    types = {name: leaf.dtype for name, leaf in found.items()}
    assert types == {"matrix": np.float16, "half": np.float16, "gain": np.float32}
    assert found["matrix"].sharding.is_equivalent_to(named_sharding(mesh, names["matrix"], (4, 2)), 2)


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
    np.testing.assert_array_equal(found, batch["tokens"])
    for shard in found.addressable_shards:
        chex.assert_shape(shard.data, (1, 3))
        np.testing.assert_array_equal(shard.data, batch["tokens"][shard.index])
