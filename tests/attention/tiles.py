"""Attention in tiles of a chosen size, with its derivatives."""

from posjax.attention.blockwise import Blocks, blockwise
from posjax.attention.operands import Operands
from posjax.attention.operation import Backends, attend


def in_tiles(x: Operands, *blocks: int) -> tuple:
    """``blockwise`` of operands whose queries are scaled already."""
    return attend(Backends(lambda x, _, given=None: blockwise(x, Blocks(*blocks), given)), x, 1.0)
