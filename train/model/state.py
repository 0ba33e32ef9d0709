"""The state that an update changes, and what the names of its axes tell about a parameter."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "parameters", "optimizer", "guard", "average"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """The state that an update changes. `parameters` is the plain nested dict of the model's parameters, in float32.

    `step` counts the batches seen in this stage, whether they led to an update or were skipped. `average` is None
    without ``train.ema``; with it, the averages of the trained parameters, by the same names and in float32.
    """

    step: Int32[Array, ""]
    parameters: Any
    optimizer: Any
    guard: Guard
    average: Any = None

    @property
    def averaged(self) -> Any:
        """The parameters, with averages in place of those that have one."""
        return overlaid(self.parameters, self.average or {})


def selected(tree: Any, chosen: Any) -> Any:
    """The leaves of a nested dict for which a tree like it, `chosen`, is true, as a nested dict."""
    flat, wanted = flatten_dict(tree), flatten_dict(chosen)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if wanted[path]})


def overlaid(tree: Any, part: Any) -> Any:
    """The nested dict with the leaves of `part`, which has some of its names, in place of its own."""
    return unflatten_dict(flatten_dict(tree, keep_empty_nodes=True) | flatten_dict(part))


def is_axis_names(node: Any) -> bool:
    """Whether a node of a tree of axis names is a leaf: the names of one parameter's axes."""
    return isinstance(node, tuple)


def is_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether a parameter with axes of these names is a matrix: from or to the residual stream, or a latent.

    The router of a mixture of experts does not count as a matrix.
    """
    return not {"embed", "rank", "latent"}.isdisjoint(names) and len(set(names) - {None, "layers", "experts"}) > 1
