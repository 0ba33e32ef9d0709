"""Every strategy, layout, mesh and class of slots: ``pytest -m wide``."""

import pytest
from attention import spread

from posjax.attention.sharded import Sizes
from posjax.attention.sharded.choice import STRATEGIES, strategy_refusal
from posjax.layout import KINDS, Layout

ALL = {**spread.CASES, **spread.WINDOWS, **spread.WHOLE_ROWS, **spread.PER_HEAD}


def takes(name: str, mesh: str, strategy: str, kind: str) -> bool:
    """Whether a strategy can split a case over this mesh with this layout."""
    case, shape = ALL[name], spread.MESHES[mesh]
    sizes = Sizes(
        spread.ROWS,
        spread.LENGTH,
        spread.HEADS // (shape[2] if len(shape) == 3 else 1),
        case.kv_heads,
        shape[1],
        window=case.scheme.mask.size if name in spread.WINDOWS else None,
        counts=name in spread.WHOLE_ROWS,
        layout=Layout(kind, shape[1]),
        ulysses=2,
    )
    return strategy_refusal(strategy, sizes) is None


GRID = [
    (name, mesh, strategy, kind)
    for name in ALL
    for mesh in spread.MESHES
    for strategy in STRATEGIES
    for kind in KINDS
    if takes(name, mesh, strategy, kind)
]


@pytest.mark.wide
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(("name", "mesh", "strategy", "kind"), GRID)
def test_sharded_is_single_device(name, mesh, strategy, kind, implementation):
    spread.check(ALL[name], mesh, spread.placement(mesh, strategy, kind), implementation)
