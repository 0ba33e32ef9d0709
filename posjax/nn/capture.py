"""The inputs of attention in every layer of a decoder, for diagnostics."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from posjax.nn.attention import LayerInputs
from posjax.nn.block import Block
from posjax.nn.decoder import Decoder
from posjax.nn.parameters import plain
from posjax.positions import Range
from posjax.scheme import Scheme


class Layer(NamedTuple):
    """The inputs of attention in one layer: projections before the scheme's features, after a norm before them.

    A layer of Gated DeltaNet has no queries and keys of attention: theirs are of size 0.

    ``gates`` are the result of ``Scheme.prepare``, or None. ``options`` are the options of the config that change
    the logits, as arguments of ``Scheme.attend``.
    """

    scheme: Scheme
    params: dict[str, dict[str, Array]]
    q: Float[Array, "batch length heads query_size"]
    k: Float[Array, "batch length kv_heads key_size"]
    gates: dict[str, Float[Array, "batch heads length *size"]] | None
    options: dict[str, float]


def capture(model: Decoder, tokens: Int[Array, "batch length"], *, length: int | None = None) -> Iterator[Layer]:
    """The queries and keys of every layer in turn, for tokens at positions ``0, 1, 2, ...``.

    Only the queries and keys of one period of the layers' pattern are in memory at a time.

    Args:
        model: any decoder.
        tokens: int32 ids, one document in each row.
        length: the current length, for schemes that read it; the number of tokens of a row when left out.
    """
    inputs = model._layer_inputs(tokens, None, None, length, None)
    x = model._embed(tokens, inputs)
    for stack, (layers, repeats) in zip(model.stacks, model.config.patterns, strict=True):
        graph, state = nnx.split(stack)
        schemes = tuple(layer.scheme for layer in layers)
        static = {"graph": graph, "schemes": schemes, "length": inputs.length}
        shared = [inputs.shared.get(scheme, {}) for scheme in schemes]
        for n in range(repeats):
            x, attention_inputs = _run_period(
                jax.tree.map(lambda leaf, n=n: leaf[n], state), x, inputs.visible, shared, **static
            )
            for scheme, captured in zip(schemes, attention_inputs, strict=True):
                yield Layer(scheme, *captured, model.config.logit_options)


@partial(jax.jit, static_argnames=("graph", "schemes", "length"))
def _run_period(state, x, visible, shared, *, graph, schemes, length) -> tuple[Array, list[tuple]]:
    """The output of the blocks of one period, and the inputs of attention in each block."""
    inputs = LayerInputs(Range(0, x.shape[1]), None, visible, length, dict(zip(schemes, shared, strict=True)))
    attention_inputs = []
    for block in nnx.merge(graph, state):
        attention_inputs.append(_attention_inputs(block, x, inputs))
        x = block(x, inputs)
    return x, attention_inputs


def _attention_inputs(block: Block, x: Array, inputs: LayerInputs) -> tuple:
    if block.delta is not None:
        nothing = jnp.zeros((*x.shape[:2], block.delta.config.num_heads, 0), x.dtype)
        return {}, nothing, nothing, None
    attention = block.attention
    x = block.attention_input(x)
    scheme = attention.scheme
    params = plain(attention.learned) | inputs.shared.get(scheme, {})
    q, k, _ = attention._project(x)
    if scheme.norm is not None and not scheme.norm.after_features:
        q, k = scheme.norm.apply(params.get("norm", {}), q, k)
    return params, q, k, scheme.prepare(params, x)
