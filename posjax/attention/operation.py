"""Attention as one JAX primitive: forward, tangents and backward, each computed by a backend for the platform.

Merging part of the keys into earlier results is a primitive of the same kind; see ``posjax.attention.backends``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from posjax._lowered import Derivative, Form, Lowered, run, zero_tangent
from posjax._numbers import is_number
from posjax.attention.backends import TPU, Backend
from posjax.attention.operands import Operands, like_zeros, mix, scores, taken_apart
from posjax.attention.own import has_own
from posjax.attention.rows import PerQuery, Rows, named

_RESULTS = len(Rows._fields)


@dataclass(frozen=True)
class Backends:
    """The backends of a call.

    Args:
        usual: for platforms without a kernel; its forward pass supports ``jax.jvp``.
        kernels: platforms and their kernels.
    """

    usual: Backend
    kernels: tuple[tuple[str, TPU], ...] = ()

    def of(self, platform: str) -> Backend | TPU:
        """The backend of a platform."""
        return dict(self.kernels).get(platform, self.usual)


def attend(backends: Backends, x: Operands, scale: Any) -> Rows:
    """The results of a call whose queries are not scaled yet."""
    form, arrays = Form.of((x, scale), unique=has_own(x))
    return Rows(*run(_Forward(backends, form), *arrays))


def attend_here(backend: Backend | TPU, x: Operands, scale: Any) -> Rows:
    """``attend`` by a backend that is traced now, for any platform; used for an interpreted kernel."""
    number = is_number(scale)
    return _here((backend, scale if number else None), x, None if number else scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _here(static: tuple, x: Operands, scale: Any) -> Rows:
    backend, number = static
    return backend.forward(x, number if scale is None else scale)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "scale", "rows"], meta_fields=["of_bias"])
@dataclass(frozen=True)
class _SavedHere:
    """Residuals of the forward pass, and whether the gradient of the bias is wanted."""

    x: Operands
    scale: Any
    rows: Rows
    of_bias: bool


def _forward_here(static, x, scale):
    ((x, scale), _), (_, wanted) = taken_apart((x, scale)), taken_apart(x.bias)
    rows = named(_here(static, x, scale))
    return rows, _SavedHere(x, scale, rows, any(wanted))


def _backward_here(static, saved: _SavedHere, cotangents):
    (backend, number), x, scale, rows = static, saved.x, saved.scale, saved.rows
    materialized = [like_zeros(c.shape, c.dtype, rows.out) if isinstance(c, SymbolicZero) else c for c in cotangents]
    per_query = backend.per_query_of(x, rows, Rows(*materialized))
    d_x, d_scale = backend.backward(x, number if scale is None else scale, per_query, of_bias=saved.of_bias)
    return d_x, None if scale is None else d_scale


_here.defvjp(_forward_here, _backward_here, symbolic_zeros=True)


def merge(backends: Backends, x: Operands, scale: Any, so_far: Rows) -> Rows:
    """The results over the keys so far and the keys of ``x``, in the dtype of the statistics."""
    form, arrays = Form.of((x, scale, so_far), unique=has_own(x))
    return Rows(*run(_OfPart(backends, "merge", form, tuple(range(-len(so_far), 0))), *arrays))


def per_query_of(backends: Backends, x: Operands, rows: Rows, cotangents: Rows) -> PerQuery:
    """The input of the backward pass of a part of the keys, from the results and their cotangents."""
    form, arrays = Form.of((x, rows, cotangents), unique=has_own(x))
    of_out, of_lse = (Rows._fields.index(name) - len(rows) for name in ("out", "lse"))
    return PerQuery(*run(_OfPart(backends, "per_query_of", form, (of_out, of_lse, of_lse, of_lse)), *arrays))


def add(backends: Backends, x: Operands, scale: Any, per_query: PerQuery, so_far: Operands) -> Operands:
    """The sums ``so_far`` plus the cotangents from the keys of ``x``; a sum that is not wanted is None.

    The cotangents of queries are those of the scaled queries.
    """
    form, arrays = Form.of((x, scale, per_query, so_far), unique=has_own(x))
    structure = jax.tree.structure(so_far)
    sums = tuple(range(-structure.num_leaves, 0))
    return structure.unflatten(run(_OfPart(backends, "add", form, sums), *arrays))


@dataclass(frozen=True)
class _Forward(Lowered):
    """``Rows``; their tangents are ``_Tangents``, and the transpose of these is ``_Backward``."""

    backends: Backends
    form: Form

    def types(self, *arrays):
        x, _ = self.form.filled(arrays)
        with self.form.as_set():
            logits = scores(x.q, x.k)
            return Rows(mix(logits, x.v, x.v.dtype), *[logits.max(-1)] * (_RESULTS - 1))

    def on(self, platform, *arrays):
        with self.form.as_set():
            return self.backends.of(platform).forward(*self.form.filled(arrays))

    def differentiated(self, primals, tangents):
        rows = named(run(self, *primals))
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
        primals, nonzero = arrays[: len(self.which)], arrays[len(self.which) + _RESULTS :]
        return super().on(platform, *primals, *nonzero)

    def transposed(self, constants, cotangents):
        return run(_Backward(self.function, self.which), *constants, *cotangents)


@dataclass(frozen=True)
class _Backward(Lowered):
    """Cotangents of the arrays that ``which`` selects, from the results and their cotangents."""

    forward: _Forward
    which: tuple[bool, ...]

    def types(self, *arrays):
        return [x for selected, x in zip(self.which, arrays, strict=False) if selected]

    def on(self, platform, *arrays):
        primals = arrays[: len(self.which)]
        rows, cotangents = Rows(*arrays[-2 * _RESULTS : -_RESULTS]), Rows(*arrays[-_RESULTS:])
        form = self.forward.form
        backend, (x, scale) = self.forward.backends.of(platform), form.filled(primals)
        wanted, _ = form.filled(self.which)
        with form.as_set():
            per_query = backend.per_query_of(x, rows, cotangents)
            found = backend.backward(x, scale, per_query, of_bias=_of_bias(wanted))
        return [x for selected, x in zip(self.which, form.taken(found), strict=True) if selected]


def _of_bias(wanted: Operands) -> bool:
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

    def types(self, *arrays):
        return [arrays[n] for n in self.alike]

    def on(self, platform, *arrays):
        with self.form.as_set():
            return jax.tree.leaves(getattr(self.backends.of(platform), self.method)(*self.form.filled(arrays)))
