"""Kernels of other libraries, and the FLOPs of products, from small programs counted by hand."""

import json

import jax
import jax.numpy as jnp
import pytest
from compiled_step import call, everything

from train.lab.steps.foreign_kernels import AnyKernels, foreign_call
from train.lab.steps.products import products_of
from train.plan.hlo import parse
from train.plan.pods import pod_of

pytestmark = pytest.mark.lab


def test_the_sizes_and_blocks_of_another_librarys_kernel_are_read_from_its_call():
    sizes = {"block_q_dkv": 2048, "block_kv_dkv": 512, "block_kv_dkv_compute": 256}
    # JSON in a string in JSON, on separate lines, as in a program
    written = "{\n" + json.dumps({"xprof_metadata": json.dumps(sizes)}, separators=(",", ":"))[1:-1] + "\n}"
    q = "bf16[3,2,4096,128]{3,2,1,0}"
    line = call("splash_mha_dkv.1", f"({q}, {q}, {q})", f"s8[1,4,4]{{2,1,0}}, {q}, {q}, {q}", written)
    assert foreign_call(line) == ("splash_mha_dkv.1", 6, 4096, 4096, 128, (2048, 512, 256), True)
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
