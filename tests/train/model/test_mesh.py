"""Meshes: their axes and devices, how arrays are split over them, and which sizes are refused."""

import dataclasses
import itertools

import numpy as np
import pytest
from refusals import refused

from train.config import MeshConfig
from train.model.mesh import AXES, make_mesh, mesh_shape


def test_one_axis_takes_what_is_left():
    assert mesh_shape(MeshConfig(fsdp=2, tensor=2), 8) == dict(zip(AXES, (1, 2, 2, 1, 2), strict=True))
    assert mesh_shape(MeshConfig(data=1, context=-1), 8)["context"] == 8
    assert mesh_shape(MeshConfig(data=3), 8)["data"] == 3


@dataclasses.dataclass(frozen=True)
class Chip:
    """A v5e of one of several slices."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


CHIPS = [
    Chip(id=8 * piece + 4 * y + x, slice_index=piece, coords=(x, y, 0), process_index=2 * piece + x // 2)
    for y, x, piece in itertools.product(range(2), range(4), range(2))
]
"""Two slices of 4 x 2 chips, out of order."""


@pytest.mark.parametrize("replica", [2, 4])
def test_slices_lie_along_replicas(replica):
    mesh = make_mesh(MeshConfig(replica=replica, data=1, fsdp=-1), rows=16, devices=CHIPS)
    assert mesh.shape["replica"] == replica
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices).reshape(replica, -1)
    np.testing.assert_array_equal(
        slices, np.repeat(np.arange(replica) * 2 // replica, 16 // replica).reshape(replica, -1)
    )


def test_neighbours_in_a_mesh_of_one_slice_are_neighbours_on_its_links():
    chips = [Chip(id=4 * y + x, coords=(x, y, 0), process_index=0) for x, y in itertools.product(range(4), range(2))]
    mesh = make_mesh(MeshConfig(data=4, tensor=2), rows=4, devices=chips)
    places = np.array([chip.coords for chip in mesh.devices.flat]).reshape(4, 2, 3)
    assert (np.abs(np.diff(places, axis=1)).sum(-1) == 1).all()


@pytest.mark.parametrize(
    ("named", "sizes", "rows"),
    [
        ("data=9", {"data": 9}, 9),
        ("train.mesh", {"tensor": 3}, 8),
        ("train.mesh", {"data": 1, "context": 16}, 8),
        ("train.mesh.data=6", {}, 6),
        ("train.mesh.context=2", {}, 4),
        ("12 rows", {"data": 2, "fsdp": 2}, 9),
        ("train.mesh.replica", {}, 16),  # over two slices
    ],
)
def test_impossible_sizes_are_refused(named, sizes, rows):
    devices = CHIPS if named == "train.mesh.replica" else None
    refused(named, lambda: make_mesh(MeshConfig(**sizes), rows, devices))
