"""The part of the model and the pass of each instruction, and their sums over a step, as the timeline counts them."""

import pytest

from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.lab.steps import parts
from train.lab.steps.breakdown import measure
from train.lab.steps.parts import BACKWARD, FORWARD, NEITHER, Widths, part_of
from train.plan.compiling import DeviceMemory
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.plan.network import Network
from train.plan.pods import pod_of
from train.plan.timeline import Simulator

pytestmark = pytest.mark.lab

LLAMA = Widths(4096, 14336, 128256, (32, 8), 128, 8192, devices=256)
LONG = Widths(2048, 8192, 32768, (32, 8), 64, 8192, devices=256)  # hidden units as many as tokens
WIDE = Widths(4096, 14336, 32768, (32, 8), 128, 32768, devices=64)  # a vocabulary as large as the length
LOOP = "jit(_update)/jvp()/while/body/closed_call"


def part(text, widths):
    """The part of the last instruction of a program."""
    module = parse(text)
    return part_of(module, module.entry, module.computations[module.entry][-1], widths)


@pytest.mark.parametrize(
    ("left", "right", "result", "expected", "widths"),
    [
        ("bf16[3,8192,4096]", "bf16[4096,1792]", "bf16[3,8192,1792]", parts.MLP, LLAMA),  # an eighth of the units
        ("bf16[3,8192,4096]", "bf16[4096,32,128]", "bf16[3,8192,32,128]", parts.PROJECTIONS, LLAMA),
        ("bf16[8,8192,1024]", "bf16[1024,8,128]", "bf16[8,8192,8,128]", parts.PROJECTIONS, LLAMA),
        ("bf16[3,32,8192,128]", "bf16[3,32,8192,128]", "f32[3,32,8192,8192]", parts.ATTENTION, LLAMA),
        ("bf16[3,2048,4096]", "bf16[4096,501]", "f32[3,2048,501]", parts.LOGITS, LLAMA),  # split over all devices
        ("bf16[3,7]", "bf16[7,5]", "bf16[3,5]", parts.OTHER, LLAMA),
        ("bf16[3,8192,2048]", "bf16[2048,8192]", "bf16[3,8192,8192]", parts.MLP, LONG),
        ("bf16[1,8192,4096]", "bf16[4096,32768]", "f32[1,8192,32768]", parts.LOGITS, WIDE),
        ("bf16[1,32768,4096]", "bf16[4096,14336]", "bf16[1,32768,14336]", parts.MLP, WIDE),
        ("pred[3,8192,128256]", "bf16[128256,4096]", "bf16[3,8192,4096]", parts.EMBEDDING, LLAMA),  # one-hot rows
    ],
)
def test_products_are_known_by_their_sizes(left, right, result, expected, widths):
    text = f"""
ENTRY %main (x: {left}, w: {right}) -> {result} {{
  %x = {left}{{0}} parameter(0)
  %w = {right}{{0}} parameter(1)
  ROOT %y = {result}{{0}} dot(%x, %w), lhs_contracting_dims={{0}}, metadata={{op_name="{LOOP}/dot_general"}}
}}
"""
    assert part(text, widths) == expected


STEP = """
%idle (x: bf16[512,256]) -> bf16[512,256] {
  ROOT %x = bf16[512,256]{1,0} parameter(0)
}
%busy (x: bf16[512,256]) -> bf16[512,256] {
  %work = bf16[512,256]{1,0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(u)/jvp()/while/body/mul"}, \
backend_config={"estimated_cycles":"4000"}
  %posjax_attention_forward.1 = (bf16[1,4,512,128]{3,2,1,0}, f32[1,4,1,512]{3,2,1,0}) custom-call(%x), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s32[1,1,1,1]{3,2,1,0}, s32[1,1,1,3]{3,2,1,0}, \
bf16[1,4,1,512,128]{4,3,2,1,0}, bf16[1,2,1,512,128]{4,3,2,1,0}, bf16[1,2,512,128]{3,2,1,0}}, \
frontend_attributes={kernel_metadata={}}, metadata={op_name="jit(u)/jvp()/while/body/pallas_call"}
}
%body (p: (s32[], bf16[512,256])) -> (s32[], bf16[512,256]) {
  %x = bf16[512,256]{1,0} get-tuple-element(%p), index=1
  %async-collective-start.1 = bf16[256,256]{1,0} fusion(%x), kind=kCustom, calls=%gathered
  %beside = bf16[512,1024]{1,0} fusion(%x), kind=kOutput, calls=%gathered, backend_config={"estimated_cycles":"100"}, \
metadata={op_name="jit(u)/transpose(jvp())/while/body/mlp/mul"}
  %async-collective-done.1 = bf16[256,256]{1,0} fusion(%x), kind=kCustom, calls=%gathered
  ROOT %c = bf16[512,256]{1,0} conditional(%p, %x, %x), branch_computations={%idle, %busy}
}
%gathered (x: bf16[64,256]) -> bf16[256,256] {
  ROOT %g = bf16[256,256]{1,0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
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


def test_each_part_has_its_time_and_all_add_up():
    """Three trips of a loop with a collective spread over fusions, and a kernel with a causal mask."""
    target = pod_of("v6e:2x2")
    places = tuple((x, y, 0, 0) for x, y in ((0, 0), (1, 0), (1, 1), (0, 1)))
    share = visited_share(uniform(scheme("rope"), 1), 2048, causal=True)
    simulator = Simulator(parse(STEP), Network(target, {"fsdp": 4}, places), Kernels(target, share))
    widths = Widths(256, 1024, 8192, (4, 2), 64, 512, devices=4)
    breakdown = measure("a step", simulator, DeviceMemory(*[0.0] * 7), 4 * 512, widths)
    cycles = {key: seconds * 1.75e9 for key, seconds in breakdown.parts.items()}
    assert cycles[parts.MLP, BACKWARD] == pytest.approx(3 * 100)
    assert cycles[parts.OPTIMIZER, NEITHER] == pytest.approx(500)
    # The causal mask allows 10 of the 4 x 4 pairs of shards of 512 tokens.
    assert cycles[parts.NORMS, FORWARD] == pytest.approx(3 * 4000 * 10 / 16)
    assert breakdown.parts[parts.EMBEDDING, FORWARD] == pytest.approx((2 * 2 * 512 * 256 + 4 * 512) / 1640e9)
    assert sum(breakdown.parts.values()) == pytest.approx(breakdown.tally.compute)
    (launches,) = breakdown.kernels.values()
    assert (launches.times, launches.seconds) == (3, pytest.approx(breakdown.tally.kernels))
    sent = {key: (each.times, each.bytes) for key, each in breakdown.collectives.items()}
    assert sent == {("all-gather", "bf16"): (3, 3 * 3 / 4 * 2 * 256**2), ("all-reduce", "f32"): (1, 2 * 3 / 4 * 4 * 64)}
    assert sum(breakdown.tally.moved.values()) == sum(size for _, size in sent.values())
