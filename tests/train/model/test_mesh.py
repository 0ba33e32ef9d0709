"""Meshes: their axes and devices, how arrays are split over them, and which sizes are refused."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from train.config import MeshConfig, parse
from train.loop.fit import prepare
from train.model.build import placement
from train.model.mesh import AXES, make_mesh, mesh_shape
from train.model.sharding import named_sharding, replicated, rows_of_process


def test_one_axis_takes_what_is_left():
    assert mesh_shape(MeshConfig(fsdp=2, tensor=2), 8) == dict(zip(AXES, (1, 2, 2, 1, 2), strict=True))
    assert mesh_shape(MeshConfig(data=1, context=-1), 8)["context"] == 8
    assert mesh_shape(MeshConfig(data=3), 8)["data"] == 3


def test_a_mesh_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(data=2, context=3), rows=4)
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3, 4, 5]
    assert mesh.shape["context"] == 3


@pytest.mark.parametrize(
    ("sizes", "rows", "message"),
    [
        (
            {"data": 9},
            9,
            r"train.mesh \(data=9\) needs 9 devices, but there are 8; sizes whose product is 8 would work",
        ),
        ({"tensor": 3}, 8, r"\(data=-1, tensor=3\) needs a multiple of 3 devices, but there are 8; .* product is 2"),
        ({"data": 1, "context": 16}, 8, r"needs 16 devices, but there are 8"),
        ({}, 6, r"6 rows at a time, which 8 devices along replica, data and fsdp .*train.mesh.data=6\), or 8 rows"),
        ({}, 4, r"4 rows at a time, which 8 devices .*; 4 along them would work \(train.mesh.context=2\), or 8 rows"),
        ({"data": 2, "fsdp": 2}, 9, r"9 rows at a time, which 4 devices .*train.mesh.data=3\), or 12 rows"),
    ],
)
def test_impossible_sizes_are_refused(sizes, rows, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshConfig(**sizes), rows)


@pytest.mark.parametrize("tensor", [1, 2])
def test_heads_lie_along_an_axis_of_two_or_more(tensor):
    mesh = make_mesh(MeshConfig(data=1, context=2, tensor=tensor), 4)
    found = placement(parse({}), mesh)
    assert (found.heads, found.context) == ("tensor" if tensor == 2 else None, "context")


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((260, 48), ("tensor", ("fsdp", "context"))),
        ((263, 48), (None, ("fsdp", "context"))),
        ((260, 46), ("tensor", "context")),
        ((260, 9), ("tensor", "fsdp")),
        ((260, 7), ("tensor", None)),
    ],
)
def test_an_axis_is_split_over_what_divides_it(shape, spec):
    """Over the most devices that divide it: 48 over 6, 46 over 2, 9 over 3."""
    mesh = AbstractMesh((1, 1, 3, 2, 4), AXES)
    found = named_sharding(mesh, ("vocab", "embed"), shape)
    assert found.spec == jax.P(*spec)
    found.shard_shape(shape)  # raises if a shard is not whole


def test_parameters_that_are_not_split_are_reported_with_their_bytes():
    mesh = AbstractMesh((1, 1, 512, 1, 1), AXES)
    axes = {"embed": ("vocab", "embed"), "norm": ("embed",), "head": ("embed", "vocab")}
    shapes = {"embed": (32_000, 3_840), "norm": (3_840,), "head": (4_096, 100)}
    message = replicated(mesh, axes, {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()})
    extra = (32_000 * 3_840 + 3_840) * 4 * 511 / 512 / 2**20  # 511/512 of the arrays that 512 devices cannot split
    assert f" {extra:,.0f} MiB " in message
    assert "embed, of shape (32000, 3840)" in message
    shapes |= {"embed": (32_000, 4_096)}
    message = replicated(mesh, axes, {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()})
    assert not message


def test_a_process_reads_the_rows_that_its_devices_hold(monkeypatch):
    """Four processes with two devices each: the first two share rows 0 and 1, the others rows 2 and 3."""
    devices = {_Device(n // 2): (slice(n // 4 * 2, n // 4 * 2 + 2),) for n in range(8)}
    mesh = make_mesh(MeshConfig(data=2, context=4), rows=4)
    assert rows_of_process(mesh, 4) == slice(0, 4)
    sharding = types.SimpleNamespace(devices_indices_map=lambda shape: devices)
    monkeypatch.setattr("train.model.sharding.named_sharding", lambda *_: sharding)
    found = [rows_of_process(mesh, 4, process) for process in range(4)]
    assert found == [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)]


class _Device:
    def __init__(self, process_index):
        self.process_index = process_index


@dataclasses.dataclass(frozen=True)
class Chip:
    """A v5e."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


@dataclasses.dataclass(frozen=True)
class ChipOfSlice(Chip):
    """A v5e of one of several slices."""

    slice_index: int = 0


CHIPS = [
    ChipOfSlice(id=8 * piece + 4 * y + x, slice_index=piece, coords=(x, y, 0), process_index=2 * piece + x // 2)
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
    """Chips of a single slice need not say which slice they are of."""
    chips = [Chip(id=4 * y + x, coords=(x, y, 0), process_index=0) for x, y in itertools.product(range(4), range(2))]
    mesh = make_mesh(MeshConfig(data=4, tensor=2), rows=4, devices=chips)
    places = np.array([chip.coords for chip in mesh.devices.flat]).reshape(4, 2, 3)
    assert len({chip.id for chip in mesh.devices.flat}) == 8
    assert (np.abs(np.diff(places, axis=1)).sum(-1) == 1).all()


def test_a_mesh_spans_all_slices():
    with pytest.raises(ValueError, match=r"train.mesh.replica must be a multiple of the 2 slices, found 1; .*=2 would"):
        make_mesh(MeshConfig(data=-1), rows=16, devices=CHIPS)


def test_fit_reports_what_a_mesh_does_not_split(tmp_path):
    """A table of five million rows of width 15, which two devices cannot split: both hold all of it."""
    config = parse(
        {
            "model": {"vocab_size": 5_000_000, "model_dim": 15, "num_heads": 1, "num_layers": 1, "tied_head": True},
            "scheme": "nope",
            "train": {"length": 32, "batch_tokens": 64, "mesh": {"data": 1, "fsdp": 2}},
            "output": str(tmp_path),
        }
    )
    messages = []
    prepare(config, messages.append)
    assert [
        message
        for message in messages
        if message.startswith("warning: train.mesh does not divide") and "143 MiB" in message
    ]
