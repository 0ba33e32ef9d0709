"""Argument checks whose messages name the argument, what was found and what would work."""

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a pointer, which git-lfs leaves in the place of a file that it has not fetched."""
IS_POINTER = "only a pointer of git-lfs, not the file: run `git lfs pull` in its folder, or download the file"


def check_no_pointer(content: bytes, path: Any) -> None:
    """Raises if a file, by its first bytes, is a pointer of git-lfs."""
    check(not content.startswith(POINTER), f"{path} is {IS_POINTER}")


_LONGEST = 100
_MOST = 16


def describe(value: Any) -> str:
    """The text for a value in a message: dtype and shape of an array, type of a tree of arrays, name of a class.

    For any other value it is the repr, shortened.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, jax.core.Tracer):
        return f"a traced {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype} array of shape {tuple(value.shape)}"
    if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)):
        return f"a {type(value).__name__} of arrays"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def nearest(value: Any, known: Collection[str], listing: str = "") -> str:
    """The end of a message about an unknown name: the nearest known name, and all known names if they are few.

    If there are many, the message has a few near ones, and ``listing`` says where all are listed.
    """
    close = get_close_matches(value, known, n=3, cutoff=0.4) if isinstance(value, str) else []
    near = get_close_matches(str(value), close, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if len(known) <= _MOST or not listing:
        return f"{hint} (known: {', '.join(known)})"
    some = f", among them {', '.join(close)}" if close else ""
    return f"{hint} ({len(known)} are known{some}; {listing} list them)"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises unless ``value`` is one of ``choices``; suggests the nearest one."""
    if isinstance(value, str) and value in choices:
        return
    raise ValueError(f"{name}: unknown value {describe(value)}{nearest(value, sorted(choices))}")


def is_known(array: Any) -> bool:
    """Whether this process can read the numbers of an array now: it is neither traced nor on other hosts."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def check_array(name: str, value: Any) -> None:
    """Raises unless ``value`` is a NumPy or JAX array."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    check(is_array, f"{name} must be an array, found {describe(value)}; jnp.asarray makes one of a list of numbers")


def check_float(name: str, array: Any) -> None:
    """Raises unless ``array`` is of a floating dtype of 16 bits or more: narrower ones have no arithmetic here."""
    check_array(name, array)
    check(jnp.issubdtype(array.dtype, jnp.floating), f"{name} must be of a floating dtype, found {array.dtype}")
    wide = jnp.dtype(array.dtype).itemsize > 1
    check(wide, f"{name} must be bfloat16, float16, float32 or float64, found {array.dtype}; cast it to bfloat16")


def check_tokens(name: str, array: Any) -> None:
    """Raises unless ``array`` is ``[batch, length]`` of integers."""
    check_rank(name, array, 2, "[batch, length]")
    check(jnp.issubdtype(array.dtype, jnp.integer), f"{name} must be integers, found {array.dtype}")


def check_valid(valid: Any, of: str, shape: tuple[int, ...]) -> None:
    """Raises unless ``valid`` is an array of booleans with the shape of the tokens ``of``."""
    check_array("valid", valid)
    fits = valid.shape == shape and valid.dtype == bool
    check(fits, f"valid must be booleans of the shape of {of}, {shape}, found {describe(valid)}")


def check_heads(name: str, array: Any) -> None:
    """Raises unless ``array`` is ``[batch, length, heads, size]`` of a floating dtype, no axis empty but the batch."""
    check_rank(name, array, 4, "[batch, length, heads, size]")
    check_float(name, array)
    for what, size in zip(("token", "head", "feature"), array.shape[1:], strict=True):
        check(size > 0, f"{name} must hold at least one {what}, found shape {tuple(array.shape)}")


def check_positive(name: str, value: Any) -> None:
    """Raises unless ``value`` is a finite number greater than zero."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    check(number and value > 0, f"{name} must be positive{_host(value)}, found {describe(value)}")
    check(value < math.inf, f"{name} must be finite, found {describe(value)}")


def check_number(name: str, value: Any, at_least: float = -math.inf) -> None:
    """Raises unless ``value`` is a finite Python or NumPy number of at least ``at_least``."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    bound = "" if at_least == -math.inf else f" of at least {at_least}"
    check(number and value >= at_least, f"{name} must be a number{bound}{_host(value)}, found {describe(value)}")


def check_finite(name: str, value: Any) -> None:
    """Raises if ``value``, a number or an array, holds NaN or an infinity; traced arrays are not checked."""
    if is_known(value):
        array = np.asarray(value, np.float64)
        wrong = array[~np.isfinite(array)]
        check(not wrong.size, f"{name} must be finite, found {wrong[:1].sum()}")


def _host(value: Any) -> str:
    """Words of a message that ask for a Python number, if the value found is a JAX array."""
    return ", a Python number known before tracing" if isinstance(value, jax.Array) else ""


def check_flag(name: str, value: Any) -> None:
    """Raises unless ``value`` is True or False: the text "false" would count as true."""
    check(isinstance(value, bool | np.bool_), f"{name} must be True or False, found {describe(value)}")


def check_flags(spec: Any, prefix: str = "") -> None:
    """Raises unless every field of a dataclass that is declared ``bool`` is one; ``prefix`` comes before its name."""
    for field in dataclasses.fields(spec):
        if field.type in (bool, "bool"):
            check_flag(f"{prefix}{field.name}", getattr(spec, field.name))


def check_count(name: str, value: Any) -> None:
    """Raises unless ``value`` is a whole number greater than zero."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    check(whole and value > 0, f"{name} must be positive and whole{_host(value)}, found {describe(value)}")


def check_counts(**values: Any) -> None:
    """Raises unless all of the named values are whole numbers greater than zero."""
    for name, value in values.items():
        check_count(name, value)


def check_length(length: Any) -> None:
    """Raises unless ``length``, a current length, is None or whole, and above 0 unless it is a JAX array."""
    if length is None or isinstance(length, numbers.Integral):
        check(length is None or length > 0, f"length must be at least 1, found {length}")
        return
    whole = isinstance(length, jax.Array | np.ndarray) and jnp.issubdtype(length.dtype, jnp.integer)
    check(whole, f"length must be a whole number or an array of them, found {describe(length)}")
    if isinstance(length, np.ndarray) and length.size:
        check(length.min() > 0, f"length must be at least 1, found {length.min()}")


def params_of(params: Mapping[str, Any] | None, spec: Any, **shapes: tuple[int | str, ...]) -> tuple[Any, ...]:
    """The named parameters of a spec, in the order of ``shapes``; a string in a shape stands for any size.

    Raises:
        ValueError: if a parameter is missing or has another shape.
    """
    names = ", ".join(map(repr, shapes))
    hint = f"{type(spec).__name__}(...).init makes them"
    check(set(shapes) <= set(params or {}), f"params must hold {names}: {hint}")
    for name, shape in shapes.items():
        actual_shape = params[name].shape
        check(_fits(actual_shape, shape), f"{name} must have shape {shape}, found {actual_shape}: {hint}")
    return tuple(params[name] for name in shapes)


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    """Whether a shape fits ``wanted``, in which a string stands for any size."""
    return len(shape) == len(wanted) and all(isinstance(b, str) or a == b for a, b in zip(shape, wanted, strict=True))


def check_even(name: str, value: int) -> None:
    """Raises unless ``value`` is a positive even integer."""
    check(value > 0 and value % 2 == 0, f"{name} must be a positive even number, found {value}")


def check_rank(name: str, array: Any, rank: int, layout: str) -> None:
    """Raises unless ``array`` has ``rank`` axes; ``layout`` names them, as in ``"[batch, length, heads, size]"``."""
    check_array(name, array)
    check(array.ndim == rank, f"{name} must have {rank} axes {layout}, found shape {tuple(array.shape)}")
