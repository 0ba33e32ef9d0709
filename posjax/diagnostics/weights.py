"""The weight that a scheme gives to each key, measured by its own attention."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_number
from posjax._mesh import is_array
from posjax.positions import Range
from posjax.scheme import Scheme

_COLUMNS = 128  # keys whose weights are read in one call of attention


def weights(
    scheme: Scheme,
    length: int,
    *,
    query: int = -1,
    q: Float[Array, "heads query_size"] | None = None,
    k: Float[Array, "*keys kv_heads key_size"] | None = None,
    num_heads: int = 8,
    head_dim: int = 64,
    params: dict | None = None,
    **options,
) -> Float[np.ndarray, "heads keys"]:
    """The attention weights of one query over ``length`` keys at positions ``0 .. length - 1``.

    They are the output of ``Scheme.attend`` for values that are unit vectors, so they include features, scale, bias,
    mask and remapped branches. Memory grows with ``length``, not with its square. Tokens that a bias reads (FoX) are
    zeros.

    Args:
        scheme: any scheme.
        length: the number of keys, and the current length for schemes that read it.
        query: the position of the query; negative ones count from the end.
        q: the raw query projection; ones when left out.
        k: the raw key projection, one for all keys ``[kv_heads, key_size]`` or one for each
            ``[length, kv_heads, key_size]``; ones when left out.
        num_heads: the number of heads, if ``q`` is left out.
        head_dim: the size of a head of the model.
        params: the scheme's parameters (``init`` and ``init_shared``, merged); as initialised when left out.
        options: passed to ``Scheme.attend``, such as ``causal=False`` or ``sinks``.

    Returns:
        float32; they sum to 1, or to less with sinks, and are 0 if no key may be seen. Those of linear attention may be
        negative, and with rotation their sum is not 1.

    Raises:
        ValueError: for a layer recipe instead of one scheme, and for a query that is not among the keys.
    """
    check(isinstance(scheme, Scheme), f"scheme must be one posjax.Scheme, found {type(scheme).__name__}")
    check_count("length", length)
    heads = num_heads if q is None else q.shape[0]
    q = jnp.ones((heads, scheme.query_size(head_dim))) if q is None else q
    k = jnp.ones((heads, scheme.key_size(head_dim))) if k is None else k
    k = jnp.broadcast_to(k, (length, *k.shape[-2:]))
    return _row(scheme, q[None], k[None], query, head_dim, params, options)[0]


def _row(scheme: Scheme, q, k, query: int, head_dim: int, params, options) -> Float[np.ndarray, "draws heads keys"]:
    """Weights of one query for ``q [draws, heads, size]`` and ``k [draws, keys, kv_heads, size]``."""
    length = k.shape[1]
    check(-length <= query < length, f"query must be one of the {length} keys, found {query}")
    params = parameters(scheme, q.shape[1], k.shape[2], head_dim) if params is None else params
    at = jnp.array([query % length], jnp.int32)
    gates = _gates(scheme, params, *k.shape[:2])
    blocks = _read(scheme, q[:, None], k, at, params, None, gates, _settings(options, length=length))[:, :, 0]
    return np.concatenate(np.moveaxis(blocks, 1, 0), axis=-1)[..., :length]


class Curve(NamedTuple):
    """How a scheme weighs distance; see ``weight_curve``."""

    distances: Int[np.ndarray, "n"]
    weights: Float[np.ndarray, "heads n"]
    logits: Float[np.ndarray, "heads n"]


def weight_curve(
    scheme: Scheme,
    distances: Int[np.ndarray, "n"],
    *,
    draws: int = 0,
    num_heads: int = 8,
    head_dim: int = 64,
    seed: int = 0,
    params: dict | None = None,
    **options,
) -> Curve:
    """Weights and logits of a scheme against the distance ``r = i - j``, for one query and equal keys.

    The context is just long enough for the largest distance, and the query is its last token. Negative distances, of
    bidirectional schemes, add tokens after the query.

    Args:
        scheme: any scheme.
        distances: integers, in any order.
        draws: 0 for queries and keys of ones, otherwise the mean over this number of standard normal queries, each with
            keys equal to it (with an independent draw if a key is not as wide as a query, as in CoCA).
        num_heads: number of heads.
        head_dim: size of a head.
        seed: of the draws.
        params: see ``weights``.
        options: see ``weights``.

    Returns:
        ``weights`` of the softmax, and ``logits``: their logarithms, which are the logits up to a constant; minus
        infinity for masked keys, and for weights below the smallest normal float32 (``e^-87``).
    """
    distances = np.asarray(distances)
    check(distances.size > 0, "distances is empty")
    reach = max(int(distances.max()), 0)
    ahead = max(-int(distances.min()), 0)
    q, k = _contents(scheme, draws, num_heads, head_dim, seed)
    k = jnp.broadcast_to(k[:, None], (len(k), reach + ahead + 1, *k.shape[1:]))
    rows = _row(scheme, q, k, reach, head_dim, params, options)[..., reach - distances]
    with np.errstate(divide="ignore", invalid="ignore"):
        return Curve(distances, rows.mean(0), np.log(rows).mean(0))


def receptive_field(
    scheme: Scheme,
    length: int,
    *,
    share: float = 0.99,
    layers: int = 1,
    num_heads: int = 8,
    head_dim: int = 64,
    **options,
) -> Int[np.ndarray, "heads"]:
    """The distance that contains ``share`` of the weight if all contents have the same score.

    Queries are zero, so only bias, mask and sinks decide. Through ``layers`` equal layers the distances add up as in a
    random walk, if each layer has a context that is long enough; a window of ``w`` reaches ``layers (w - 1) + 1`` keys
    for a share of 1. ALiBi's slope ``m`` gives ``ceil(ln(1 / (1 - share)) / m)`` keys.

    Args:
        scheme: a scheme for causal attention.
        length: the context of the weights; it must be much longer than the result for the result to be meaningful.
        share: of the weight, in (0, 1].
        layers: number of layers.
        num_heads: number of heads.
        head_dim: size of a head.
        options: see ``weights``.

    Returns:
        Per head, the smallest number of nearest positions, including the query's own, with at least ``share``.
    """
    check(0 < share <= 1, f"share must be in (0, 1], found {share!r}")
    check_count("layers", layers)
    zeros = jnp.zeros((num_heads, scheme.query_size(head_dim)))
    by_distance = weights(scheme, length, q=zeros, head_dim=head_dim, **options)[:, ::-1].astype(np.float64)
    return np.array([_reach(row, layers, share) for row in by_distance])


def _reach(row: Float[np.ndarray, "n"], layers: int, share: float) -> int:
    total = row
    for _ in range(layers - 1):
        total = np.convolve(total, row)
    if share == 1:  # sums of rounded weights reach 1 too early
        return int(np.flatnonzero(total)[-1]) + 1
    return int(np.searchsorted(total.cumsum(), share * total.sum())) + 1


def entropy(
    scheme: Scheme,
    q: Float[Array, "batch queries heads query_size"],
    k: Float[Array, "batch keys kv_heads key_size"],
    *,
    q_positions: Int[Array, "queries"] | None = None,
    params: dict | None = None,
    length: int | None = None,
    gates: dict[str, Float[Array, "batch heads keys *size"]] | None = None,
    **options,
) -> Float[np.ndarray, "batch queries heads"]:
    """Entropy of the attention weights of every query, ``-sum_j a_ij log a_ij``, in nats.

    ``log n`` if ``n`` keys have equal weights, 0 if one key has all the weight.

    Args:
        scheme: any scheme.
        q: raw query projections.
        k: raw key projections, at positions ``0, 1, 2, ...``.
        q_positions: of the queries; ``0, 1, 2, ...`` when left out.
        params: the scheme's parameters, if it has any.
        length: the current length, for schemes that read it; the number of keys when left out.
        gates: the result of ``Scheme.prepare``, for schemes that read tokens (FoX, Inkling).
        options: passed to ``Scheme.attend``, such as ``causal=False``.

    Raises:
        ValueError: for linear attention, whose weights need not be a distribution.
    """
    check(scheme.linear is None, "scheme: the weights of linear attention can be negative, so they have no entropy")
    at = jnp.arange(q.shape[1], dtype=jnp.int32) if q_positions is None else jnp.asarray(q_positions, jnp.int32)
    length = jnp.int32(k.shape[1] if length is None else length)
    return _read(scheme, q, k, at, params, length, gates, _settings(options), _block_entropy).sum(1)


def entropy_curve(
    scheme: Scheme,
    lengths: Int[np.ndarray, "n"],
    *,
    draws: int = 8,
    gain: float = 1.0,
    num_heads: int = 8,
    head_dim: int = 64,
    seed: int = 0,
    params: dict | None = None,
) -> Float[np.ndarray, "heads n"]:
    """Mean entropy of the last query's weights by context length, for standard normal queries and keys, in nats.

    Logits ``q . k / sqrt(d)`` are then about standard normal, and plain softmax has an entropy of ``log n - 1 / 2``:
    attention spreads as the context grows. Scales such as log n counteract this.

    Args:
        scheme: a scheme for causal attention.
        lengths: numbers of keys.
        draws: number of random contexts to average.
        gain: factor of the queries: the standard deviation of plain logits.
        num_heads: number of heads.
        head_dim: size of a head.
        seed: of the draws.
        params: the scheme's parameters; as initialised when left out.
    """
    check_number("gain", gain)
    lengths = np.asarray(lengths)
    key_q, key_k = jax.random.split(jax.random.key(seed))
    q = gain * jax.random.normal(key_q, (draws, 1, num_heads, scheme.query_size(head_dim)))
    k = jax.random.normal(key_k, (draws, int(lengths.max()), num_heads, scheme.key_size(head_dim)))
    params = parameters(scheme, num_heads, num_heads, head_dim) if params is None else params
    fixed = {"params": params, "gates": _gates(scheme, params, *k.shape[:2])}
    rows = [entropy(scheme, q, k, q_positions=[n - 1], length=n, **fixed) for n in lengths.tolist()]
    return np.stack([row[:, 0].mean(0) for row in rows], axis=-1)


def parameters(scheme: Scheme, num_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0) -> dict:
    """All parameters of one layer of the scheme as initialised, including shared ones, for tokens of size 1."""
    key = jax.random.key(seed)
    layer_params = scheme.init(key, num_heads, head_dim, num_kv_heads=num_kv_heads, model_dim=1)
    return layer_params | scheme.init_shared(key, num_heads, head_dim)


def _gates(scheme: Scheme, params, batch: int, length: int) -> dict[str, Float[Array, "batch heads keys *size"]] | None:
    """The gates of tokens that are zero, for schemes that read tokens."""
    if not scheme.reads_tokens:
        return None
    weights_of_tokens = (params[name]["w"] for name in scheme.token_readers if "w" in params[name])
    width = next((w.shape[0] for w in weights_of_tokens), 1)
    return scheme.prepare(params, jnp.zeros((batch, length, width)))


def _contents(scheme: Scheme, draws: int, num_heads: int, head_dim: int, seed: int) -> tuple[Array, Array]:
    """Queries and keys ``[draws, heads, size]``: ones, or random."""
    shapes = [(max(draws, 1), num_heads, size) for size in (scheme.query_size(head_dim), scheme.key_size(head_dim))]
    if not draws:
        return jnp.ones(shapes[0]), jnp.ones(shapes[1])
    q, k = map(jax.random.normal, jax.random.split(jax.random.key(seed)), shapes)
    return q, q if q.shape == k.shape else k


def _settings(options: dict[str, Any], **more) -> tuple[dict, tuple]:
    """The options that hold arrays, as a dictionary, and the static ones, as pairs of name and value."""
    options = options | more
    arrays = {name: value for name, value in options.items() if any(map(is_array, jax.tree.leaves(value)))}
    return arrays, tuple(sorted((name, value) for name, value in options.items() if name not in arrays))


def _block_entropy(block: Float[Array, "queries heads size"]) -> Float[Array, "queries heads"]:
    return jax.scipy.special.entr(block).sum(-1)


def _read(scheme, q, k, at, params, length, gates, settings, reduce=None) -> np.ndarray:
    arrays, static = settings
    inputs = (q, k, gates), at, params or {}, length, arrays
    return np.asarray(_read_rows(*inputs, scheme=scheme, static=static, reduce=reduce))


@partial(jax.jit, static_argnames=("scheme", "static", "reduce"))
def _read_rows(rows, at, params, length, arrays, *, scheme, static, reduce):
    """Weights of every sequence, one block of keys at a time: ``[batch, blocks, queries, heads, block]``.

    ``reduce`` is applied to each block. Values are unit vectors, so that the output of attention is its weights. A
    method may rotate values, and outputs back (VO-RoPE). Here the map of outputs is applied to the values before
    attention, and the map of values to the outputs after it, which cancels both rotations.
    """
    keys, kv_heads = rows[1].shape[1:3]
    maps = scheme.feature_map_or_identity
    options = {**({} if length is None else {"length": length}), **arrays, **dict(static)}

    def row(sequence):
        q, k, gates = jax.tree.map(lambda x: x[None], sequence)
        sizes = {"head_dim": maps.head_dim(k.shape[-1]), "length": options["length"]}
        q_at, k_at = (at, Range(0, keys)) if scheme.linear is None else (Range(0, keys),) * 2
        if scheme.linear is not None:  # linear attention takes whole sequences
            q = jnp.zeros((1, keys, *q.shape[2:])).at[:, at].set(q)
        gated = {} if gates is None else {"gates": (jax.tree.map(lambda each: each[:, :, at], gates), gates)}

        def block(first):
            units = (jnp.arange(keys)[:, None] == first + jnp.arange(_COLUMNS)).astype(jnp.float32)
            v = jnp.broadcast_to(units[None, :, None], (1, keys, kv_heads, _COLUMNS))
            v = maps.output(params.get("features", {}), v, k_at, **sizes)
            out = scheme.attend(q, k, v, params=params, q_positions=q_at, kv_positions=k_at, **gated, **options)
            out = out if scheme.linear is None else out[:, at]
            block_weights = maps.value(params.get("features", {}), out, at, **sizes)[0]
            return block_weights if reduce is None else reduce(block_weights)

        return jax.lax.map(block, jnp.arange(0, keys, _COLUMNS))

    return jax.lax.map(row, rows)
