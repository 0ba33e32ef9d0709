"""Near and far: pairs beyond a boundary that are scored by a second pair of feature maps.

Methods such as ReRoPE score near pairs with their true distance and far pairs with another one, which a model has met
in training. Both scores are inner products of features, so each is a ``Branch``: other queries and keys, and the pairs
that take them. An attention backend computes, for each tile, only the branches that some pair of it takes.
"""

import dataclasses
from functools import partial

import jax
from jaxtyping import Array, Float

from posjax.masks import Mask


@partial(jax.tree_util.register_dataclass, data_fields=["q", "k", "where"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Branch:
    """Features that replace the first pair where ``where`` holds: the pairs of a branch are those of its mask.

    Masks of several branches must not overlap. ``where`` only selects; what may be seen at all is the mask's business.

    Args:
        q: ``[batch, queries, heads, size]``, as wide as the first pair.
        k: ``[batch, keys, kv_heads, size]``.
        where: a mask over pairs of positions.
    """

    q: Float[Array, "batch queries heads size"]
    k: Float[Array, "batch keys kv_heads size"]
    where: Mask
