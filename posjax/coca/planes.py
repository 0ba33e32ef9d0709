"""CoCA's features plane by plane: the formulas, and the function that makes features, which is a kernel on TPUs."""

from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._lowered import Lowered, run, split_by_compiler, zero_tangent
from posjax._numbers import at_least_float32
from posjax.coca import tpu


def strict(x, y, cos, sin):
    """``phi`` of the variant strict, for a free query."""
    squared = x * x + y * y
    return squared * cos, squared * sin


def tied(x, cos, sin):
    """``phi`` of the variant tied, for a query with ``y = x``."""
    return strict(x, x, cos, sin)


def slack(x, y, cos, sin):
    """``phi`` of the variant slack, which the released code computes."""
    return (x * x + y * y) * cos, 2 * x * y * sin + (y - x) * (y + x) * cos


def relative(x, y, cos, sin):
    """``phi`` of the variant relative: slack without its absolute part."""
    uu = (x + y) * (x + y) / 2
    uw = (y - x) * (y + x) / 2
    return uu * cos - uw * sin, uu * sin + uw * cos


def key(t, cos, sin):
    """``psi``, the same for every variant."""
    positive = jax.nn.relu(t)
    return positive * cos, positive * sin


QUERY = {"strict": strict, "tied": tied, "slack": slack, "relative": relative}
"""The formulas of ``phi``, by variant."""


def split(x: Float[Array, "*b width"], pairing: str) -> tuple[Array, Array]:
    """Both components of all planes."""
    return (x[..., 0::2], x[..., 1::2]) if pairing == "interleaved" else tuple(jnp.split(x, 2, axis=-1))


def join(first: Float[Array, "*b planes"], second: Float[Array, "*b planes"], pairing: str) -> Float[Array, "*b width"]:
    """The inverse of ``split``."""
    if pairing == "interleaved":
        return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
    return jnp.concatenate([first, second], axis=-1)


def feature(
    formula: tpu.Formula, pairing: str | None, cos: Array, sin: Array, x: Float[Array, "batch length heads width"]
) -> Float[Array, "batch length heads size"]:
    """Features with a table ``[batch or 1, length, planes]``: the first of all planes, then the second.

    Computed in at least float32, returned in the dtype of ``x``. ``pairing`` is None for a formula of one component,
    which is then all of ``x``.
    """
    function = _Feature(formula, pairing)
    if tpu.supports(x, cos) and not split_by_compiler(x):
        return run(function, cos.astype(jnp.float32), sin.astype(jnp.float32), x)[0]
    return function.plain(cos, sin, x)


@dataclass(frozen=True)
class _Feature(Lowered):
    """Features as a function of cosines, sines and components; it is a kernel on TPUs."""

    formula: tpu.Formula
    pairing: str | None

    def plain(self, cos, sin, x):
        """The XLA implementation."""
        wide = x.astype(at_least_float32(x.dtype))
        components = split(wide, self.pairing) if self.pairing else (wide,)
        table = (part[:, :, None].astype(wide.dtype) for part in (cos, sin))
        return jnp.concatenate(self.formula(*components, *table), axis=-1).astype(x.dtype)

    def types(self, cos, sin, x):
        return [self.plain(cos, sin, x)]

    def on(self, platform, cos, sin, x):
        if platform == "tpu":
            return [tpu.features(x, cos, sin, formula=self.formula, pairing=self.pairing)]
        return [self.plain(cos, sin, x)]

    def differentiated(self, primals, tangents):
        """Features are linear in the table, so XLA computes the part that comes from the table's tangent."""
        *table, x = primals
        *d_table, d_x = tangents
        parts = [] if d_x is None else run(_Tangent(self), *primals, d_x)
        if any(part is not None for part in d_table):
            filled = [zero_tangent(a) if d is None else d for a, d in zip(table, d_table, strict=True)]
            parts = [*parts, self.plain(*filled, x)]
        return run(self, *primals), [reduce(jnp.add, parts)]


@dataclass(frozen=True)
class _Linearised(Lowered):
    """A function of cosines, sines, components and a fourth argument, linear in the last. XLA differentiates it."""

    of: _Feature

    @property
    def linear(self):
        return 1

    def plain(self, *arrays):
        """The XLA implementation."""
        raise NotImplementedError

    def types(self, *arrays):
        return [self.plain(*arrays)]

    def on(self, platform, *arrays):
        return [self.plain(*arrays)]

    def differentiated(self, primals, tangents):
        filled = (zero_tangent(x) if d is None else d for x, d in zip(primals, tangents, strict=True))
        value, tangent = jax.jvp(self.plain, primals, tuple(filled))
        return [value], [tangent]


class _Tangent(_Linearised):
    """The tangent of features, from the tangent of components."""

    def plain(self, cos, sin, x, d_x):
        return jax.jvp(partial(self.of.plain, cos, sin), (x,), (d_x,))[1]

    def transposed(self, constants, cotangents):
        return run(_Cotangent(self.of), *constants, *cotangents)


class _Cotangent(_Linearised):
    """The cotangent of components, from the cotangent of features; it is a kernel on TPUs."""

    def plain(self, cos, sin, x, d_features):
        return jax.vjp(partial(self.of.plain, cos, sin), x)[1](d_features)[0]

    def on(self, platform, cos, sin, x, d_features):
        if platform == "tpu":
            return [tpu.gradient(x, cos, sin, d_features, formula=self.of.formula, pairing=self.of.pairing)]
        return [self.plain(cos, sin, x, d_features)]

    def transposed(self, constants, cotangents):
        return run(_Tangent(self.of), *constants, *cotangents)
