"""Meshes of eight devices with explicit, automatic and mixed axes, and arrays on them."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SPEC = P("data", None, "tensor")
"""The sharding of queries in most tests."""
KINDS = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "auto": (AxisType.Auto, AxisType.Auto),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@cache
def mesh(kind: str, shape=(4, 2)):
    """A mesh with the axes "data" and "tensor"; "explicit" is the default of ``jax.make_mesh``."""
    types = {} if kind == "explicit" else {"axis_types": KINDS[kind]}
    return jax.make_mesh(shape, ("data", "tensor"), **types)


def put(where, value, spec=SPEC):
    """An array on a mesh. A dimension is replicated if the mesh axes of its spec do not divide it."""

    def divides(axis, size):
        names = (axis,) if isinstance(axis, str) else axis or ()
        return size % math.prod(where.shape[name] for name in names) == 0

    fits = [axis if divides(axis, value.shape[n]) else None for n, axis in enumerate(spec)]
    return jax.device_put(value, NamedSharding(where, P(*fits)))


def partition(kind: str, spec=SPEC) -> dict:
    """The arguments of attention that give the sharding of queries, where array types do not show it."""
    return {} if kind == "explicit" else {"placement": spec}


def same(found, wanted, tolerance=1e-5):
    """Asserts that trees agree, relative to the largest number of each array."""
    for (path, got), want in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        size = np.abs(want[np.isfinite(want)]).max(initial=1e-3)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * size, err_msg=jax.tree_util.keystr(path))


def gradients(function):
    """A function that returns the gradients of a weighted sum of ``out, lse = function(tree)``, and ``(out, lse)``."""

    def weigh(x):
        return jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def loss(tree):
        out, lse = function(tree)
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return (out * weigh(out)).sum() + (seen * weigh(seen)).sum(), (out, lse)

    return jax.jit(jax.grad(loss, has_aux=True))
