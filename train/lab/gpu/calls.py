"""The calls of posjax: arguments, outputs, gradients, and their errors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention import attention
from posjax.attention.api import result_of
from posjax.attention.call import call_of
from posjax.attention.gpu.backend import GPU
from posjax.attention.gpu.inputs import Options, TileSizes
from posjax.attention.placement import Placement
from posjax.attention.platform import computed, everywhere
from posjax.bias import T5, ALiBi, FoX, Kerple
from posjax.masks import Beyond, Causal, Segments, Window
from posjax.remap import Branch
from train.lab.gpu.jobs import DOCUMENT, LAYERS, WINDOW, Shape

_BIASES = {"alibi": ALiBi(), "slopes": ALiBi(learned=True), "t5": T5(), "kerple": Kerple()}
"""The biases whose parameters alone are arguments."""
_GRADIENTS = ("q", "k", "v", "params", "gates")


def arguments(shape: Shape) -> tuple:
    """q, k and v in bfloat16, the parameters of the bias, and float32 gates ``[1, heads, length]``."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    qkv = [
        jax.random.normal(key, (1, shape.length, count, shape.size), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    ]
    params = _BIASES[shape.form].init(keys[0], shape.heads) if shape.form in _BIASES else {}
    if shape.form == "array":
        params = jax.random.normal(keys[0], (shape.heads, shape.length, shape.length), jnp.bfloat16)
    gates = -jnp.cumsum(jnp.full((1, shape.heads, shape.length), 0.01), -1)
    return *qkv, params, gates


def forward(shape: Shape, implementation: str = "gpu") -> Callable:
    """A function of `arguments` that returns the output of attention."""

    def run(q, k, v, params, gates):
        mask, bias, remap = Causal(), None, []
        if shape.form == "window":
            mask &= Window(WINDOW)
        elif shape.form == "packed":
            mask &= Segments(jnp.arange(shape.length)[None] // DOCUMENT)
        elif shape.form == "fox":
            bias = FoX().bind(num_heads=shape.heads, q_gates=gates, kv_gates=gates)
        elif shape.form == "array":
            bias = params
        elif shape.form == "rerope":
            remap = [Branch(q[..., ::-1], k[..., ::-1], Beyond(WINDOW))]
        elif shape.form in _BIASES:
            bias = _BIASES[shape.form].bind(params, num_heads=shape.heads)
        softcap = 30.0 if shape.form == "capped" else None
        return attention(q, k, v, bias=bias, mask=mask, softcap=softcap, remap=remap, implementation=implementation)

    return run


def with_tiles(shape: Shape, sizes: TileSizes) -> Callable:
    """`forward` by the kernels for GPUs with other tiles; the form is a bias under a causal mask."""
    backends = everywhere(GPU(Options(sizes=sizes)))

    def run(q, k, v, params, gates):
        call = call_of(
            q,
            k,
            v,
            placement=Placement(),
            bias=_BIASES[shape.form].bind(params, num_heads=shape.heads),
            mask=Causal(),
            scale=None,
            softcap=None,
            remap=(),
            decay=None,
            q_positions=None,
            kv_positions=None,
        )
        return result_of(computed(backends, call), None, False)

    return run


def gradients(shape: Shape, implementation: str = "gpu") -> Callable:
    """A function of `arguments`: the output, and the gradients of all arguments for a fixed cotangent."""
    return with_gradients(forward(shape, implementation))


def with_gradients(function: Callable) -> Callable:
    """A function that returns the output and the gradients of all arguments, for a fixed cotangent."""

    def run(*arguments):
        out, transpose = jax.vjp(function, *arguments)
        return out, transpose(jnp.ones_like(out) * 0.5)

    return run


def exact_gradients(shape: Shape) -> Callable:
    """`gradients` by ``dense`` in float32, with exact products."""

    def run(*arguments):
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), arguments)
        with jax.default_matmul_precision("highest"):
            return gradients(shape, "dense")(*exact)

    return run


def errors(found: tuple, wanted: tuple) -> dict[str, float]:
    """For the output and every gradient, the norm of the difference over the norm of what is wanted.

    Both arguments are results of `gradients`. An argument of several arrays has the largest of their errors.
    """
    (out, of_arguments), (wanted_out, wanted_of_arguments) = found, wanted
    result = {"out": _error(out, wanted_out)}
    for name, one, other in zip(_GRADIENTS, of_arguments, wanted_of_arguments, strict=True):
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        result[name] = max((_error(*pair) for pair in leaves), default=0.0)
    return result


def _error(found: jax.Array, wanted: jax.Array) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


def decode_arguments(shape: Shape) -> tuple:
    """One query ``[1, 1, heads, size]``, and for every layer its own keys and values; all in bfloat16."""
    key, *layers = jax.random.split(jax.random.key(0), LAYERS + 1)
    query = jax.random.normal(key, (1, 1, shape.heads, shape.size), jnp.bfloat16)
    cache = (2, 1, shape.length, shape.kv_heads, shape.size)
    return query, [tuple(jax.random.normal(layer, cache, jnp.bfloat16)) for layer in layers]


def decode(shape: Shape, implementation: str = "gpu") -> Callable:
    """A function of `decode_arguments`: attention to all keys in every layer; an output is the next layer's query.

    One program has several layers, so the start of the program counts less, and no cache is found in the GPU's L2
    from the call before.
    """

    def run(query, caches):
        for k, v in caches:
            query = attention(query, k, v, implementation=implementation)
        return query

    return run


def decode_bytes(shape: Shape) -> int:
    """Bytes of the keys and values that one layer reads."""
    return 2 * shape.length * shape.kv_heads * shape.size * jnp.dtype(jnp.bfloat16).itemsize
