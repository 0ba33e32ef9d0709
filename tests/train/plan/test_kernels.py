"""The time of kernels, from small programs counted by hand."""

import math

import numpy as np
import pytest
from compiled_step import call, everything

from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.masks import Causal, Window
from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.plan.kernels import Kernels, visited_share
from train.plan.pods import pod_of
from train.runtime.chips import CHIPS

TILES = "s32[2,4,1,2]{3,2,1,0}, s32[2,4,1,3]{3,2,1,0}, s32[2]{0}"


def test_a_kernel_takes_its_visited_tiles_and_rows():
    """Four rows of two tiles, of which the causal mask needs 1, 1, 2 and 2."""
    operands = f"{TILES}, bf16[2,16,1,4096,128]{{4,3,2,1,0}}, bf16[2,4,1,4096,128]{{4,3,2,1,0}}, bf16[2,4,4096,128]"
    line = call("posjax_attention_forward.1", "(bf16[2,16,4096,128], f32[2,16,1,4096]{3,2,1,0})", operands)
    share = visited_share(uniform(scheme("rope"), 3), 4096, causal=True)
    whole, _, row = FORWARD["v5p"][1024, 2048, 512]
    kernels = Kernels(pod_of("v5p:2x2x1"), share)
    assert kernels.seconds(line) == pytest.approx(2 * 16 * (6 * whole + 4 * row) / 2 / 1.75e9)
    assert kernels.chance(line) == 1.0


def test_heads_that_lie_side_by_side_are_counted():
    """Sixteen query heads over four key heads; four blocks of keys, each with two blocks of queries."""
    operands = f"{TILES}, bf16[2,1,1,4096,2048], bf16[2,1,1,4096,512], bf16[2,1,4096,512], f32[2,16,1,4096]"
    line = call("posjax_attention_backward.3", "(bf16[2,1,1,4096,2048], f32[2,1,1,4096,2048])", operands)
    whole, _, row = BACKWARD["v5p"][1024, 1024, 512]
    cycles = 2 * 16 * (4 * 2 * 2 * whole + 4 * math.sqrt(2) * row) / 2
    assert Kernels(pod_of("v5p:2x2x1"), everything).seconds(line) == pytest.approx(cycles / 1.75e9)


@pytest.mark.parametrize(("topology", "devices"), [("v6e:2x2", 1), ("7x:2x2x1", 2)])
def test_a_kernel_that_is_bound_by_memory_takes_the_time_of_its_bytes(topology, devices):
    line = call("posjax_rotation.7", "bf16[2,4096,2048]", "bf16[2,4096,2048]{2,1,0}, f32[1,4096,128]{2,1,0}")
    target = pod_of(topology)
    moved = 2 * 2 * 2 * 4096 * 2048 + 4 * 4096 * 128
    expected = moved / (CHIPS[target.generation].streaming * 1e9 / devices)
    assert Kernels(target, everything).seconds(line) == pytest.approx(expected)


def test_the_share_of_tiles_is_that_of_the_mask():
    positions = np.arange(1024)
    allowed = (Causal() & Window(100)).allowed(positions, positions)
    tiles = allowed.reshape(8, 128, 4, 256).any((1, 3)).mean()
    assert visited_share(uniform(scheme("window", size=100), 2), 1024, causal=True)(128, 256) == tiles
