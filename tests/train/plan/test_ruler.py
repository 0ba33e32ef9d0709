"""The ruler: it counts the same seconds and bytes as the timeline, and assigns them to the right parts."""

import pytest

from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.plan.compiling import Memory
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.plan.network import Fabric
from train.plan.parts import BACKWARD, EMBEDDING, FORWARD, MLP, NEITHER, OPTIMIZER, Widths
from train.plan.pods import pod
from train.plan.ruler import Reading, measure, visits
from train.plan.timeline import Player

WIDTHS = Widths(256, 1024, 8192, (4, 2), 64, 512, devices=4)
MEMORY = Memory(*[0.0] * 7)
CALL = (
    "%posjax_attention_forward.1 = (bf16[1,4,512,128]{3,2,1,0}, f32[1,4,1,512]{3,2,1,0}) custom-call(%x), "
    'custom_call_target="tpu_custom_call", operand_layout_constraints={s32[1,1,1,1]{3,2,1,0}, s32[1,1,1,3]{3,2,1,0}, '
    "bf16[1,4,1,512,128]{4,3,2,1,0}, bf16[1,2,1,512,128]{4,3,2,1,0}, bf16[1,2,512,128]{3,2,1,0}}, "
    'frontend_attributes={kernel_metadata={}}, metadata={op_name="jit(u)/jvp()/while/body/pallas_call"}'
)
STEP = """
%hidden (x: bf16[512,256], w: bf16[256,1024]) -> bf16[512,1024] {
  %x = bf16[512,256]{1,0} parameter(0)
  %w = bf16[256,1024]{1,0} parameter(1)
  ROOT %y = bf16[512,1024]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

%gathered (x: bf16[64,256]) -> bf16[256,256] {
  %x = bf16[64,256]{1,0} parameter(0)
  ROOT %g = bf16[256,256]{1,0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

%idle (x: bf16[512,256]) -> bf16[512,256] {
  ROOT %x = bf16[512,256]{1,0} parameter(0)
}

%busy (x: bf16[512,256]) -> bf16[512,256] {
  %x = bf16[512,256]{1,0} parameter(0)
  %work = bf16[512,256]{1,0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(u)/jvp()/while/body/mul"}, \
backend_config={"estimated_cycles":"4000"}
  CALL
}

%body (p: (s32[], bf16[512,256])) -> (s32[], bf16[512,256]) {
  %p = (s32[], bf16[512,256]{1,0}) parameter(0)
  %x = bf16[512,256]{1,0} get-tuple-element(%p), index=1
  %w = bf16[256,1024]{1,0} get-tuple-element(%p), index=0
  %y = bf16[512,1024]{1,0} fusion(%x, %w), kind=kOutput, calls=%hidden, \
metadata={op_name="jit(u)/jvp()/while/body/dot_general"}, backend_config={"estimated_cycles":"10000"}
  %async-collective-start.1 = bf16[256,256]{1,0} fusion(%x), kind=kCustom, calls=%gathered
  %beside = bf16[512,1024]{1,0} fusion(%x), kind=kOutput, calls=%gathered, backend_config={"estimated_cycles":"100"}, \
metadata={op_name="jit(u)/transpose(jvp())/while/body/mlp/mul"}
  %async-collective-done.1 = bf16[256,256]{1,0} fusion(%x), kind=kCustom, calls=%gathered
  %c = bf16[512,256]{1,0} conditional(%p, %x, %x), branch_computations={%idle, %busy}
  ROOT %t = (s32[], bf16[512,256]{1,0}) tuple(%p, %c)
}

ENTRY %main (x: bf16[512,256]) -> bf16[512,256] {
  %x = bf16[512,256]{1,0} parameter(0)
  %ids = s32[512]{0} parameter(1)
  %rows = bf16[512,256]{1,0} gather(%x, %ids), slice_sizes={1,256}, metadata={op_name="jit(u)/jvp()/gather"}
  %w = (s32[], bf16[512,256]{1,0}) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %sum = f32[8,8]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %new = bf16[512,256]{1,0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(u)/add"}, \
backend_config={"estimated_cycles":"500"}
}
"""


@pytest.fixture(scope="module")
def player() -> Player:
    """Three trips of a loop with a product, a collective spread over fusions, and a kernel with a causal mask."""
    target = pod("v6e:2x2")
    places = tuple((x, y, 0, 0) for x, y in ((0, 0), (1, 0), (1, 1), (0, 1)))
    share = visited_share(uniform(scheme("rope"), 1), 2048, causal=True)
    return Player(parse(STEP.replace("CALL", CALL)), Fabric(target, {"fsdp": 4}, places), Kernels(target, share))


@pytest.fixture(scope="module")
def reading(player) -> Reading:
    return measure("a step", player, MEMORY, 4 * 512, WIDTHS)


def test_parts_take_what_the_timeline_takes(reading):
    assert sum(spent.seconds for spent in reading.parts.values()) == pytest.approx(reading.tally.compute)
    assert sum(launches.seconds for launches in reading.kernels.values()) == pytest.approx(reading.tally.kernels)


def test_collectives_move_what_the_timeline_moves(reading):
    moved = {}
    for (_, kind), size in reading.tally.moved.items():
        moved[kind] = moved.get(kind, 0) + size
    assert {kind: sent.bytes for (kind, _), sent in reading.collectives.items()} == pytest.approx(moved)
    assert {key: sent.times for key, sent in reading.collectives.items()} == {
        ("all-gather", "bf16"): 3,
        ("all-reduce", "f32"): 1,
    }


def test_each_part_has_its_cycles_and_products(reading):
    cycles = {key: spent.seconds * 1.75e9 for key, spent in reading.parts.items()}
    assert cycles[MLP, FORWARD] == pytest.approx(3 * 10_000)
    assert cycles[MLP, BACKWARD] == pytest.approx(3 * 100)
    assert cycles[OPTIMIZER, NEITHER] == pytest.approx(500)
    assert reading.parts[EMBEDDING, FORWARD].seconds == pytest.approx((2 * 2 * 512 * 256 + 4 * 512) / 1640e9)
    assert reading.flops == reading.parts[MLP, FORWARD].flops == 3 * 2 * 512 * 256 * 1024


def test_the_branch_with_the_kernel_counts_as_often_as_it_has_allowed_pairs(player):
    found = [visit for visit in visits(player) if visit.line.name == "work"]
    # The causal mask allows 10 of the 4 x 4 pairs of shards of 512 tokens.
    assert [(visit.times, visit.chance) for visit in found] == [(3, pytest.approx(10 / 16))]


def test_an_unknown_kernel_has_no_seconds(player):
    text = STEP.replace("CALL", CALL.replace("posjax_attention_forward", "someones_kernel"))
    strange = Player(parse(text), player.fabric, player.kernels)
    reading = measure("a step", strange, MEMORY, 512, WIDTHS)
    assert reading.kernels["someones_kernel", FORWARD].seconds is None
    assert reading.kernels["someones_kernel", FORWARD].times == 3
    assert reading.tally.unknown == {"kernel someones_kernel": 1}
