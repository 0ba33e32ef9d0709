"""Attention in tiles of a chosen size, with its derivatives."""

from functools import partial

from posjax.attention.backend import JaxBackend
from posjax.attention.blockwise import Blocks, blockwise, blockwise_gradients
from posjax.attention.call import Call
from posjax.attention.platform import Backends, computed
from posjax.attention.rows import Rows


def of_tiles(*blocks: int) -> JaxBackend:
    """The blockwise backend with tiles of these sizes."""
    return JaxBackend(*(partial(each, blocks=Blocks(*blocks)) for each in (blockwise, blockwise_gradients)))


def in_tiles(call: Call, *blocks: int) -> Rows:
    """``blockwise`` in tiles of these sizes."""
    return computed(Backends(of_tiles(*blocks)), call)
