"""Decoding with a scheme: what a layer keeps of the tokens it has seen, and attention of new tokens over that."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax import linear, masks
from posjax._checks import check_counts, check_length
from posjax.arguments import check_coordinates, check_no_logits, check_projections, check_rows
from posjax.attention.cache import Cache, empty
from posjax.attention.sharded import Placement
from posjax.attention.sharded.automatic import explicit_spec, has_explicit, on_auto_axes
from posjax.attention.sharded.split import Partition
from posjax.linear import LinearState


class Decoding:
    """What a ``Scheme`` does with a cache."""

    def init_cache(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int = 1, dtype=None
    ) -> Cache | LinearState:
        """An empty cache of one layer for ``decode``; what it holds is ``caches``.

        Args:
            batch: rows.
            capacity: the most tokens of a row. A scheme whose mask lets a query see only recent tokens (and the first
                few) keeps no more than those.
            num_heads: query heads.
            num_kv_heads: key and value heads.
            head_dim: size of a head, and of a value.
            chunk: the most tokens decoded at once.
            dtype: of keys and values, float32 when left out.

        Raises:
            ValueError: for a number that is not whole and above 0.
        """
        check_counts(batch=batch, capacity=capacity, chunk=chunk)
        check_counts(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if self.caches == "state":
            size = self.linear.size(head_dim)
            return linear.empty_state(batch, num_kv_heads, size, head_dim)
        return empty(
            batch,
            capacity,
            kv_heads=num_kv_heads,
            size=self.key_size(head_dim),
            value_size=head_dim,
            gates=num_heads if self.reads_tokens else 0,
            retained=self.retained,
            chunk=min(chunk, capacity),
            dtype=dtype or jnp.float32,
        )

    def decode(
        self,
        q: Float[Array, "batch tokens heads query_size"],
        k: Float[Array, "batch tokens kv_heads key_size"],
        v: Float[Array, "batch tokens kv_heads value_size"],
        kept: Cache | LinearState,
        *,
        params: Mapping[str, Mapping[str, Array]] | None = None,
        index: Int[Array, "batch tokens"],
        valid: Bool[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"] | None = None,
        coordinates: Array | None = None,
        length: int | Int[Array, "..."],
        gates: Float[Array, "batch heads tokens"] | None = None,
        partition: Partition | None = None,
        **options,
    ) -> tuple[Float[Array, "batch tokens heads value_size"], Cache | LinearState]:
        """Attention of new tokens over all that were seen, themselves included, and the cache with them in it.

        It equals ``attend`` over the whole row, whatever parts the row is cut into, at the same ``length``.

        Args:
            q, k, v: raw projections of the new tokens.
            kept: from ``init_cache``, or an earlier call.
            params: see ``attend``.
            index: how many tokens of its row stand before each.
            valid: False for padding.
            positions: of the new tokens; ``index`` when left out. They must rise along a row from 0 or above where the
                scheme keeps recent tokens alone (``retained``), for it counts tokens where its mask counts positions.
            coordinates: see ``attend``; for schemes that keep rotated keys.
            length: the length that a scheme which reads it goes by: one for the whole generation, or else the keys
                that are kept were made by other rules than the new ones.
            gates: what ``prepare`` gave for the new tokens.
            partition: see ``attend``. On Explicit axes the cache keeps its sharding.
            options: passed on to ``attention``.
        """
        check_projections(q, k, v, self._features.widths)
        check_rows(kept, q)
        check_length(length)
        given = {"params": params or {}, "index": index, "valid": valid, "length": length, "gates": gates, **options}
        given |= {"positions": index if positions is None else positions, "coordinates": coordinates}
        lies = explicit_spec(q), jax.tree.map(explicit_spec, kept)
        run = partial(self._decode, lies[0] if has_explicit(q) else partition)
        return on_auto_axes(run, [q, k, v], kept, given, like=lies)

    def _decode(self, partition, projected, kept, given) -> tuple:
        """``decode`` where the compiler splits everything but attention itself."""
        q, k, v = projected
        params, index, valid, gates = (given.pop(name) for name in ("params", "index", "valid", "gates"))
        positions, coordinates, length = (given.pop(name) for name in ("positions", "coordinates", "length"))
        where = self._places(Placement(), k, positions, coordinates)
        ids = jnp.where(valid, 0, -1)
        if self.caches == "state":
            check_no_logits(**given)
            return self.attend_linear(q, k, v, params=params, at_q=where, at_k=where, segment_ids=ids, state=kept)
        check_coordinates(self.caches, coordinates)
        stored = self.stored(params, k, v, where, length=length)
        kept = kept.write(*stored, positions, index, valid, gates)
        out = self.attend_stored(
            q,
            kept.k,
            kept.v,
            params=params,
            head_dim=self._features.head_dim(k.shape[-1]),
            q_positions=positions,
            kv_positions=kept.positions,
            coordinates=coordinates,
            length=length,
            mask=masks.Segments(ids, kept.ids),
            visible=index + 1,
            gates=None if gates is None else (gates, kept.gates),
            partition=partition,
            **given,
        )
        return out, kept
