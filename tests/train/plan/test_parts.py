"""The part of the model and the pass of each instruction, in our programs and in those of MaxText."""

import pytest

from train.plan.hlo import parse
from train.plan.parts import (
    AGAIN,
    AROUND,
    ATTENTION,
    BACKWARD,
    EMBEDDING,
    FORWARD,
    LOGITS,
    MLP,
    NEITHER,
    NORMS,
    OPTIMIZER,
    OTHER,
    PROJECTIONS,
    Widths,
    part_of,
    pass_of,
)

LLAMA = Widths(4096, 14336, 128256, (32, 8), 128, 8192, devices=256)
LOOP = "jit(_update)/jvp()/while/body/closed_call"


def part(text: str, widths: Widths = LLAMA) -> str:
    """The part of the last instruction of a program."""
    module = parse(text)
    return part_of(module, module.entry, module.computations[module.entry][-1], widths)


def product(left: str, right: str, result: str, name: str = f"{LOOP}/dot_general") -> str:
    return f"""
ENTRY %main (x: {left}, w: {right}) -> {result} {{
  %x = {left}{{0}} parameter(0)
  %w = {right}{{0}} parameter(1)
  ROOT %y = {result}{{0}} dot(%x, %w), lhs_contracting_dims={{0}}, metadata={{op_name="{name}"}}
}}
"""


def elementwise(result: str, name: str) -> str:
    return f"""
ENTRY %main (x: {result}) -> {result} {{
  %x = {result}{{0}} parameter(0)
  ROOT %y = {result}{{0}} fusion(%x), kind=kLoop, calls=%none, metadata={{op_name="{name}"}}
}}
"""


@pytest.mark.parametrize(
    ("left", "right", "result", "expected"),
    [
        ("bf16[3,8192,4096]", "bf16[4096,14336]", "bf16[3,8192,14336]", MLP),
        ("bf16[3,8192,1024]", "bf16[1024,14336]", "bf16[3,8192,14336]", MLP),  # a part of a collective product
        ("bf16[3,8192,4096]", "bf16[4096,1792]", "bf16[3,8192,1792]", MLP),  # split over eight devices
        ("bf16[3,8192,4096]", "bf16[4096,32,128]", "bf16[3,8192,32,128]", PROJECTIONS),
        ("bf16[3,8192,32,128]", "bf16[32,128,2,1024]", "bf16[3,8192,2,1024]", PROJECTIONS),
        ("bf16[3,8192,4096]", "bf16[3,8192,8,128]", "bf16[4096,8,128]", PROJECTIONS),  # the gradient
        ("bf16[8,8192,4096]", "bf16[4096,8,128]", "bf16[8,8192,8,128]", PROJECTIONS),  # as many rows as heads
        ("bf16[8,8192,1024]", "bf16[1024,8,128]", "bf16[8,8192,8,128]", PROJECTIONS),
        ("bf16[3,32,8192,128]", "bf16[3,32,8192,128]", "f32[3,32,8192,8192]", ATTENTION),
        ("f32[3,32,8192,8192]", "bf16[3,32,8192,128]", "bf16[3,32,8192,128]", ATTENTION),
        ("bf16[3,2048,4096]", "bf16[4096,128256]", "f32[3,2048,128256]", LOGITS),
        ("bf16[3,2048,4096]", "bf16[4096,501]", "f32[3,2048,501]", LOGITS),  # split over all devices
        ("bf16[3,7]", "bf16[7,5]", "bf16[3,5]", OTHER),
    ],
)
def test_products_by_their_sizes(left, right, result, expected):
    assert part(product(left, right, result)) == expected


def test_tiles_of_attention_without_a_kernel_are_recognized_by_their_name():
    sides = "bf16[3,8,512,128]", "bf16[3,8,512,128]", "f32[3,8,512,512]"
    assert part(product(*sides, f"{LOOP}/jit(blockwise)/while/body/dot_general")) == ATTENTION


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(train_step)/jvp(Transformer)/decoder/token_embedder/embed/dot_general", EMBEDDING),
        ("jit(train_step)/jvp(Transformer)/decoder/logits_dense/dot_general", LOGITS),
        ("jit(train_step)/jvp(Transformer)/token_embedder.attend/dot_general", LOGITS),
    ],
)
def test_a_look_up_by_a_product_is_distinguished_from_the_head_by_its_name(name, expected):
    assert part(product("bf16[3,8192,128256]", "bf16[128256,4096]", "bf16[3,8192,4096]", name)) == expected


@pytest.mark.parametrize("as_numbers", [False, True])
def test_a_look_up_by_a_product_is_distinguished_from_the_head_by_its_one_hot_rows(as_numbers):
    inner = """
%inner (ids: s32[3,8192], table: bf16[128256,4096]) -> bf16[3,8192,4096] {
  %ids = s32[3,8192]{1,0} parameter(0)
  %table = bf16[128256,4096]{1,0} parameter(1)
  %ones = pred[3,8192,128256]{2,1,0} fusion(%ids), kind=kLoop, calls=%compare
  %numbers = bf16[3,8192,128256]{2,1,0} convert(%ones)
  ROOT %rows = bf16[3,8192,4096]{2,1,0} dot(%SIDE, %table), lhs_contracting_dims={2}
}
""".replace("SIDE", "numbers" if as_numbers else "ones")
    outer = elementwise("bf16[3,8192,4096]", "jit(train_step)/jvp()/dot_general").replace("%none", "%inner")
    assert part(inner + outer) == EMBEDDING
    assert part(inner.replace("pred[", "f32[") + outer) == LOGITS


def test_products_inside_of_a_fusion_decide():
    inner = product("bf16[3,8192,4096]", "bf16[4096,14336]", "bf16[3,8192,14336]").replace("ENTRY %main", "%inner")
    outer = elementwise("bf16[3,8192,4096]", f"{LOOP}/add").replace("calls=%none", "calls=%inner")
    assert part(inner + outer) == MLP


@pytest.mark.parametrize(
    ("result", "name", "expected"),
    [
        ("bf16[3,8192,32,128]", f"{LOOP}/jit(inside)/shard_map/mul", AROUND),
        ("bf16[3,8192,32,64]", f"{LOOP}/concatenate", AROUND),  # half heads, in a rotation
        ("f32[3,8,4,1,8192,128]", f"{LOOP}/broadcast_in_dim", AROUND),
        ("bf16[3,8192,4096]", f"{LOOP}/add", NORMS),
        ("f32[3,8192]", f"{LOOP}/rsqrt", NORMS),
        ("bf16[3,8192,14336]", f"{LOOP}/mul", MLP),
        ("f32[3,2048,128256]", "jit(_update)/jvp()/while/body/exp", LOGITS),
        ("bf16[3,8192,4096]", "jit(train_step)/jvp(decoder)/layers/pre_self_attention_layer_norm/mul", NORMS),
        ("bf16[3,8192,4096]", "jit(train_step)/jvp(decoder)/layers/self_attention/query/convert", AROUND),
        ("bf16[3,8192,4096]", "jit(train_step)/jvp(decoder)/layers/mlp/mul", MLP),
        ("s32[24576]", "jit(_update)/transpose(jvp())/scatter-add", EMBEDDING),
        ("s32[3,8,8]", f"{LOOP}/jit(inside)/shard_map/gather", AROUND),  # a gather of tiles inside the layers
        ("f32[4,1024,14336]", "jit(_update)/jit(_where)/select_n", OPTIMIZER),
        ("f32[3,7]", "jit(_update)/jvp()/add", OTHER),
    ],
)
def test_other_instructions_by_name_and_size(result, name, expected):
    assert part(elementwise(result, name)) == expected


def test_a_fusion_that_gathers_outside_of_the_layers_is_the_embedding():
    text = """
%inner (table: bf16[1024,4096], ids: s32[96]) -> bf16[96,4096] {
  %table = bf16[1024,4096]{1,0} parameter(0)
  %ids = s32[96]{0} parameter(1)
  ROOT %rows = bf16[96,4096]{1,0} gather(%table, %ids), slice_sizes={1,4096}
}

ENTRY %main (table: bf16[1024,4096], ids: s32[96]) -> bf16[96,4096] {
  ROOT %f = bf16[96,4096]{1,0} fusion(%t, %i), kind=kCustom, calls=%inner, metadata={op_name="jit(_update)/jvp()/take"}
}
"""
    assert part(text) == EMBEDDING


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(_update)/jvp()/while/body/closed_call/dot_general", FORWARD),
        ("jit(train_step)/jvp(Transformer)/decoder/layers/while/body/checkpoint/mul", FORWARD),
        ("jit(_update)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general", AGAIN),
        ("jit(_update)/transpose(jvp())/while/body/closed_call/checkpoint/dot_general", BACKWARD),
        ("jit(_update)/transpose(jvp(transpose(jvp())))/scatter-add", BACKWARD),
        ("jit(_update)/add", NEITHER),
        ("", NEITHER),
    ],
)
def test_passes(name, expected):
    assert pass_of(name) == expected


def test_a_size_with_another_meaning_is_not_a_shard():
    widths = Widths(1024, 4096, 32000, (8, 8), 128, 2048, devices=8)
    assert widths.shards(4096) == {4096, 512}  # 2048 is the length, 1024 the width
    assert widths.shards(32000) == {32000, 16000, 8000, 4000}


@pytest.mark.parametrize(
    ("left", "right", "result", "expected"),
    [
        ("bf16[3,8192,2048]", "bf16[2048,8192]", "bf16[3,8192,8192]", MLP),
        ("bf16[3,8192,8192]", "bf16[8192,2048]", "bf16[3,8192,2048]", MLP),
        ("bf16[3,8192,2048]", "bf16[2048,32,64]", "bf16[3,8192,32,64]", PROJECTIONS),
        ("bf16[3,2048,2048]", "bf16[2048,32768]", "bf16[3,2048,32768]", LOGITS),
    ],
)
def test_a_hidden_width_as_large_as_the_length_is_distinguished_from_it(left, right, result, expected):
    widths = Widths(2048, 8192, 32768, (32, 8), 64, 8192, devices=256)
    assert part(product(left, right, result), widths) == expected


def test_a_vocabulary_as_large_as_the_length_is_distinguished_from_it():
    widths = Widths(4096, 14336, 32768, (32, 8), 128, 32768, devices=64)
    assert part(product("bf16[1,8192,4096]", "bf16[4096,32768]", "f32[1,8192,32768]"), widths) == LOGITS
    assert part(product("bf16[1,32768,4096]", "bf16[4096,14336]", "bf16[1,32768,14336]"), widths) == MLP
    assert part(elementwise("bf16[1,32768,4096]", f"{LOOP}/add"), widths) == NORMS
    assert part(elementwise("bf16[1,32768,32,128]", f"{LOOP}/mul"), widths) == AROUND
    assert part(elementwise("f32[1,8192,32768]", f"{LOOP}/exp"), widths) == LOGITS
