"""Attention over a mesh equals attention on one device: outputs, log-sum-exps and every gradient, in float32.

By default every strategy occurs with every layout, and every class of slots that a mesh distinguishes.
"""

import pytest
from attention import spread

import posjax as pj
from posjax.attention.placement import STRATEGIES, strategy_refusal
from posjax.attention.sharded import Sizes
from posjax.layout import KINDS, Layout

ALL = {**spread.CASES, **spread.WINDOWS, **spread.WHOLE_ROWS, **spread.PER_HEAD}
COVERING = [
    ("rerope", "4x2", "all-gather", "zigzag", "blockwise"),
    ("two sides", "2x4", "ring", "contiguous", "blockwise"),
    ("fox, packed", "2x4", "ring", "zigzag", None),
    ("t5, packed", "2x2x2", "all-gather", "contiguous", None),
    ("ssmax", "2x4", "ring-ulysses", "zigzag", "blockwise"),
    ("learned sinks, first tokens", "2x2x2", "ulysses", "contiguous", "blockwise"),
    ("cope, packed", "2x4", "ulysses", "zigzag", "dense"),
    ("relative, sinks by token", "2x2x2", "ring", "zigzag", "blockwise"),
    ("window, packed", "2x4", "neighbour", "zigzag", "blockwise"),
    ("wide window on two sides", "4x2", "neighbour", "contiguous", "dense"),
]


def takes(name: str, mesh: str, strategy: str, kind: str) -> bool:
    """Whether a strategy can split a case over this mesh with this layout."""
    case, shape = ALL[name], spread.MESHES[mesh]
    heads = spread.HEADS // (shape[2] if len(shape) == 3 else 1)
    sizes = Sizes(spread.ROWS, spread.LENGTH, heads, case.kv_heads, shape[1], layout=Layout(kind, shape[1]), ulysses=2)
    window = case.scheme.mask.size if name in spread.WINDOWS else None
    return strategy_refusal(strategy, sizes._replace(window=window, counts=name in spread.WHOLE_ROWS)) is None


GRID = [
    (name, mesh, strategy, kind, implementation)
    for name in ALL
    for mesh in spread.MESHES
    for strategy in STRATEGIES
    for kind in KINDS
    for implementation in ("dense", "blockwise")
    if takes(name, mesh, strategy, kind)
]


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "kind", "implementation"),
    [*COVERING, *(pytest.param(*case, marks=pytest.mark.wide) for case in GRID if case not in COVERING)],
)
def test_attention_over_a_mesh_is_that_of_one_device(name, mesh, strategy, kind, implementation):
    spread.check(ALL[name], mesh, spread.placement(mesh, strategy, kind), implementation)


BY_DISTANCE = pj.Scheme(bias=pj.bias.T5(8, 12), scale=pj.scales.SSMax(bias=True))


@pytest.mark.parametrize(
    ("scheme", "mesh", "strategy"),
    [
        (spread.CASES["rope, packed"].scheme, "2x2x2", "ring"),
        # With a bias by distance, pieces are processed one by one, each with the scales of its own tokens.
        pytest.param(BY_DISTANCE, "2x2x2", "ring", marks=pytest.mark.wide),
        pytest.param(spread.CASES["rerope"].scheme, "2x4", "ring-ulysses", marks=pytest.mark.wide),
        pytest.param(spread.CASES["fox, packed"].scheme, "2x2x2", "ring", marks=pytest.mark.wide),
    ],
    ids=["rope", "scales", "rerope", "fox"],
)
def test_both_pieces_of_a_zigzag_at_once(scheme, mesh, strategy):
    """Pieces of 128 tokens or more are whole tiles; the shorter pieces of other tests are processed one by one."""
    rings = spread.MESHES[mesh][1] // (2 if strategy == "ring-ulysses" else 1)
    packed = scheme.bias is None and scheme.remap is None
    case = spread.Case(scheme, packed=packed, rows=2, length=2 * 128 * rings)
    spread.check(case, mesh, spread.placement(mesh, strategy, "zigzag"), "blockwise")
