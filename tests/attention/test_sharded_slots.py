"""Attention over a mesh for windows, counts along whole rows, and parameters per head: not every strategy fits."""

import dataclasses

import pytest
from attention import spread

import posjax as pj


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "implementation"),
    [
        ("window, packed", "2x4", "zigzag", "blockwise"),
        ("window", "2x2x2", "contiguous", "blockwise"),
        wide("window", "2x4", "zigzag", "blockwise"),
        wide("window, packed", "2x4", "zigzag", "dense"),
        wide("window, packed", "2x2x2", "contiguous", "blockwise"),
        ("window on two sides", "2x4", "contiguous", "dense"),
        ("window on two sides", "2x4", "zigzag", "dense"),
        ("wide window on two sides", "4x2", "contiguous", "dense"),
        ("fox in a window", "4x2", "contiguous", None),
    ],
)
def test_windows_with_the_neighbour_strategy(name, mesh, kind, implementation):
    spread.check(spread.WINDOWS[name], mesh, spread.placement(mesh, "neighbour", kind), implementation)


@pytest.mark.parametrize(
    ("mesh", "strategy", "kind", "implementation"),
    [("2x4", "all-gather", "zigzag", "blockwise"), ("2x4", "ulysses", "zigzag", "dense")],
)
def test_counts_along_whole_rows(mesh, strategy, kind, implementation):
    spread.check(spread.WHOLE_ROWS["cope, packed"], mesh, spread.placement(mesh, strategy, kind), implementation)


@pytest.mark.parametrize(
    ("name", "strategy", "kind"),
    [
        ("dilated heads", "ulysses", "contiguous"),
        ("kerple", "ring", "zigzag"),
        ("fire", "ulysses", "zigzag"),
        ("scale-invariant", "ulysses", "zigzag"),
        ("xpos", "ring", "contiguous"),
    ],
)
def test_heads_over_an_axis_take_their_own_parameters(name, strategy, kind):
    spread.check(spread.PER_HEAD[name], "2x2x2", spread.placement("2x2x2", strategy, kind), None)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "implementation"),
    [
        ("rope, packed", "2x2x2", "ring", "dense"),
        ("rerope", "2x4", "ring-ulysses", "blockwise"),
        wide("rope, packed", "2x2x2", "ring", "blockwise"),
        wide("fox, packed", "2x2x2", "ring", "blockwise"),
        wide("learned sinks, first tokens", "2x4", "ring", "dense"),
    ],
)
def test_both_pieces_of_a_zigzag_at_once(name, mesh, strategy, implementation):
    """Pieces of 128 tokens or more are whole tiles; the shorter pieces of other tests are processed one by one."""
    rings = spread.MESHES[mesh][1] // (2 if strategy == "ring-ulysses" else 1)
    case = dataclasses.replace(spread.CASES[name], rows=2, length=2 * 128 * rings)
    spread.check(case, mesh, spread.placement(mesh, strategy, "zigzag"), implementation)


def test_a_scale_per_token_stays_with_its_piece():
    """With a bias by distance, zigzag pieces are processed one by one, each with the scales of its own tokens."""
    case = spread.Case(pj.Scheme(bias=pj.bias.T5(8, 12), scale=pj.scales.SSMax(bias=True)), length=512, rows=2)
    spread.check(case, "2x2x2", spread.placement("2x2x2", "ring", "zigzag"), "blockwise")
