"""Attention in tiles of a chosen size, with its derivatives."""

from functools import partial

from posjax.attention.backends import Backend
from posjax.attention.blockwise import Blocks, blockwise, blockwise_gradients
from posjax.attention.operands import Operands
from posjax.attention.operation import Backends, attend
from posjax.attention.rows import Rows


def of_tiles(*blocks: int) -> Backend:
    """The blockwise backend with tiles of these sizes."""
    return Backend(*(partial(each, blocks=Blocks(*blocks)) for each in (blockwise, blockwise_gradients)))


def in_tiles(x: Operands, *blocks: int) -> Rows:
    """``blockwise`` of operands whose queries are scaled already."""
    return attend(Backends(of_tiles(*blocks)), x, 1.0)
