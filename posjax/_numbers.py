"""Numbers that are static if Python knows them and pytree leaves if they are arrays; dtypes of sums; equal ranks."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posjax._checks import check, is_known

LARGEST = 2**31 - 1
"""The largest int32."""

_LEAVES = "_leaves"


def at_least_float32(*dtypes) -> jnp.dtype:
    """float64 if one of the dtypes is float64, otherwise float32; works without implicit dtype promotion too."""
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in map(jnp.dtype, dtypes) else jnp.float32)


def widened(x):
    """``x`` in at least float32: low precision holds neither positions nor long sums."""
    return x.astype(at_least_float32(x.dtype))


def rounded_sum(a, b) -> tuple:
    """The sum of two finite floats, rounded, and exactly what rounding lost (Knuth, TAOCP 2, section 4.2.2)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def is_number(value: Any) -> bool:
    """Whether a value is a number known when tracing, not an array."""
    return isinstance(value, numbers.Real)


def is_array_number(value: Any) -> bool:
    """Whether a number is a JAX array, whose value is known only at run time."""
    return isinstance(value, jax.Array)


def register_numbers(cls: type, scalars: tuple[str, ...], structure: tuple[str, ...] = ()) -> type:
    """Registers a dataclass as a pytree. Each of the ``scalars`` is a leaf if it is an array, otherwise structure.

    Fields in ``structure`` are always structure; all other fields are subtrees.
    """
    names = tuple(field.name for field in dataclasses.fields(cls))

    def leaves_of(value) -> tuple[str, ...]:
        """The names of the fields that are leaves."""
        named_values = ((name, getattr(value, name)) for name in names if name not in structure)
        return tuple(name for name, x in named_values if name not in scalars or not _is_structure(x))

    def flatten(value):
        # Leaves stay leaves: transformations replace them with placeholders such as None, 0 or a tuple.
        leaves = vars(value).get(_LEAVES) or leaves_of(value)
        known = tuple((name, getattr(value, name)) for name in names if name not in leaves)
        return tuple((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in leaves), (leaves, known)

    def unflatten(fields, leaves):
        made = object.__new__(cls)
        for name, x in (*zip(fields[0], leaves, strict=True), *fields[1], (_LEAVES, fields[0])):
            object.__setattr__(made, name, x)
        return made

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def _is_structure(value: Any) -> bool:
    return value is None or type(value) is tuple or isinstance(value, numbers.Real)


def whole_number(name: str, value: Any, at_least: int = 1) -> int | jax.Array:
    """A size as a Python int, or as an int32 scalar if it is a JAX array.

    Raises:
        ValueError: unless it is whole, at least ``at_least`` and within int32. Traced values are not checked.
    """
    wanted = "positive and whole" if at_least == 1 else "whole"
    if is_array_number(value) or isinstance(value, np.ndarray):
        fits = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
        check(fits, f"{name} must be {wanted}, found an array of {value.dtype} and shape {value.shape}")
        if is_array_number(value) and not is_known(value):
            return value.astype(jnp.int32)
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be {wanted}, found {value!r}")
    number = int(value)
    check(at_least <= number, f"{name} must be {wanted}, found {number}")
    check(abs(number) <= LARGEST, f"{name} must fit in int32, at most {LARGEST}, found {number}")
    return value.astype(jnp.int32) if is_array_number(value) else number


def positive_number(name: str, value: Any) -> float | jax.Array:
    """A number as a Python float or int, or as a scalar array if it is a JAX array.

    Raises:
        ValueError: unless it is a finite number above zero. Traced values are not checked.
    """
    if is_array_number(value) or isinstance(value, np.ndarray):
        fits = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)
        check(fits, f"{name} must be a positive number, found an array of {value.dtype} and shape {value.shape}")
        if is_array_number(value) and not is_known(value):
            return value
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be positive, found {value!r}")
    check(float(value) > 0, f"{name} must be positive, found {float(value)}")
    check(float(value) < float("inf"), f"{name} must be finite, found {float(value)}")
    return value if is_array_number(value) else value.item() if isinstance(value, np.ndarray | np.generic) else value


def align_ranks(*arrays) -> tuple:
    """The arrays with leading axes of 1, all of one rank: they broadcast without implicit rank promotion too."""
    rank = max(x.ndim for x in arrays)
    return tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays)
