"""ALiBi as features of queries and keys, for kernels that compute only products of features."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import is_known
from posjax.attention.call import Call
from posjax.bias import LinearBias

FEATURES = 8
"""How many features the bias needs."""
LONGEST = 2**17
"""The most tokens whose indices are two numbers of bfloat16."""
_HIGHEST = 2.0**15
"""The largest slope times tokens. The products are then at most half of it, and float32 numbers of that size are 2^-10
apart, so that a few roundings of their sum stay below those of bfloat16. Chosen by reasoning, not measured."""
_STEP = 256
"""bfloat16 has 8 significant bits: it holds all whole numbers up to this one, and their multiples by it."""


def with_alibi(x: Call) -> Call:
    """The same attention without a bias: the bias is in ``FEATURES`` more features of queries and keys.

        slope (j - i) + e_i = (s_1, s_2, s_3, s_1, s_2, s_3, -c_1, -c_2) . (h, h, h, l, l, l, 1, 1)

    Every factor is exact in bfloat16: the slope is ``s_1 + s_2 + s_3``; the index of the key, counted from the middle
    of the sequence, is ``h + l`` with ``h`` a multiple of 256 and ``-128 <= l < 128``; and ``c_1 + c_2`` is ``slope i``
    up to ``e_i``, at most ``2^-17 slope |i|``. A softmax does not see ``e_i``, which is the same for all keys. So the
    differences of the bias between keys are exact.

    The features come first, so that they cancel before the products of the others are added.

    Args:
        x: a call that ``refusal`` allows, with a scale of 1: the features must not be multiplied by one.

    Returns:
        The call with queries and keys of ``size + FEATURES`` features. The gradients of queries, keys and values are
        those of the call with its bias; the slopes have none.
    """
    _, kv_heads, group, tokens, _ = x.q.shape
    slopes = jax.lax.stop_gradient(jnp.asarray(x.bias.slopes, jnp.float32)).reshape(kv_heads, group, 1)
    index = jnp.arange(tokens) - tokens // 2
    high = (index + _STEP // 2) // _STEP * _STEP
    low = index - high
    of_queries = [*2 * _pieces(slopes, 3), *_pieces(-slopes * index.astype(jnp.float32)[None, None], 2)]
    of_keys = [high] * 3 + [low] * 3 + [jnp.ones_like(low)] * 2
    return dataclasses.replace(x, q=_first(of_queries, x.q), k=_first(of_keys, x.k), bias=None)


def refusal(x: Call) -> str | None:
    """Why ``with_alibi`` does not compute the bias of a call, or None."""
    bias = x.bias
    # Exactly this class: a subclass may have other values.
    if type(bias) is not LinearBias:
        return f"only ALiBi can be features, found {type(bias).__name__}"
    if bias.symmetric:
        return "a symmetric LinearBias cannot be features, because |i - j| is no sum of products"
    if not is_known(bias.slopes):
        return "features give no gradient of slopes, so slopes must be fixed, known when tracing"
    if x.q.dtype != jnp.bfloat16:
        return f"with features of ALiBi q, k and v must be bfloat16 (they would overflow in float16), found {x.q.dtype}"
    tokens = x.q.shape[3]
    if tokens > LONGEST:
        return f"features of ALiBi are exact up to {LONGEST} tokens, found {tokens}"
    steepest = float(np.abs(np.asarray(bias.slopes)).max())
    if steepest * tokens > _HIGHEST:
        return (
            f"features of ALiBi would be too large for sums in float32: the largest slope times the tokens may be at "
            f"most {_HIGHEST:g}, found {steepest:g} * {tokens}"
        )
    return None


def _pieces(x: Float[Array, "..."], count: int) -> list[Float[Array, "..."]]:
    """Numbers of bfloat16, in float32, whose sum is ``x`` but for what the last one rounds."""
    pieces = []
    for _ in range(count):
        # XLA may remove a pair of casts, but not this rounding.
        pieces.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - pieces[-1]
    return pieces


def _first(features: list[Array], x: Array) -> Array:
    """``x`` with more features before its own; they broadcast against ``x`` without its last axis."""
    shape = x.shape[:-1]
    wide = [jnp.broadcast_to(each, shape).astype(x.dtype) for each in features]
    return jnp.concatenate([jnp.stack(wide, axis=-1), x], axis=-1)
