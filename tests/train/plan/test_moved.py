"""Bytes that instructions move, against small programs whose traffic can be counted by hand."""

import pytest

from train.plan.hlo import parse
from train.plan.kernels import Kernels
from train.plan.moved import is_lookup, moved_bytes
from train.plan.network import Fabric
from train.plan.pods import pod
from train.plan.timeline import Player

ROWS, WIDTH, TABLE = 24576, 4096, 128256

LOOK_UP = f"""
%inner (table: bf16[{TABLE},{WIDTH}], ids: s32[{ROWS}]) -> bf16[{ROWS},{WIDTH}] {{
  %table = bf16[{TABLE},{WIDTH}]{{1,0}} parameter(0)
  %ids = s32[{ROWS}]{{0}} parameter(1)
  ROOT %rows = bf16[{ROWS},{WIDTH}]{{1,0}} gather(%table, %ids), offset_dims={{1}}, slice_sizes={{1,{WIDTH}}}
}}

%add (zeros: f32[{TABLE},{WIDTH}], ids: s32[{ROWS}], rows: f32[{ROWS},{WIDTH}]) -> f32[{TABLE},{WIDTH}] {{
  %zeros = f32[{TABLE},{WIDTH}]{{1,0}} parameter(0)
  %ids = s32[{ROWS}]{{0}} parameter(1)
  %rows = f32[{ROWS},{WIDTH}]{{1,0}} parameter(2)
  ROOT %sum = f32[{TABLE},{WIDTH}]{{1,0}} scatter(%zeros, %ids, %rows), to_apply=%plus
}}

ENTRY %main (table: bf16[{TABLE},{WIDTH}], ids: s32[{ROWS}]) -> f32[{TABLE},{WIDTH}] {{
  %table = bf16[{TABLE},{WIDTH}]{{1,0:T(8,128)(2,1)}} parameter(0)
  %ids = s32[{ROWS}]{{0:T(1024)}} parameter(1)
  %found = bf16[{ROWS},{WIDTH}]{{1,0:T(8,128)(2,1)}} fusion(%table, %ids), kind=kCustom, calls=%inner
  %sorted = (s32[{ROWS}]{{0}}, s32[{ROWS}]{{0:T(1024)S(1)}}) sort(%ids, %ids), dimensions={{0}}, to_apply=%less
  %zeros = f32[{TABLE},{WIDTH}]{{1,0}} get-tuple-element(%state), index=0
  %grown = f32[{ROWS},{WIDTH}]{{1,0}} get-tuple-element(%state), index=1
  ROOT %sum = f32[{TABLE},{WIDTH}]{{1,0}} fusion(%zeros, %ids, %grown), kind=kCustom, calls=%add
}}
"""


def line_of(text: str, name: str):
    """The program, and an instruction of its entry."""
    module = parse(text)
    return module, module.named[module.entry][name]


def moved(text: str, name: str) -> float:
    module, line = line_of(text, name)
    return moved_bytes(module, module.entry, line)


def test_a_gather_reads_the_rows_that_it_takes():
    assert moved(LOOK_UP, "found") == 2 * (2 * ROWS * WIDTH) + 4 * ROWS


def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to():
    assert moved(LOOK_UP, "sum") == 3 * 4 * ROWS * WIDTH + 4 * ROWS


def test_a_sort_reads_and_writes_everything_but_what_stays_on_the_cores():
    assert moved(LOOK_UP, "sorted") == 2 * 4 * ROWS + 4 * ROWS


@pytest.mark.parametrize(("name", "chip"), [("found", "v6e:2x2"), ("sum", "v5p:2x2x1"), ("sorted", "7x:2x2x1")])
def test_a_look_up_takes_the_time_of_its_bytes(name, chip):
    target = pod(chip)
    player = Player(
        parse(LOOK_UP), Fabric(target, {"all": target.devices}, ()), Kernels(target, lambda queries, keys: 1.0)
    )
    line = player.module.named["main"][name]
    gigabytes = {"v6e:2x2": 1640, "v5p:2x2x1": 2765, "7x:2x2x1": 7380 / 2}[chip]
    assert player.seconds("main", line) == pytest.approx(moved(LOOK_UP, name) / gigabytes / 1e9)


def test_all_look_ups_of_a_step_are_counted():
    target = pod("v6e:2x2")
    player = Player(parse(LOOK_UP), Fabric(target, {"all": 4}, ()), Kernels(target, lambda queries, keys: 1.0))
    bytes_moved = sum(moved(LOOK_UP, name) for name in ("found", "sum", "sorted"))
    assert player.play().compute == pytest.approx(bytes_moved / 1640e9)


def test_cycles_that_the_compiler_expects_take_precedence_over_bytes():
    text = LOOK_UP.replace("calls=%inner", 'calls=%inner, backend_config={"estimated_cycles":"1750"}')
    target = pod("v6e:2x2")
    player = Player(parse(text), Fabric(target, {"all": 4}, ()), Kernels(target, lambda queries, keys: 1.0))
    assert player.seconds("main", player.module.named["main"]["found"]) == pytest.approx(1e-6)


FUSED = """
%body (whole: f32[8,1024], part: f32[1,1024], at: s32[]) -> f32[8,1024] {
  %whole = f32[8,1024]{1,0} parameter(0)
  %part = f32[1,1024]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %one = f32[1,1024]{1,0} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={1,1024}
  %sum = f32[1,1024]{1,0} add(%one, %part)
  ROOT %put = f32[8,1024]{1,0} dynamic-update-slice(%whole, %sum, %at, %at)
}

%fresh (part: f32[1,1024], at: s32[]) -> f32[8,1024] {
  %part = f32[1,1024]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[8,1024]{1,0} broadcast(%zero), dimensions={}
  ROOT %put = f32[8,1024]{1,0} dynamic-update-slice(%zeros, %part, %at, %at)
}

ENTRY %main (whole: f32[8,1024], part: f32[1,1024], at: s32[]) -> f32[8,1024] {
  %whole = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %part = f32[1,1024]{1,0:T(8,128)} parameter(1)
  %at = s32[]{:T(128)S(6)} parameter(2)
  %put = f32[8,1024]{1,0:T(8,128)} fusion(%whole, %part, %at), kind=kLoop, calls=%body
  %new = f32[8,1024]{1,0:T(8,128)} fusion(%part, %at), kind=kLoop, calls=%fresh
  %near = f32[8,1024]{1,0:T(8,128)S(1)} add(%put, %new)
  ROOT %alone = f32[8,1024]{1,0:T(8,128)} dynamic-update-slice(%near, %part, %at, %at)
}
"""


def test_an_update_of_a_slice_moves_only_that_slice():
    assert moved(FUSED, "put") == 3 * 4 * 1024  # reads a slice and the part, writes a slice
    assert moved(FUSED, "alone") == 2 * 4 * 1024


def test_an_array_that_is_made_anew_is_written_whole():
    assert moved(FUSED, "new") == 4 * 1024 + 4 * 8 * 1024


def test_arrays_in_the_memory_of_the_cores_are_not_moved():
    assert moved(FUSED, "near") == 2 * 4 * 8 * 1024  # read, but not written


def test_only_look_ups_are_counted_by_bytes():
    assert [is_lookup(*line_of(LOOK_UP, name)) for name in ("found", "sorted", "sum", "zeros")] == [True] * 3 + [False]
    module, line = line_of(FUSED, "put")
    assert not is_lookup(module, line)
