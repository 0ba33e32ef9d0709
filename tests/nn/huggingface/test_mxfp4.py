"""Experts in MXFP4, against transformers' own reading of them."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface import released
from refusals import refused

from posjax.nn.huggingface import files
from posjax.nn.huggingface.mxfp4 import Mxfp4

NAME = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def packed(tmp_path):
    """A folder with a packed tensor of 3 experts, and its blocks and scales."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{NAME}_blocks": rng.integers(0, 256, (3, 5, 2, 16)).astype(np.uint8),
        f"{NAME}_scales": rng.integers(110, 140, (3, 5, 2)).astype(np.uint8),
        "model.norm.weight": rng.normal(size=4).astype(np.float32),
    }
    released.write_tensors(tmp_path, arrays)
    return tmp_path, arrays


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_the_numbers_are_those_of_transformers(packed):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder, arrays = packed
    blocks, scales = (torch.tensor(arrays[f"{NAME}_{part}"]) for part in ("blocks", "scales"))
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    found = Mxfp4(files.TensorFolder(folder)).tensor(NAME)
    chex.assert_type(jnp.asarray(found), jnp.bfloat16)
    assert found.shape == (3, 64, 5)
    np.testing.assert_array_equal(found.astype(np.float32), wanted)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{NAME}_scales", {f"{NAME}_scales": None}),
        (f"{NAME}_blocks", {f"{NAME}_scales": (3, 5, 3)}),
        (f"{NAME}_blocks", {f"{NAME}_blocks": (3, 160)}),
        (f"{NAME}_blocks", {f"{NAME}_blocks": (3, 5, 2, 8)}),
    ],
)
def test_blocks_and_scales_that_do_not_belong_together(name, change, tmp_path):
    shapes = {f"{NAME}_blocks": (3, 5, 2, 16), f"{NAME}_scales": (3, 5, 2)} | change
    released.write_tensors(tmp_path, {name: np.zeros(shape, np.uint8) for name, shape in shapes.items() if shape})
    refused(name, lambda: Mxfp4(files.TensorFolder(tmp_path)))


def test_a_byte_holds_two_numbers_the_lower_half_first(tmp_path):
    blocks = np.zeros((1, 1, 1, 16), np.uint8)
    blocks[..., 0] = 0x2F  # code 0xF is -6, then code 2 is 1
    arrays = {f"{NAME}_blocks": blocks, f"{NAME}_scales": np.full((1, 1, 1), 128, np.uint8)}
    released.write_tensors(tmp_path, arrays)
    found = Mxfp4(files.TensorFolder(tmp_path)).tensor(NAME)[0, :, 0]
    assert found[:3].tolist() == [-12.0, 2.0, 0.0]
