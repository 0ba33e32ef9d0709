"""Attention as one operation: forward, tangents and backward, each computed by a backend of the program's platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from posjax.attention.lowered import Form, Lowered, run, zero_tangent
from posjax.attention.operands import Operands, mix, named, scores
from posjax.attention.own import has_own

Backend = Callable[..., tuple[Array, Array]]
"""``backend(operands, scale, given=None)`` gives output and log-sum-exp; see ``posjax.attention.dense.dense``."""


@dataclass(frozen=True)
class Backends:
    """What computes a call.

    Args:
        usual: where there is no kernel; forward, it may be differentiated by ``jax.jvp``.
        kernels: the platforms that have one, and those.
    """

    usual: Backend
    kernels: tuple[tuple[str, Backend], ...] = ()

    def of(self, platform: str) -> Backend:
        """What computes on a platform."""
        return dict(self.kernels).get(platform, self.usual)


def attend(backends: Backends, x: Operands, scale: Any, given: tuple | None = None) -> tuple[Array, Array]:
    """Output and log-sum-exp of a call whose queries are not scaled yet; with ``given`` as in ``dense``."""
    form, arrays = Form.of((x, scale), unique=has_own(x))
    if given is None:
        return tuple(run(_Forward(backends, form), *arrays))
    return tuple(run(_OfSomeKeys(backends, form), *arrays, *map(jax.lax.stop_gradient, given)))


@dataclass(frozen=True)
class _Forward(Lowered):
    """Output and log-sum-exp; its tangents are ``_Tangents``, and their transpose is ``_Backward``."""

    backends: Backends
    form: Form

    def types(self, *arrays):
        x, _ = self.form.filled(arrays)
        with self.form.as_set():
            logits = scores(x.q, x.k)
            return mix(logits, x.v, x.v.dtype), logits.max(-1)

    def on(self, platform, *arrays):
        with self.form.as_set():
            return self.backends.of(platform)(*self.form.filled(arrays))

    def differentiated(self, primals, tangents):
        rows = named(*run(self, *primals))
        return rows, _tangents(self, primals, tangents, rows)


@dataclass(frozen=True)
class _OfSomeKeys(Lowered):
    """Output and log-sum-exp of whole rows as they are, with the tangents of some of their keys."""

    backends: Backends
    form: Form

    def types(self, *arrays):
        return arrays[-2:]

    def on(self, platform, *arrays):
        return arrays[-2:]

    def differentiated(self, primals, tangents):
        return primals[-2:], _tangents(self, primals[:-2], tangents[:-2], primals[-2:])


def _tangents(of: _Forward | _OfSomeKeys, primals: tuple, tangents: tuple, rows: tuple) -> Sequence[Array]:
    which = tuple(tangent is not None for tangent in tangents)
    if not any(which):
        return tuple(map(zero_tangent, rows))
    moved = [tangent for tangent in tangents if tangent is not None]
    return run(_Tangents(of.backends, of.form, which), *primals, *rows, *moved)


@dataclass(frozen=True)
class _Tangents(Lowered):
    """Tangents of output and log-sum-exp, from their values and from the tangents of the arrays that ``which`` names.

    The values are for the transpose, which finds the weights ``P = exp(z - lse)`` from them.
    """

    backends: Backends
    form: Form
    which: tuple[bool, ...]

    @property
    def linear(self):
        return sum(self.which)

    def types(self, *arrays):
        return arrays[len(self.which) : len(self.which) + 2]

    def on(self, platform, *arrays):
        primals, moved = arrays[: len(self.which)], iter(arrays[len(self.which) + 2 :])
        tangents = [next(moved) if own else zero_tangent(x) for own, x in zip(self.which, primals, strict=True)]
        with self.form.as_set():
            return jax.jvp(lambda *x: self.backends.usual(*self.form.filled(x)), primals, tuple(tangents))[1]

    def transposed(self, constants, cotangents):
        return run(_Backward(self.backends, self.form, self.which), *constants, *cotangents)


@dataclass(frozen=True)
class _Backward(Lowered):
    """Cotangents of the arrays that ``which`` names, from output, log-sum-exp, and the cotangents of both."""

    backends: Backends
    form: Form
    which: tuple[bool, ...]

    def types(self, *arrays):
        return [x for own, x in zip(self.which, arrays, strict=False) if own]

    def on(self, platform, *arrays):
        primals, rows, cotangents = arrays[:-4], arrays[-4:-2], arrays[-2:]

        def part(*chosen):
            chosen = iter(chosen)
            filled = [next(chosen) if own else x for own, x in zip(self.which, primals, strict=True)]
            return self.backends.of(platform)(*self.form.filled(filled), given=rows)

        with self.form.as_set():
            return jax.vjp(part, *self.types(*primals))[1](tuple(cotangents))
