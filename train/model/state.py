"""The state that an update changes, and what the names of its axes tell about a parameter."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int32


class Guard(NamedTuple):
    """Statistics for detecting spikes.

    Attributes:
      norm: running mean of the gradient norms of the updates made; 0 before the first.
      skipped: updates left out so far in this stage.
      in_row: the number of consecutive skips up to now.
    """

    norm: Float[Array, ""]
    skipped: Int32[Array, ""]
    in_row: Int32[Array, ""]


@partial(jax.tree_util.register_dataclass, data_fields=["step", "parameters", "optimizer", "guard"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """The state that an update changes. `parameters` is the plain nested dict of the model's parameters, in float32.

    `step` counts the batches seen in this stage, whether they led to an update or were skipped.
    """

    step: Int32[Array, ""]
    parameters: Any
    optimizer: Any
    guard: Guard


def is_axis_names(node: Any) -> bool:
    """Whether a node of a tree of axis names is a leaf: the names of one parameter's axes."""
    return isinstance(node, tuple)


def is_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether a parameter with axes of these names is a matrix: from or to the residual stream, or a latent.

    The router of a mixture of experts does not count as a matrix.
    """
    return not {"embed", "rank", "latent"}.isdisjoint(names) and len(set(names) - {None, "layers", "experts"}) > 1
