"""Softmax attention with the choices of a scheme, in one pass or over a cache of keys and values."""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax import masks
from posjax._checks import check
from posjax.attention import attention
from posjax.attention.cache import Cache, ring
from posjax.attention.checks import check_scale
from posjax.attention.padding import without_padding
from posjax.attention.sharded import context_attention
from posjax.positions import Positions, as_array
from posjax.scheme.arguments import bound_bias, check_no_slots, count_visible, sink_logits
from posjax.scheme.calls import NewTokens, Params, Where
from posjax.scheme.checks import check_direction
from posjax.scheme.choices import Choices, all_of


@dataclasses.dataclass(frozen=True)
class SoftmaxAttention:
    """Norm, features, scale, bias and mask around one call of ``attention``."""

    scheme: Choices

    @property
    def caches(self) -> str:
        """See ``Scheme.caches``."""
        kind = self.scheme.maps.cached
        return "raw" if kind == "rotated" and (self.scheme.remap is not None or self.scheme.reads_length) else kind

    def attend(self, q, k, v, params: Params, where: Where, *, mask=None, **options):
        """``attend_stored`` on the keys and values that ``stored`` returns."""
        q, k, v = without_padding(mask, q, k, v)
        heads = where.placement.key_heads(k.shape[2])
        if "features" in params and heads is not None:
            # The parameters of the features are those of this device's key heads.
            params = dict(params) | {"features": self.scheme.maps.heads(params["features"], heads)}
        k, v = self.stored(params, k, v, where.keys(self.scheme.maps, k), **where.sizes)
        return self.attend_stored(q, k, v, params, where, mask=mask, **options)

    def stored(self, params: Params, k, v, at: Positions | Array, **sizes) -> tuple[Array, Array]:
        """Keys and values after the norm and the maps that never change, for features at positions ``at``."""
        features, learned = self.scheme.maps, params.get("features", {})
        if self.scheme.norm is not None:
            k = self.scheme.norm.apply(params.get("norm", {}), k, k)[1]
        if self.caches != "rotated":
            return features.compact(k), v
        return features.key(learned, k, at, **sizes), features.value(learned, v, at, **sizes)

    def attend_stored(
        self,
        q,
        k,
        v,
        params: Params,
        where: Where,
        *,
        causal: bool = True,
        mask: masks.Mask | None = None,
        visible: Int[Array, "*b queries"] | None = None,
        gates: tuple[Float[Array, "batch heads queries"], Float[Array, "batch heads keys"]] | None = None,
        query_scale: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
        **options,
    ):
        """Attention on keys and values as returned by ``stored``, with residuals if ``return_residuals``."""
        check_direction(self.scheme, causal)
        check_no_slots(options)
        check_scale(query_scale, "query_scale")
        heads, at_q = where.placement.all_heads(q.shape[2]), where.queries(self.scheme.maps, q)
        dot_scale = (where.head_dim**-0.5 if query_scale is None else query_scale) * self.scheme.maps.softmax_scale
        scale = self._scale(q, params, where, causal, visible) * dot_scale
        q, k, v, remap = self._mapped(q, k, v, params, where)
        terms = options | {
            "bias": bound_bias(self.scheme.bias, params, heads, gates),
            "mask": all_of(masks.Causal() if causal else None, self.scheme.own_mask, mask),
            "sinks": sink_logits(self.scheme.sinks, params, heads, sinks),
            "decay": self.scheme.maps.decay(where.head_dim),
        }
        at = {"q_positions": where.q_positions, "kv_positions": where.kv_positions}
        return self._finished(_attention(where)(q, k, v, scale=scale, remap=remap, **at, **terms), params, at_q, where)

    def _scale(
        self, q, params: Params, where: Where, causal: bool, visible
    ) -> Float[Array, "*b queries heads"] | float:
        """``c_h(i)`` of all heads."""
        if self.scheme.scale is None:
            return 1.0
        at = where.placement.local(where.q_positions, q.shape[1])
        visible = count_visible(where, at, causal, self.scheme.own_mask, visible)
        sizes = {"num_heads": where.placement.all_heads(q.shape[2])}
        return self.scheme.scale.factor(params.get("scale", {}), positions=as_array(at), visible=visible, **sizes)

    def _mapped(self, q, k, v, params: Params, where: Where) -> tuple:
        """Queries, keys, values and remapped branches for attention, from raw queries and stored keys and values."""
        features, learned, rotated = self.scheme.maps, params.get("features", {}), self.caches == "rotated"
        at_q, at_k = where.queries(features, q), where.keys(features, k)
        if self.scheme.norm is not None:
            q = self.scheme.norm.apply(params.get("norm", {}), q, q)[0]
        v = v if rotated else features.value(learned, v, at_k, **where.sizes)
        if self.scheme.remap is not None:
            q, k, remap = self.scheme.remap.branches(features, learned, q, k, at_q, at_k, **where.sizes)
            return q, k, v, remap
        k = k if rotated else features.key(learned, k, at_k, **where.sizes)
        return features.query(learned, q, at_q, **where.sizes), k, v, ()

    def _finished(self, out, params: Params, at_q, where: Where):
        """The result of attention, with or without residuals, after the map of outputs."""
        if isinstance(out, tuple):
            return self._finished(out[0], params, at_q, where), out[1]
        return self.scheme.maps.output(params.get("features", {}), out, at_q, **where.sizes)

    def empty(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int, dtype
    ) -> Cache:
        """A cache without tokens; ``chunk`` is the most tokens that are written at once."""
        chunk, dtype, gated = min(chunk, capacity), dtype or jnp.float32, self.scheme.reads_tokens
        first, slots = ring(self.scheme.kept_keys, capacity, chunk)
        return Cache(
            k=jnp.zeros((batch, slots, num_kv_heads, self.scheme.maps.key_size(head_dim)), dtype),
            v=jnp.zeros((batch, slots, num_kv_heads, head_dim), dtype),
            positions=jnp.zeros((batch, slots), jnp.int32),
            ids=jnp.full((batch, slots), -1, jnp.int32),
            gates=jnp.zeros((batch, num_heads, slots), jnp.float32) if gated else None,
            total=jnp.zeros((batch, num_heads), jnp.float32) if gated else None,
            first=first,
            chunk=chunk,
        )

    def step(self, projected, cache: Cache, params: Params, where: Where, new: NewTokens, options, partition) -> tuple:
        """Attention of new tokens over the cache, and the cache with the new tokens."""
        q, k, v = projected
        check(
            where.coordinates is None or self.caches == "rotated",
            f"coordinates: this scheme caches {self.caches} keys, which are mapped by their positions when read",
        )
        stored = self.stored(params, k, v, where.keys(self.scheme.maps, k), **where.sizes)
        cache = cache.write(*stored, where.kv_positions, new.index, new.valid, new.gates)
        arguments = {
            "mask": masks.Segments(new.ids, cache.ids),
            "visible": new.index + 1,
            "gates": None if new.gates is None else (new.gates, cache.gates),
            "partition": partition,
        }
        where = where._replace(kv_positions=cache.positions)
        return self.attend_stored(q, cache.k, cache.v, params, where, **arguments, **options), cache


def _attention(where: Where):
    """``attention``, or its equivalent for sequences that are split over devices."""
    split = where.placement.axes or where.placement.layout.reorders
    return partial(context_attention, placement=where.placement) if split else attention
