"""The time of kernels, and the FLOPs of products, from small programs counted by hand."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.masks import Causal, Window
from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.lab.steps.foreign_kernels import AnyKernels, others_call
from train.plan.pods import pod_of
from train.lab.steps.products import products_of
from train.runtime.chips import CHIPS

CALL = """
ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %NAME = RESULT custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={OPERANDS}, \
frontend_attributes={kernel_metadata=METADATA}, metadata={op_name="jit(step)/jvp()/pallas_call"}
}
"""


def call(name, result, operands, metadata="{}"):
    text = CALL.replace("NAME", name).replace("RESULT", result).replace("OPERANDS", operands)
    return parse(text.replace("METADATA", metadata)).computations["main"][0]


def everything(queries, keys):
    return 1.0


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


def test_the_sizes_and_blocks_of_another_librarys_kernel_are_read_from_its_call():
    sizes = {"block_q_dkv": 2048, "block_kv_dkv": 512, "block_kv_dkv_compute": 256}
    # JSON in a string in JSON, on separate lines, as in a program
    written = "{\n" + json.dumps({"xprof_metadata": json.dumps(sizes)}, separators=(",", ":"))[1:-1] + "\n}"
    q = "bf16[3,2,4096,128]{3,2,1,0}"
    line = call("splash_mha_dkv.1", f"({q}, f32[3,2,4096])", f"s8[1,4,4]{{2,1,0}}, {q}, {q}, {q}", written)
    assert others_call(line) == ("splash_mha_dkv.1", 6, 4096, 4096, 128, (2048, 512, 256))
    assert AnyKernels(pod_of("v6e:2x2"), everything).seconds(line) is None  # no schedules


def flops(text):
    """The FLOPs of all products in the entry."""
    module = parse(text)
    lines = module.computations[module.entry]
    return sum(product.flops for line in lines for product in products_of(module, module.entry, line))


def convolution(left, right, result, settings):
    return f"""
ENTRY %main (x: {left}, w: {right}) -> {result} {{
  %x = {left}{{0}} parameter(0)
  %w = {right}{{0}} parameter(1)
  ROOT %y = {result}{{0}} convolution(%x, %w), {settings}
}}
"""


def test_flops_of_products_that_are_written_as_convolutions():
    text = convolution("bf16[24576,4096]", "bf16[4096,14336]", "bf16[24576,14336]", "dim_labels=bf_io->bf")
    assert flops(text) == 2 * 24576 * 4096 * 14336
    # [3, 8192, 32, 128] x [32, 128, 4096], the heads as a window without padding
    sizes = "bf16[3,8192,32,128]", "bf16[1,32,128,4096]", "bf16[3,8192,1,4096]"
    text = convolution(*sizes, "window={size=1x32}, dim_labels=b01f_01io->b01f")
    assert flops(text) == 2 * 3 * 8192 * 32 * 128 * 4096


def test_a_program_of_jax_counts_what_its_shapes_say():
    def heads(x, w, v):
        return jnp.einsum("bthd,hde->bte", jnp.einsum("bte,ehd->bthd", x, w), v)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 64), (64, 4, 8), (4, 8, 64))]
    assert flops(jax.jit(heads).lower(*shapes).compile().as_text()) == 2 * 2 * (2 * 16) * 64 * (4 * 8)
