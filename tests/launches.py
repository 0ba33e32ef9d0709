"""How a program launches its Pallas kernels: grids and blocks, read from its jaxpr."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import jaxprs_in_params


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        grid: number of programs along each axis.
        blocks: the shape of every block of inputs and outputs; axes of size 1 that the kernel does not see are left
            out.
    """

    grid: tuple[int, ...]
    blocks: list[tuple[int, ...]]


def launches(function, *arguments) -> dict[str, Launch]:
    """The launches of a function's kernels by name."""
    return dict(_launches(jax.make_jaxpr(function)(*arguments).jaxpr))


def _launches(jaxpr) -> Iterator[tuple[str, Launch]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"], _launch(**equation.params)
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _launches(inner)


def _launch(grid_mapping, **_) -> Launch:
    blocks = [
        tuple(size.block_size for size in mapping.block_shape if hasattr(size, "block_size"))
        for mapping in grid_mapping.block_mappings
    ]
    return Launch(grid_mapping.grid, blocks)
