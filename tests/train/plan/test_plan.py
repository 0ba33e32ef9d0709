"""Plans: what is read from compiled programs, against programs with known collectives, and closed forms."""

import importlib.util
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.masks import Causal, Window
from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.cli import WRONG_INPUT, main
from train.config import load
from train.config import parse as parse_config
from train.evaluate.decoder import predictor_of
from train.evaluate.perplexity import scoring
from train.model.build import build_model
from train.plan import plan as plans
from train.plan.compiling import _evaluation
from train.plan.hlo import parse
from train.plan.kernels import Kernels, visited_share
from train.plan.network import Fabric, groups_of, kind_of
from train.plan.plan import Plan, make_plan, plan_evaluation
from train.plan.pods import GIB, Pod, pod
from train.plan.report import assumptions
from train.plan.timeline import Player
from train.runtime.chips import CHIPS

ROWS, COLUMNS, NUMBERS = 2, 4, 64
NONE = Kernels(pod("v5e:2x4"), lambda queries, keys: 1.0)


def fabric(name: str, slices: int = 1, **axes: int) -> Fabric:
    """A mesh that lies over a slice in the order of the chips' coordinates."""
    target = pod(name, slices)
    sides = (*target.chips_along, *(1 for _ in range(3 - len(target.chips_along))), target.network.devices)
    return Fabric(target, axes, tuple(itertools.product(*map(range, sides))))


@pytest.fixture(scope="module")
def program():
    """Collectives of every kind over a mesh of 2 x 4, two of them in a loop of five trips."""
    mesh = jax.make_mesh((ROWS, COLUMNS), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)

    def trip(x, _):
        y = jax.lax.psum(x, "columns") * 0.1
        return jax.lax.ppermute(y, "rows", [(0, 1), (1, 0)]), None

    def body(x):
        x, _ = jax.lax.scan(trip, x, None, length=5)
        whole = jax.lax.all_gather(x, "rows", tiled=True)
        part = jax.lax.psum_scatter(whole, "columns", tiled=True)
        swapped = jax.lax.all_to_all(part.reshape(COLUMNS, -1), "columns", 0, 0, tiled=True)
        return swapped.sum()[None] * jax.lax.psum(part.sum(), ("rows", "columns"))

    spec = P(("rows", "columns"))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return parse(run.lower(jax.ShapeDtypeStruct((8 * NUMBERS,), jnp.float32)).compile().as_text())


def test_bytes_by_axis_of_a_program_with_known_collectives(program):
    tally = Player(program, fabric("v5e:2x4", rows=ROWS, columns=COLUMNS), NONE).play()
    size = 4 * NUMBERS
    assert tally.moved == {
        ("columns", "all-reduce"): 5 * 2 * size * 3 / 4,
        ("rows", "collective-permute"): 5 * size,
        ("rows", "all-gather"): 2 * size / 2,
        ("columns", "reduce-scatter"): 2 * size * 3 / 4,
        ("columns", "all-to-all"): 2 * size / 4 * 3 / 4,
        ("rows+columns", "all-reduce"): 2 * 4 * 7 / 8,
    }
    assert not tally.unknown


def test_trips_from_the_counter_alone(program):
    loop = next(line for lines in program.computations.values() for line in lines if line.opcode == "while")
    assert program.trips(loop) == 5
    assert (
        program.trips(loop.__class__(**{**vars(loop), "attributes": loop.attributes.split(", backend_config")[0]})) == 5
    )


def test_a_loop_that_counts_by_two():
    text = """
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %k = s32[] add(%j, %one)
  ROOT %t = (s32[], f32[4]{0}) tuple(%k, %x)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = (s32[], f32[4]{0}) parameter(0)
  ROOT %loop = (s32[], f32[4]{0}) while(%x), condition=%condition, body=%body
}
"""
    module = parse(text)
    assert module.trips(module.computations["main"][-1]) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=1,'b'=4] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_in_every_notation(text, expected):
    line = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  ROOT %g = f32[4]{{0}} all-reduce(%x), {text}, to_apply=%add\n}}"
    (found,) = parse(line).computations["main"]
    assert kind_of(found) == "all-reduce"
    assert groups_of(found, 4) == expected


def gather(devices: list[list[int]], kind: str = "all-gather", numbers: int = 2**20):
    groups = ",".join("{" + ",".join(map(str, group)) + "}" for group in devices)
    name = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    text = f"ENTRY %m (x: f32[4]) -> f32[4] {{\n  ROOT %g = f32[{numbers}]{{0}} {kind}(%x), {name}={{{groups}}}\n}}"
    return parse(text).computations["m"][0]


def test_a_whole_torus_gathers_over_all_links():
    network = fabric("v5p:8x8x8", all=512)
    line = gather([list(range(512))])
    seconds = 4 * 2**20 * 511 / 512 / (6 * 90e9) + 12e-6
    assert network.traffic(line, "all-gather").seconds == pytest.approx(seconds)
    assert network.traffic(line, "all-reduce").seconds == pytest.approx(2 * (seconds - 12e-6) + 12e-6)


def test_a_row_that_is_not_a_ring_has_one_direction():
    network = fabric("v5e:4x4", rows=4, columns=4)
    found = network.traffic(gather([[0, 1, 2, 3]]), "all-gather")
    assert found.axes == "columns"
    assert found.seconds == pytest.approx(4 * 2**20 * 3 / 4 / 45e9 + 4e-6)


def test_members_of_a_group_that_are_not_adjacent_share_links():
    network = fabric("v5e:4x4", rows=4, columns=4)
    apart, together = (network.traffic(gather([group]), "all-gather").seconds for group in ([0, 2], [0, 1]))
    assert apart - 2e-6 == pytest.approx(2 * (together - 2e-6))


def test_an_exchange_is_bound_by_the_cut_of_the_longest_dimension():
    network = fabric("v5p:4x4x4", all=64)
    found = network.traffic(gather([list(range(64))], "all-to-all"), "all-to-all").seconds
    # Two chips send half of their B bytes over the cut of a ring of four, which has two links: B x 4 / 8 a link.
    assert found == pytest.approx(4 * 2**20 * 4 / 8 / 90e9 + 6e-6)


def test_a_permutation_is_routed():
    network = fabric("v5e:1x4", ring=4)
    ring = [[0, 1], [1, 2], [2, 3], [3, 0]]
    # The row is not a ring: data from its end to its start cross all links backwards, and share them with nothing.
    found = network.traffic(gather(ring, "collective-permute"), "collective-permute")
    assert found.seconds == pytest.approx(4 * 2**20 / 45e9 + 3e-6)
    crossing = network.traffic(gather([[0, 2], [1, 3]], "collective-permute"), "collective-permute")
    assert crossing.seconds == pytest.approx(2 * 4 * 2**20 / 45e9 + 2e-6)


def test_on_a_ring_the_end_is_next_to_the_start():
    network = fabric("v5p:4x4x4", slow=16, ring=4)
    ring = [[0, 1], [1, 2], [2, 3], [3, 0]]
    found = network.traffic(gather(ring, "collective-permute"), "collective-permute")
    assert found.axes == "ring"
    assert found.seconds == pytest.approx(4 * 2**20 / 90e9 + 1e-6)


def test_two_devices_of_a_chip_share_its_links():
    network = fabric("7x:4x4x4", chips=64, halves=2)
    half, both = (network.traffic(gather([list(range(0, 128, step))]), "all-gather") for step in (2, 1))
    assert (half.axes, both.axes) == ("chips", "chips+halves")
    assert half.seconds == pytest.approx(4 * 2**20 * 63 / 64 / (3 * 90e9) + 6e-6)
    assert both.seconds == pytest.approx(4 * 2**20 * 127 / 128 / (6 * 90e9) + 6e-6)
    within = network.traffic(gather([[0, 1]]), "all-gather")
    assert within.seconds == pytest.approx(4 * 2**20 / 2 / 540e9 + 2e-6)


OVERLAP = """
ENTRY %main (x: f32[262144]) -> f32[262144] {
  %x = f32[262144]{0} parameter(0)
  %start = (f32[262144]{0}, f32[1048576]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %work = f32[262144]{0} fusion(%x), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"CYCLES"}
  %done = f32[1048576]{0} all-gather-done(%start)
  ROOT %more = f32[262144]{0} fusion(%done), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"15000"}
}
"""


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000])
def test_what_is_started_early_hides_behind_work(cycles):
    network = fabric("v5e:1x4", ring=4)
    tally = Player(parse(OVERLAP.replace("CYCLES", str(cycles))), network, NONE).play()
    alone = 4 * 2**20 * 3 / 4 / 45e9 + 4e-6
    assert tally.compute == pytest.approx((cycles + 15_000) / 1.5e9)
    assert tally.seconds == pytest.approx(max(alone, cycles / 1.5e9) + 15_000 / 1.5e9)


SPREAD = """
%gather (x: f32[262144]) -> f32[1048576] {
  %x = f32[262144]{0} parameter(0)
  ROOT %g = f32[1048576]{0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[262144]) -> f32[1048576] {
  %x = f32[262144]{0} parameter(0)
  %async-collective-start.1 = f32[1048576]{0} fusion(%x), kind=kCustom, calls=%gather
  %fusion.2 = f32[262144]{0} fusion(%x), kind=kOutput, calls=%gather, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %async-collective-done.1 = f32[1048576]{0} fusion(%x), kind=kCustom, calls=%gather
}
"""


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000])
def test_a_collective_that_is_spread_over_fusions_counts_once(cycles):
    tally = Player(parse(SPREAD.replace("CYCLES", str(cycles))), fabric("v5e:1x4", ring=4), NONE).play()
    assert tally.moved == {("ring", "all-gather"): 4 * 2**20 * 3 / 4}
    assert tally.seconds == pytest.approx(max(4 * 2**20 * 3 / 4 / 45e9 + 4e-6, cycles / 1.5e9))


OFFLOADED = """
%gather (x: f32[262144], t: token[]) -> f32[1048576] {
  %x = f32[262144]{0} parameter(0)
  ROOT %g = f32[1048576]{0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[262144]) -> f32[1048576] {
  %x = f32[262144]{0} parameter(0)
  %go = ((f32[262144]{0}), f32[1048576]{0}) OPCODE(%x), async_execution_thread="sparsecore", to_apply=%gather
  %work = f32[262144]{0} fusion(%x), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %there = f32[1048576]{0} call-done(%go)
}
"""


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000])
def test_a_collective_on_the_sparse_cores_runs_beside_the_work(cycles):
    text = OFFLOADED.replace("OPCODE", "call-start").replace("CYCLES", str(cycles))
    tally = Player(parse(text), fabric("v5e:1x4", ring=4), NONE).play()
    assert tally.moved == {("ring", "all-gather"): 4 * 2**20 * 3 / 4}
    assert tally.seconds == pytest.approx(max(4 * 2**20 * 3 / 4 / 45e9 + 4e-6, cycles / 1.5e9))


def test_collectives_in_an_unknown_instruction_are_reported():
    text = OFFLOADED.replace("OPCODE", "sent-elsewhere").replace("CYCLES", "0")
    tally = Player(parse(text), fabric("v5e:1x4", ring=4), NONE).play()
    assert tally.unknown == {"collectives in a sent-elsewhere": 1}


CROSSING = """
%body (p: (s32[], f32[262144])) -> (s32[], f32[262144]) {
  %p = (s32[], f32[262144]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[262144]{0} get-tuple-element(%p), index=1
  %token = token[] after-all()
  FIRST
  %work = f32[262144]{0} fusion(%x), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"CYCLES"}
  SECOND
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[262144]{0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %y = f32[262144]{0} get-tuple-element(%recv-done), index=0
  ROOT %t = (s32[], f32[262144]{0}) tuple(%i, %y)
}

ENTRY %main (x: (s32[], f32[262144])) -> (s32[], f32[262144]) {
  %x = (s32[], f32[262144]{0}) parameter(0)
  ROOT %w = (s32[], f32[262144]{0}) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def half(opcode: str, kind: str = "ALL_REDUCE", count: int = 262144, status: str = "ISSUE") -> str:
    """An instruction that sends to other slices, or receives from them."""
    name, operands = ("send", "%x, %token") if opcode == "send" else ("recv", "%token")
    hosts = f'_xla_host_transfer_rendezvous="all-reduce.8_0",_xla_megascale_transfer_type="{kind}"'
    return (
        f"%{name} = (f32[{count}]{{0}}, u32[], token[]) {name}({operands}), channel_id=2, is_host_transfer=true, "
        f"frontend_attributes={{{hosts}}}, "
        f'backend_config={{"aggregated_send_recv_config":{{"status":"AGGREGATE_STATUS_{status}"}}}}'
    )


def crossing(first: str, second: str, cycles: int, slices: int = 4):
    """The tally of three trips of a loop with both halves around some work."""
    text = CROSSING.replace("FIRST", first).replace("SECOND", second).replace("CYCLES", str(cycles))
    return Player(parse(text), fabric("v5e:2x4", slices=slices, replica=1, fsdp=8), NONE).play()


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000_000])
def test_what_goes_to_other_slices_hides_behind_work(cycles):
    tally = crossing(half("send"), half("recv"), cycles)
    sent = 2 * 4 * 262144 * 3 / 4
    assert tally.moved == {("replica (DCN)", "all-reduce"): 3 * sent}
    assert tally.seconds == pytest.approx(3 * max(sent / 3.125e9 + 1e-4, cycles / 1.5e9))


@pytest.mark.parametrize(
    ("first", "second"), [(half("send", status="DEFER"), half("recv")), (half("recv"), half("send"))]
)
def test_what_is_deferred_or_sent_late_hides_behind_nothing(first, second):
    assert crossing(first, second, 1_500_000).seconds == pytest.approx(3 * (1.5 * 1024**2 / 3.125e9 + 1e-4 + 1e-3))


def test_an_exchange_without_its_other_half_is_reported():
    assert crossing(half("send"), "", 0).unknown == {"exchange without its other half": 1}


@pytest.mark.parametrize(
    ("kind", "share"),
    [("ALL_REDUCE", 1.5), ("ALL_GATHER", 0.75), ("REDUCE_SCATTER", 0.75), ("ONE_TO_ONE", 1.0), ("ALL_TO_ALL", 1.0)],
)
def test_bytes_to_other_slices(kind, share):
    tally = crossing(half("send", kind), half("recv", kind, 4 * 262144), 0)
    name = {"ONE_TO_ONE": "collective-permute"}.get(kind, kind.lower().replace("_", "-"))
    assert tally.moved == {("replica (DCN)", name): 3 * share * 4 * 4 * 262144}


def test_devices_of_a_chip_share_its_way_to_other_slices():
    (line,) = parse(f"ENTRY %main (x: f32[]) -> f32[] {{\n  {half('send')}\n}}").computations["main"]
    found = fabric("7x:2x2x1", slices=2, replica=1, fsdp=8).crossing(line, "all-reduce")
    assert (found.seconds, found.delay) == pytest.approx((4 * 262144 / (12.5e9 / 2), 1e-4))


def test_exchanges_at_once_share_the_wait_for_hosts():
    both = half("send"), half("recv"), half("send").replace("8_0", "9_0"), half("recv").replace("8_0", "9_0")
    others = [line.replace("%send =", "%send.2 =").replace("%recv =", "%recv.2 =") for line in both[2:]]
    tally = crossing("\n  ".join([*both[:2], *others]), "", 0)
    assert tally.seconds == pytest.approx(3 * (2 * 1.5 * 4 * 262144 / 3.125e9 + 1e-4))


TWO_WAYS = """
ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %a = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs=AHEAD
  %b = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs=PAIRS
  %c = bf16[1024,1024]{1,0} collective-permute-done(%a)
  ROOT %d = bf16[1024,1024]{1,0} collective-permute-done(%b)
}
"""


@pytest.mark.parametrize(("way", "times"), [(1, 2), (-1, 1)], ids=["one way", "both"])
def test_permutations_in_opposite_directions_share_no_links(way, times):
    ahead, second = ("{" + ",".join(f"{{{n},{(n + step) % 16}}}" for n in range(16)) + "}" for step in (1, way))
    text = TWO_WAYS.replace("AHEAD", ahead).replace("PAIRS", second)
    tally = Player(parse(text), fabric("v5e:1x16", ring=16), NONE).play()
    assert tally.exposed == pytest.approx(times * 2 * 1024**2 / 45e9 + 1e-6 * times)


CUT_OUT = """
%all-reduce-scatter.1 (x: f32[1024]) -> f32[256] {
  %x = f32[1024]{0} parameter(0)
  %sum = f32[1024]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[256]{0} dynamic-slice(%sum), dynamic_slice_sizes={256}
}

ENTRY %main (x: f32[1024]) -> f32[256] {
  %x = f32[1024]{0} parameter(0)
  ROOT %f = f32[256]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_sum_of_which_a_part_is_cut_out_is_scattered():
    tally = Player(parse(CUT_OUT), fabric("v5e:1x4", ring=4), NONE).play()
    assert tally.moved == {("ring", "reduce-scatter"): 4 * 1024 * 3 / 4}
    assert tally.exposed == tally.seconds == pytest.approx(4 * 1024 * 3 / 4 / 45e9 + 4e-6)


KERNEL = """
ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %posjax_attention_forward.1 = (bf16[2,16,4096,128]{3,2,1,0}, f32[2,16,1,4096]{3,2,1,0}) custom-call(%x), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s32[2,4,1,2]{3,2,1,0}, s32[2,4,1,3]{3,2,1,0}, \
s32[2]{0}, bf16[2,16,1,4096,128]{4,3,2,1,0}, bf16[2,4,1,4096,128]{4,3,2,1,0}, bf16[2,4,4096,128]{3,2,1,0}}, \
frontend_attributes={kernel_metadata={}}
}
"""


def test_a_kernel_takes_its_visited_tiles_and_rows():
    (line,) = parse(KERNEL).computations["main"]
    share = visited_share(uniform(scheme("rope"), 3), 4096, causal=True)
    whole, _, row = FORWARD["v5p"][1024, 2048, 512]
    # Four rows of two tiles, of which the causal mask needs 1, 1, 2 and 2.
    cycles = 2 * 16 * (6 * whole + 4 * row) / 2
    assert Kernels(pod("v5p:2x2x1"), share).seconds(line) == pytest.approx(cycles / 1.75e9)


BESIDE = """
ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %posjax_attention_backward.3 = (bf16[2,1,1,4096,2048]{4,3,2,1,0}, bf16[2,1,1,4096,512]{4,3,2,1,0}, \
bf16[2,1,4096,512]{3,2,1,0}, f32[2,1,1,4096,2048]{4,3,2,1,0}) custom-call(%x), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s32[2,4,1,2]{3,2,1,0}, s32[2,4,1,3]{3,2,1,0}, \
s32[2]{0}, bf16[2,1,1,4096,2048]{4,3,2,1,0}, bf16[2,1,1,4096,512]{4,3,2,1,0}, bf16[2,1,4096,512]{3,2,1,0}, \
bf16[2,1,4096,2048]{3,2,1,0}, f32[2,16,1,4096]{3,2,1,0}, f32[2,16,1,4096]{3,2,1,0}}, frontend_attributes={}
}
"""


def test_heads_that_lie_side_by_side_are_counted():
    """Sixteen query heads over four key heads; four blocks of keys, each with two blocks of queries."""
    (line,) = parse(BESIDE).computations["main"]
    whole, _, row = BACKWARD["v5p"][1024, 1024, 512]
    cycles = 2 * 16 * (4 * 2 * 2 * whole + 4 * math.sqrt(2) * row) / 2
    assert Kernels(pod("v5p:2x2x1"), lambda q, k: 1.0).seconds(line) == pytest.approx(cycles / 1.75e9)


STREAM = """
ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %posjax_rotation.7 = bf16[2,4096,2048]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[2,4096,2048]{2,1,0}, f32[1,4096,128]{2,1,0}}, frontend_attributes={}
}
"""


@pytest.mark.parametrize(("topology", "devices"), [("v6e:2x2", 1), ("7x:2x2x1", 2)])
def test_a_kernel_that_is_bound_by_memory_takes_the_time_of_its_bytes(topology, devices):
    (line,) = parse(STREAM).computations["main"]
    target = pod(topology)
    moved = 2 * 2 * 2 * 4096 * 2048 + 4 * 4096 * 128
    expected = moved / (CHIPS[target.generation].streaming * 1e9 / devices)
    assert Kernels(target, lambda q, k: 1.0).seconds(line) == pytest.approx(expected)


BRANCHES = """
%idle (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} parameter(0)
}

%busy (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %work = f32[4]{0} fusion(%x), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"1750000"}
  CALL
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %p = s32[] parameter(0)
  ROOT %c = f32[4]{0} conditional(%p, %x, %x), branch_computations={%idle, %busy}
}
"""


def test_a_branch_counts_as_often_as_its_kernel_has_allowed_pairs():
    call = KERNEL.split("\n")[2].strip()
    text, network = BRANCHES.replace("CALL", call), fabric("v5p:2x2x1", ring=4)
    share = visited_share(uniform(scheme("rope"), 1), 16384, causal=True)
    tally = Player(parse(text), network, Kernels(network.pod, share)).play()
    # The causal mask allows 10 of the 4 x 4 pairs of shards of 4,096 tokens.
    assert tally.compute == pytest.approx(1e-3 * 10 / 16)
    (line,) = parse(KERNEL).computations["main"]
    assert tally.kernels == pytest.approx(Kernels(network.pod, share).seconds(line))


def test_the_share_of_tiles_is_that_of_the_mask():
    layers = uniform(scheme("window", size=100), 2)
    positions = np.arange(1024)
    allowed = (Causal() & Window(100)).allowed(positions, positions)
    tiles = allowed.reshape(8, 128, 4, 256).any((1, 3)).mean()
    assert visited_share(layers, 1024, causal=True)(128, 256) == tiles


def test_pods():
    assert pod("7x:4x4x4") == pod("tpu7x:4x4x4") == Pod("7x", (4, 4, 4))
    assert (pod("7x:4x4x4").devices, pod("v5p:8x8x8").devices, pod("v5e:16x16").devices) == (128, 512, 256)
    assert pod("v5p:2x2x1").peak_flops == pytest.approx(459e12, rel=1e-3)
    assert math.prod(pod("v6e:8x16").chips_along) == pod("v6e:8x16").chips
    four = pod("v5p:4x4x4", 4)
    assert (four.name, four.slice_name, four.chips) == ("4 slices of v5p:4x4x4", "v5p:4x4x4", 256)


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("7x:2x2x1", (False, False, False)),
        ("v6e:8x16", (False, True)),
        ("v5e:16x16", (True, True)),
    ],
)
def test_links_close_into_rings_as_published(name, rings):
    assert pod(name).rings == rings


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        ("v5p", "expected a pod such as v5p:8x8x8, found 'v5p'"),
        ("v9:2x2", "there is no chip 'v9' (known: v5e, v5p, v6e, 7x)"),
        ("v5p:8x8", "pods of v5p have 3 dimensions, as in v5p:8x8x8, found 'v5p:8x8'"),
        ("v5e:0x8", "pods of v5e have 2 dimensions"),
    ],
)
def test_an_invalid_pod_is_a_one_line_error(topology, reason, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model: {num_layers: 1}\n")
    assert main(["plan", str(tmp_path / "run.yaml"), "--topology", topology]) == WRONG_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: --topology: ")
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        ("0", "--slices: expected at least one, found 0"),
        ("2", "train.mesh.replica must be a multiple of the 2 slices, found 1; train.mesh.replica=2 would work"),
    ],
)
def test_slices_that_a_mesh_cannot_span_are_a_one_line_error(slices, reason, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("train: {mesh: {data: -1}}\n")
    command = ["plan", str(tmp_path / "run.yaml"), "--topology", "v5e:2x4", "--slices", slices]
    assert main(command) == WRONG_INPUT
    assert capsys.readouterr().err == f"error: {reason}\n"


needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
TINY = """
model: {num_layers: 2, model_dim: 256, num_heads: 2, vocab_size: 1024, compute_dtype: bfloat16, remat: full}
train: {length: 1024, batch_tokens: 8192, mesh: {data: 2, fsdp: 2, tensor: 2}}
"""


@needs_compiler
@pytest.mark.compile
def test_a_tiny_config_is_planned(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(TINY)
    assert main(["plan", str(tmp_path / "run.yaml"), "--topology", "v5e:2x4"]) == 0
    out = capsys.readouterr().out
    for part in (
        "HBM of a chip: v5e:2x4",
        "Largest temporary arrays",
        "bf16[",
        "fsdp",
        "all-gather",
        "Predicted, not measured",
        "1.5 GHz",
    ):
        assert part in out
    assert "Left out" not in out


@needs_compiler
@pytest.mark.compile
def test_the_evaluation_of_a_tiny_config_is_planned(tmp_path, capsys):
    """One row of a text, split over all eight chips; each has an eighth of the parameters."""
    (tmp_path / "run.yaml").write_text(TINY)
    sizes = ["evaluate.lengths=[8192]", "evaluate.tokens=8192", "evaluate.batch_tokens=8192"]
    assert main(["plan", str(tmp_path / "run.yaml"), "--topology", "v5e:2x4", "--evaluate", *sizes]) == 0
    out = capsys.readouterr().out
    for part in ("HBM of a chip: v5e:2x4, context 8", "The loss of 1 rows of 8,192 tokens", "all-gather"):
        assert part in out
    plan = plan_evaluation(load(tmp_path / "run.yaml", sizes), pod("v5e:2x4"))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(build_model(plan.config)))))
    assert plan.memory.parameters == 4 * count / 8
    assert plan.memory.optimizer == 0


STAGES = {
    "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
    "scheme": {"name": "rope", "extend": {"frequencies": {"name": "linear"}}},
    "train": {"length": 16, "batch_tokens": 64},
    "evaluate": {"lengths": [32, 64], "tokens": 64, "batch_tokens": 128},
    "stages": [{"name": "short"}, {"name": "long", "train": {"length": 32}}],
}


def test_the_evaluation_of_the_last_stage_is_planned_under_its_extension(monkeypatch):
    """Linear scaling by the longest evaluated length divided by the length of the last stage."""
    config, requested = parse_config(STAGES), []
    monkeypatch.setattr(plans, "compile_step", lambda config, *_: requested.append(config))
    monkeypatch.setattr(plans, "plan_of", lambda config, *_: Plan(config, *(None,) * 5))
    planned = plan_evaluation(config, pod("v5e:2x4")).config
    [compiled] = requested
    assert (compiled.train.length, compiled.stages, compiled.scheme.extend) == (32, (), config.scheme.extend)
    assert (planned.train.length, planned.train.rows, planned.train.mesh.context) == (64, 2, 4)
    mesh, program, (_, tokens, weights) = _evaluation(compiled, jax.devices())
    assert tokens.shape == (2, 65)
    model = build_model(compiled)
    parameters = nnx.to_pure_dict(nnx.state(model))
    inputs = np.random.default_rng(0).integers(0, 64, tokens.shape).astype(np.int32), np.ones(weights.shape, np.float32)
    by_scheme = {}
    for factor in (1.0, 2.0):
        extended = scheme("rope").extend(frequencies={"name": "linear", "factor": factor})
        predictor, own = predictor_of(model.with_scheme(extended), 0, None)
        by_scheme[factor] = scoring(predictor, *weights.shape)[0](own, *inputs)
    with jax.set_mesh(mesh):
        found = program(parameters, *inputs)
    np.testing.assert_allclose(found, by_scheme[2.0], rtol=1e-5)
    assert np.abs(found - by_scheme[1.0]).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--keep", "kept"], "--evaluate: only train steps can be kept or compared"),
        (["--sweep"], "--sweep ranks ways to train, not evaluations"),
    ],
)
def test_evaluations_are_planned_alone(tmp_path, capsys, options, reason):
    (tmp_path / "run.yaml").write_text(TINY)
    assert main(["plan", str(tmp_path / "run.yaml"), "--topology", "v5e:2x4", "--evaluate", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {reason}")


@needs_compiler
@pytest.mark.compile
def test_a_tiny_config_is_planned_for_two_slices(tmp_path):
    (tmp_path / "run.yaml").write_text(TINY)
    config = load(
        tmp_path / "run.yaml",
        (
            "train.mesh={replica: 2, data: 1, fsdp: 8, tensor: 1}",
            "train.batch_tokens=16384",
        ),
    )
    plan = make_plan(config, pod("v5e:2x4", 2))
    ((crossing, sent),) = [(axes, size) for (axes, _), size in plan.tally.moved.items() if "DCN" in axes]
    gradients = plan.memory.parameters / 4  # numbers per device; half of them are sent twice, in bfloat16 or float32
    assert crossing == "replica (DCN)"
    assert "3.125 GB/s of a chip to other slices" in assumptions(plan)
    assert 2 * gradients <= sent <= 4.1 * gradients
    assert not plan.tally.unknown


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize(
    ("topology", "override", "reason"),
    [
        ("v5e:3x5", "train.mesh={data: 1}", "the compiler knows no pod v5e:3x5"),
        ("v5e:2x4", "train.mesh.data=3", "devices"),
        # So wide that the hidden units, half of them on each device, are among the largest arrays.
        ("v5e:2x4", "model.mlp_dim=33554432", ",16777216] "),
        ("v5e:2x4", "model.mlp_dim=33554432", f"a device has {pod('v5e:2x4').hbm_bytes / GIB:.1f}; "),
    ],
)
def test_a_tiny_config_that_a_pod_cannot_run_is_a_one_line_error(topology, override, reason, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(TINY)
    assert main(["plan", str(tmp_path / "run.yaml"), "--topology", topology, override]) == WRONG_INPUT
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
