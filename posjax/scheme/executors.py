"""What computes attention with the choices of a scheme: the softmax, or linear attention in its place."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax import linear, masks
from posjax._checks import check, check_choice, check_heads, describe
from posjax._numbers import LARGEST, widened
from posjax._slots import Features
from posjax.attention import attention
from posjax.attention.cache import Cache, ring
from posjax.attention.call import check_scale, checked_positions, own_heads
from posjax.attention.padding import without_padding
from posjax.attention.placement import Placement
from posjax.attention.platform import IMPLEMENTATIONS
from posjax.attention.sharded.mesh import Partition
from posjax.bias import Bias, BiasSpec
from posjax.linear import DeltaState, LinearState
from posjax.masks import Mask
from posjax.positions import Positions, Range, as_array, difference
from posjax.scheme.choices import Choices, all_of, check_direction
from posjax.sinks import Sinks

Params = Mapping[str, Mapping[str, Array]]
LayerCache = Cache | LinearState | DeltaState
"""The cache of one layer."""


class TokenPositions(NamedTuple):
    """The positions of the queries and keys of a call.

    Args:
        placement: how sequences and heads are split over a mesh.
        q_positions: see ``attention``.
        kv_positions: see ``attention``.
        coordinates: positions for the features, if they differ from ``q_positions`` and ``kv_positions``.
        length: the current length.
        head_dim: size of a head.
        partition: how the queries are split over the Auto axes of a mesh, outside ``shard_map``.
    """

    placement: Placement
    q_positions: Positions
    kv_positions: Positions
    coordinates: Array | None
    length: int | Int[Array, "..."] | None
    head_dim: int
    partition: Partition | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of feature maps besides positions."""
        return {"head_dim": self.head_dim, "length": self.length}

    def queries(self, features: Features, q: Array) -> Positions | Array:
        """Positions of the queries for the features, with an axis of coordinates if the features have several axes."""
        return self._for_features(features, q, self.q_positions)

    def keys(self, features: Features, k: Array) -> Positions | Array:
        """Positions of the keys for the features, in the same form."""
        return self._for_features(features, k, self.kv_positions)

    def _for_features(self, features, x, positions):
        several = features.num_axes > 1
        positions = self.placement.local(positions, x.shape[1])
        given = self.coordinates
        if given is None:
            rows = several and not isinstance(positions, Range) and jnp.ndim(positions) == 2
            return as_array(positions)[..., None] if rows else positions
        return given[..., 0] if given.shape[-1] == 1 and not several else given


class NewTokens(NamedTuple):
    """The tokens of one call of decoding.

    Args:
        index: for each token, how many tokens of its row come before it.
        valid: False for padding.
        gates: the result of ``Scheme.prepare`` for these tokens.
    """

    index: Int[Array, "batch tokens"]
    valid: Bool[Array, "batch tokens"]
    gates: dict[str, Float[Array, "batch heads tokens *size"]] | None

    @property
    def ids(self) -> Int[Array, "batch tokens"]:
        """0 for a token, -1 for padding."""
        return jnp.where(self.valid, 0, -1)


def check_projections(q, k, v, widths: tuple[float, float]) -> None:
    """Raises ValueError for arrays without heads, and for queries and keys whose widths do not fit each other.

    ``widths`` are those of ``Features``.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    wanted = int(q.shape[-1] / widths[0] * widths[1])
    check(
        k.shape[-1] == wanted,
        f"k must be {wanted} wide for a q that is {q.shape[-1]} wide (see key_size), found shape {k.shape}",
    )


def layer_of(stack: LayerCache, layer: Int[Array, ""]) -> LayerCache:
    """One layer of a stack, for `Scheme.decode`."""
    if isinstance(stack, Cache):
        return dataclasses.replace(stack, layer=layer)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack)


def with_layer(stack: LayerCache, after: LayerCache, layer: Int[Array, ""]) -> LayerCache:
    """The stack after one layer of it has become ``after``."""
    if isinstance(after, Cache):
        return dataclasses.replace(after, layer=None)
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, layer, 0), stack, after)


def check_rows(cache: LayerCache, q: Array) -> None:
    """Raises ValueError if tokens and cache differ in batch size."""
    rows = cache.rows if isinstance(cache, Cache) else jax.tree.leaves(cache)[0].shape[0]
    check(rows == q.shape[0], f"q must have the {rows} rows of the cache, found a batch of {q.shape[0]}")


def row_positions(placement: Placement, name: str, positions: Positions | None, x) -> Positions:
    """The positions of queries or keys ``x``; if ``positions`` is None, 0, 1, 2, ... over the whole sequence.

    Raises ValueError unless there is one position for each token.
    """
    if positions is None:
        return Range(0, placement.whole(x.shape[1]))
    return positions if placement.shards > 1 else checked_positions(name, positions, x)


@dataclasses.dataclass(frozen=True)
class SoftmaxAttention:
    """Norm, features, scale, bias and mask around one call of ``attention``."""

    scheme: Choices

    @property
    def caches(self) -> str:
        """See ``Scheme.caches``."""
        kind = self.scheme.feature_map_or_identity.cached
        return "raw" if kind == "rotated" and (self.scheme.remap is not None or self.scheme.reads_length) else kind

    def attend(self, q, k, v, params: Params, where: TokenPositions, *, mask=None, **options):
        """``attend_cached`` on the keys and values that ``cache_entries`` returns."""
        q, k, v = without_padding(mask, q, k, v)
        heads = where.placement.key_heads(k.shape[2])
        if "features" in params and heads is not None:
            # The parameters of the features are those of this device's key heads.
            params = dict(params) | {"features": self.scheme.feature_map_or_identity.heads(params["features"], heads)}
        k, v = self.cache_entries(params, k, v, where.keys(self.scheme.feature_map_or_identity, k), **where.sizes)
        return self.attend_cached(q, k, v, params, where, mask=mask, **options)

    def cache_entries(self, params: Params, k, v, at: Positions | Array, **sizes) -> tuple[Array, Array]:
        """Keys and values after the norm and the maps that never change, for features at positions ``at``."""
        features = self.scheme.feature_map_or_identity
        learned = params.get("features", {})
        k = self._normed(params, k, 1)
        if self.caches != "rotated":
            return features.compact(k), v
        k = self._normed(params, features.key(learned, k, at, **sizes), 1, mapped=True)
        return k, features.value(learned, v, at, **sizes)

    def _normed(self, params: Params, x: Array, part: int, *, mapped: bool = False) -> Array:
        """Queries (part 0) or keys (part 1), normed if the norm stands on this side of the features."""
        norm = self.scheme.norm
        if norm is None or norm.after_features != mapped:
            return x
        return norm.apply(params.get("norm", {}), x, x)[part]

    def attend_cached(
        self,
        q,
        k,
        v,
        params: Params,
        where: TokenPositions,
        *,
        causal: bool = True,
        mask: masks.Mask | None = None,
        visible: Int[Array, "*b queries"] | None = None,
        gates: tuple[Mapping[str, Array], Mapping[str, Array]] | None = None,
        query_scale: float | None = None,
        sinks: Float[Array, "*b heads"] | None = None,
        **options,
    ):
        """Attention on keys and values as returned by ``cache_entries``, with residuals if ``return_residuals``."""
        check_direction(self.scheme, causal)
        check_no_slots(options)
        check_scale(query_scale, "query_scale")
        heads = where.placement.all_heads(q.shape[2]) * self.scheme.copies
        at_q = where.queries(self.scheme.feature_map_or_identity, q)
        query_scale = where.head_dim**-0.5 if query_scale is None else query_scale
        query_scale = query_scale * self.scheme.feature_map_or_identity.softmax_scale
        own_scale = self._scale(q, params, where, causal, visible)
        scale = own_scale * query_scale
        states = self._states(q, params, where, gates, scale, own_scale)
        q, k, v, remap = self._mapped(q, k, v, params, where)
        terms = options | {
            "bias": bound_bias(self.scheme.bias, params, heads, q.shape[2], gates, states),
            "mask": all_of(masks.Causal() if causal else None, self.scheme.scheme_mask, mask),
            "sinks": sink_logits(self.scheme.sinks, params, heads, sinks, gates),
            "decay": self.scheme.feature_map_or_identity.decay(where.head_dim),
        }
        terms |= {"q_positions": where.q_positions, "kv_positions": where.kv_positions}
        terms |= {"placement": where.partition if where.placement.is_empty else where.placement}
        return self._finished(attention(q, k, v, scale=scale, remap=remap, **terms), params, at_q, where)

    def _scale(
        self, q, params: Params, where: TokenPositions, causal: bool, visible
    ) -> Float[Array, "*b queries heads"] | float:
        """``c_h(i)`` of all heads."""
        if self.scheme.scale is None:
            return 1.0
        at = where.placement.local(where.q_positions, q.shape[1])
        visible = count_visible(where, at, causal, self.scheme.scheme_mask, visible)
        sizes = {"num_heads": where.placement.all_heads(q.shape[2]) * self.scheme.copies}
        return self.scheme.scale.factor(params.get("scale", {}), positions=as_array(at), visible=visible, **sizes)

    def _states(
        self, q, params: Params, where: TokenPositions, gates, scale, own_scale
    ) -> Float[Array, "batch heads queries size"] | None:
        """The states of the queries that the bias reads, times the scale if it has that factor; or None."""
        bias = self.scheme.bias
        if bias is not None and bias.reads_queries:
            q = q if self.scheme.norm is None else self.scheme.norm.apply(params.get("norm", {}), q, q)[0]
            states = jnp.moveaxis(q, 1, 2)
            # The gradient of a repeat is a sum, which must not be in bfloat16.
            repeated = self.scheme.copies > 1
            states = jnp.repeat(widened(states), self.scheme.copies, axis=1) if repeated else states
            return self._scaled_states(states, scale, where)
        if bias is None or bias.gated or bias.reads_keys or not bias.reads_tokens:
            return None
        check(gates is not None, f"gates: {type(bias).__name__} reads the tokens: pass the result of Scheme.prepare")
        return self._scaled_states(gates[0]["bias"], own_scale if bias.scaled else 1.0, where)

    def _scaled_states(self, states, scale, where: TokenPositions):
        """States ``[batch, heads, queries, size]`` of this device's heads times factors ``[*b, queries, heads]``."""
        states = widened(states)
        if not jnp.ndim(scale):
            return states * scale
        scale = own_heads(where.placement, scale, states.shape[1])
        scale = jnp.reshape(scale, (1,) * (3 - scale.ndim) + scale.shape)
        return states * jnp.moveaxis(scale, 1, 2)[..., None].astype(states.dtype)

    def _mapped(self, q, k, v, params: Params, where: TokenPositions) -> tuple:
        """Queries, keys, values and remapped branches for attention, from raw queries and stored keys and values."""
        features = self.scheme.feature_map_or_identity
        learned = params.get("features", {})
        rotated = self.caches == "rotated"
        at_q, at_k = where.queries(features, q), where.keys(features, k)
        finish = partial(self._normed, params, mapped=True)
        q = self._normed(params, q, 0)
        v = v if rotated else features.value(learned, v, at_k, **where.sizes)
        if self.scheme.remap is not None:
            q, k, remap = self.scheme.remap.branches(features, learned, q, k, at_q, at_k, **where.sizes)
            remap = tuple(dataclasses.replace(part, q=finish(part.q, 0), k=finish(part.k, 1)) for part in remap)
            return finish(q, 0), finish(k, 1), v, remap
        k = k if rotated else finish(features.key(learned, k, at_k, **where.sizes), 1)
        return finish(features.query(learned, q, at_q, **where.sizes), 0), k, v, ()

    def _finished(self, out, params: Params, at_q, where: TokenPositions):
        """The result of attention, with or without residuals, after the map of outputs."""
        if isinstance(out, tuple):
            return self._finished(out[0], params, at_q, where), out[1]
        return self.scheme.feature_map_or_identity.output(params.get("features", {}), out, at_q, **where.sizes)

    def empty(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int, dtype
    ) -> Cache:
        """A cache without tokens; ``chunk`` is the most tokens that are written at once."""
        chunk = min(chunk, capacity)
        dtype = dtype or jnp.float32
        kept = None if self.scheme.bias is None else self.scheme.bias.kept(num_heads, num_kv_heads, head_dim)
        first, slots = ring(self.scheme.kept_keys, capacity, chunk)
        return Cache(
            k=jnp.zeros((batch, num_kv_heads, slots, self.scheme.feature_map_or_identity.key_size(head_dim)), dtype),
            v=jnp.zeros((batch, num_kv_heads, slots, head_dim), dtype),
            positions=jnp.zeros((batch, slots), jnp.int32),
            ids=jnp.full((batch, slots), -1, jnp.int32),
            gates=None if kept is None else jnp.zeros((batch, kept[0], slots, *kept[1:]), jnp.float32),
            total=jnp.zeros((batch, num_heads), jnp.float32) if self.scheme.gated else None,
            first=first,
            chunk=chunk,
        )

    def step(
        self,
        projected,
        cache: Cache,
        params: Params,
        where: TokenPositions,
        new: NewTokens,
        options,
        *,
        read: Callable | None = None,
    ) -> tuple:
        """Attention of new tokens over the cache, and the cache with the new tokens; see ``Scheme.decode``."""
        q, k, v = projected
        check(
            where.coordinates is None or self.caches == "rotated",
            f"coordinates: this scheme caches {self.caches} keys, which are mapped by their positions when read",
        )
        stored = self.cache_entries(params, k, v, where.keys(self.scheme.feature_map_or_identity, k), **where.sizes)
        kept = None if cache.gates is None else new.gates["bias"]
        cache = cache.write(*stored, where.kv_positions, new.index, new.valid, kept)
        own, (q,) = cache.own, without_padding(masks.Segments(new.ids), q)
        arguments = {
            "mask": masks.Segments(new.ids, own.ids, finite=True),  # padding was never written, empty slots hold zeros
            "visible": new.index + 1,
            "gates": None if new.gates is None else (new.gates, {"bias": own.gates}),
        }
        where = where._replace(kv_positions=own.positions)
        k, v = (own.keys, own.values) if read is None else read(own.keys)
        return self.attend_cached(q, k, v, params, where, **arguments, **options), cache


def bound_bias(
    bias: BiasSpec | None,
    params: Params,
    heads: int,
    local_heads: int,
    gates: tuple[Mapping[str, Array], Mapping[str, Array]] | None,
    states: Float[Array, "batch heads queries size"] | None,
) -> Bias | None:
    """The bias with its parameters, and with what it reads of the tokens or the queries, of this device's heads.

    ``heads`` are all heads of the model, ``local_heads`` those of this device.

    Raises:
        ValueError: for missing gates.
    """
    if bias is None:
        return None
    if states is not None:
        return bias.bind(params.get("bias"), num_heads=states.shape[1], states=states)
    if not bias.reads_tokens:
        return _bound(bias, params, heads)
    check(gates is not None, f"gates: {type(bias).__name__} reads the tokens: pass the result of Scheme.prepare")
    q_gates, kv_gates = (each["bias"] for each in gates)
    if bias.reads_keys:
        return bias.bind(params.get("bias"), num_heads=local_heads, kv_states=kv_gates)
    return bias.bind(params.get("bias"), num_heads=q_gates.shape[1], q_gates=q_gates, kv_gates=kv_gates)


def _bound(bias: BiasSpec, params: Params, heads: int) -> Bias:
    try:
        return bias.bind(params.get("bias"), num_heads=heads)
    except (TypeError, KeyError) as error:
        if "bias" in params:
            raise
        why = f"{type(bias).__name__}.bind fails without them: {error}"
        raise ValueError(f"params must hold 'bias', as Scheme.init makes it: {why}") from error


def sink_logits(
    sinks: Sinks | None,
    params: Params,
    heads: int,
    given: Array | None,
    gates: tuple[Mapping[str, Array], Mapping[str, Array]] | None,
) -> Float[Array, "*b heads"] | None:
    """The logits of the sinks of a scheme, or those given to the call if the slot is empty.

    Raises:
        ValueError: if both the scheme and the call have sinks, and for missing gates.
    """
    if sinks is None:
        return given
    check(given is None, "sinks: the scheme has its own sinks")
    if not sinks.reads_tokens:
        return sinks.logits(params.get("sinks", {}), num_heads=heads)
    check(gates is not None, f"gates: {type(sinks).__name__} reads the tokens: pass the result of Scheme.prepare")
    return jnp.moveaxis(gates[0]["sinks"], 1, 2)


def check_no_slots(options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of ``attention`` that are slots of a scheme."""
    for name in ("bias", "scale", "remap", "decay"):
        check(name not in options, f"{name}: a scheme has its own; give it as Scheme({name}=...) or replace it")


def count_visible(
    where: TokenPositions,
    q_positions: Positions,
    causal: bool,
    own: Mask | None,
    given: Int[Array, "*b queries"] | None,
) -> Int[Array, "*b queries"]:
    """How many keys each query sees, unchanged by a common shift of all positions.

    Args:
        where: the tokens of the call.
        q_positions: of this device's queries.
        causal: whether a query sees only the keys at or before its position.
        own: the scheme's mask.
        given: how many keys each query sees without the scheme's mask. If None, keys are contiguous, and a query sees
            all keys at or before its position, or all keys if not causal.
    """
    at = as_array(q_positions)
    placement = where.placement
    kv_positions = where.kv_positions
    if given is not None:
        count = placement.local(given, at.shape[-1])
    elif causal:
        count = jnp.minimum(difference(at, placement.lowest(kv_positions)), LARGEST - 1) + 1
    else:
        keys = kv_positions.length if isinstance(kv_positions, Range) else placement.whole(kv_positions.shape[-1])
        count = jnp.full_like(at, keys)
    return count if own is None else own.visible(count, at, causal)


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """Norm, kernel and rotation around the forms of ``posjax.linear``. It has no logits, so it reads no other slots."""

    scheme: Choices
    caches: ClassVar[str] = "state"

    def attend(
        self,
        q,
        k,
        v,
        params: Params,
        where: TokenPositions,
        *,
        causal=True,
        mask=None,
        visible=None,
        gates=None,
        **options,
    ):
        """One pass over whole sequences or segments; ``visible`` and ``gates`` are not used."""
        where.placement.check_scheme(self.scheme)
        check_direction(self.scheme, causal)
        check(
            mask is None or isinstance(mask, masks.Segments),
            f"mask: linear attention sees whole documents, so only masks.Segments is supported, found {describe(mask)}",
        )
        check_no_logits(**options)
        ids = None if mask is None else mask.q_ids
        form = linear.chunked if causal else linear.bidirectional
        out = self._run(form, (q, k, v), params, where, ids)
        return out[0] if causal else out

    def step(
        self, projected, cache: LinearState, params: Params, where: TokenPositions, new: NewTokens, options
    ) -> tuple[Array, LinearState]:
        """Attention of new tokens over the state, and the state after them."""
        check_no_logits(**options)
        return self._run(partial(linear.chunked, state=cache), projected, params, where, new.ids)

    def _run(self, form: Callable, projected, params: Params, where: TokenPositions, ids: Array | None):
        """The result of ``form``, one of the forms of ``posjax.linear``, on raw projections with segment ids."""
        q, k, v = projected if ids is None else without_padding(masks.Segments(ids), *projected)
        return form(v=v, segment_ids=ids, **self._features(q, k, params, where), **self._decay(k, where))

    def _decay(self, k, where: TokenPositions) -> dict[str, Array]:
        """The decay of this device's key heads, if the kernel has one."""
        heads = where.placement.key_heads(k.shape[2])
        decay = self.scheme.linear.log_decay(jnp.arange(k.shape[2]) if heads is None else heads)
        return {} if decay is None else {"log_decay": jnp.broadcast_to(decay, k.shape[:3])}

    def _features(self, q, k, params: Params, where: TokenPositions) -> dict[str, Array | None]:
        """The arguments of a form, from raw queries and keys."""
        if self.scheme.norm is not None:
            q, k = self.scheme.norm.apply(params.get("norm", {}), q, k)
        features = self.scheme.features
        rotations = {}
        if features is not None:
            positions = {"rotate_q": where.queries(features, q), "rotate_k": where.keys(features, k)}
            rotations = {name: partial(self._rotated, params, at) for name, at in positions.items()}
        return linear.features(self.scheme.linear, q, k, params=params.get("linear"), **rotations)

    def _rotated(self, params: Params, at, x):
        return self.scheme.features.query(params.get("features", {}), x, at, head_dim=x.shape[-1])

    def empty(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int, dtype
    ) -> LinearState:
        """The state before the first token, for any capacity."""
        return linear.empty_state(batch, num_kv_heads, self.scheme.linear.size(head_dim), head_dim)


@dataclasses.dataclass(frozen=True)
class DeltaAttention:
    """The cache of a layer of Gated DeltaNet; its projections and all that is computed with them are the model's."""

    scheme: Choices
    caches: ClassVar[str] = "state"

    def attend(self, *arguments, **options):
        """Raises ValueError: the layer has no queries, keys and values of attention."""
        raise ValueError(
            "linear: Gated DeltaNet is a layer with projections of its own: use nn.Block or nn.DeltaMixer for the "
            "layer, or posjax.linear.gated_delta for the rule alone"
        )

    step = attend

    def empty(self, batch: int, capacity: int, *, dtype, **sizes) -> DeltaState:
        """The state before the first token, for any capacity; the layer has its own sizes of heads."""
        return self.scheme.linear.empty(batch, dtype=dtype)


def check_no_logits(*, softcap=None, sinks=None, return_residuals: bool = False, implementation=None) -> None:
    """Checks the options of ``attention`` for linear attention, which has no logits.

    ``implementation`` is ignored: it is for layers of the same model with softmax attention.

    Raises:
        ValueError: for an option about logits, or an unknown implementation.
        TypeError: for an unknown keyword.
    """
    for name, value in (("softcap", softcap), ("sinks", sinks), ("return_residuals", return_residuals or None)):
        check(value is None, f"{name}: linear attention has no logits for it; leave it out")
    if implementation is not None:
        check_choice("implementation", implementation, IMPLEMENTATIONS)
