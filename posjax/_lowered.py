"""Functions whose implementation is chosen and traced when a program is lowered, only for the program's platform.

``jax.lax.platform_dependent`` traces an implementation for every platform into every program. Here one JAX primitive
represents all of them until the platform is known. ``vmap``, differentiation and transposition of this primitive give
the same primitive with another function.

A function is traced late, so anything it reads besides its arguments is read when the program is lowered. Therefore the
JAX settings it depends on are stored (``Form.settings``), and NumPy arrays are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh
from jaxtyping import Array

from posjax._numbers import is_number

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Lowered:
    """A function that takes all its arrays as arguments. A subclass is hashable: it is a key of compiled programs."""

    @property
    def linear(self) -> int:
        """The number of last arguments in which the function is linear."""
        return 0

    @property
    def effects(self) -> frozenset:
        """The side effects of its implementations, such as those of an interpreted kernel."""
        return frozenset()

    def types(self, *arrays: Array) -> Sequence[Array]:
        """Arrays with the types of the results: shapes, dtypes and shardings. It is traced, never run."""
        raise NotImplementedError

    def on(self, platform: str, *arrays: Array) -> Sequence[Array]:
        """The results on one of ``PLATFORMS``; ``""`` is an implementation that runs anywhere and has a ``jvp``."""
        raise NotImplementedError

    def differentiated(self, primals: tuple, tangents: tuple) -> tuple[Sequence[Array], Sequence[Array]]:
        """The results and their tangents; ``tangents`` has None for every argument without a tangent."""
        which = tuple(tangent is not None for tangent in tangents)
        nonzero = [tangent for tangent in tangents if tangent is not None]
        return run(self, *primals), run(Derivative(self, which), *primals, *nonzero)

    def transposed(self, constants: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        """The cotangents of the last arguments, in which the function is linear."""
        raise ValueError("attention is not linear in its arguments, so it has no transpose; use jax.vjp for gradients")


@dataclass(frozen=True)
class Derivative(Lowered):
    """The function that computes the tangents of another function's results.

    Its arguments are those of the other function, and then the tangents of the arguments that ``which`` marks.
    """

    function: Lowered
    which: tuple[bool, ...]

    @property
    def linear(self) -> int:
        """The number of tangents among the arguments."""
        return sum(self.which)

    def types(self, *arrays):
        """Arrays with the types of the tangents, which are the types of the results."""
        return self.function.types(*arrays[: len(self.which)])

    def on(self, platform, *arrays):
        """The tangents, from ``jax.jvp`` of the implementation that runs anywhere."""
        primals = arrays[: len(self.which)]
        nonzero = iter(arrays[len(self.which) :])
        tangents = [
            next(nonzero) if has_tangent else zero_tangent(x)
            for has_tangent, x in zip(self.which, primals, strict=True)
        ]
        return jax.jvp(functools.partial(self.function.on, ""), primals, tuple(tangents))[1]

    def transposed(self, constants, cotangents):
        """Raises ValueError: its loops have lengths that are not known when tracing, and JAX cannot transpose them."""
        raise ValueError(
            "attention: a second derivative in reverse mode (reverse over reverse, reverse over forward) needs "
            "implementation='dense'; forward over reverse, as in jax.jvp(jax.grad(f), ...), works at every size"
        )


@dataclass(frozen=True)
class Mapped(Lowered):
    """A function under ``vmap``: over the given axes of its arguments, and over the first axis of its results."""

    function: Lowered
    axes: tuple[int | None, ...]

    @property
    def linear(self) -> int:
        """The number of last arguments in which the mapped function is linear."""
        return self.function.linear

    @property
    def effects(self) -> frozenset:
        """Those of the mapped function."""
        return self.function.effects

    def types(self, *arrays):
        """Arrays with the types of the mapped function's results."""
        return jax.vmap(self.function.types, self.axes)(*arrays)

    def on(self, platform, *arrays):
        """The results of the mapped function."""
        return jax.vmap(functools.partial(self.function.on, platform), self.axes)(*arrays)

    def differentiated(self, primals, tangents):
        """The results and tangents of the mapped function."""
        return jax.vmap(self.function.differentiated, (self.axes, self.axes))(primals, tangents)

    def transposed(self, constants, cotangents):
        """The cotangents of the mapped function, summed over the rows for arguments that all rows share."""
        axes = self.axes[: len(constants)], 0
        mapped = jax.vmap(self.function.transposed, axes)(constants, cotangents)
        with_axes = zip(mapped, self.axes[len(constants) :], strict=True)
        return [x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in with_axes]


_lowered_p = Primitive("posjax")
_lowered_p.multiple_results = True


def run(function: Lowered, *arrays: Array) -> list[Array]:
    """The results of a function, computed by its implementation for the platform of the program."""
    return _lowered_p.bind(*arrays, function=function)


@functools.partial(jax.jit, static_argnames="function")
def _compiled(*arrays, function):
    return _lowered_p.bind(*arrays, function=function)


def _eager(*arrays, function):
    with jax.disable_jit(False):  # without jit nothing would ever be lowered
        return _compiled(*arrays, function=function)


def _types(*types, function: Lowered) -> tuple[list, frozenset]:
    return jax.make_jaxpr(function.types)(*types).out_avals, function.effects


def _lowering(platform: str):
    return mlir.lower_fun(lambda *arrays, function: function.on(platform, *arrays), multiple_results=True)


def _mapped(arrays, axes, *, function: Lowered) -> tuple:
    results = run(Mapped(function, tuple(axes)), *arrays)
    return results, [0] * len(results)


def _differentiated(primals, tangents, *, function: Lowered) -> tuple:
    first_linear = len(primals) - function.linear
    tangents = [None if type(t) is ad.Zero else t for t in tangents]
    if function.linear and all(tangent is None for tangent in tangents[:first_linear]):
        filled = [
            zero_tangent(x) if t is None else t
            for x, t in zip(primals[first_linear:], tangents[first_linear:], strict=True)
        ]
        return run(function, *primals), run(function, *primals[:first_linear], *filled)
    return function.differentiated(tuple(primals), tuple(tangents))


def _transposed(cotangents, *arrays, function: Lowered) -> list:
    first_linear = len(arrays) - function.linear
    constants = arrays[:first_linear]
    last = arrays[first_linear:]
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    gradients = function.transposed(constants, cotangents)
    return [None] * first_linear + [
        x if ad.is_undefined_primal(y) else None for x, y in zip(gradients, last, strict=True)
    ]


_lowered_p.def_impl(_eager)
_lowered_p.def_effectful_abstract_eval(_types)
mlir.register_lowering(_lowered_p, _lowering(""))
for _platform in PLATFORMS:
    mlir.register_lowering(_lowered_p, _lowering(_platform), platform=_platform)
batching.primitive_batchers[_lowered_p] = _mapped
ad.primitive_jvps[_lowered_p] = _differentiated
ad.primitive_transposes[_lowered_p] = _transposed


def mesh_of_types(*arrays: Array) -> AbstractMesh:
    """The mesh in the types of the arrays: the first mesh that is not empty, if there is one."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def split_by_compiler(*arrays: Array) -> list[str]:
    """The mesh axes outside any ``shard_map``: a kernel cannot run on arrays that the compiler shards over them."""
    mesh = mesh_of_types(*arrays)
    axes = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    return axes if mesh.size > 1 or mesh.manual_axes else []


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which an array varies inside ``shard_map``."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Array, axes: frozenset[str]) -> Array:
    """The array, varying over ``axes`` too, as the carry of a loop must inside ``shard_map``."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_varying(tree: Any) -> Any:
    """The tree with every array varying, inside ``shard_map``, over all mesh axes that any of them varies over.

    Numbers and NumPy arrays, which are known when tracing, stay unchanged. The transpose of this step sums, over the
    devices, the gradient of a parameter that is the same on all of them, such as a slope.
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))

    def matched(leaf):
        return leaf if is_number(leaf) or isinstance(leaf, np.ndarray) else vary(leaf, axes)

    return jax.tree.map(matched, tree)


def full_varying_like(shape: tuple[int, ...], dtype, like: Array, fill: float = 0.0) -> Array:
    """A constant that varies over the same mesh axes as ``like``, as a loop's carry must inside ``shard_map``."""
    return vary(jnp.full(shape, fill, dtype), varying(like))


def split_symbolic_zeros(tree: Any) -> tuple[Any, list[bool]]:
    """The values of the tree that a ``custom_vjp`` rule with symbolic zeros gets, and which gradients are wanted."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    return structure.unflatten([leaf.value for leaf in leaves]), [leaf.perturbed for leaf in leaves]


def no_gradient(leaf: Array) -> Array | np.ndarray:
    """The zero cotangent of a leaf, of ``float0`` if it is not differentiable."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return full_varying_like(leaf.shape, leaf.dtype, leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def zero_tangent(x: Array) -> Any:
    """The zero tangent of an array."""
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return ad.instantiate_zeros(zero_from_primal(x))
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


class _Known:
    """A leaf whose numbers are known when tracing: a number, or a NumPy array, copied because it may change later."""

    def __init__(self, leaf: Any):
        array = np.array(leaf)
        self.leaf = array if isinstance(leaf, np.ndarray) else leaf
        self._key = type(leaf), array.dtype, array.shape, array.tobytes()

    def __eq__(self, other):
        return type(other) is _Known and self._key == other._key

    def __hash__(self):
        return hash(self._key)


@dataclass(frozen=True, eq=False)
class Form:
    """The structure of a tree and its leaves that are known when tracing; its JAX arrays are taken out.

    Args:
        structure: of the tree.
        known: its leaves, with None for those that were taken out.
        settings: the JAX settings when the form was made: precision of matrix products, and whether x64 is enabled.
        token: makes the form equal to no other, for a tree with classes from outside the library, which may read
            anything; otherwise None.
    """

    structure: Any
    known: tuple[_Known | None, ...]
    settings: tuple[str | None, bool]
    token: object = None

    @staticmethod
    def of(tree: Any, unique: bool = False) -> tuple[Form, list[Array]]:
        """The form of a tree, and the arrays that were taken out; a ``unique`` form equals no other."""
        leaves, structure = jax.tree.flatten(tree)
        are_arrays = [isinstance(leaf, jax.Array) for leaf in leaves]
        known = tuple(None if is_array else _Known(leaf) for is_array, leaf in zip(are_arrays, leaves, strict=True))
        settings = jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64
        form = Form(structure, known, settings, object() if unique else None)
        return form, [leaf for is_array, leaf in zip(are_arrays, leaves, strict=True) if is_array]

    def filled(self, arrays: Sequence[Array]) -> Any:
        """The tree with these arrays in place of those that were taken out."""
        rest = iter(arrays)
        return self.structure.unflatten([next(rest) if known is None else known.leaf for known in self.known])

    def taken(self, tree: Any) -> list[Any]:
        """The leaves of a tree of the same structure that correspond to the arrays that were taken out."""
        return [leaf for known, leaf in zip(self.known, jax.tree.leaves(tree), strict=True) if known is None]

    @contextmanager
    def as_set(self) -> Iterator[None]:
        """A context with the JAX settings that were active when the form was made."""
        precision, wide = self.settings
        with jax.default_matmul_precision(precision), jax.enable_x64(wide):
            yield

    @functools.cached_property
    def _key(self) -> tuple:
        # 1, 1.0 and True are equal as structure but differ as text.
        return str(self.structure), self.known, self.settings, self.token

    def __eq__(self, other):
        return type(other) is Form and self._key == other._key and self.structure == other.structure

    def __hash__(self):
        return hash(self._key)
