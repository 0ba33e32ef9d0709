"""The kernels for NVIDIA GPUs of the Hopper generation as a backend."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posjax.attention.backend import Backend, added
from posjax.attention.formulas import kernel_refusal
from posjax.attention.rows import per_query_of

_DTYPES = (jnp.bfloat16, jnp.float16)
_LARGEST_HEAD = 256


@dataclasses.dataclass(frozen=True)
class GPU(Backend):
    """The kernels for GPUs. ``interpret``: ``plgpu.InterpretGPUParams`` to run without one, or None."""

    interpret: Any = None

    @property
    def effects(self):
        """Those of an interpreted kernel."""
        return frozenset() if self.interpret is None else _entry().effects_of(self.interpret)

    def refusal(self, call):
        dtypes = {call.q.dtype, call.k.dtype, call.v.dtype}
        if len(dtypes) > 1 or call.q.dtype not in _DTYPES:
            return f"q, k and v must be all bfloat16 or all float16, found {', '.join(sorted(map(str, dtypes)))}"
        return kernel_refusal(call)

    def needs_ranges(self, call):
        return False

    def forward(self, call):
        return _entry().forward_rows(call, self._options)

    def merge(self, call, so_far):
        return _entry().forward_rows(call, self._options, so_far)

    def per_query_of(self, call, rows, cotangents):
        return per_query_of(rows, rows.subtracted, cotangents)

    def backward(self, call, per_query, *, of_bias):
        return _entry().gradients(call, self._options, per_query, of_bias=of_bias)

    def add(self, call, per_query, so_far):
        of_bias = bool(jax.tree.leaves(so_far.bias))
        return added(so_far, _entry().gradients(call, self._options, per_query, of_bias=of_bias, wide=True))

    @property
    def _options(self):
        return _entry().Options(self.interpret)


def _entry():
    # Imported when a kernel is traced: Mosaic GPU takes a third of a second, and older versions of jax lack it.
    from posjax.attention.gpu import entry

    return entry
