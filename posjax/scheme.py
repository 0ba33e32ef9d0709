"""A position scheme: one choice for each slot of the logit, and the presets of the field by name.

For query i, key j and head h every method of this library computes

    z_h(i, j) = c_h(i) <phi(q_i, p_i), psi(k_j, p_j)> / sqrt(d) + b_h(p_i, p_j)      where allowed(i, j)

and a ``Scheme`` names phi and psi (``features``, after ``norm``), c (``scale``), b (``bias``) and allowed (``mask``);
``embedding`` is what is added to the token embeddings. Slots compose freely. What does not compose is refused when the
scheme is built, with the reason.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax import absolute, bias, coca, masks, rotary, scales
from posjax._checks import check
from posjax.attention import attention
from posjax.positions import Positions, Range, as_array

SLOTS: dict[str, dict[str, type]] = {
    "embedding": {"sinusoidal": absolute.Sinusoidal, "learned": absolute.Learned},
    "frequencies": rotary.SCALINGS,
    "norm": {"key-norm": scales.KeyNorm, "qk-norm": scales.QKNorm},
    "scale": {
        "log-n": scales.LogN,
        "clipped-log-n": scales.ClippedLogN,
        "ssmax": scales.SSMax,
        "llama4": scales.Llama4Temperature,
        "ministral": scales.MinistralTemperature,
        "yarn": scales.YaRNTemperature,
    },
    "bias": {"alibi": bias.ALiBi, "t5": bias.T5, "kerple": bias.Kerple},
    "mask": {"window": masks.Window, "chunked": masks.Chunked},
}
"""What can stand in each slot, by the names that configurations use."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One choice for each slot; frozen and hashable, so it is a static argument of ``jit``.

    Args:
        embedding: added to the token embeddings: ``absolute.Sinusoidal`` or ``absolute.Learned``.
        norm: of queries and keys, before the features: ``scales.KeyNorm`` or ``scales.QKNorm``.
        features: the maps phi and psi: ``rotary.Rotary`` or ``coca.Coca``; the plain projections when left out.
        scale: a factor of every query: ``scales.LogN``, ``scales.SSMax``, ...
        bias: added to the logits: ``bias.ALiBi``, ``bias.T5``, ``bias.Kerple``.
        mask: narrows what the model allows anyway: ``masks.Window``, ``masks.Chunked``, ``masks.Sinks``, composed.

    Raises:
        ValueError: for slots that do not compose, with the reason.
    """

    embedding: Any = None
    norm: Any = None
    features: Any = None
    scale: Any = None
    bias: Any = None
    mask: masks.Mask | None = None

    def __post_init__(self):
        _check_slot("embedding", self.embedding, "embed")
        _check_slot("norm", self.norm, "apply")
        _check_slot("features", self.features, "query_size")
        _check_slot("scale", self.scale, "factor")
        _check_slot("bias", self.bias, "bind")
        _check_mask(self.mask)
        rule = getattr(self.features, "frequencies", None)
        check(
            not (isinstance(rule, rotary.YaRN) and isinstance(self.scale, scales.YaRNTemperature)),
            "scale: YaRN's frequencies bring its temperature already; leave YaRNTemperature out, or use NTKByParts",
        )
        check(
            self.norm is None or not isinstance(self.features, coca.Coca),
            "norm does not compose with CoCA: its key is a half-width t whose size is the strength of each plane, "
            "and a norm of it would take that away; leave norm out",
        )

    @property
    def reads_length(self) -> bool:
        """Whether the scheme depends on the current length (dynamic NTK, LongRoPE's switch)."""
        return self.features is not None and self.features.reads_length

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        slots = (self.embedding, self.features, self.scale, self.bias, self.mask)
        return all(slot is None or slot.shift_invariant for slot in slots)

    def extend(self, **changes) -> "Scheme":
        """Another scheme over the same parameters, for use beyond the training length without retraining.

        Args:
            changes: slots to replace, by a spec or by ``{"name": ..., option: value}``. ``frequencies`` replaces the
                frequency rule of the features; by name it keeps the rule's base, head size and rotated share.

        Raises:
            ValueError: for an unknown slot, or a change that would need other parameters.
        """
        known = ("frequencies", *(field.name for field in dataclasses.fields(Scheme)))
        for name in changes:
            _check_known("slot", name, known)
        changes = {name: self._resolve(name, value) for name, value in changes.items()}
        if "frequencies" in changes:
            features = changes.get("features", self.features)
            changes["features"] = dataclasses.replace(features, frequencies=changes.pop("frequencies"))
        extended = dataclasses.replace(self, **changes)
        for name in ("embedding", "norm", "scale", "bias"):
            _check_same_parameters(name, getattr(self, name), getattr(extended, name))
        _check_same_projections(self.features, extended.features)
        return extended

    def _resolve(self, slot_name: str, value):
        """A spec from ``{"name": ...}``; a frequency rule keeps what it does not change."""
        if slot_name == "frequencies":
            check(self.features is not None, "frequencies: this scheme rotates nothing, so it has no frequencies")
        if not isinstance(value, Mapping):
            return value
        options = dict(value)
        check("name" in options, f"{slot_name}: expected a spec or {{'name': ...}}, found {value!r}")
        if slot_name == "frequencies":
            before = self.features.frequencies
            check(
                before.partial_rotary_factor == 1
                or isinstance(before, rotary.Proportional) == (options["name"] == "proportional"),
                f"frequencies: {options['name']!r} would not rotate the pairs that {before!r} does, for the share of "
                "p-RoPE and that of partial rotary are different things; give the rule itself if that is meant",
            )
            options = {key: getattr(before, key) for key in ("base", "head_dim", "partial_rotary_factor")} | options
        return slot(slot_name, options.pop("name"), **options)

    def check_direction(self, causal: bool) -> None:
        """Refuses biases that are meant for the other direction.

        Raises:
            ValueError: for a one-sided bias in bidirectional attention.
        """
        if causal:
            return
        one_sided = (isinstance(self.bias, bias.ALiBi) and not self.bias.symmetric) or (
            isinstance(self.bias, bias.T5) and not self.bias.bidirectional
        )
        option = "symmetric" if isinstance(self.bias, bias.ALiBi) else "bidirectional"
        check(
            not one_sided,
            f"bias: {type(self.bias).__name__}() is for causal attention; use "
            f"{type(self.bias).__name__}({option}=True) when every token sees both sides",
        )

    def init(self, key: Array, num_heads: int, head_dim: int) -> dict[str, dict[str, Array]]:
        """Learned parameters of one layer, ``{slot: {name: array}}``, without the slots that learn nothing."""
        return {name: value for name, value in self._init_all(key, num_heads, head_dim) if not self._is_shared(name)}

    def init_shared(self, key: Array, num_heads: int, head_dim: int) -> dict[str, dict[str, Array]]:
        """Learned parameters that all layers share (T5's table, KERPLE's scalars), in the same form."""
        return {name: value for name, value in self._init_all(key, num_heads, head_dim) if self._is_shared(name)}

    def _is_shared(self, slot_name: str) -> bool:
        return slot_name == "bias" and self.bias.shared_across_layers

    def _init_all(self, key, num_heads: int, head_dim: int):
        sizes = {"norm": head_dim, "scale": num_heads, "bias": num_heads}
        for name, part in zip(sizes, jax.random.split(key, len(sizes)), strict=True):
            spec = getattr(self, name)
            if spec is not None and (params := spec.init(part, sizes[name])):
                yield name, params

    def query_size(self, head_dim: int) -> int:
        """Width of a head's query projection."""
        return head_dim if self.features is None else self.features.query_size(head_dim)

    def key_size(self, head_dim: int) -> int:
        """Width of a head's key projection."""
        return head_dim if self.features is None else self.features.key_size(head_dim)

    def attend(
        self,
        q: Float[Array, "batch queries heads query_size"],
        k: Float[Array, "batch keys kv_heads key_size"],
        v: Float[Array, "batch keys kv_heads value_size"],
        *,
        params: Mapping[str, Mapping[str, Array]] | None = None,
        causal: bool = True,
        mask: masks.Mask | None = None,
        q_positions: Positions | None = None,
        kv_positions: Positions | None = None,
        visible: Int[Array, "*b queries"] | None = None,
        length: int | Int[Array, ""] | None = None,
        **options,
    ) -> Float[Array, "batch queries heads value_size"]:
        """Attention with this scheme: norm, features, scale, bias and mask around one call of ``attention``.

        Args:
            q: raw query projections, of width ``query_size(head_dim)``.
            k: raw key projections, of width ``key_size(head_dim)``.
            v: values.
            params: what ``init`` and ``init_shared`` made, merged.
            causal: whether a query sees only the keys at or before its position.
            mask: what else the model allows, for instance the segments of packed documents.
            q_positions: see ``attention``.
            kv_positions: see ``attention``.
            visible: how many keys each query may see, for scales that count them. When left out: if causal, those
                from the first key to the query's own position, otherwise all. Packed rows need their own counts.
                What the scheme's own mask leaves of them is worked out here.
            length: the current length, for schemes that read it; the number of keys when left out.
            options: passed on to ``attention`` (``implementation``, ``sinks``, ``softcap``, ...).

        Raises:
            ValueError: for a bias of the other direction, missing parameters, or shapes that do not fit.
        """
        self.check_direction(causal)
        params = params or {}
        heads, head_dim = q.shape[2], self._head_dim(k)
        q_positions = Range(0, q.shape[1]) if q_positions is None else q_positions
        kv_positions = Range(0, k.shape[1]) if kv_positions is None else kv_positions
        if visible is None:
            visible = _count_visible(q_positions, kv_positions, causal)
        if self.mask is not None:
            visible = self.mask.visible(visible, as_array(q_positions), causal)
        if self.norm is not None:
            q, k = self.norm.apply(params.get("norm", {}), q, k)
        if self.features is not None:
            learned = params.get("features", {})
            where = {"head_dim": head_dim, "length": k.shape[1] if length is None else length}
            q = self.features.query(learned, q, q_positions, **where)
            k = self.features.key(learned, k, kv_positions, **where)
        return attention(
            q,
            k,
            v,
            bias=None if self.bias is None else self.bias.bind(params.get("bias"), num_heads=heads),
            mask=_all_of(masks.Causal() if causal else None, self.mask, mask),
            scale=self._scale(params, q_positions, visible, heads, head_dim),
            q_positions=q_positions,
            kv_positions=kv_positions,
            **options,
        )

    def _head_dim(self, k) -> int:
        """Head size from a key projection: CoCA's ``t`` has half of it."""
        return k.shape[-1] if self.features is None else self.features.head_dim(k.shape[-1])

    def _scale(self, params, q_positions, visible, heads: int, head_dim: int):
        """``c_h(i) / sqrt(d)``, with the softmax factor that some frequency rules (YaRN) ask for."""
        fixed = head_dim**-0.5 * (1.0 if self.features is None else self.features.softmax_scale)
        if self.scale is None:
            return fixed
        positions = as_array(q_positions)
        return fixed * self.scale.factor(params.get("scale", {}), positions=positions, visible=visible, num_heads=heads)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Schemes that differ from layer to layer: patterns of schemes, each repeated, one after the other.

    ``Layers((((local, local, globe), 7), ((local,), 2)))`` are 23 layers. A model scans over each pattern.

    Args:
        patterns: ``((schemes of one period, repeats), ...)``.

    Raises:
        ValueError: for empty patterns, or layers that disagree on the embedding, which the model has once.
    """

    patterns: tuple[tuple[tuple[Scheme, ...], int], ...]

    def __post_init__(self):
        check(bool(self.patterns), "patterns is empty: name at least one ((scheme, ...), repeats)")
        for schemes, repeats in self.patterns:
            check(bool(schemes) and repeats > 0, f"patterns: every period needs schemes and repeats, found {repeats}")
        for scheme in self.schemes:
            check(isinstance(scheme, Scheme), f"patterns: expected posjax.Scheme, found {scheme!r}")
        embeddings = {scheme.embedding for scheme in self.schemes}
        check(len(embeddings) == 1, f"patterns: all layers must name the same embedding, found {embeddings}")

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The scheme of every layer, in order."""
        return tuple(scheme for schemes, repeats in self.patterns for _ in range(repeats) for scheme in schemes)

    @property
    def embedding(self):
        """What is added to the token embeddings."""
        return self.schemes[0].embedding

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing in any layer."""
        return all(scheme.shift_invariant for scheme in self.schemes)

    @property
    def reads_length(self) -> bool:
        """Whether some layer depends on the current length."""
        return any(scheme.reads_length for scheme in self.schemes)

    def extend(self, **changes) -> "Layers":
        """The same layers with every scheme extended alike; see ``Scheme.extend``."""
        extended = (((*(s.extend(**changes) for s in schemes),), repeats) for schemes, repeats in self.patterns)
        return Layers(tuple(extended))


def uniform(scheme: Scheme | Layers, num_layers: int) -> Layers:
    """One scheme for all layers as ``Layers``; ``Layers`` are checked to be that many.

    Raises:
        ValueError: if the layers do not add up.
    """
    layers = scheme if isinstance(scheme, Layers) else Layers((((scheme,), num_layers),))
    check(
        len(layers.schemes) == num_layers,
        f"scheme names {len(layers.schemes)} layers, but num_layers is {num_layers}",
    )
    return layers


def slot(slot_name: str, name: str, **options):
    """A spec by name, for configurations: ``slot("frequencies", "dynamic-ntk", original_length=2048)``.

    Raises:
        ValueError: for an unknown slot, name or option, with the nearest known one.
    """
    _check_known("slot", slot_name, SLOTS)
    _check_known(slot_name, name, SLOTS[slot_name])
    return _build(f"{slot_name} {name!r}", SLOTS[slot_name][name], options)


def _features(feature: Callable[[rotary.FrequencyRule], Any]) -> Callable[[rotary.FrequencyRule], Scheme]:
    return lambda rule: Scheme(features=feature(rule))


def _embedding(spec) -> Scheme:
    return Scheme(embedding=spec)


def _bias(spec) -> Scheme:
    return Scheme(bias=spec)


PRESETS: dict[str, tuple[Callable[..., Any], Callable[[Any], Scheme]]] = {
    "nope": (lambda: None, lambda _: Scheme()),
    "sinusoidal": (absolute.Sinusoidal, _embedding),
    "learned": (absolute.Learned, _embedding),
    "rope": (rotary.Plain, _features(rotary.Rotary)),
    "p-rope": (rotary.Proportional, _features(rotary.Rotary)),
    "alibi": (bias.ALiBi, _bias),
    "t5": (bias.T5, _bias),
    "kerple-log": (lambda: bias.Kerple("log"), _bias),
    "kerple-power": (lambda: bias.Kerple("power"), _bias),
    "coca-strict": (rotary.Plain, _features(partial(coca.Coca, "strict"))),
    "coca-tied": (rotary.Plain, _features(partial(coca.Coca, "tied"))),
    "coca-slack": (rotary.Plain, _features(partial(coca.Coca, "slack"))),
    "coca-relative": (rotary.Plain, _features(partial(coca.Coca, "relative"))),
}
"""Named schemes, the registry that a new method adds one line to: what the options build, and its place in a scheme."""


def scheme_names() -> tuple[str, ...]:
    """The names that ``scheme`` knows."""
    return tuple(PRESETS)


def scheme(name: str, /, **options) -> Scheme:
    """A preset by name, with the hyper-parameters of its method as options.

    ``scheme("rope", base=500_000.0)``, ``scheme("alibi")``, ``scheme("t5", max_distance=24)``. The options
    ``norm``, ``scale``, ``mask``, ``bias``, ``embedding`` and ``frequencies`` fill further slots, with a spec or with
    ``{"name": ..., option: value}``: ``scheme("rope", scale={"name": "log-n", "length": 512})``.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one.
    """
    _check_known("scheme", name, PRESETS)
    slots = {key: options.pop(key) for key in _OPEN_SLOTS if key in options}
    make, place = PRESETS[name]
    built = place(_build(f"scheme {name!r}", make, options, also=_OPEN_SLOTS))
    resolved = {key: built._resolve(key, value) for key, value in slots.items()}
    if "frequencies" in resolved:
        resolved["features"] = dataclasses.replace(built.features, frequencies=resolved.pop("frequencies"))
    return dataclasses.replace(built, **resolved)


_OPEN_SLOTS = ("frequencies", "embedding", "norm", "scale", "bias", "mask")


def _build(what: str, make: Callable, options: Mapping[str, Any], also: tuple[str, ...] = ()):
    """``make(**options)``; an option it does not know (``also`` is known), or one that is missing, is a clear error."""
    for option in options:
        _check_known(f"{what} option", option, (*inspect.signature(make).parameters, *also))
    try:
        return make(**options)
    except TypeError as error:
        raise ValueError(f"{what}: {str(error).partition(') ')[2] or error}") from None


def _check_known(what: str, name: Any, known) -> None:
    if name in known:
        return
    near = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}{hint} (known: {', '.join(known)})")


def _check_slot(name: str, spec, method: str) -> None:
    fits = spec is None or (hasattr(spec, method) and not isinstance(spec, type))
    check(fits, f"{name}: expected one of the specs of this slot or None, found {spec!r}")


def _check_mask(mask) -> None:
    check(mask is None or isinstance(mask, masks.Mask), f"mask: expected a posjax.masks mask or None, found {mask!r}")
    check(
        mask is None or not jax.tree.leaves(mask),
        "mask: a scheme holds position masks only; pass masks that carry arrays, such as Segments, to attend(mask=)",
    )


def _check_same_parameters(name: str, before, after) -> None:
    """Both specs must learn arrays of the same names and shapes."""

    def shapes(spec):
        made = {} if spec is None else jax.eval_shape(lambda: spec.init(jax.random.key(0), 8))
        return jax.tree.map(lambda leaf: leaf.shape, made)

    check(
        shapes(before) == shapes(after),
        f"{name}: {after!r} needs parameters {shapes(after)}, but the model has {shapes(before)}; train it instead",
    )


def _check_same_projections(before, after) -> None:
    def sizes(features):
        # Any head size that every kind of features takes; which rule turns it does not matter here.
        kind = Scheme(features=features and dataclasses.replace(features, frequencies=rotary.Plain()))
        return kind.query_size(64), kind.key_size(64)

    check(
        sizes(before) == sizes(after),
        f"features: {after!r} needs other projections than {before!r}; train it instead",
    )


def _count_visible(q_positions: Positions, kv_positions: Positions, causal: bool) -> Int[Array, "*b queries"]:
    """Keys at or before each query, for contiguous keys; all keys when not causal. Unchanged by a common shift."""
    q, k = as_array(q_positions), as_array(kv_positions)
    if not causal:
        return jnp.full_like(q, k.shape[-1])
    return q - k.min(-1, keepdims=True) + 1


def _all_of(*parts: masks.Mask | None) -> masks.Mask | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    combined = found[0]
    for part in found[1:]:
        combined = combined & part
    return combined
