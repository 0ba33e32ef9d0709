"""Masks and biases in the forms that kernels compute: masks as formulas of two tokens, biases in a few forms."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from posjax._numbers import LARGEST, is_array_number
from posjax._slots import OfSomeHeads, is_custom
from posjax.attention.call import Call
from posjax.bias import ArrayBias, ForgetBias, LinearBias
from posjax.masks import Mask, Not, OfTokens, Pair, traced_sizes
from posjax.positions import Range

LOG2E = math.log2(math.e)
LN2 = math.log(2)
"""Logits of kernels are in base 2: ``2^(z log2 e) = e^z``. Gradients with respect to them lack a factor ``ln 2``."""

BiasForm = Literal["none", "linear", "gates", "by distance", "pairs"]


def bias_form(call: Call) -> BiasForm | None:
    """The form of the bias of a call, or None if it has none of these.

    * ``"none"``: there is no bias;
    * ``"linear"``: ``slope (p_i - p_j)``, a number for each key and a constant of the query (ALiBi);
    * ``"gates"``: ``c_i - c_j`` with numbers for each token (FoX);
    * ``"by distance"``: a function of ``i - j`` alone for each head (T5, KERPLE and others);
    * ``"pairs"``: an array with a number for each pair of tokens.
    """
    bias = call.bias
    if bias is None:
        return "none"
    if type(bias) is ArrayBias:
        return "pairs" if bias.array.shape[2:] == (call.q.shape[3], call.k.shape[2]) else None
    # Exactly these classes: a subclass may have other values. A soft cap keeps the constant of a query in the logits.
    if type(bias) in (LinearBias, ForgetBias) and not bias.symmetric and call.softcap is None:
        return "linear" if type(bias) is LinearBias else "gates"
    return "by distance" if bias.by_distance and bias.only_adds else None


def exact_difference(a, b):
    """The exact difference of two int32, rounded once to float32: it may leave int32."""
    high = (a >> 16) - (b >> 16)
    low = (a & 0xFFFF) - (b & 0xFFFF)
    return high.astype(jnp.float32) * 65536 + low.astype(jnp.float32)


def distance_refusal(call: Call) -> str | None:
    """Why kernels do not support a bias by distance of a call, or None."""
    places = call.q_positions, call.kv_positions
    if not all(isinstance(each, Range) for each in places):
        return (
            "a bias by distance needs positions that are ranges (packed documents may share one range: distances "
            "are the same); use 'blockwise'"
        )
    if not all(each.is_static for each in places):
        return None
    ahead = call.q_positions.start - call.kv_positions.start
    if ahead + call.q_positions.length >= 2**31 or ahead - call.kv_positions.length < -(2**31):
        return "q_positions and kv_positions are 2^31 or more apart, and these distances exceed int32; use 'blockwise'"
    return None


def distance_numbers(call: Call, ahead) -> dict[str, jax.Array]:
    """The numbers of a bias by distance, for each head and in base 2.

    ``values`` are those at distances ``-keys`` to ``queries - 1``, and ``edges`` those far behind and far ahead.
    ``ahead`` is the distance of the first query from the first key.
    """
    heads = call.q.shape[1] * call.q.shape[2]
    queries = call.q.shape[3]
    keys = call.k.shape[2]

    def values(distances):
        biases = call.bias.values(jnp.asarray(distances, jnp.int32), jnp.zeros(1, jnp.int32))[..., 0]
        return _in_base_2(jnp.broadcast_to(biases.astype(jnp.float32), (heads, len(distances))))

    distances = ahead + np.arange(queries + keys) - keys
    edge = call.bias.constant_from or 0
    if isinstance(ahead, int):
        # Those of padding may leave int32.
        distances = np.clip(distances, -LARGEST, LARGEST)
    return {"values": values(distances), "edges": values(np.array([edge, -edge]))}


def _in_base_2(bias):
    """``bias log2 e``. A finite number stays finite, as an additive mask of the lowest float32 must."""
    lowest = float(jnp.finfo(jnp.float32).min) / LOG2E * (1 - 1e-6)
    too_low = (bias < lowest) & (bias > -jnp.inf)
    # By addition, so that the gradient is that of the product everywhere.
    return (bias + jax.lax.stop_gradient(jnp.where(too_low, lowest - bias, 0))) * LOG2E


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


@dataclasses.dataclass(frozen=True)
class Inverted:
    """The opposite of a formula."""

    formula: Any


Formula = Mask | OfArrays | Joined | Inverted | None
"""A mask as static structure, without its arrays."""


def dissect(mask: Mask | None) -> tuple[Formula, list, list]:
    """The formula of a mask and its arrays ``[batch, tokens]`` of the queries and of the keys, in order."""
    if isinstance(mask, Pair):
        (left, *some), (right, *more) = dissect(mask.left), dissect(mask.right)
        return Joined(type(mask), left, right), *(a + b for a, b in zip(some, more, strict=True))
    if isinstance(mask, Not):
        formula, *arrays = dissect(mask.mask)
        return Inverted(formula), *arrays
    if isinstance(mask, OfTokens):
        q, k = mask.arrays
        return OfArrays(type(mask)), [q], [k]
    return mask, [], []


def _mask_refusal(mask: Mask | None, operations: Collection[str]) -> str | None:
    """Why a kernel that knows these operations cannot evaluate a mask, or None."""
    if mask is None:
        return None
    if isinstance(mask, Pair):
        return _mask_refusal(mask.left, operations) or _mask_refusal(mask.right, operations)
    if isinstance(mask, Not):
        return _mask_refusal(mask.mask, operations)
    name = type(mask).__name__
    if isinstance(mask, OfTokens):
        if any(jnp.issubdtype(array.dtype, jnp.inexact) for array in mask.arrays):
            return f"{name} holds arrays of floating-point numbers"
        return _custom_refusal(mask, mask.matches, operations) if is_custom(mask) else None
    if isinstance(mask, OfSomeHeads) or _differs_between_heads(mask):
        return "the mask differs between heads"
    if jax.tree.leaves(mask) or type(mask).pairs is Mask.pairs:
        return f"{name} must depend only on two positions and Python ints"
    return _custom_refusal(mask, mask.pairs, operations) if is_custom(mask) else None


def _differs_between_heads(mask: Mask) -> bool:
    position = np.zeros((1, 1), np.int32)
    return type(mask).pairs is not Mask.pairs and np.ndim(mask.pairs(position, position)) > 2


def _custom_refusal(mask: Mask, function: Callable, operations: Collection[str]) -> str | None:
    """Why the function of a mask from outside the library cannot be part of a kernel, or None."""
    name = type(mask).__name__
    if type(mask).__hash__ is None:
        return f"{name} is not hashable (a frozen dataclass is)"
    tile = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    traced = jax.make_jaxpr(function)(tile, tile)
    others = sorted(set(_primitives(traced.jaxpr)) - operations)
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
        elif name == "not" and equation.outvars[0].aval.dtype == jnp.bool_:
            yield NOT_OF_BOOLEANS
        else:
            yield name


_ARITHMETIC = {"add", "sub", "mul", "neg", "abs", "sign", "max", "min", "clamp", "div", "rem", "integer_pow"}
_LOGIC = {"and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "shift_left"}
OPERATIONS = _ARITHMETIC | _LOGIC | {"shift_right_arithmetic", "convert_element_type", "broadcast_in_dim"}
"""The operations on integers and booleans, by their primitives' names, that all kernels compile."""
NOT_OF_BOOLEANS = "not of booleans (write x ^ True)"


def allowed(formula: Formula, i, j, q_numbers, k_numbers):
    """The formula on a tile: positions ``i`` and ``j``, and iterators over the numbers of its tokens."""
    if isinstance(formula, Joined):
        left = allowed(formula.left, i, j, q_numbers, k_numbers)
        return formula.kind.join(left, allowed(formula.right, i, j, q_numbers, k_numbers))
    if isinstance(formula, Inverted):
        # In a form that the compilers of all kernels know.
        return allowed(formula.formula, i, j, q_numbers, k_numbers) ^ True
    if isinstance(formula, OfArrays):
        return formula.kind.matches(next(q_numbers), next(k_numbers))
    return formula.pairs(i, j)


def kernel_refusal(call: Call, forms: Collection[BiasForm], operations: Collection[str]) -> str | None:
    """Why kernels, which are compiled for one program of fixed sizes, do not support a call, or None.

    ``forms`` are those of the biases that they compute, ``operations`` those of a user's own masks.
    """
    if not all(isinstance(size, int) for size in call.q.shape):
        return "a size of the queries is symbolic, and a kernel is compiled for known sizes; use 'blockwise'"
    if call.decay is not None:
        return "xPos decays every feature by its own factor within a tile; use 'blockwise'"
    for mask in call.masks:
        if traced := traced_sizes(mask):
            return f"{traced[0]} is an array, and a kernel is compiled for sizes that are Python ints; use 'blockwise'"
        why = _mask_refusal(mask, operations)
        if why is not None:
            return f"{why}; use 'blockwise'"
    if is_array_number(call.softcap):
        return "softcap is an array, and a kernel is compiled for a Python float; use 'blockwise'"
    form = bias_form(call)
    if form not in forms:
        known = "a number for each key or a function of distance" + (", or a whole array" if "pairs" in forms else "")
        return f"{type(call.bias).__name__} is not {known}; use 'blockwise'"
    return distance_refusal(call) if form == "by distance" else None
