"""The kernels for TPUs as a backend."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posjax._numbers import is_number
from posjax.attention.backend import Backend, added
from posjax.attention.call import Call
from posjax.attention.formulas import LOG2E
from posjax.attention.rows import per_query_of, plain_per_query_of
from posjax.attention.tpu import entry

_USUAL = entry.Options()


@dataclasses.dataclass(frozen=True)
class TPU(Backend):
    """The kernels for TPUs. They multiply the queries by ``log2 e``, and by the scale if it is a number."""

    options: entry.Options = _USUAL

    @property
    def effects(self):
        """Those of a kernel that the options, or ``pltpu.force_tpu_interpret_mode``, let an interpreter run."""

        def kernel(source, target):
            target[...] = source[...]

        def copy(x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
            return pl.pallas_call(kernel, shape, interpret=self.options.interpret)(x)

        return frozenset(jax.make_jaxpr(copy)(jax.ShapeDtypeStruct((8, 128), jnp.float32)).effects)

    def refusal(self, call):
        return entry.refusal(call)

    def needs_ranges(self, call):
        return entry.needs_ranges(call)

    def forward(self, call):
        return entry.forward_rows(*self._ready(call))

    def merge(self, call, so_far):
        return entry.forward_rows(*self._ready(call), so_far)

    def per_query_of(self, call, rows, cotangents):
        summed = partial(entry.row_sums, interpret=self.options.interpret)
        # Without need, a factor of 1 would cost a pass over the cotangents in memory.
        function = plain_per_query_of if entry.is_plain(call) else per_query_of
        return function(rows, rows.subtracted, cotangents, summed)

    def backward(self, call, per_query, *, of_bias):
        if is_number(call.scale):
            return entry.gradients(*self._ready(call), per_query, of_bias=of_bias)
        scaled, transpose = jax.vjp(_scaled_in_base_2, call)
        return transpose(entry.gradients(scaled, self.options, per_query, of_bias=of_bias))[0]

    def add(self, call, per_query, so_far):
        of_bias = bool(jax.tree.leaves(so_far.bias))
        sums = (so_far.q, so_far.k, so_far.v)
        if call.remap or any(array is None for array in sums):
            gradients = entry.gradients(_scaled_in_base_2(call), self.options, per_query, of_bias=of_bias)
            return added(so_far, gradients.with_queries(lambda q: q * LOG2E))
        (q, k, v), others = entry.add_gradients(*self._ready(call), per_query, sums, of_bias=of_bias)
        return dataclasses.replace(added(so_far, others), q=q, k=k, v=v)

    def _ready(self, call: Call) -> tuple[Call, entry.Options]:
        """The input of the kernels: unscaled queries and the number that scales them, or queries scaled by an array."""
        if is_number(call.scale):
            return call, dataclasses.replace(self.options, factor=call.scale * LOG2E)
        return _scaled_in_base_2(call), self.options


def _scaled_in_base_2(call: Call) -> Call:
    """The queries times ``scale log2 e``; the factor must not be rounded to less than float32."""
    return call.times(call.scale * LOG2E)
