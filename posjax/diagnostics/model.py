"""The diagnostics of a trained decoder, from the queries and keys of each layer."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from posjax._checks import check
from posjax.coca import Coca, PartlyCollinear
from posjax.diagnostics.anomaly import Anomaly, absolute_share, coca_anomaly, rotary_anomaly
from posjax.diagnostics.rotation import radians
from posjax.diagnostics.weights import entropy
from posjax.nn import Decoder
from posjax.nn.capture import Layer, capture
from posjax.rotary import Rotary


class Measurement(NamedTuple):
    """The result of ``measure``.

    Args:
        layers: indices, from 0, of the layers in ``anomaly``: those with rotary features or CoCA, without a norm after.
        anomaly: ``[layers, heads, planes]``, or None without such layers; see ``rotary_anomaly``, ``coca_anomaly``.
        radians: frequencies of these layers' planes, radians per position ``[layers, planes]``, or None.
        absolute_share: of layers with slack CoCA ``[layers, heads, planes]``, or None; see ``absolute_share``.
        queries: positions of the queries whose entropy was measured.
        entropy: mean over the sequences, in nats, ``[all layers, heads, queries]``; NaN for linear attention.
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
        tokens: int32 ids, one document per sequence, at positions ``0, 1, 2, ...``.
        queries: positions to measure entropy at; those that see 1, 2, 4, 8, ... keys, and the last, when left out.
        length: the current length, for schemes that read it; the number of tokens in a sequence when left out.

    Raises:
        ValueError: for queries outside the sequences.
    """
    columns = tokens.shape[1]
    queries = _powers(columns) if queries is None else np.asarray(queries)
    check(queries.size > 0 and queries.min() >= 0 and queries.max() < columns, f"queries must be in [0, {columns})")
    settings = {"causal": model.config.causal, "length": columns if length is None else length}
    rotating = {}
    shares = []
    entropies = []
    for index, layer in enumerate(capture(model, tokens, length=length)):
        anomaly = _anomaly(layer, **settings)
        if anomaly is not None:
            rotating[index] = anomaly
        if isinstance(layer.scheme.features, Coca) and layer.scheme.features.variant == "slack":
            shares.append(absolute_share(layer.q, pairing=layer.scheme.features.pairing))
        entropies.append(_entropy(layer, queries, **settings))
    anomalies, frequencies = zip(*rotating.values(), strict=True) if rotating else ((), ())
    return Measurement(
        layers=np.array(list(rotating), int),
        anomaly=Anomaly(*map(np.stack, zip(*anomalies, strict=True))) if rotating else None,
        radians=np.stack(frequencies) if rotating else None,
        absolute_share=np.stack(shares) if shares else None,
        queries=queries,
        entropy=np.stack(entropies),
    )


def _powers(columns: int) -> Int[np.ndarray, "queries"]:
    return np.unique([*(2 ** np.arange(columns.bit_length()) - 1), columns - 1])


def _anomaly(layer: Layer, *, causal: bool, length: int) -> tuple[Anomaly, Float[np.ndarray, "planes"]] | None:
    features = layer.scheme.features
    settings = {"causal": causal, "mask": layer.scheme.mask, "length": length}
    if layer.scheme.norm is not None and layer.scheme.norm.after_features:
        return None
    if isinstance(features, Coca):
        anomaly = coca_anomaly(layer.q, layer.k, features, **settings)
        return anomaly, radians(features.frequencies, 2 * layer.k.shape[-1], length)
    if isinstance(features, Rotary) and getattr(features, "targets", "qk") != "vo":
        anomaly = rotary_anomaly(*_rotated(layer), features.frequencies, pairing=features.pairing, **settings)
        return anomaly, radians(features.frequencies, layer.q.shape[-1], length)
    return None


def _rotated(layer: Layer) -> tuple[Array, Array]:
    """The queries and keys that rotary features rotate."""
    features = layer.scheme.features
    head_dim = layer.q.shape[-1]
    if isinstance(features, PartlyCollinear):
        return features.collinear_query(layer.q, head_dim=head_dim), features.collinear_key(layer.k, head_dim=head_dim)
    return layer.q, layer.k


def _entropy(layer: Layer, queries, *, causal: bool, length: int) -> Float[np.ndarray, "heads queries"]:
    if layer.scheme.linear is not None:
        return np.full((layer.q.shape[2], len(queries)), np.nan)
    norm = layer.scheme.norm
    early = norm is not None and not norm.after_features
    scheme = dataclasses.replace(layer.scheme, norm=None) if early else layer.scheme  # the projections are normed
    options = {"params": layer.params, "q_positions": queries, "length": length, "gates": layer.gates, "causal": causal}
    options |= layer.options
    return entropy(scheme, layer.q[:, queries], layer.k, **options).mean(0).T
