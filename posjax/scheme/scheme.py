"""A position scheme: one choice for each slot of the logit.

For query i, key j and head h every method of this library computes

    z_h(i, j) = c_h(i) <phi(q_i, p_i), psi(k_j, p_j)> / sqrt(d) + b_h(p_i, p_j)      where allowed(i, j)

and a ``Scheme`` names phi and psi (``features``, and a ``norm`` before or after them), c (``scale``), b (``bias``) and
allowed (``mask``); ``remap`` scores distant pairs by other distances, ``sinks`` take part in the normalisation,
``embedding`` is added to the token embeddings, ``training_positions`` draws the positions of training, and ``linear``
replaces the softmax.
Slots compose freely; slots that do not compose raise ValueError when the scheme is built, with the reason.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax import bias, masks
from posjax._checks import check, check_counts, check_length, describe
from posjax._mesh import explicit_spec, has_explicit, on_auto_axes
from posjax.attention.call import check_aligned, check_masks
from posjax.attention.placement import Placement
from posjax.attention.sharded.mesh import Partition, over_mesh, split_of
from posjax.layout import Layout
from posjax.positions import Positions
from posjax.scheme.choices import (
    Choices,
    check_composition,
    check_direction,
    check_reach,
    check_same_parameters,
    check_slots,
    init_slots,
    replaced,
)
from posjax.scheme.executors import (
    DeltaAttention,
    LayerCache,
    LinearAttention,
    NewTokens,
    Params,
    SoftmaxAttention,
    TokenPositions,
    check_projections,
    check_rows,
    row_positions,
)


@dataclasses.dataclass(frozen=True)
class Scheme(Choices):
    """One choice for each slot; frozen and hashable, so it is a static argument of ``jit``.

    Args:
        embedding: added to the token embeddings: ``absolute.Sinusoidal``, ``absolute.Learned``, ...
        norm: of queries and keys, before the features or after them: ``norms.KeyNorm``, ``norms.QKNorm``, ...
        features: the maps phi and psi: ``rotary.Rotary``, ``coca.Coca``, ...; the plain projections when left out.
        scale: a factor of every query: ``scales.LogN``, ``scales.SSMax``, ...
        bias: added to the logits: ``bias.ALiBi``, ``bias.T5``, ``bias.FoX``, ...
        mask: combined with the model's own mask: ``masks.Window``, ``masks.Chunked``, ..., or a composition of masks.
        remap: other features for distant pairs: ``remap.ReRoPE``, ``remap.SelfExtend``, ...
        sinks: logits without values: ``sinks.LearnedSinks``, ``sinks.SoftmaxPlusOne``.
        linear: in place of the softmax, the kernel of linear attention: ``linear.Elu``, ``linear.Performer``, ...; or
            ``linear.GatedDelta``, a layer of Gated DeltaNet.
        training_positions: how positions are drawn in training: ``training_positions.Randomised``, ... Only a trainer
            reads it.

    Raises:
        ValueError: for slots that do not compose, with the reason.
    """

    def __post_init__(self):
        check_slots(self)
        check_composition(self)

    @property
    def _executor(self) -> SoftmaxAttention | LinearAttention | DeltaAttention:
        if self.is_delta:
            return DeltaAttention(self)
        return SoftmaxAttention(self) if self.linear is None else LinearAttention(self)

    def _softmax(self, asked: str) -> SoftmaxAttention:
        why = f"{asked}: linear attention keeps one state for all keys; use init_cache and decode"
        check(self.linear is None, why)
        return SoftmaxAttention(self)

    @property
    def caches(self) -> str:
        """The form of the keys in a cache: ``"rotated"``, ``"raw"``, ``"half-width"``, or one ``"state"`` for all keys.

        Rotated keys can be cached only if the map of a key never changes. It changes if a rule reads the current
        length, or if remapped pairs have another map.
        """
        return self._executor.caches

    def extend(self, **changes) -> "Scheme":
        """Another scheme over the same parameters, for use beyond the training length without retraining.

        Args:
            changes: slots to replace, by a spec or by ``{"name": ..., option: value}``. ``frequencies`` replaces the
                frequency rule of the features; by name it keeps the rule's base, head size and rotated share.

        Raises:
            ValueError: for an unknown slot, or a change that would need other parameters.
        """
        extended = self.replace(**changes)
        check_same_parameters(self, extended)
        return extended

    def replace(self, **changes) -> "Scheme":
        """The scheme with some slots replaced, in the forms that ``extend`` takes; parameters may differ.

        Raises:
            ValueError: for an unknown slot, name or option.
        """
        return replaced(self, changes)

    def check_direction(self, causal: bool) -> None:
        """Checks that no method for causal attention is used in bidirectional attention.

        Raises:
            ValueError: naming the slot, and the option that makes it two-sided if there is one.
        """
        check_direction(self, causal)

    def init(
        self,
        key: Array,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        model_dim: int | None = None,
    ) -> dict[str, dict[str, Array]]:
        """Learned parameters of one layer, ``{slot: {name: array}}``, without slots that have no parameters.

        ``num_kv_heads`` is ``num_heads`` when left out; ``model_dim``, the width of the tokens, is only for FoX.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_counts(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "model_dim": model_dim}
        return init_slots(self, key, sizes, shared=False)

    def init_shared(self, key: Array, num_heads: int, head_dim: int) -> dict[str, dict[str, Array]]:
        """Learned parameters that all layers share (T5's table, KERPLE's scalars), in the same form."""
        sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim, "model_dim": None}
        return init_slots(self, key, sizes, shared=True)

    def query_size(self, head_dim: int) -> int:
        """Width of a head's query projection."""
        return self.feature_map_or_identity.query_size(head_dim)

    def key_size(self, head_dim: int) -> int:
        """Width of a head's key projection."""
        return self.feature_map_or_identity.key_size(head_dim)

    def prepare(
        self,
        params: Params,
        x: Float[Array, "batch length model_dim"],
        *,
        start: Float[Array, "batch heads"] | None = None,
        valid: Bool[Array, "batch length"] | None = None,
        layout: Layout | None = None,
    ) -> dict[str, Float[Array, "batch heads length *size"]] | None:
        """What the bias and the sinks read of the tokens, by slot, for ``attend``; None if they read nothing.

        These are the cumulative gates of FoX, the states of Inkling's bias, the logits of sinks by token.

        Args:
            params: see ``attend``.
            x: the tokens' hidden states, the input of the projections.
            start: the gates of the last token before ``x``, for a chunk of a longer sequence (FoX).
            valid: False at padding, which may then hold NaN.
            layout: the order of the tokens, if it is not the original one; the results have the same order.
        """
        if not self.reads_tokens:
            return None
        layout = Layout() if layout is None else layout
        if valid is not None:
            x = jnp.where(layout.apply(valid)[..., None], x, jnp.zeros((), x.dtype))
        found = {name: spec.prepare(params[name], x) for name, spec in self.token_readers.items()}
        if self.gated:
            gates = layout.restore(found["bias"], axis=1)
            found["bias"] = layout.apply(bias.accumulate(gates, start, valid))
        return found

    def attend(
        self,
        q: Float[Array, "batch queries heads query_size"],
        k: Float[Array, "batch keys kv_heads key_size"],
        v: Float[Array, "batch keys kv_heads value_size"],
        *,
        params: Params | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
        coordinates: Float[Array, "*b tokens axes"] | Int[Array, "*b tokens axes"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        head_dim: int | None = None,
        placement: Placement | Partition | None = None,
        **options,
    ) -> Float[Array, "batch queries heads value_size"]:
        """Attention with this scheme: norm, features, scale, bias and mask around one call of ``attention``.

        Args:
            q: raw query projections, of width ``query_size(head_dim)``.
            k: raw key projections, of width ``key_size(head_dim)``.
            v: values.
            params: the results of ``init`` and ``init_shared``, merged.
            q_positions, kv_positions: see ``attention``.
            coordinates: positions of the tokens for the features only, in several axes (images) or real-valued, if
                queries and keys are the same tokens; masks, biases and scales still read the integer positions.
            length: the current length, for schemes that read it; the number of keys when left out.
            head_dim: size of the head that the features read: the first channels of ``q`` and ``k`` if these have more
                (the rotated part of latent attention); that of ``k`` when left out.
            placement: how the call is split over a mesh, as in ``attention``. Inside ``sharded.attend_on_mesh``,
                ``params`` are those of all heads.
            options: the other arguments of ``attend_cached``.

        Raises:
            ValueError: for a causal method in bidirectional attention, missing parameters, or shapes that do not fit.
            TypeError: for an unknown option.
        """
        check_projections(q, k, v, self.feature_map_or_identity.widths)
        check_length(length)
        given = {"q_positions": q_positions, "kv_positions": kv_positions, "coordinates": coordinates, "length": length}
        given |= {"head_dim": head_dim}
        if not isinstance(placement, Placement):
            split = split_of(q, k, v, placement)
            placement = Placement()
            if split is not None:
                check_masks(q, k, self.mask, None if options.get("mask") is None else masks.as_mask(options["mask"]))
                return over_mesh(*split, self.attend, [q, k, v], params or {}, given | options)
        check_aligned(q, k, q_positions, self.reads_positions(options))
        where = self._where(q, k, placement, **given)
        return self._executor.attend(q, k, v, params or {}, where, **options)

    def _where(
        self, q, k, placement: Placement, *, q_positions, kv_positions, coordinates, length, head_dim
    ) -> TokenPositions:
        """The positions of the tokens of a call, by default 0, 1, 2, ..."""
        return TokenPositions(
            placement,
            row_positions(placement, "q_positions", q_positions, q),
            row_positions(placement, "kv_positions", kv_positions, k),
            coordinates,
            placement.whole(k.shape[1]) if length is None else length,
            self.feature_map_or_identity.head_dim(k.shape[-1]) if head_dim is None else head_dim,
        )

    def cache_entries(self, params: Params, k, v, positions: Positions, *, length=None) -> tuple[Array, Array]:
        """Keys and values for a cache, from raw projections: norm, and the maps that never change (``caches``).

        Raises:
            ValueError: for linear attention, which stores no keys.
        """
        sizes = {"head_dim": self.feature_map_or_identity.head_dim(k.shape[-1]), "length": length}
        return self._softmax("cache_entries").cache_entries(params, k, v, positions, **sizes)

    def attend_cached(
        self,
        q: Float[Array, "batch queries heads query_size"],
        k: Float[Array, "batch keys kv_heads stored_size"],
        v: Float[Array, "batch keys kv_heads value_size"],
        *,
        params: Params,
        head_dim: int,
        q_positions: Positions,
        kv_positions: Positions,
        coordinates: Array | None = None,
        length: int | Int[Array, "..."],
        placement: Placement | None = None,
        **options,
    ) -> Float[Array, "batch queries heads value_size"]:
        """``attend`` on the keys and values that ``cache_entries`` returns, for caches.

        Args:
            q: raw query projections.
            k: stored keys.
            v: stored values.
            params: see ``attend``.
            head_dim: size of a head.
            q_positions, kv_positions: see ``attention``.
            coordinates: see ``attend``.
            length: the current length, for schemes that read it.
            placement: the ``sharded.Placement`` inside ``shard_map``; see ``attention``. Parameters of the features are
                then those of this device's heads.
            options: those of ``attention`` (``implementation``, ``softcap``, ``sinks``, ``return_residuals``), and:

                * ``causal``, True when left out: whether a query sees only the keys at or before its position.
                * ``mask``: another mask of the model, for instance the segments of packed documents.
                * ``visible``, ``[*b, queries]``: how many keys each query may see without the scheme's own mask, for
                  scales that count them. When left out: if causal, those from the first key to the query's own
                  position, otherwise all. Packed documents need their own counts.
                * ``gates``: the results of ``prepare`` for the queries and for the keys, for schemes that read tokens.
                * ``query_scale``: replaces the factor ``head_dim ** -0.5`` of inner products; the scheme's own scale
                  still multiplies them.

        Raises:
            ValueError: as ``attend``, and for linear attention, which stores no keys.
        """
        placement = Placement() if placement is None else placement
        check(
            isinstance(placement, Placement),
            "placement: attend_cached takes a sharded.Placement, inside shard_map; decode and attend take a "
            f"PartitionSpec too; found {describe(placement)}",
        )
        where = TokenPositions(placement, q_positions, kv_positions, coordinates, length, head_dim)
        return self._softmax("attend_cached").attend_cached(q, k, v, params, where, **options)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        chunk: int = 1,
        dtype=None,
        only_keys: bool = False,
    ) -> LayerCache:
        """An empty cache of one layer for ``decode``; see ``caches`` for what it holds.

        Args:
            batch: batch rows.
            capacity: the most tokens of a row. A scheme whose queries see only recent tokens (and the first few) caches
                only those.
            num_heads: query heads.
            num_kv_heads: key and value heads.
            head_dim: size of a head, and of a value.
            chunk: the most tokens decoded at once.
            dtype: of keys and values, float32 when left out.
            only_keys: no values are stored, because ``decode(read=)`` computes them from the keys (latent attention).

        Raises:
            ValueError: for a number that is not whole and above 0, and a capacity beyond a learned embedding.
        """
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        check_counts(batch=batch, capacity=capacity, chunk=chunk, **heads)
        check_reach(self.reach, "capacity", capacity)
        executor = self._softmax("only_keys") if only_keys else self._executor
        empty = executor.empty(batch, capacity, **heads, chunk=chunk, dtype=dtype)
        return dataclasses.replace(empty, v=None) if only_keys else empty

    def decode(
        self,
        q: Float[Array, "batch tokens heads query_size"],
        k: Float[Array, "batch tokens kv_heads key_size"],
        v: Float[Array, "batch tokens kv_heads value_size"] | None,
        cache: LayerCache,
        *,
        params: Params | None = None,
        index: Int[Array, "batch tokens"],
        valid: Bool[Array, "batch tokens"] | None = None,
        positions: Int[Array, "batch tokens"] | None = None,
        coordinates: Array | None = None,
        length: int | Int[Array, "..."],
        gates: dict[str, Float[Array, "batch heads tokens *size"]] | None = None,
        head_dim: int | None = None,
        read: Callable[[Array], tuple[Array, Array]] | None = None,
        placement: Partition | None = None,
        **options,
    ) -> tuple[Float[Array, "batch tokens heads value_size"], LayerCache]:
        """Attention of new tokens over the cache and themselves, and the cache with the new tokens.

        The result equals that of ``attend`` over the whole sequence at the same ``length``, for any split into calls.

        Args:
            q, k, v: raw projections of the new tokens; ``v`` is None for a cache of keys only.
            cache: from ``init_cache``, or an earlier call.
            params: see ``attend``.
            index: for each token, how many tokens of its row come before it.
            valid: False for padding; everything is valid when left out.
            positions: of the new tokens; ``index`` when left out. If the scheme caches only recent tokens
                (``kept_keys``), positions must be at least 0 and increase along a row.
            coordinates: see ``attend``; only for schemes that cache rotated keys.
            length: the current length for schemes that read it: the same for the whole generation. Otherwise cached and
                new keys would have different frequencies.
            gates: the result of ``prepare`` for the new tokens.
            head_dim: see ``attend``.
            read: for a cache of keys only, the keys and values of attention, ``[batch, slots, kv_heads, size]``, from
                the stored keys. The first ``head_dim`` channels must stay the first ones.
            placement: how the queries are split over the Auto axes of a mesh; see ``attention``. On Explicit axes the
                cache keeps its sharding.
            options: passed to ``attention``.
        """
        if read is None:
            check_projections(q, k, v, self.feature_map_or_identity.widths)
        check_rows(cache, q)
        check_length(length)
        valid = jnp.ones_like(index, bool) if valid is None else valid
        positions = index if positions is None else positions
        check(
            not isinstance(placement, Placement),
            "placement: decode takes the split of the queries, a PartitionSpec or a NamedSharding; inside shard_map "
            "pass a Placement to attend_cached",
        )
        specs = explicit_spec(q), jax.tree.map(explicit_spec, cache)
        where = TokenPositions(
            Placement(),
            positions,
            positions,
            coordinates,
            length,
            self.feature_map_or_identity.head_dim(k.shape[-1]) if head_dim is None else head_dim,
            partition=specs[0] if has_explicit(q) else placement,
        )
        step = self._executor.step if read is None else partial(self._softmax("read").step, read=read)
        arguments = params or {}, where, NewTokens(index, valid, gates), options
        return on_auto_axes(step, [q, k, v], cache, *arguments, like=specs)
