"""Attention over a mesh equals attention on one device: outputs, log-sum-exps and every gradient, in float32.

By default every class of slots occurs once, and every strategy with every layout, mesh and backend. In the wide grid
every class of slots occurs with two of the four strategies. ``test_sharded_wide.py`` has all combinations.
"""

import itertools

import pytest
from attention import spread

from posjax.layout import KINDS

STRATEGIES = ("all-gather", "ring", "ulysses", "ring-ulysses")
BACKENDS = ("dense", "blockwise", None)


# Every class of slots, and every pair of values of the other columns. Groups of two need four shards.
COVERING = [
    ("alibi, soft cap", "2x2x2", "all-gather", "contiguous", None),
    # A ring of more than two devices, whose positions are no arrays and so are not sent.
    ("alibi, soft cap", "2x4", "ring", "zigzag", "blockwise"),
    ("rerope", "4x2", "all-gather", "contiguous", "blockwise"),
    ("coca", "2x4", "all-gather", "zigzag", "dense"),
    ("two sides", "4x2", "ring", "contiguous", "dense"),
    ("fox, packed", "2x4", "ring", "zigzag", None),
    ("t5, packed", "2x2x2", "ring", "zigzag", "blockwise"),
    ("ssmax", "2x4", "ring-ulysses", "zigzag", "dense"),
    ("log-n, key norm, packed", "2x4", "ring-ulysses", "contiguous", "blockwise"),
    ("alibi, soft cap", "2x4", "ring-ulysses", "zigzag", None),
    ("learned sinks, first tokens", "2x4", "ulysses", "contiguous", "blockwise"),
    ("rope, packed", "4x2", "ulysses", "zigzag", None),
    ("fox, packed", "2x2x2", "ulysses", "zigzag", "dense"),
]


def grid():
    """Two strategies for every class of slots."""
    for n, name in enumerate(spread.CASES):
        for s, strategy in list(enumerate(STRATEGIES))[n % 2 :: 2]:
            mesh = "2x4" if strategy == "ring-ulysses" else tuple(spread.MESHES)[n // 2 % 3]
            yield name, mesh, strategy, KINDS[(n // 2 + s) % 2], BACKENDS[(n // 4 + s) % 3]


@pytest.mark.parametrize("cases", [COVERING, list(grid())], ids=["covering", "wide"])
def test_every_pair_of_strategy_mesh_layout_and_backend_occurs(cases):
    pairs = {pair for _, *case in cases for pair in itertools.combinations(enumerate(case), 2)}
    # Groups of two occur on one mesh only.
    assert len(pairs) == 10 + 6 + 9 + 8 + 12 + 6
    assert {name for name, *_ in cases} == set(spread.CASES)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "kind", "implementation"),
    [*COVERING, *(pytest.param(*case, marks=pytest.mark.wide) for case in grid() if case not in COVERING)],
)
def test_sharded_is_single_device(name, mesh, strategy, kind, implementation):
    spread.check(spread.CASES[name], mesh, spread.placement(mesh, strategy, kind), implementation)
