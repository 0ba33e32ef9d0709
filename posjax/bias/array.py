"""A bias given as an array."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check
from posjax._slots import OfPairs
from posjax.bias.base import Bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayBias(OfPairs, Bias):
    """``b_h(i, j) = array[batch, h, i, j]``, indexed by the order of the tokens in the call, not by positions.

    Args:
        array: broadcasts to ``[batch, heads, queries, keys]``; its gradient has the shape of the array.
    """

    name: ClassVar[str] = "bias"

    def values(self, q_positions, kv_positions):
        """The array itself, for all positions."""
        return self.array


def array_bias(array: Float[Array, "..."]) -> ArrayBias:
    """``ArrayBias`` of an array with up to four axes.

    Raises:
        ValueError: for more axes, or a dtype that is not floating.
    """
    hint = "; a boolean array is a mask: pass it as mask=" if array.dtype == jnp.bool_ else ""
    check(jnp.issubdtype(array.dtype, jnp.floating), f"bias must be of a floating dtype, found {array.dtype}{hint}")
    return ArrayBias(ArrayBias.with_four_axes(array))
