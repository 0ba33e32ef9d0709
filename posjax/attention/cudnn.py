"""cuDNN's flash attention on NVIDIA GPUs, through ``jax.nn``, for calls where it computes the same function.

cuDNN adds a bias only as an array of quadratic size, so ALiBi with fixed slopes is computed as features of queries and
keys (``posjax.attention.bias_features``).
"""

import dataclasses

import jax
import jax.numpy as jnp

from posjax.attention import bias_features
from posjax.attention.call import Call
from posjax.attention.tiles import lengthen
from posjax.masks import And, Causal, Mask, Window, traced_sizes
from posjax.positions import Range

_LARGEST_HEAD = 128
_OLDEST = 8.0
"""Compute capability of the first devices with fused attention."""


def cudnn(x: Call) -> jax.Array:
    """``softmax(q k^T + bias where allowed) v``, without the log-sum-exp, because cuDNN gives no gradient for it."""
    value_size = x.v.shape[-1]
    if x.bias is not None:
        x = bias_features.with_alibi(x)
        # jax.nn demands values of the size of the keys.
        x = dataclasses.replace(x, v=lengthen(x.v, bias_features.FEATURES, axis=-1))
    batch, kv_heads, group, queries, size = x.q.shape
    window = _window(x.mask)
    out = jax.nn.dot_product_attention(
        jnp.moveaxis(x.q.reshape(batch, kv_heads * group, queries, size), 1, 2),
        jnp.moveaxis(x.k, 1, 2),
        jnp.moveaxis(x.v, 1, 2),
        scale=1.0,
        is_causal=x.mask is not None,
        # How many keys before and after the query's own key.
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return jnp.moveaxis(out, 1, 2).reshape(x.q.shape)[..., :value_size]


def refusal(x: Call, with_lse: bool) -> str | None:
    """Why cuDNN does not compute this function, or None; ``with_lse`` if the log-sum-exp of the rows is wanted."""
    dtypes = sorted({str(a.dtype) for a in (x.q, x.k, x.v)})
    sizes = sorted({x.k.shape[-1], x.v.shape[-1]})
    largest = _LARGEST_HEAD if x.bias is None else _LARGEST_HEAD - bias_features.FEATURES
    of_bias = None if x.bias is None else bias_features.refusal(x)
    traced = traced_sizes(x.mask)
    reasons = (
        (with_lse, "the log-sum-exp of cuDNN, for return_residuals and sinks, has no gradient"),
        (of_bias is not None, f"cuDNN has no bias, and {of_bias}"),
        (x.softcap is not None, "cuDNN has no soft cap"),
        (bool(x.remap), "cuDNN has no remapped branches"),
        (x.decay is not None, "cuDNN does not know the decay of xPos"),
        (
            dtypes not in (["bfloat16"], ["float16"]),
            f"for cuDNN q, k and v must be all bfloat16 or all float16, found {dtypes}",
        ),
        (
            len(sizes) > 1 or sizes[0] > largest or sizes[0] % 8 > 0,
            f"for cuDNN heads must have one size, a multiple of 8 up to {largest}, found {sizes}",
        ),
        (bool(traced), f"for cuDNN {', '.join(traced)} must be a Python int"),
        (not _is_supported(x.mask), "cuDNN supports no masks except Causal() and Causal() & Window(n)"),
        (
            (x.mask is not None or x.bias is not None) and not _aligned(x),
            "for cuDNN a mask or a bias needs equal ranges of positions, known when tracing",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def unsupported(x: Call) -> str | None:
    """Why the cuDNN of this host, if any, does not support a call that ``refusal`` allows, or None."""
    try:
        jax.eval_shape(cudnn, x)
    except (RuntimeError, NotImplementedError) as error:
        return f"jax says: {error}"
    return None


def has_gpu() -> bool:
    """Whether this process computes on NVIDIA GPUs that cuDNN's fused attention runs on."""
    if jax.default_backend() != "gpu":
        return False
    return all(float(getattr(device, "compute_capability", 0)) >= _OLDEST for device in jax.local_devices())


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return (mask.left, mask.right) if isinstance(mask, And) else (mask,)


def _is_supported(mask: Mask | None) -> bool:
    kinds = {Causal} if mask is None else set(map(type, _parts(mask)))
    return Causal in kinds and kinds <= {Causal, Window}


def _window(mask: Mask | None) -> int | None:
    """The most keys that a query sees: its own and those before it."""
    sizes = [part.size for part in _parts(mask) if isinstance(part, Window)]
    return min(sizes, default=None)


def _aligned(x: Call) -> bool:
    """Whether query and key of the same index have the same position, known when tracing."""
    q, k = x.q_positions, x.kv_positions
    return isinstance(q, Range) and isinstance(k, Range) and q.is_static and q == k
