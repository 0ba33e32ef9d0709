"""Model FLOPs of an update, counted exactly, from the model's matrix products and the pairs that its masks allow."""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax import masks
from posjax.masks import Mask
from posjax.nn import DecoderConfig
from posjax.positions import Range
from posjax.scheme import Scheme
from posjax.scheme.choices import all_of
from train.model.build import Setup

END = np.iinfo(np.int64).max // 4
"""A position after the end of any sequence."""

_BLOCK = 2**22
"""The number of ends of intervals processed together, which bounds the memory for a mask of many intervals."""

Intervals = list[tuple[np.ndarray, np.ndarray]]
"""Pairs of arrays (low, high), each with one interval of other positions for every position, ``low[n] <= j < high[n]``.
Intervals may overlap or be empty."""


class Flops(NamedTuple):
    """Model FLOPs of an update, over all devices: one forward pass and a backward pass of twice that, no
    recomputation."""

    parameters: float  # products of tokens and parameters
    attention: float  # Q K^T and P V, only of the pairs that the mask allows

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.parameters + self.attention


def update_flops(setup: Setup) -> Flops:
    """`decoder_flops` of a config, with every row of the batch as one document."""
    train = setup.config.train
    row = decoder_flops(setup.decoder, np.zeros((1, train.length), np.int32))
    return Flops(train.rows * row.parameters, train.rows * row.attention)


def decoder_flops(decoder: DecoderConfig, segment_ids: np.ndarray) -> Flops:
    """Model FLOPs of one update: no recomputation, only tokens that are not padding, only pairs that are allowed,

        parameters = 6 N tokens                        N: `product_parameters`
        attention  = sum over layers of  6 heads pairs (d_qk + d_v)

    since a product of n multiply-adds costs 2 n FLOPs forward and 4 n backward. The lookup of embeddings, norms,
    rotations, biases and the softmax are not counted, nor are adapters and the parameters of a position scheme. Frozen
    parameters count like trained ones, though their products cost 4 n in all. A layer of linear attention has no pairs:
    it costs ``12 heads m d_v`` a token, m features updating and reading a state of ``m d_v``. One of Gated DeltaNet
    costs ``18 heads d_k d_v``, because it reads the state for the key too.

    Args:
        decoder: the shape of the model.
        segment_ids: ``[rows, length]``, the documents of a batch as the model gets them, negative at padding.
    """
    tokens, documents = int(np.count_nonzero(segment_ids >= 0)), _documents(segment_ids)
    attention = sum(
        6 * layers * _attention_work(layer, segment_ids.shape[1], documents, tokens)
        for layer, layers in Counter(decoder.every_layer).items()
    )
    return Flops(6.0 * product_parameters(decoder) * tokens, float(attention))


def _attention_work(layer: DecoderConfig, length: int, documents: Counter[int], tokens: int) -> float:
    """Multiply-adds of the heads of one layer, forward pass."""
    size, scheme = layer.head_dim, layer.scheme
    if scheme.is_delta:
        return 3 * tokens * scheme.linear.state_size
    if scheme.linear is not None:
        return 2 * tokens * layer.num_heads * scheme.linear.size(size) * size
    pairs = _pairs(scheme, layer.causal, length, documents)
    latent = layer.latent
    sizes = _score_size(layer) + size if latent is None else latent.size + latent.value
    return layer.num_heads * scheme.copies * pairs * sizes


@cache
def _score_size(layer: DecoderConfig) -> int:
    """``d_qk``, the width of the features whose inner product is a score; some feature maps widen their input."""
    heads, size, scheme, few = layer.num_heads, layer.head_dim, layer.scheme, 8

    def phi(key):
        made = scheme.init(key, heads, size, num_kv_heads=layer.num_kv_heads, model_dim=layer.model_dim)
        q = jnp.zeros((1, few, heads, scheme.query_size(size)))
        return scheme.feature_map_or_identity.query(
            made.get("features", {}), q, Range(0, few), head_dim=size, length=few
        )

    return jax.eval_shape(phi, jax.random.key(0)).shape[-1]


def maxtext_flops(setup: Setup) -> Flops:
    """Model FLOPs by MaxText's convention, for comparison with its published numbers: half of all pairs for any mask,

    attention = layers x 12 heads d_head length^2 / 2 x rows.
    """
    decoder, train = setup.decoder, setup.config.train
    work = 6 * decoder.num_heads * sum(map(sum, map(head_sizes, decoder.every_layer)))
    return Flops(6.0 * product_parameters(decoder) * train.batch_tokens, work * train.length**2 / 2 * train.rows)


def product_parameters(decoder: DecoderConfig) -> int:
    """N, the parameters that are multiplied with tokens: projections, hidden layers and the head,

        layers x width x (heads d_q + kv_heads d_k + kv_heads d_v + heads d_v + (3 or 2) hidden) + width x vocabulary,

    or, with latent attention of ranks r and r_q, d_q = d_r + d_c, and n heads,

        layers x (width x (r + d_r + r_q + n d_v) + r n (d_c + d_v) + r_q n d_q).

    The output gate of attention adds ``heads d_v`` or ``heads``; `attention_products` has those of Gated DeltaNet. Of a
    mixture of experts, the experts that a token uses count, the MLP that all tokens share, and the router. The
    embedding is a lookup, and counts only if it is also the head.
    """
    layers = sum(count * layer_products(layer) for layer, count in Counter(decoder.every_layer).items())
    return layers + decoder.model_dim * decoder.vocab_size


def layer_products(layer: DecoderConfig) -> int:
    """The parameters of a layer that are multiplied with a token."""
    experts, matrices = layer.experts, 3 if layer.gated else 2
    hidden = matrices * layer.mlp_dim
    if experts is not None:
        shared = matrices * (experts.shared_dim or 0) + experts.shared_gate
        hidden = experts.per_token * hidden + shared + experts.count
    return attention_products(layer) + layer.model_dim * hidden


def attention_products(layer: DecoderConfig) -> int:
    """The parameters of attention, or of Gated DeltaNet, in a layer that are multiplied with a token."""
    heads, width, size, latent = layer.num_heads, layer.model_dim, head_sizes(layer)[1], layer.latent
    if layer.scheme.is_delta:
        queries, keys, values = layer.scheme.linear.channels
        return width * (queries + keys + 3 * values + 2 * layer.scheme.linear.num_heads)
    gate = width * {None: 0, "head": heads, "elementwise": heads * size}[layer.attention_gate] * layer.scheme.copies
    if latent is None:
        queries = heads * (layer.scheme.query_size(size) + layer.scheme.copies * size)
        values = 0 if layer.keys_as_values else size
        return width * (queries + layer.num_kv_heads * (layer.scheme.key_size(size) + values)) + gate
    into = width if latent.query_rank is None else latent.query_rank
    queries = into * heads * latent.size + (0 if latent.query_rank is None else width * latent.query_rank)
    keys = width * latent.stored + latent.rank * heads * (latent.unrotated + latent.value)
    return queries + keys + heads * latent.value * width + gate


def head_sizes(layer: DecoderConfig) -> tuple[int, int]:
    """The channels of a key and of a value."""
    latent = layer.latent
    return (layer.head_dim, layer.head_dim) if latent is None else (latent.size, latent.value)


def _pairs(scheme: Scheme, causal: bool, length: int, documents: Counter[int]) -> float:
    """How many pairs of a query and a key a layer allows in documents; the mean over heads if their masks differ.

    Positions are counted in each document, so the pairs of a document of n tokens are the n-th prefix sum of the mask.
    These sums are computed once for a mask and a length, in O(length); then a batch costs O(documents).
    """
    heads = [prefix_pairs(mask, length) for mask in _masks_of_heads(allowed(scheme, causal))]
    found = [sum(int(sums[tokens]) * count for tokens, count in documents.items()) for sums in heads]
    return found[0] if len(found) == 1 else sum(found) / len(found)


def _documents(segment_ids: np.ndarray) -> Counter[int]:
    """How many documents of each length are in the rows; a document is a run of one id that is not negative."""
    ids = np.asarray(segment_ids)
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    firsts = np.flatnonzero(starts)
    lengths = np.diff(np.append(firsts, ids.size))
    return Counter(lengths[ids.reshape(-1)[firsts] >= 0].tolist())


def allowed(scheme: Scheme, causal: bool) -> Mask | None:
    """The scheme's mask, in addition to that of documents; None if it allows everything."""
    return all_of(masks.Causal() if causal else None, scheme.scheme_mask)


def _masks_of_heads(mask: Mask | None) -> list[Mask | None]:
    """One mask for each kind of head; a single one unless dilations differ between heads."""
    if isinstance(mask, masks.Pair):
        left, right = _masks_of_heads(mask.left), _masks_of_heads(mask.right)
        kinds = range(max(len(left), len(right)))
        return [type(mask)(left[kind % len(left)], right[kind % len(right)]) for kind in kinds]
    if isinstance(mask, masks.Dilated) and isinstance(mask.dilation, tuple):
        return [masks.Dilated(mask.size, dilation) for dilation in mask.dilation]
    return [mask]


@lru_cache(maxsize=64)
def prefix_pairs(mask: Mask | None, length: int) -> np.ndarray:
    """``[length + 1]``: the pairs that `mask` allows in a document of 0, 1, ... `length` tokens.

    The m-th token of a document adds the keys up to it that it sees, and the queries before it that see it,

        P(m + 1) = P(m) + #{j <= m: allowed(m, j)} + #{i < m: allowed(i, m)}.
    """
    step = max(1, _BLOCK // len(_seen(mask, np.zeros(1, np.int64), True)))
    blocks = [np.arange(low, min(low + step, length), dtype=np.int64) for low in range(0, length, step)]
    added = [_count(_seen(mask, m, True), m + 1) + _count(_seen(mask, m, False), m) for m in blocks]
    return np.concatenate([np.zeros(1, np.int64), *added]).cumsum()


def _seen(mask: Mask | None, at: np.ndarray, keys: bool) -> Intervals:
    """The keys that queries at positions `at` see, or the queries that see the keys at `at`."""
    if isinstance(mask, masks.And):
        left, right = _seen(mask.left, at, keys), _seen(mask.right, at, keys)
        return [(np.maximum(a, c), np.minimum(b, d)) for a, b in left for c, d in right]
    if isinstance(mask, masks.Or):
        return _seen(mask.left, at, keys) + _seen(mask.right, at, keys)
    if isinstance(mask, masks.Dilated):
        steps = range(1 - mask.size, mask.size)
        return [(at + n * mask.dilation, at + n * mask.dilation + 1) for n in steps]
    return [np.broadcast_arrays(low, high, at)[:2] for low, high in [_run(mask, at, keys)]]


def _run(mask: Mask | None, at: np.ndarray, keys: bool) -> tuple:
    """The single interval (low, high) that `_seen` gives for a mask that is not a combination of others."""
    match mask:
        case None:
            return 0, END
        case masks.Causal():
            return (0, at + 1) if keys else (at, END)
        case masks.FirstTokens():
            return (0, mask.count) if keys else (0, np.where(at < mask.count, END, 0))
        case masks.GlobalFirst():
            return 0, np.where(at < mask.count, END, mask.count)
        case masks.Prefix():
            return 0, np.where(at < mask.length, mask.length, 0)
        case masks.Window() | masks.Band() | masks.Beyond():
            return _by_distance(mask.limits, 1, at, keys)
        case masks.Chunked() | masks.ChunksApart():
            return _by_distance(mask.limits, mask.size, at, keys)
    raise ValueError(f"mask: the pairs of {type(mask).__name__} cannot be counted from positions alone")


def _by_distance(limits: tuple[int, int | None], unit: int, at: np.ndarray, keys: bool) -> tuple:
    """``least <= i - j <= most`` in units of `unit` positions, for queries i or for keys j at `at`."""
    (least, most), here = limits, at // unit
    if keys:
        return (0 if most is None else (here - most) * unit), (here - least + 1) * unit
    return (here + least) * unit, (END if most is None else (here + most + 1) * unit)


def _count(intervals: Intervals, stop: np.ndarray) -> np.ndarray:
    """How many positions of ``[0, stop)`` are in at least one of the intervals, for every position."""
    if len(intervals) == 1:
        (low, high) = intervals[0]
        return np.maximum(np.minimum(high, stop) - np.maximum(low, 0), 0)
    low, high = (np.clip(np.stack(ends), 0, stop) for ends in zip(*intervals, strict=True))
    order = np.argsort(low, axis=0)
    low, high = (np.take_along_axis(ends, order, axis=0) for ends in (low, high))
    reached = np.maximum.accumulate(high, axis=0)
    low[1:] = np.maximum(low[1:], reached[:-1])
    return np.maximum(high - low, 0).sum(axis=0)
