"""FLOPs of products in every notation, against known sizes and pairs counted one by one."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from train.plan.hlo import parse
from train.plan.products import products_of


def flops(text: str) -> float:
    """The FLOPs of all products in the entry."""
    module = parse(text)
    return sum(
        product.flops
        for line in module.computations[module.entry]
        for product in products_of(module, module.entry, line)
    )


def convolution(left: str, right: str, result: str, settings: str) -> str:
    return f"""
ENTRY %main (x: {left}, w: {right}) -> {result} {{
  %x = {left}{{0}} parameter(0)
  %w = {right}{{0}} parameter(1)
  ROOT %y = {result}{{0}} convolution(%x, %w), {settings}
}}
"""


def test_a_product_of_matrices_as_a_convolution():
    text = convolution("bf16[24576,4096]", "bf16[4096,14336]", "bf16[24576,14336]", "dim_labels=bf_io->bf")
    assert flops(text) == 2 * 24576 * 4096 * 14336


def test_a_product_over_two_dimensions_contracts_both():
    # [3, 8192, 32, 128] x [32, 128, 4096], the heads as a window without padding.
    settings = "window={size=1x32}, dim_labels=b01f_01io->b01f"
    text = convolution("bf16[3,8192,32,128]", "bf16[1,32,128,4096]", "bf16[3,8192,1,4096]", settings)
    assert flops(text) == 2 * 3 * 8192 * 32 * 128 * 4096


def test_padding_of_a_window_is_not_multiplied():
    # Each output of the window uses exactly one head, so this is a product with heads in the result.
    settings = "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0io->b0f"
    text = convolution("bf16[24576,1,4096]", "bf16[8,4096,128]", "bf16[24576,8,128]", settings)
    assert flops(text) == 2 * 24576 * 4096 * 8 * 128


def test_a_batch_is_a_window_of_stride_and_holes():
    settings = "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf"
    text = convolution("bf16[6,512,128]", "bf16[6,128,256]", "bf16[6,512,256]", settings)
    assert flops(text) == 2 * 6 * 512 * 128 * 256


@pytest.mark.parametrize(
    ("size", "window", "stride", "before", "after", "of_left", "of_right"),
    [
        (7, 3, 1, 1, 1, 1, 1),
        (9, 3, 2, 1, 0, 1, 1),
        (8, 2, 1, 2, 3, 2, 1),
        (10, 3, 2, 0, 4, 1, 3),
        (5, 4, 3, 3, 3, 3, 2),
    ],
)
def test_any_window_against_counting(size, window, stride, before, after, of_left, of_right):
    wide = (size - 1) * of_left + 1 + before + after
    results = (wide - (window - 1) * of_right - 1) // stride + 1
    numbers = {before + n * of_left for n in range(size)}
    hits = sum(o * stride + t * of_right in numbers for o, t in itertools.product(range(results), range(window)))
    settings = (
        f"window={{size={window} stride={stride} pad={before}_{after} lhs_dilate={of_left} rhs_dilate={of_right}}}, "
        "dim_labels=b0f_0io->b0f"
    )
    text = convolution(f"f32[2,{size},3]", f"f32[{window},3,5]", f"f32[2,{results},5]", settings)
    assert flops(text) == 2 * hits * 2 * 3 * 5


def test_products_inside_of_fusions_count():
    text = """
%inner (x: f32[64,32], w: f32[32,16]) -> f32[64,16] {
  %x = f32[64,32]{1,0} parameter(0)
  %w = f32[32,16]{1,0} parameter(1)
  ROOT %y = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (x: f32[64,32], w: f32[32,16]) -> f32[64,16] {
  %x = f32[64,32]{1,0} parameter(0)
  %w = f32[32,16]{1,0} parameter(1)
  ROOT %y = f32[64,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%inner
}

ENTRY %main (x: f32[64,32], w: f32[32,16]) -> f32[64,16] {
  %x = f32[64,32]{1,0} parameter(0)
  %w = f32[32,16]{1,0} parameter(1)
  ROOT %y = f32[64,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%outer
}
"""
    assert flops(text) == 2 * 64 * 32 * 16


def test_a_program_of_jax_counts_what_its_shapes_say():
    def heads(x, w, v):
        return jnp.einsum("bthd,hde->bte", jnp.einsum("bte,ehd->bthd", x, w), v)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 64), (64, 4, 8), (4, 8, 64))]
    assert flops(jax.jit(heads).lower(*shapes).compile().as_text()) == 2 * 2 * (2 * 16) * 64 * (4 * 8)
