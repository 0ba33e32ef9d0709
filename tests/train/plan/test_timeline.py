"""The predicted time and traffic of programs whose collectives and cycles are counted by hand."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from train.plan.hlo import parse
from train.plan.kernels import Kernels
from train.plan.network import Network
from train.plan.pods import pod_of
from train.plan.timeline import Simulator

MIB = 2**20


def network(name, slices=1, **axes):
    """A mesh that lies over a slice in the order of the chips' coordinates."""
    target = pod_of(name, slices)
    sides = (*target.chips_along, *(1 for _ in range(3 - len(target.chips_along))), target.links.devices)
    return Network(target, axes, tuple(itertools.product(*map(range, sides))))


def play(text, network):
    """The tally of a program without attention kernels."""
    return Simulator(parse(text), network, Kernels(network.pod, lambda queries, keys: 1.0)).run()


def entry(*lines):
    return "ENTRY %main (x: f32[262144]) -> f32[262144] {\n  %x = f32[262144]{0} parameter(0)\n  " + "\n  ".join(
        [*lines, "ROOT %r = f32[] constant(0)\n}\n"]
    )


def work(cycles, operand="%x"):
    return (
        f"%work.{cycles} = f32[262144]{{0}} fusion({operand}), kind=kLoop, calls=%none, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


ROWS, COLUMNS, NUMBERS = 2, 4, 64


def test_bytes_by_axis_of_a_program_with_known_collectives():
    """Collectives of every kind over a mesh of 2 x 4, two of them in a loop of five trips, as JAX compiles them."""
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
    text = run.lower(jax.ShapeDtypeStruct((8 * NUMBERS,), jnp.float32)).compile().as_text()
    size = 4 * NUMBERS
    for program in (text, text.replace("known_trip_count", "count")):  # the second has only the loop's counter
        tally = play(program, network("v5e:2x4", rows=ROWS, columns=COLUMNS))
        assert tally.moved == {
            ("columns", "all-reduce"): 5 * 2 * size * 3 / 4,
            ("rows", "collective-permute"): 5 * size,
            ("rows", "all-gather"): 2 * size / 2,
            ("columns", "reduce-scatter"): 2 * size * 3 / 4,
            ("columns", "all-to-all"): 2 * size / 4 * 3 / 4,
            ("rows+columns", "all-reduce"): 2 * 4 * 7 / 8,
        }
        assert not tally.unknown


ROW, RING = {"rows": 4, "columns": 4}, [[0, 1], [1, 2], [2, 3], [3, 0]]


@pytest.mark.parametrize(
    ("place", "axes", "kind", "groups", "over", "of_a_byte", "hops"),
    [
        ("v5p:8x8x8", {"all": 512}, "all-gather", [range(512)], "all", 511 / 512 / (6 * 90e9), 12),
        ("v5p:8x8x8", {"all": 512}, "all-reduce", [range(512)], "all", 2 * 511 / 512 / (6 * 90e9), 12),
        # A row that is no ring has one direction. Members that are not adjacent share links.
        ("v5e:4x4", ROW, "all-gather", [range(4)], "columns", 3 / 4 / 45e9, 4),
        ("v5e:4x4", ROW, "all-gather", [[0, 1]], "columns", 1 / 2 / 45e9, 2),
        ("v5e:4x4", ROW, "all-gather", [[0, 2]], "columns", 2 / 2 / 45e9, 2),
        # Two chips send half of their B bytes over the cut of a ring of four, which has two links: B x 4 / 8 a link.
        ("v5p:4x4x4", {"all": 64}, "all-to-all", [range(64)], "all", 4 / 8 / 90e9, 6),
        # Data from the end of a row to its start cross all links backwards, and share them with nothing.
        ("v5e:1x4", {"ring": 4}, "collective-permute", RING, "ring", 1 / 45e9, 3),
        ("v5e:1x4", {"ring": 4}, "collective-permute", [[0, 2], [1, 3]], "ring", 2 / 45e9, 2),
        ("v5p:4x4x4", {"slow": 16, "ring": 4}, "collective-permute", RING, "ring", 1 / 90e9, 1),
        # Two devices of a chip share its links.
        ("7x:4x4x4", {"chips": 64, "halves": 2}, "all-gather", [range(0, 128, 2)], "chips", 63 / 64 / 270e9, 6),
        ("7x:4x4x4", {"chips": 64, "halves": 2}, "all-gather", [range(128)], "chips+halves", 127 / 128 / 540e9, 6),
        ("7x:4x4x4", {"chips": 64, "halves": 2}, "all-gather", [[0, 1]], "halves", 1 / 2 / 540e9, 2),
    ],
)
def test_a_collective_alone_takes_the_time_of_its_links(place, axes, kind, groups, over, of_a_byte, hops):
    written = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    name = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    line = parse(entry(f"%g = f32[{MIB}]{{0}} {kind}(%x), {name}={{{written}}}")).named["main"]["g"]
    found = network(place, **axes).traffic(line, kind)
    assert found.axes == over
    assert found.seconds == pytest.approx(4 * MIB * of_a_byte + hops * 1e-6)


GATHER = """
%gather (x: f32[262144]) -> f32[1048576] {
  %x = f32[262144]{0} parameter(0)
  ROOT %g = f32[1048576]{0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""
STARTED = (
    "%start = (f32[262144]{0}, f32[1048576]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}",
    "%done = f32[1048576]{0} all-gather-done(%start)",
)
SPREAD = (
    "%async-collective-start.1 = f32[1048576]{0} fusion(%x), kind=kCustom, calls=%gather",
    "%async-collective-done.1 = f32[1048576]{0} fusion(%x), kind=kCustom, calls=%gather",
)
OFFLOADED = (  # to the sparse cores
    '%go = ((f32[262144]{0}), f32[1048576]{0}) call-start(%x), async_execution_thread="sparsecore", to_apply=%gather',
    "%there = f32[1048576]{0} call-done(%go)",
)


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000])
@pytest.mark.parametrize("halves", [STARTED, SPREAD, OFFLOADED], ids=["started", "spread", "offloaded"])
def test_what_is_started_early_hides_behind_work_and_counts_once(halves, cycles):
    beside = work(cycles).replace("%none", "%gather") if halves is SPREAD else work(cycles)
    tally = play(GATHER + entry(halves[0], beside, halves[1], work(3000)), network("v5e:1x4", ring=4))
    assert tally.moved == {("ring", "all-gather"): 4 * MIB * 3 / 4}
    assert tally.compute == pytest.approx((cycles + 3000) / 1.5e9)
    assert tally.seconds == pytest.approx(max(4 * MIB * 3 / 4 / 45e9 + 4e-6, cycles / 1.5e9) + 2e-6)


def test_collectives_in_an_unknown_instruction_are_reported():
    text = GATHER + entry(OFFLOADED[0].replace("call-start", "sent-elsewhere"))
    assert play(text, network("v5e:1x4", ring=4)).unknown == {"collectives in a sent-elsewhere": 1}


def half(opcode, kind="ALL_REDUCE", count=262144, status="ISSUE", name="all-reduce.8"):
    """An instruction that sends to other slices, or receives from them."""
    operands = "%x, %token" if opcode == "send" else "%token"
    return (
        f"%{opcode}.{name} = (f32[{count}]{{0}}, u32[], token[]) {opcode}({operands}), channel_id=2, "
        f"is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="
        f'"{name}",_xla_megascale_transfer_type="{kind}"}}, '
        f'backend_config={{"aggregated_send_recv_config":{{"status":"AGGREGATE_STATUS_{status}"}}}}'
    )


def crossing(first, second, cycles=0, more=()):
    """The tally of a step over four slices with both halves around some work."""
    done = (f"%{name}-done = token[] {name}-done(%{name}.all-reduce.8), channel_id=2" for name in ("send", "recv"))
    lines = [line for line in (first, work(cycles), second, *more, *done) if line]
    return play(entry(*lines), network("v5e:2x4", slices=4, replica=1, fsdp=8))


SENT = 2 * MIB * 3 / 4


@pytest.mark.parametrize("cycles", [0, 15_000, 1_500_000_000])
def test_what_goes_to_other_slices_hides_behind_work(cycles):
    tally = crossing(half("send"), half("recv"), cycles)
    assert tally.moved == {("replica (DCN)", "all-reduce"): SENT}
    assert tally.seconds == pytest.approx(max(SENT / 3.125e9 + 1e-4, cycles / 1.5e9))


def test_what_is_deferred_or_sent_late_hides_behind_nothing():
    for first, second in ((half("send", status="DEFER"), half("recv")), (half("recv"), half("send"))):
        assert crossing(first, second, 1_500_000).seconds == pytest.approx(SENT / 3.125e9 + 1e-4 + 1e-3)
    assert crossing(half("send"), "").unknown == {"exchange without its other half": 1}


def test_exchanges_at_once_share_the_wait_for_hosts_and_devices_of_a_chip_its_way_out():
    others = half("send", name="all-reduce.9"), half("recv", name="all-reduce.9")
    assert crossing(half("send"), half("recv"), more=others).seconds == pytest.approx(2 * SENT / 3.125e9 + 1e-4)
    halves = play(entry(half("send"), half("recv")), network("7x:2x2x1", slices=2, replica=1, fsdp=8))
    assert halves.seconds == pytest.approx(MIB / (12.5e9 / 2) + 1e-4)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("ALL_REDUCE", 1.5), ("ALL_GATHER", 0.75), ("REDUCE_SCATTER", 0.75), ("ONE_TO_ONE", 1.0), ("ALL_TO_ALL", 1.0)],
)
def test_bytes_to_other_slices(kind, share):
    tally = crossing(half("send", kind), half("recv", kind, 4 * 262144))
    name = {"ONE_TO_ONE": "collective-permute"}.get(kind, kind.lower().replace("_", "-"))
    assert tally.moved == {("replica (DCN)", name): share * 4 * MIB}


def test_a_sum_of_which_a_part_is_cut_out_is_scattered():
    inner = """
%all-reduce-scatter.1 (x: f32[1024]) -> f32[256] {
  %sum = f32[1024]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[256]{0} dynamic-slice(%sum), dynamic_slice_sizes={256}
}
"""
    text = inner + entry("%f = f32[256]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1")
    tally = play(text, network("v5e:1x4", ring=4))
    assert tally.moved == {("ring", "reduce-scatter"): 4 * 1024 * 3 / 4}
    assert tally.exposed == tally.seconds == pytest.approx(4 * 1024 * 3 / 4 / 45e9 + 4e-6)
