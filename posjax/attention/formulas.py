"""Masks and biases in the forms that kernels compute: masks as formulas of two tokens, biases in three forms."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from posjax._slots import OfSomeHeads, is_custom
from posjax.attention.call import Call
from posjax.bias import ForgetBias, LinearBias
from posjax.masks import Mask, OfTokens, Pair

BiasForm = Literal["none", "linear", "gates", "by distance"]


def bias_form(call: Call) -> BiasForm | None:
    """The form of the bias of a call, or None if it has none of these.

    * ``"none"``: there is no bias;
    * ``"linear"``: ``slope (p_i - p_j)``, a number for each key and a constant of the query (ALiBi);
    * ``"gates"``: ``c_i - c_j`` with numbers for each token (FoX);
    * ``"by distance"``: a function of ``i - j`` alone for each head (T5, KERPLE and others).
    """
    bias = call.bias
    if bias is None:
        return "none"
    # Exactly these classes: a subclass may have other values. A soft cap keeps the constant of a query in the logits.
    if type(bias) in (LinearBias, ForgetBias) and not bias.symmetric and call.softcap is None:
        return "linear" if type(bias) is LinearBias else "gates"
    return "by distance" if bias.by_distance and bias.only_adds else None


@dataclasses.dataclass(frozen=True)
class OfArrays:
    """A mask of tokens without its arrays; ``kind.matches`` compares the numbers of two tokens."""

    kind: type


@dataclasses.dataclass(frozen=True)
class Joined:
    """Two formulas, joined by the ``join`` of ``kind``."""

    kind: type
    left: Any
    right: Any


Formula = Mask | OfArrays | Joined | None
"""A mask as static structure, without its arrays."""


def dissect(mask: Mask | None) -> tuple[Formula, list, list]:
    """The formula of a mask and its arrays ``[batch, tokens]`` of the queries and of the keys, in order."""
    if isinstance(mask, Pair):
        (left, *some), (right, *more) = dissect(mask.left), dissect(mask.right)
        return Joined(type(mask), left, right), *(a + b for a, b in zip(some, more, strict=True))
    if isinstance(mask, OfTokens):
        q, k = mask.arrays
        return OfArrays(type(mask)), [q], [k]
    return mask, [], []


def mask_refusal(mask: Mask | None) -> str | None:
    """Why a kernel cannot evaluate a mask, or None."""
    if mask is None:
        return None
    if isinstance(mask, Pair):
        return mask_refusal(mask.left) or mask_refusal(mask.right)
    name = type(mask).__name__
    if isinstance(mask, OfTokens):
        if any(jnp.issubdtype(array.dtype, jnp.inexact) for array in mask.arrays):
            return f"{name} holds arrays of floating-point numbers"
        return _custom_refusal(mask, mask.matches) if is_custom(mask) else None
    if isinstance(mask, OfSomeHeads) or _differs_between_heads(mask):
        return "the mask differs between heads"
    if jax.tree.leaves(mask) or type(mask).pairs is Mask.pairs:
        return f"{name} must depend only on two positions and Python ints"
    return _custom_refusal(mask, mask.pairs) if is_custom(mask) else None


def _differs_between_heads(mask: Mask) -> bool:
    position = np.zeros((1, 1), np.int32)
    return type(mask).pairs is not Mask.pairs and np.ndim(mask.pairs(position, position)) > 2


def _custom_refusal(mask: Mask, function: Callable) -> str | None:
    """Why the function of a mask from outside the library cannot be part of a kernel, or None."""
    name = type(mask).__name__
    if type(mask).__hash__ is None:
        return f"{name} is not hashable (a frozen dataclass is)"
    tile = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    traced = jax.make_jaxpr(function)(tile, tile)
    others = sorted(set(_primitives(traced.jaxpr)) - _KNOWN)
    if others or traced.consts:
        return (
            f"{name} uses {' and '.join(others) or 'arrays'}: kernels support only arithmetic and comparisons of "
            "integers"
        )
    return None


def _primitives(jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "jit":
            yield from _primitives(equation.params["jaxpr"].jaxpr)
        elif name == "select_n" and equation.outvars[0].aval.dtype == jnp.bool_:
            yield "where of booleans"
        else:
            yield name


# The primitives on integers and booleans that kernels compile.
_ARITHMETIC = {"add", "sub", "mul", "neg", "abs", "sign", "max", "min", "clamp", "div", "rem", "integer_pow"}
_LOGIC = {"and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "shift_left"}
_KNOWN = _ARITHMETIC | _LOGIC | {"shift_right_arithmetic", "convert_element_type", "broadcast_in_dim"}


def allowed(formula: Formula, i, j, q_numbers, k_numbers):
    """The formula on a tile: positions ``i`` and ``j``, and iterators over the numbers of its tokens."""
    if isinstance(formula, Joined):
        left = allowed(formula.left, i, j, q_numbers, k_numbers)
        return formula.kind.join(left, allowed(formula.right, i, j, q_numbers, k_numbers))
    if isinstance(formula, OfArrays):
        return formula.kind.matches(next(q_numbers), next(k_numbers))
    return formula.pairs(i, j)
