"""The diagnostics of a trained decoder, whose blocks are run one by one to look at the queries and keys of each."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from posjax._checks import check
from posjax.coca import Coca
from posjax.diagnostics.anomaly import Anomaly, absolute_share, coca_anomaly, rotary_anomaly
from posjax.diagnostics.rotation import radians
from posjax.diagnostics.weights import entropy
from posjax.nn import Decoder
from posjax.nn.modules import Block, Context, plain
from posjax.positions import Range
from posjax.rotary import Rotary
from posjax.scheme import Scheme


class Layer(NamedTuple):
    """What attention of one layer is given: projections after the norm of the scheme and before its features.

    ``gates`` are those that ``Scheme.prepare`` makes of the tokens (FoX), or None.
    """

    scheme: Scheme
    params: dict[str, dict[str, Array]]
    q: Float[Array, "batch length heads query_size"]
    k: Float[Array, "batch length kv_heads key_size"]
    gates: Float[Array, "batch heads length"] | None


def capture(model: Decoder, tokens: Int[Array, "batch length"], *, length: int | None = None) -> Iterator[Layer]:
    """The queries and keys of every layer in turn, for tokens at positions ``0, 1, 2, ...``.

    Only one period of the layers' pattern is held at a time.

    Args:
        model: any decoder.
        tokens: int32 ids, one document in each row.
        length: the current length, for schemes that read it; that of the rows when left out.
    """
    context = model._context(tokens, None, None, length, None)
    x = model._embed(tokens, context)
    for stack, (schemes, repeats) in zip(model.stacks, model.config.layers.patterns, strict=True):
        graph, state = nnx.split(stack)
        where = {"graph": graph, "schemes": schemes, "length": context.length}
        shared = [context.shared.get(scheme, {}) for scheme in schemes]
        for n in range(repeats):
            x, found = _run_period(jax.tree.map(lambda leaf, n=n: leaf[n], state), x, context.visible, shared, **where)
            yield from (Layer(scheme, *given) for scheme, given in zip(schemes, found, strict=True))


@partial(jax.jit, static_argnames=("graph", "schemes", "length"))
def _run_period(state, x, visible, shared, *, graph, schemes, length) -> tuple[Array, list[tuple]]:
    """The blocks of one period: what comes out, and what each of their attentions was given."""
    context = Context(Range(0, x.shape[1]), None, visible, length, dict(zip(schemes, shared, strict=True)))
    found = []
    for block in nnx.merge(graph, state):
        found.append(_given(block, x, context))
        x = block(x, context)
    return x, found


def _given(block: Block, x: Array, context: Context) -> tuple:
    attention, x = block.attention, block.attention_norm(x)
    scheme = attention.scheme
    params = plain(attention.learned) | context.shared.get(scheme, {})
    q, k, _ = attention._project(x)
    if scheme.norm is not None:
        q, k = scheme.norm.apply(params.get("norm", {}), q, k)
    return params, q, k, scheme.prepare(params, x)


class Measurement(NamedTuple):
    """What ``measure`` found.

    Args:
        layers: indices, from 0, of the layers that ``anomaly`` is about: those with rotary features or CoCA.
        anomaly: ``[layers, heads, planes]``, or None without such layers; see ``rotary_anomaly``, ``coca_anomaly``.
        radians: frequencies of these layers' planes, radians per position ``[layers, planes]``, or None.
        absolute_share: of layers with slack CoCA ``[layers, heads, planes]``, or None; see ``absolute_share``.
        queries: positions of the queries whose entropy was taken.
        entropy: mean over the rows, in nats, ``[all layers, heads, queries]``; NaN for linear attention.
    """

    layers: Int[np.ndarray, "layers"]
    anomaly: Anomaly | None
    radians: Float[np.ndarray, "layers planes"] | None
    absolute_share: Float[np.ndarray, "layers heads planes"] | None
    queries: Int[np.ndarray, "queries"]
    entropy: Float[np.ndarray, "all_layers heads queries"]


def measure(
    model: Decoder,
    tokens: Int[Array, "batch length"],
    *,
    queries: Int[np.ndarray, "queries"] | None = None,
    length: int | None = None,
) -> Measurement:
    """The rotary anomaly, slack CoCA's absolute share and the entropy of attention, of every layer of a model.

    Time grows with the square of the length; memory holds the projections of one period of layers, not their attention.

    Args:
        model: a trained decoder.
        tokens: int32 ids, one document in each row, at positions ``0, 1, 2, ...``.
        queries: positions at which entropy is taken; those that see 1, 2, 4, 8, ... keys, and the last, when left out.
        length: the current length, for schemes that read it; that of the rows when left out.

    Raises:
        ValueError: for queries outside the rows.
    """
    columns = tokens.shape[1]
    queries = _powers(columns) if queries is None else np.asarray(queries)
    check(queries.size > 0 and queries.min() >= 0 and queries.max() < columns, f"queries must be in [0, {columns})")
    where = {"causal": model.config.causal, "length": columns if length is None else length}
    turning, shares, entropies = {}, [], []
    for index, layer in enumerate(capture(model, tokens, length=length)):
        if (found := _anomaly(layer, **where)) is not None:
            turning[index] = found
        if isinstance(layer.scheme.features, Coca) and layer.scheme.features.variant == "slack":
            shares.append(absolute_share(layer.q, pairing=layer.scheme.features.pairing))
        entropies.append(_entropy(layer, queries, **where))
    anomalies, frequencies = zip(*turning.values(), strict=True) if turning else ((), ())
    return Measurement(
        layers=np.array(list(turning), int),
        anomaly=Anomaly(*map(np.stack, zip(*anomalies, strict=True))) if turning else None,
        radians=np.stack(frequencies) if turning else None,
        absolute_share=np.stack(shares) if shares else None,
        queries=queries,
        entropy=np.stack(entropies),
    )


def _powers(columns: int) -> Int[np.ndarray, "queries"]:
    return np.unique([*(2 ** np.arange(columns.bit_length()) - 1), columns - 1])


def _anomaly(layer: Layer, *, causal: bool, length: int) -> tuple[Anomaly, Float[np.ndarray, "planes"]] | None:
    features = layer.scheme.features
    where = {"causal": causal, "mask": layer.scheme.mask, "length": length}
    if isinstance(features, Coca):
        found = coca_anomaly(layer.q, layer.k, features, **where)
        return found, radians(features.frequencies, 2 * layer.k.shape[-1], length)
    if isinstance(features, Rotary) and getattr(features, "targets", "qk") != "vo":
        found = rotary_anomaly(layer.q, layer.k, features.frequencies, pairing=features.pairing, **where)
        return found, radians(features.frequencies, layer.q.shape[-1], length)
    return None


def _entropy(layer: Layer, queries, *, causal: bool, length: int) -> Float[np.ndarray, "heads queries"]:
    if layer.scheme.linear is not None:
        return np.full((layer.q.shape[2], len(queries)), np.nan)
    scheme = dataclasses.replace(layer.scheme, norm=None)  # the projections are normed already
    given = {"params": layer.params, "q_positions": queries, "length": length, "gates": layer.gates, "causal": causal}
    return entropy(scheme, layer.q[:, queries], layer.k, **given).mean(0).T
