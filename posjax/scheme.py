"""A position scheme: one choice for each slot of the logit.

For query i, key j and head h every method of this library computes

    z_h(i, j) = c_h(i) <phi(q_i, p_i), psi(k_j, p_j)> / sqrt(d) + b_h(p_i, p_j)      where allowed(i, j)

and a ``Scheme`` names phi and psi (``features``, after ``norm``), c (``scale``), b (``bias``) and allowed (``mask``);
``far`` scores distant pairs by other features, ``sinks`` take part in the normalisation, ``embedding`` is added to the
token embeddings, ``positions`` draws the positions of training, and ``linear`` replaces the softmax altogether. Slots
compose freely. What does not compose is refused when the scheme is built, with the reason.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax import bias, linear, masks
from posjax._checks import check, check_counts, check_length, shown
from posjax._slots import Features
from posjax.arguments import (
    all_of,
    bound_bias,
    check_no_logits,
    check_no_slots,
    check_projections,
    count_visible,
    row_positions,
    scale_factor,
    sink_logits,
)
from posjax.attention import attention
from posjax.attention.api import check_aligned
from posjax.attention.checks import check_masks
from posjax.attention.padding import without_padding
from posjax.attention.sharded import Placement, context_attention
from posjax.attention.sharded.enter import over_mesh
from posjax.attention.sharded.split import Partition, split_of
from posjax.compose import check_composition, check_slots, init_spec
from posjax.decoding import Decoding
from posjax.extension import check_same_parameters, replaced
from posjax.layout import Layout
from posjax.linear import LinearState
from posjax.positions import Positions, Range, as_array
from posjax.registry import check_known

_PLAIN = Features()


@dataclasses.dataclass(frozen=True)
class Scheme(Decoding):
    """One choice for each slot; frozen and hashable, so it is a static argument of ``jit``.

    Args:
        embedding: added to the token embeddings: ``absolute.Sinusoidal``, ``absolute.Learned``, ...
        norm: of queries and keys, before the features: ``norms.KeyNorm``, ``norms.QKNorm``, ...
        features: the maps phi and psi: ``rotary.Rotary``, ``coca.Coca``, ...; the plain projections when left out.
        scale: a factor of every query: ``scales.LogN``, ``scales.SSMax``, ...
        bias: added to the logits: ``bias.ALiBi``, ``bias.T5``, ``bias.FoX``, ...
        mask: narrows what the model allows anyway: ``masks.Window``, ``masks.Chunked``, ``masks.Sinks``, composed.
        far: other features for distant pairs: ``far.ReRoPE``, ``far.SelfExtend``, ...
        sinks: logits without values: ``sinks.LearnedSinks``, ``sinks.SoftmaxPlusOne``.
        linear: the kernel of linear attention, in place of the softmax: ``linear.Elu``, ``linear.Performer``, ...
        positions: how positions are drawn in training: ``sampling.Randomised``, ... Only a trainer reads it.

    Raises:
        ValueError: for slots that do not compose, with the reason.
    """

    embedding: Any = None
    norm: Any = None
    features: Any = None
    scale: Any = None
    bias: Any = None
    mask: masks.Mask | None = None
    far: Any = None
    sinks: Any = None
    linear: Any = None
    positions: Any = None

    def __post_init__(self):
        check_slots(self)
        check_composition(self)

    @property
    def reads_length(self) -> bool:
        """Whether the scheme depends on the current length (dynamic NTK, LongRoPE's switch)."""
        return self._features.reads_length

    @property
    def reads_tokens(self) -> bool:
        """Whether ``attend`` needs the gates that ``prepare`` makes of the tokens (FoX)."""
        return self.bias is not None and self.bias.reads_tokens

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        slots = (self.embedding, self.features, self.scale, self.bias, self.mask, self.far)
        # Random features of a rotated query estimate the same kernel, but are not the same numbers.
        estimated = self.linear is not None and self.linear.random and self.rotates
        return not estimated and all(slot is None or slot.shift_invariant for slot in slots)

    @property
    def caches(self) -> str:
        """What a cache holds of a key: ``"rotated"``, ``"raw"``, ``"half-width"``, or ``"state"``, one for all keys.

        Rotated keys may be kept where the map of a key never changes. It does where a rule reads the current length,
        and where far pairs are scored with another one.
        """
        if self.linear is not None:
            return "state"
        kind = self._features.cached
        return "raw" if kind == "rotated" and (self.far is not None or self.reads_length) else kind

    @property
    def retained(self) -> tuple[int, int] | None:
        """``(first, recent)``: the only keys that a causal query can see, at the start and at the end; None for all.

        None too for CoPE, which counts along keys that stand in order, as they do not in a ring.
        """
        if self.bias is not None and self.bias.contextual:
            return None
        found = [mask.retained for mask in (self.mask, self._far_mask) if mask is not None]
        return next((bounds for bounds in found if bounds is not None), None)

    @property
    def rotates(self) -> bool:
        """Whether its features have frequencies, which ``extend`` may change."""
        return self._features.frequencies is not None

    def _reads_positions(self, options: Mapping[str, Any]) -> bool:
        """Whether a call with these options depends on where queries and keys stand."""
        slots = (self.features, self.scale, self.bias, self.mask, self.far)
        given = options.get("mask")
        return (
            options.get("causal", True)
            or any(slot is not None for slot in slots)
            or (given is not None and masks.as_mask(given).reads_positions)
        )

    @property
    def _features(self) -> Features:
        return _PLAIN if self.features is None else self.features

    def _places(self, across: Placement, x, positions: Positions, coordinates):
        """Where the features of ``x`` stand, with an axis of coordinates where they have several, without elsewhere."""
        several, positions = self._features.axes > 1, across.local(positions, x.shape[1])
        if coordinates is None:
            rows = several and not isinstance(positions, Range) and jnp.ndim(positions) == 2
            return as_array(positions)[..., None] if rows else positions
        return coordinates[..., 0] if coordinates.shape[-1] == 1 and not several else coordinates

    @property
    def _far_mask(self) -> masks.Mask | None:
        return None if self.far is None else self.far.mask()

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
        check(
            self._features.widths == extended._features.widths,
            f"features: {shown(extended.features)} needs other projections than {shown(self.features)}; train it",
        )
        return extended

    def replace(self, **changes) -> "Scheme":
        """The scheme with some slots replaced, in the forms that ``extend`` takes; parameters may differ.

        Raises:
            ValueError: for an unknown slot, name or option.
        """
        for name in changes:
            check_known("slot", name, SLOT_NAMES)
        return replaced(self, changes)

    def check_direction(self, causal: bool) -> None:
        """Refuses methods that are meant for causal attention in bidirectional attention.

        Raises:
            ValueError: naming the slot, and the option that makes it two-sided where there is one.
        """
        if causal:
            return
        for name in ("features", "bias", "far"):
            spec = getattr(self, name)
            found = None if spec is None else spec.one_sided
            kind = type(spec).__name__
            remedy = f"use {kind}({found}) when every token sees both sides" if found and "=" in found else found
            check(found is None, f"{name}: {kind} is for causal attention; {remedy or 'use another method'}")

    def init(
        self,
        key: Array,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        model_dim: int | None = None,
    ) -> dict[str, dict[str, Array]]:
        """Learned parameters of one layer, ``{slot: {name: array}}``, without the slots that learn nothing.

        ``num_kv_heads`` is ``num_heads`` when left out; ``model_dim``, the width of the tokens, is for FoX alone.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_counts(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        sizes = (num_heads, num_kv_heads, head_dim, model_dim)
        return self._init(key, sizes, [name for name in _LEARNING if not self._is_shared(name)])

    def init_shared(self, key: Array, num_heads: int, head_dim: int) -> dict[str, dict[str, Array]]:
        """Learned parameters that all layers share (T5's table, KERPLE's scalars), in the same form."""
        return self._init(key, (num_heads, num_heads, head_dim, None), [n for n in _LEARNING if self._is_shared(n)])

    def _is_shared(self, slot_name: str) -> bool:
        return slot_name == "bias" and self.bias is not None and self.bias.shared_across_layers

    def _init(self, key, sizes: tuple, names: list[str]) -> dict[str, dict[str, Array]]:
        check(
            sizes[-1] is not None or not self.reads_tokens or "bias" not in names,
            f"model_dim: {type(self.bias).__name__} reads the tokens, so their width is needed",
        )
        sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim", "model_dim"), sizes, strict=True))
        parts = dict(zip(_LEARNING, jax.random.split(key, len(_LEARNING)), strict=True))
        made = {name: init_spec(getattr(self, name), parts[name], sizes) for name in names}
        return {name: params for name, params in made.items() if params}

    def query_size(self, head_dim: int) -> int:
        """Width of a head's query projection."""
        return self._features.query_size(head_dim)

    def key_size(self, head_dim: int) -> int:
        """Width of a head's key projection."""
        return self._features.key_size(head_dim)

    def prepare(
        self,
        params: Mapping[str, Mapping[str, Array]],
        x: Float[Array, "batch length model_dim"],
        *,
        start: Float[Array, "batch heads"] | None = None,
        valid: Bool[Array, "batch length"] | None = None,
        layout: Layout | None = None,
    ) -> Float[Array, "batch heads length"] | None:
        """What ``attend`` needs of the tokens beside their projections: FoX's cumulative gates; None without.

        Args:
            params: see ``attend``.
            x: the tokens' hidden states, as the projections see them.
            start: the last gates of the tokens before, for a chunk of a longer sequence.
            valid: False at padding, which may then hold anything.
            layout: the order of the tokens, where it is not their own; the gates come in it too.
        """
        if not self.reads_tokens:
            return None
        layout = Layout() if layout is None else layout
        if valid is not None:
            x = jnp.where(layout.apply(valid)[..., None], x, jnp.zeros((), x.dtype))
        gates = layout.restore(self.bias.prepare(params["bias"], x), axis=1)
        return layout.apply(bias.accumulate(gates, start, valid))

    def stored(self, params, k, v, positions: Positions, *, length=None) -> tuple[Array, Array]:
        """What a cache holds of raw key and value projections: norm, and the maps that never change (``caches``)."""
        if self.norm is not None:
            k = self.norm.apply(params.get("norm", {}), k, k)[1]
        if self.caches != "rotated":
            return self._features.compact(k), v
        where = {"head_dim": self._features.head_dim(k.shape[-1]), "length": length}
        learned = params.get("features", {})
        return self._features.key(learned, k, positions, **where), self._features.value(learned, v, positions, **where)

    def attend(
        self,
        q: Float[Array, "batch queries heads query_size"],
        k: Float[Array, "batch keys kv_heads key_size"],
        v: Float[Array, "batch keys kv_heads value_size"],
        *,
        params: Mapping[str, Mapping[str, Array]] | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
        coordinates: Float[Array, "*b tokens axes"] | Int[Array, "*b tokens axes"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        across: Placement | None = None,
        partition: Partition | None = None,
        **options,
    ) -> Float[Array, "batch queries heads value_size"]:
        """Attention with this scheme: norm, features, scale, bias and mask around one call of ``attention``.

        Args:
            q: raw query projections, of width ``query_size(head_dim)``.
            k: raw key projections, of width ``key_size(head_dim)``.
            v: values.
            params: what ``init`` and ``init_shared`` made, merged.
            q_positions, kv_positions: see ``attention``.
            coordinates: positions of the tokens for the features alone, in several axes (images) or real-valued, where
                queries and keys are the same tokens; masks, biases and scales go on reading the integer positions.
            length: the current length, for schemes that read it; the number of keys when left out.
            across: how rows and heads lie over a mesh, inside ``sharded.attend_on_mesh``. Queries, keys and all that
                has an axis of tokens are then those of one device, positions may be a ``Range`` over the whole row, and
                ``params`` are those of all heads. What it returns is what it would for the whole rows.
            partition: how the queries lie over the Auto axes of a mesh; see ``attention``. Explicit axes need nothing.
            options: the further arguments of ``attend_stored``.

        Raises:
            ValueError: for a bias of the other direction, missing parameters, or shapes that do not fit.
            TypeError: for an option that there is not.
        """
        params = params or {}
        check_projections(q, k, v, self._features.widths)
        check_length(length)
        options |= {"q_positions": q_positions, "kv_positions": kv_positions}
        options |= {"coordinates": coordinates, "length": length}
        if across is None and (split := split_of(q, k, v, partition)) is not None:
            check_masks(q, k, self.mask, None if options.get("mask") is None else masks.as_mask(options["mask"]))
            return over_mesh(split, self.attend, [q, k, v], params, options)
        return self._attend_here(q, k, v, params, Placement() if across is None else across, **options)

    def _attend_here(self, q, k, v, params, across: Placement, *, coordinates, length, **options):
        """``attend`` of the rows and heads of one device."""
        length = across.whole(k.shape[1]) if length is None else length
        check_aligned(q, k, options["q_positions"], self._reads_positions(options))
        where = {
            name: row_positions(across, name, options.pop(name), x)
            for name, x in (("q_positions", q), ("kv_positions", k))
        }
        at_k = self._places(across, k, where["kv_positions"], coordinates)
        if self.caches == "state":
            across.check_scheme(self)
            at_q = self._places(across, q, where["q_positions"], coordinates)
            return self._attend_whole_rows(q, k, v, params, at_q, at_k, **options)
        q, k, v = without_padding(options.get("mask"), q, k, v)
        params, size = self._of_heads(params, across, k.shape[2]), self._features.head_dim(k.shape[-1])
        k, v = self.stored(params, k, v, at_k, length=length)
        where |= {"coordinates": coordinates, "length": length, "across": across}
        return self.attend_stored(q, k, v, params=params, head_dim=size, **where, **options)

    def _of_heads(self, params, across: Placement, kv_heads: int):
        """The parameters, those of the features narrowed to the key heads of this device."""
        heads = across.key_heads(kv_heads)
        if "features" not in params or heads is None:
            return params
        narrow = self._features.heads(params["features"], heads)
        return dict(params) | {"features": narrow}

    def _attend_whole_rows(
        self, q, k, v, params, at_q, at_k, *, causal=True, mask=None, visible=None, gates=None, **options
    ):
        """``attend`` for linear attention, which only segments narrow; it has no slot that reads counts or gates."""
        check(
            mask is None or isinstance(mask, masks.Segments),
            f"mask: linear attention sees whole documents, so masks.Segments is all it takes, found {shown(mask)}",
        )
        check_no_logits(**options)
        ids = None if mask is None else mask.q_ids
        return self.attend_linear(q, k, v, params=params, at_q=at_q, at_k=at_k, causal=causal, segment_ids=ids)[0]

    def attend_stored(
        self,
        q: Float[Array, "batch queries heads query_size"],
        k: Float[Array, "batch keys kv_heads stored_size"],
        v: Float[Array, "batch keys kv_heads value_size"],
        *,
        params: Mapping[str, Mapping[str, Array]],
        head_dim: int,
        q_positions: Positions,
        kv_positions: Positions,
        coordinates: Array | None = None,
        length: int | Int[Array, "..."],
        causal: bool = True,
        mask: masks.Mask | None = None,
        visible: Int[Array, "*b queries"] | None = None,
        gates: tuple[Float[Array, "batch heads queries"], Float[Array, "batch heads keys"]] | None = None,
        across: Placement | None = None,
        query_scale: float | None = None,
        **options,
    ) -> Float[Array, "batch queries heads value_size"]:
        """``attend`` on keys and values as ``stored`` made them: the same function, for caches.

        Args:
            q: raw query projections.
            k: stored keys.
            v: stored values.
            params: see ``attend``.
            head_dim: size of a head.
            q_positions, kv_positions: see ``attention``.
            coordinates: see ``attend``.
            length: the current length, for schemes that read it.
            causal: whether a query sees only the keys at or before its position.
            mask: what else the model allows, for instance the segments of packed documents.
            visible: how many keys each query may see, for scales that count them. When left out: if causal, those
                from the first key to the query's own position, otherwise all. Packed rows need their own counts.
                What the scheme's own mask leaves of them is worked out here.
            gates: what ``prepare`` gave for the queries and for the keys, for schemes that read tokens.
            across: see ``attend``; parameters of the features are then those of this device's heads.
            query_scale: of the inner products in place of ``head_dim ** -0.5``, beside the scheme's own scale.
            options: passed on to ``attention`` (``implementation``, ``softcap``, ``return_residuals``).
        """
        self.check_direction(causal)
        check_no_slots(options)
        across = Placement() if across is None else across
        heads, own = across.all_heads(q.shape[2]), all_of(self.mask, self._far_mask)
        at_q = self._places(across, q, q_positions, coordinates)
        at_k = self._places(across, k, kv_positions, coordinates)
        scale = (head_dim**-0.5 if query_scale is None else query_scale) * self._features.softmax_scale
        if self.scale is not None:
            at = across.local(q_positions, q.shape[1])
            visible = count_visible(across, at, kv_positions, causal, own, visible)
            scale = scale * scale_factor(self.scale, params, heads, at, visible)
        maps = {"head_dim": head_dim, "length": length}
        q, k, v, far = self._mapped(params, q, k, v, at_q, at_k, **maps)
        attend = partial(context_attention, across=across) if across.axes or across.layout.moves else attention
        out = attend(
            q,
            k,
            v,
            bias=bound_bias(self.bias, params, heads, gates),
            mask=all_of(masks.Causal() if causal else None, own, mask),
            scale=scale,
            sinks=sink_logits(self.sinks, params, heads, options.pop("sinks", None)),
            far=far,
            decay=self._features.decay(head_dim),
            q_positions=q_positions,
            kv_positions=kv_positions,
            **options,
        )
        return self._finished(params, out, at_q, **maps)

    def _mapped(self, params, q, k, v, at_q, at_k, **maps) -> tuple:
        """What attention takes: queries, keys, values and far branches, of raw queries and of what is stored."""
        learned, rotated = params.get("features", {}), self.caches == "rotated"
        if self.norm is not None:
            q = self.norm.apply(params.get("norm", {}), q, q)[0]
        v = v if rotated else self._features.value(learned, v, at_k, **maps)
        if self.far is not None:
            q, k, far = self.far.branches(self._features, learned, q, k, at_q, at_k, **maps)
            return q, k, v, far
        k = k if rotated else self._features.key(learned, k, at_k, **maps)
        return self._features.query(learned, q, at_q, **maps), k, v, ()

    def _finished(self, params, out, at_q, **maps):
        """What attention gives, alone or with its residuals, after the map of outputs."""
        if isinstance(out, tuple):
            return self._finished(params, out[0], at_q, **maps), out[1]
        return self._features.output(params.get("features", {}), out, at_q, **maps)

    def attend_linear(
        self,
        q: Float[Array, "batch length heads size"],
        k: Float[Array, "batch length kv_heads size"],
        v: Float[Array, "batch length kv_heads value_size"],
        *,
        params: Mapping[str, Mapping[str, Array]],
        at_q: Positions,
        at_k: Positions,
        causal: bool = True,
        segment_ids: Int[Array, "batch length"] | None = None,
        state: LinearState | None = None,
    ) -> tuple[Float[Array, "batch length heads value_size"], LinearState | None]:
        """Linear attention of raw projections, and the state after it (None if not causal); see ``posjax.linear``."""
        if segment_ids is not None:
            q, k, v = without_padding(masks.Segments(segment_ids), q, k, v)
        if self.norm is not None:
            q, k = self.norm.apply(params.get("norm", {}), q, k)

        def rotate(where):
            learned = params.get("features", {})
            return lambda x: self.features.query(learned, x, where, head_dim=x.shape[-1])

        turns = {} if self.features is None else {"rotate_q": rotate(at_q), "rotate_k": rotate(at_k)}
        made = linear.features(self.linear, q, k, params=params.get("linear"), **turns)
        if not causal:
            return linear.bidirectional(v=v, segment_ids=segment_ids, **made), None
        return linear.chunked(v=v, segment_ids=segment_ids, state=state, **made)


_LEARNING = ("norm", "scale", "bias", "features", "sinks", "linear")
SLOT_NAMES = ("frequencies", *(field.name for field in dataclasses.fields(Scheme)))
"""The slots that ``replace`` and ``extend`` take."""
