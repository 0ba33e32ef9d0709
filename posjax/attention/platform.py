"""Where a call runs: why a backend refuses it, which one is chosen, and the operation that JAX traces.

Attention is one JAX primitive each way (forward, tangents, backward), and so is merging part of the keys into earlier
results. What computes it is chosen and traced when the program is lowered, for its platform alone: ``BACKENDS`` run
everywhere, ``KERNELS`` on their platform.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import cached_property, partial

import jax

from posjax._checks import check, check_choice
from posjax._lowered import (
    PLATFORMS,
    Derivative,
    Form,
    Lowered,
    match_varying,
    mesh_of_types,
    run,
    split_by_compiler,
    zero_tangent,
)
from posjax.attention import cudnn
from posjax.attention.backend import Backend, JaxBackend
from posjax.attention.blockwise import FEW_LAUNCHES, IN_CACHE, blockwise, blockwise_gradients
from posjax.attention.call import Call
from posjax.attention.contextual import blockwise_contextual, dense_contextual
from posjax.attention.custom import has_custom
from posjax.attention.dense import dense, dense_gradients
from posjax.attention.gpu.backend import GPU
from posjax.attention.logits import mix, scores
from posjax.attention.rows import PerQuery, Rows, mark_for_checkpoint
from posjax.attention.tpu.backend import TPU
from posjax.bias import Contextual

BACKENDS = {"dense": JaxBackend(dense, dense_gradients), "blockwise": JaxBackend(blockwise, blockwise_gradients)}
"""Backends that support every call and run on every platform."""
GPU_LOOPS = JaxBackend(partial(blockwise, limits=FEW_LAUNCHES), partial(blockwise_gradients, limits=FEW_LAUNCHES))
"""``blockwise`` with tiles for NVIDIA GPUs, where it stands for ``BACKENDS["blockwise"]``."""
KERNELS = {"tpu": ("tpu", TPU()), "gpu": ("cuda", GPU())}
"""Packages of kernels by name: the platform that they run on, and the backend."""
IMPLEMENTATIONS = (*BACKENDS, *KERNELS, "cudnn")
"""All names. Kernels and ``cudnn`` run on one platform each and raise ValueError for calls that they do not support."""
CONTEXTUAL = {"dense": dense_contextual, "blockwise": blockwise_contextual}
"""What computes biases that read the queries and keys between a pair (CoPE, PaTH)."""

_LONGEST_DENSE = 512 * 512
"""The most pairs of a head for which ``dense`` may be the default: with more pairs it is faster to skip empty tiles."""
_RESULTS = len(Rows._fields)

_log = logging.getLogger("posjax")


def attend(implementation: str | None, call: Call, with_lse: bool) -> Rows:
    """The results for each query; all but the output may be None unless the log-sum-exp is wanted.

    ``implementation`` is that of ``posjax.attention``.
    """
    call = match_varying(call)
    small = _is_small(call)
    contextual = isinstance(call.bias, Contextual)
    if implementation is None and not (small or contextual):
        return _on_any_platform(call, with_lse)
    implementation = implementation or ("dense" if small else "blockwise")
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation in KERNELS:
        return _by_kernels(implementation, call)
    if implementation == "cudnn":
        why = cudnn.refusal(call, with_lse) or cudnn.unsupported(call)
        check(why is None, f"implementation='cudnn': {why}")
        return Rows(cudnn.cudnn(call.scaled))
    if contextual:
        return CONTEXTUAL[implementation](call)
    # Its program is short, so it need not wait for the platform; and it has derivatives of any order.
    if implementation == "dense":
        return BACKENDS["dense"].forward(call)
    return computed(_loops(), call)


def backends_of_parts(implementation: str | None, call: Call) -> Backends:
    """The backends for calls like this one over part of the keys of a sequence.

    Raises ValueError for a backend that does not support such calls, which need the log-sum-exp.
    """
    if implementation is None and not _is_small(call):
        return _loops(*_supporting(call))
    implementation = implementation or "dense"
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation in KERNELS:
        return _only(implementation, call)
    if implementation == "cudnn":
        why = cudnn.refusal(call, True)
        check(why is None, f"implementation='cudnn': {why}")
    return _loops() if implementation == "blockwise" else Backends(BACKENDS["dense"])


def needs_ranges(call: Call) -> bool:
    """Whether a call needs positions that are ranges or is faster with them: with decay, or with a bias by distance."""
    return call.decay is not None or any(kernels.needs_ranges(call) for _, kernels in KERNELS.values())


def _is_small(call: Call) -> bool:
    """Whether all logits fit in one tile of ``blockwise``, so that ``dense`` needs no more memory.

    False for more than ``_LONGEST_DENSE`` pairs of a head, and for a symbolic batch.
    """
    batch, kv_heads, group, queries, _ = call.q.shape
    pairs = queries * call.k.shape[2]
    known = isinstance(batch, int)
    return known and pairs <= _LONGEST_DENSE and batch * kv_heads * group * pairs <= IN_CACHE.logits


def _on_any_platform(call: Call, with_lse: bool) -> Rows:
    """The kernel of the platform that the program is lowered for, if it supports the call, otherwise ``blockwise``.

    On an NVIDIA GPU cuDNN comes first, but for calls with a bias, where it computes more features than our kernel.
    """
    supporting = dict(_supporting(call))
    backends = _loops(*supporting.items())
    cudnn_refusal = _cudnn_refusal(call, with_lse, kernel="cuda" in supporting)
    _log_choice("cuda", "cuDNN", cudnn_refusal)
    if cudnn_refusal and "cuda" not in supporting and _is_for_cuda():
        why = f"the kernel: {_refusal('gpu', call)}; cuDNN: {cudnn_refusal}"
        warnings.warn(
            f"attention runs in loops of XLA on this GPU, many times slower than a kernel. {why}", stacklevel=2
        )

    def usual() -> Rows:
        rows = computed(backends, call)
        return rows if with_lse else Rows(rows.out)

    if cudnn_refusal:
        return usual()
    return jax.lax.platform_dependent(default=usual, cuda=lambda: Rows(cudnn.cudnn(call.scaled)))


def _supporting(call: Call) -> tuple[tuple[str, Backend], ...]:
    """The platforms whose kernels support a call, and the kernels. Warns if only the partition is missing."""
    refusals = {name: _refusal(name, call) for name in KERNELS}
    for name, why in refusals.items():
        platform, kernels = KERNELS[name]
        _log_choice(platform, "the kernel of posjax", why)
        device = mesh_of_types(call.q, call.k, call.v).abstract_device
        on_mesh = (
            device is not None and device.platform in _names(platform) and split_by_compiler(call.q, call.k, call.v)
        )
        if on_mesh and kernels.refusal(call) is None:
            warnings.warn(f"attention runs without its {name.upper()} kernel: {why}", stacklevel=2)
    return tuple(KERNELS[name] for name, why in refusals.items() if why is None)


def _is_for_cuda() -> bool:
    """Whether programs are for an NVIDIA GPU: that of the mesh in use, or of this machine."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if target is None else target.platform) in _names("cuda")


def _names(platform: str) -> tuple[str, ...]:
    """What devices and meshes call a platform that programs are lowered for."""
    return ("gpu", "cuda") if platform == "cuda" else (platform,)


def _log_choice(platform: str, kernel: str, refusal: str | None) -> None:
    choice = kernel if refusal is None else f"not {kernel}, because {refusal}"
    _log.debug("attention on %s: %s", platform, choice)


def _refusal(name: str, call: Call) -> str | None:
    """Why a package of kernels does not run a call, or None."""
    if axes := split_by_compiler(call.q, call.k, call.v):
        return (
            f"the compiler does not split a {name.upper()} kernel over mesh axes {axes}; pass placement=, the partition"
            " of the queries, for instance jax.sharding.PartitionSpec('data', None, 'tensor'), or the placement of a "
            "DecoderConfig"
        )
    if jax.config.jax_enable_x64:
        return "with jax_enable_x64 the integers of a kernel would have 64 bits, which it does not support"
    return KERNELS[name][1].refusal(call)


def _cudnn_refusal(call: Call, with_lse: bool, kernel: bool) -> str | None:
    """Why cuDNN is not the default for a call, or None; a host without a suitable GPU is a reason too.

    ``kernel``: whether a kernel of posjax supports the call on NVIDIA GPUs.
    """
    if why := cudnn.refusal(call, with_lse):
        return why
    if kernel and call.bias is not None:
        return f"the kernel of posjax computes {type(call.bias).__name__} without more features"
    # The GPU is checked first, so that cuDNN is not traced on a host without one.
    return cudnn.unsupported(call) if cudnn.has_gpu() else "this host has no GPU that it runs on"


def _by_kernels(name: str, call: Call) -> Rows:
    platform, _ = KERNELS[name]
    backends = _only(name, call)
    try:
        return computed(backends, call)
    except (ValueError, NotImplementedError) as error:
        # When tracing, the platform is not known yet; without the device, jax raises later, when it lowers the program.
        if isinstance(call.q, jax.core.Tracer) or jax.default_backend() in _names(platform):
            raise
        why = f"found no {name.upper()}; use 'blockwise', or None to choose"
        raise ValueError(f"implementation={name!r}: {why}") from error


def _only(name: str, call: Call) -> Backends:
    """One package of kernels for every platform. Raises ValueError if it does not support the call."""
    why = _refusal(name, call)
    check(why is None, f"implementation={name!r}: {why}")
    return everywhere(KERNELS[name][1])


def _loops(*kernels: tuple[str, Backend]) -> Backends:
    """Loops of XLA, with the tiles of each platform, where none of these kernels runs."""
    return Backends(BACKENDS["blockwise"], (("cuda", GPU_LOOPS), *kernels))


def everywhere(kernels: Backend) -> Backends:
    """Kernels for every platform: those that are not theirs must interpret them."""
    return Backends(BACKENDS["blockwise"], tuple((platform, kernels) for platform in PLATFORMS))


@dataclass(frozen=True)
class Backends:
    """The backends of a call.

    Args:
        usual: for platforms without one of their own; its forward pass supports ``jax.jvp``.
        kernels: platforms and their own backends; of two for a platform the last one.
    """

    usual: Backend
    kernels: tuple[tuple[str, Backend], ...] = ()

    def of(self, platform: str) -> Backend:
        """The backend of a platform."""
        return dict(self.kernels).get(platform, self.usual)

    @cached_property
    def effects(self) -> frozenset:
        """The side effects that JAX must know when it traces: those of kernels that are interpreted everywhere."""
        backends = {self.of(platform) for platform in PLATFORMS}
        return frozenset() if self.usual in backends else frozenset.union(*(backend.effects for backend in backends))


def computed(backends: Backends, call: Call) -> Rows:
    """The results of a call."""
    form, arrays = Form.of(call, unique=has_custom(call.bias, *call.masks))
    return Rows(*run(_Forward(backends, form), *arrays))


def merge(backends: Backends, call: Call, so_far: Rows) -> Rows:
    """The results over the keys so far and the keys of ``call``, in the dtype of the statistics."""
    form, arrays = Form.of((call, so_far), unique=has_custom(call.bias, *call.masks))
    return Rows(*run(_OfPart(backends, "merge", form, tuple(range(-len(so_far), 0))), *arrays))


def per_query_of(backends: Backends, call: Call, rows: Rows, cotangents: Rows) -> PerQuery:
    """The input of the backward pass of a part of the keys, from the results and their cotangents."""
    form, arrays = Form.of((call, rows, cotangents), unique=has_custom(call.bias, *call.masks))
    of_out, of_lse = (Rows._fields.index(name) - len(rows) for name in ("out", "lse"))
    return PerQuery(*run(_OfPart(backends, "per_query_of", form, (of_out, of_lse, of_lse, of_lse)), *arrays))


def add(backends: Backends, call: Call, per_query: PerQuery, so_far: Call) -> Call:
    """The sums ``so_far`` plus the cotangents from the keys of ``call``; a sum that is not wanted is None.

    The cotangents of queries are those of the scaled queries.
    """
    form, arrays = Form.of((call, per_query, so_far), unique=has_custom(call.bias, *call.masks))
    structure = jax.tree.structure(so_far)
    sums = tuple(range(-structure.num_leaves, 0))
    return structure.unflatten(run(_OfPart(backends, "add", form, sums), *arrays))


@dataclass(frozen=True)
class _Forward(Lowered):
    """``Rows``; their tangents are ``_Tangents``, and the transpose of these is ``_Backward``."""

    backends: Backends
    form: Form

    @property
    def effects(self):
        """Those of the backends."""
        return self.backends.effects

    def types(self, *arrays):
        call = self.form.filled(arrays)
        with self.form.as_set():
            logits = scores(call.q, call.k)
            return Rows(mix(logits, call.v, call.v.dtype), *[logits.max(-1)] * (_RESULTS - 1))

    def on(self, platform, *arrays):
        with self.form.as_set():
            return self.backends.of(platform).forward(self.form.filled(arrays))

    def differentiated(self, primals, tangents):
        rows = mark_for_checkpoint(run(self, *primals))
        which = tuple(tangent is not None for tangent in tangents)
        if not any(which):
            return rows, tuple(map(zero_tangent, rows))
        nonzero = [tangent for tangent in tangents if tangent is not None]
        return rows, run(_Tangents(self, which), *primals, *rows, *nonzero)


class _Tangents(Derivative):
    """Tangents of the results.

    The results are arguments too, after those of ``_Forward``. They are for the transpose, which computes the weights
    ``P = exp(z - L)`` from them.
    """

    def types(self, *arrays):
        return arrays[len(self.which) : len(self.which) + _RESULTS]

    def on(self, platform, *arrays):
        primals = arrays[: len(self.which)]
        nonzero = arrays[len(self.which) + _RESULTS :]
        return super().on(platform, *primals, *nonzero)

    def transposed(self, constants, cotangents):
        return run(_Backward(self.function, self.which), *constants, *cotangents)


@dataclass(frozen=True)
class _Backward(Lowered):
    """Cotangents of the arrays that ``which`` selects, from the results and their cotangents."""

    forward: _Forward
    which: tuple[bool, ...]

    @property
    def effects(self):
        """Those of the backends."""
        return self.forward.effects

    def types(self, *arrays):
        return [x for selected, x in zip(self.which, arrays, strict=False) if selected]

    def on(self, platform, *arrays):
        primals = arrays[: len(self.which)]
        rows = Rows(*arrays[-2 * _RESULTS : -_RESULTS])
        cotangents = Rows(*arrays[-_RESULTS:])
        form = self.forward.form
        backend = self.forward.backends.of(platform)
        call = form.filled(primals)
        with form.as_set():
            per_query = backend.per_query_of(call, rows, cotangents)
            gradients = backend.backward(call, per_query, of_bias=_of_bias(form.filled(self.which)))
        return [x for selected, x in zip(self.which, form.taken(gradients), strict=True) if selected]


def _of_bias(wanted: Call) -> bool:
    """Whether the gradient of some array of the bias is wanted.

    In ``wanted``, values that are known when tracing stand for themselves, so only ``True`` itself counts.
    """
    return any(leaf is True for leaf in jax.tree.leaves(wanted.bias))


@dataclass(frozen=True)
class _OfPart(Lowered):
    """The results of a backend's method for a part of the keys.

    Args:
        backends: the backends of the call.
        method: the name of the method.
        form: the form of its arguments.
        alike: for each result, the index of an argument of the same type.
    """

    backends: Backends
    method: str
    form: Form
    alike: tuple[int, ...]

    @property
    def effects(self):
        """Those of the backends."""
        return self.backends.effects

    def types(self, *arrays):
        return [arrays[n] for n in self.alike]

    def on(self, platform, *arrays):
        with self.form.as_set():
            return jax.tree.leaves(getattr(self.backends.of(platform), self.method)(*self.form.filled(arrays)))
