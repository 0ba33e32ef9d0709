"""The kernels for NVIDIA GPUs of the Hopper generation as a backend."""

import dataclasses
import re

import jax
import jax.numpy as jnp

from posjax._numbers import is_number
from posjax.attention.backend import Backend, added
from posjax.attention.call import Call
from posjax.attention.formulas import OPERATIONS, bias_form, kernel_refusal
from posjax.attention.gpu.inputs import Options
from posjax.attention.rows import per_query_of

_DTYPES = (jnp.bfloat16, jnp.float16)
_LARGEST_HEAD = 256
_FORMS = ("none", "linear", "gates", "by distance", "pairs")
"""The keys of ``posjax.attention.gpu.biases.FORMS``, which is imported when a kernel is traced."""
_OLDEST_JAX = (0, 11)
_USUAL = Options()
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
"""The names of the devices of compute capability 9.0, for a program that is lowered without one."""


@dataclasses.dataclass(frozen=True)
class GPU(Backend):
    """The kernels for GPUs."""

    options: Options = _USUAL

    @property
    def effects(self):
        """Those of an interpreted kernel."""
        return frozenset() if self.options.interpret is None else _entry().effects_of(self.options.interpret)

    def refusal(self, call):
        dtypes = {array.dtype for array in (call.q, call.k, call.v)}
        if len(dtypes) > 1 or call.q.dtype not in _DTYPES:
            return f"q, k and v must be all bfloat16 or all float16, found {', '.join(sorted(map(str, dtypes)))}"
        size = max(call.q.shape[-1], call.v.shape[-1])
        if size > _LARGEST_HEAD:
            return f"heads must have at most {_LARGEST_HEAD} features, found {size}; use 'blockwise'"
        return kernel_refusal(call, _FORMS, OPERATIONS) or (None if self.options.interpret else _device_refusal())

    def needs_ranges(self, call):
        return bias_form(call) == "by distance"

    def forward(self, call):
        return _entry().forward_rows(_ready(call), self.options)

    def merge(self, call, so_far):
        return _entry().forward_rows(_ready(call), self.options, so_far)

    def per_query_of(self, call, rows, cotangents):
        return per_query_of(rows, rows.subtracted, cotangents)

    def backward(self, call, per_query, *, of_bias):
        ready, transpose = jax.vjp(_ready, call)
        return transpose(_entry().gradients(ready, self.options, per_query, of_bias=of_bias))[0]

    def add(self, call, per_query, so_far):
        of_bias = bool(jax.tree.leaves(so_far.bias))
        ready = _ready(call)
        gradients = _entry().gradients(ready, self.options, per_query, of_bias=of_bias, wide=True)
        return added(so_far, gradients.with_queries(lambda q: q / ready.scale))


def _ready(call: Call) -> Call:
    """The call with a positive number as its scale: only that can be applied after the maximum of a row."""
    return call if is_number(call.scale) and call.scale > 0 else call.scaled


def _device_refusal() -> str | None:
    """Why the GPU of the mesh in use, or of this machine, does not run the kernels, or None."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"the kernels need jax {'.'.join(map(str, _OLDEST_JAX))} or newer, found {jax.__version__}"
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        hopper = _HOPPER.search(target.device_kind)
        return (
            None if hopper else f"the kernels are for GPUs of compute capability 9.0 (H100), found {target.device_kind}"
        )
    if jax.default_backend() != "gpu":
        return "found no GPU"
    found = {getattr(device, "compute_capability", "none") for device in jax.local_devices()}
    return (
        None
        if found == {"9.0"}
        else f"the kernels are for compute capability 9.0 (H100), found {', '.join(sorted(found))}"
    )


def _entry():
    # Imported when a kernel is traced: Mosaic GPU takes a third of a second to import, and jax 0.10 has an older one.
    from posjax.attention.gpu import entry

    return entry
