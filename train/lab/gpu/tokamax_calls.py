"""The calls of tokamax, whose attention in Mosaic GPU is the nearest relative of ours."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import tokamax

from posjax.bias import alibi_bias
from train.lab.gpu import calls
from train.lab.gpu.jobs import Shape


def arguments(shape: Shape) -> tuple:
    """q, k and v in bfloat16, and for ALiBi the bias ``[1, heads, length, length]`` in bfloat16."""
    qkv = calls.arguments(shape)[:3]
    return (*qkv, _bias(shape)) if shape.form == "alibi" else qkv


def _bias(shape: Shape) -> jax.Array:
    """The bias, computed in one program: in float32 it would not fit beside it."""
    positions = jnp.arange(shape.length)
    return jax.jit(lambda: alibi_bias(shape.heads, positions, positions)[None].astype(jnp.bfloat16))()


def forward(shape: Shape) -> Callable:
    """A function of `arguments` that returns the output of attention."""

    def run(q, k, v, *bias):
        return tokamax.dot_product_attention(q, k, v, *bias, is_causal=True, implementation="mosaic")

    return run


def gradients(shape: Shape) -> Callable:
    """A function of `arguments`: the output, and the gradients of q, k and v."""

    def run(q, k, v, *bias):
        return calls.with_gradients(lambda q, k, v: forward(shape)(q, k, v, *bias))(q, k, v)

    return run
