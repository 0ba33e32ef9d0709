"""Attention over a mesh is attention on one device: outputs, log-sum-exps and every gradient, in float32.

Every class of slots meets two of the four strategies, every strategy every layout, mesh and backend;
``test_sharded_wide.py`` has all combinations.
"""

import itertools

import pytest
from attention import spread

from posjax.layout import KINDS

STRATEGIES = ("all-gather", "ring", "ulysses", "ring-ulysses")
BACKENDS = ("dense", "blockwise", None)


def grid():
    for n, name in enumerate(spread.CASES):
        for s, strategy in list(enumerate(STRATEGIES))[n % 2 :: 2]:
            # Only four shards make groups of two.
            mesh = "2x4" if strategy == "ring-ulysses" else tuple(spread.MESHES)[n // 2 % 3]
            yield name, mesh, strategy, KINDS[(n // 2 + s) % 3], BACKENDS[(n // 4 + s) % 3]


def test_every_two_of_strategies_meshes_layouts_and_backends_meet():
    pairs = {pair for _, *case in grid() for pair in itertools.combinations(enumerate(case), 2)}
    # Groups of two need one mesh.
    assert len(pairs) == 12 + 12 + 9 + 9 + 9 + 10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "strategy", "kind", "implementation"), list(grid()))
def test_sharded_is_single_device(name, mesh, strategy, kind, implementation):
    spread.check(spread.CASES[name], mesh, spread.placement(mesh, strategy, kind), implementation)
