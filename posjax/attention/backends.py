"""The backends, for calls whose queries are not scaled yet, with all keys of a sequence or part of them.

With part of the keys, the forward pass takes the results of the other keys and merges its own into them (see
``posjax.attention.rows``), and the backward pass takes sums of gradients and adds its own to them: with the weights
``P = exp(z - L)`` and ``D = rowsum(dO * O) - dL`` of all keys, the gradients of each part are independent. A kernel
reads and writes these sums in the same pass over memory.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from posjax._numbers import is_number
from posjax.attention.blockwise import blockwise, blockwise_gradients
from posjax.attention.dense import dense, dense_gradients
from posjax.attention.operands import Operands, statistics_dtype, vary_alike
from posjax.attention.rows import PerQuery, Rows, merged, per_query_of, plain_per_query_of
from posjax.attention.tpu import entry


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend in plain JAX.

    Args:
        compute: the results of operands whose queries are scaled.
        gradients: the gradients of these operands, from ``PerQuery``.
    """

    compute: Callable[[Operands], Rows]
    gradients: Callable[[Operands, PerQuery], Operands]

    def forward(self, x: Operands, scale: Any) -> Rows:
        """The results for each query."""
        return self.compute(scaled(x, scale))

    def merge(self, x: Operands, scale: Any, so_far: Rows) -> Rows:
        """The results over the keys so far and the keys of ``x``, in the dtype of the statistics."""
        return merged(so_far, self.forward(x, scale))

    def per_query_of(self, x: Operands, rows: Rows, cotangents: Rows) -> PerQuery:
        """The input of the backward pass for each query, from the results and their cotangents."""
        return per_query_of(rows, rows.lse, cotangents)

    def backward(self, x: Operands, scale: Any, per_query: PerQuery, *, of_bias: bool) -> tuple[Operands, Any]:
        """Cotangents of operands and scale; without ``of_bias`` the cotangent of the bias may be 0."""
        prepared, transpose = jax.vjp(scaled, x, scale)
        return transpose(self.gradients(prepared, per_query))

    def add(self, x: Operands, scale: Any, per_query: PerQuery, so_far: Operands) -> Operands:
        """The sums of cotangents so far plus the cotangents from the keys of ``x``; None, as for positions, stays None.

        The cotangents of queries are those of scaled queries.
        """
        return _sum(so_far, self.gradients(scaled(x, scale), per_query))


def _sum(so_far: Operands, found: Operands) -> Operands:
    def plus(a, b):
        return None if a is None else a + b.astype(a.dtype)

    found = dataclasses.replace(found, q_positions=None, kv_positions=None)
    return jax.tree.map(plus, so_far, found, is_leaf=lambda leaf: leaf is None)


_USUAL = entry.Options()


@dataclasses.dataclass(frozen=True)
class TPU:
    """The kernels for TPUs. They multiply the queries by ``log2 e``, and by the scale if it is a number."""

    options: entry.Options = _USUAL

    def forward(self, x, scale):
        """See ``Backend.forward``."""
        return entry.attend(*self._ready(x, scale))

    def merge(self, x, scale, so_far):
        """See ``Backend.merge``."""
        return entry.attend(*self._ready(x, scale), so_far)

    def per_query_of(self, x, rows, cotangents):
        """See ``Backend.per_query_of``."""
        summed = partial(entry.row_sums, interpret=self.options.interpret)
        # Without need, a factor of 1 would cost a pass over the cotangents in memory.
        function = plain_per_query_of if entry.is_plain(x) else per_query_of
        return function(rows, rows.subtracted, cotangents, summed)

    def backward(self, x, scale, per_query, *, of_bias):
        """See ``Backend.backward``."""
        if is_number(scale):
            return entry.gradients(x, per_query, self._ready(x, scale)[1], of_bias=of_bias), jnp.zeros_like(scale)
        prepared, transpose = jax.vjp(_scaled_in_base_2, x, scale)
        return transpose(entry.gradients(prepared, per_query, self.options, of_bias=of_bias))

    def add(self, x, scale, per_query, so_far):
        """See ``Backend.add``."""
        of_bias, sums = bool(jax.tree.leaves(so_far.bias)), (so_far.q, so_far.k, so_far.v)
        if x.remap or any(array is None for array in sums):
            found = entry.gradients(_scaled_in_base_2(x, scale), per_query, self.options, of_bias=of_bias)
            return _sum(so_far, _with_queries(found, lambda q: q * entry.LOG2E))
        prepared, options = self._ready(x, scale)
        (q, k, v), found = entry.add_gradients(prepared, per_query, options, sums, of_bias=of_bias)
        return dataclasses.replace(_sum(so_far, found), q=q, k=k, v=v)

    def _ready(self, x: Operands, scale) -> tuple[Operands, entry.Options]:
        """The input of the kernels: unscaled queries and the number that scales them, or queries scaled by an array."""
        if is_number(scale):
            return x, dataclasses.replace(self.options, factor=scale * entry.LOG2E)
        return _scaled_in_base_2(x, scale), self.options


def scaled(x: Operands, scale) -> Operands:
    """The operands with their queries times the scale."""

    def times(q):
        dtype = statistics_dtype(q)
        return (q.astype(dtype) * jnp.asarray(scale, dtype)).astype(q.dtype)

    return _with_queries(x, times)


def _scaled_in_base_2(x: Operands, scale) -> Operands:
    """The queries times ``scale log2 e``; the factor must not be rounded to less than float32."""
    return scaled(x, scale * entry.LOG2E)


def _with_queries(x: Operands, function: Callable) -> Operands:
    remap = tuple(dataclasses.replace(branch, q=function(branch.q)) for branch in x.remap)
    return vary_alike(dataclasses.replace(x, q=function(x.q), remap=remap))


DENSE = Backend(dense, dense_gradients)
BLOCKWISE = Backend(blockwise, blockwise_gradients)
