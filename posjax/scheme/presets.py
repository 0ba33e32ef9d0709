"""The known schemes by name, and the recipes whose layers differ."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal, overload

from posjax import bias, coca, linear, masks, norms, remap, rotary, scales, sinks, training_positions
from posjax._checks import check, check_count, check_counts, check_flag
from posjax.scheme.choices import SLOT_NAMES
from posjax.scheme.layers import Layers, check_layers
from posjax.scheme.registry import SLOTS, build, check_known, slots_with
from posjax.scheme.scheme import Scheme

_ROPE = rotary.Rotary()
# Scale-invariant attention states an effective base of 1024; its exact rule is not public. This rule has a base of
# 10,000^0.75 = 1,000.
_P_ROPE = rotary.Rotary(rotary.Proportional())


def _in(slot_name: str, **others) -> Callable[[Any], Scheme]:
    """A function from a spec to the scheme with that spec in one slot and ``others`` in other slots."""
    return lambda spec: Scheme(**{slot_name: spec}, **others)


_ONLY_SPECS = {
    "features": ("rotary", "general", "coca"),
    "bias": ("kerple", "scale-invariant"),
    "mask": ("dilated", "band", "global-first", "lambda", "first-tokens"),
    "scale": (
        *("clipped-log-n", "llama4", "ministral", "inkling", "yarn", "constant", "gradient-maximal"),
        *("cosine", "learned-cosine", "drope"),
    ),
    "training_positions": ("clex",),
}
"""The names of specs that are not names of presets: alone they are no method, or a preset has another form of them."""


def _of_slot(slot_name: str, **others) -> dict[str, tuple[Callable[..., Any], Callable[[Any], Scheme]]]:
    """A preset for every spec of a slot, with ``others`` in other slots."""
    left_out = _ONLY_SPECS.get(slot_name, ())
    return {name: (spec, _in(slot_name, **others)) for name, spec in SLOTS[slot_name].items() if name not in left_out}


def _features(feature: Callable[[rotary.FrequencyRule], Any]) -> Callable[[rotary.FrequencyRule], Scheme]:
    return lambda rule: Scheme(features=feature(rule))


def _clex(rule: rotary.CLEX) -> Scheme:
    return Scheme(
        features=rotary.Rotary(rule),
        training_positions=training_positions.ClexPositions(rule.original_length, int(rule.max_factor)),
    )


def _axial(layout: str = "rope-vit") -> rotary.Rotary:
    """One of the four public layouts of 2-D RoPE.

    Args:
        layout: the model whose layout it is: ``"rope-vit"``, ``"llama4-vision"``, ``"pixtral"`` or ``"dinov3"``.
    """
    check_known("layout", layout, rotary.AXIAL_LAYOUTS)
    return rotary.AXIAL_LAYOUTS[layout]


def _longformer(window: int = 512, dilation: int | tuple[int, ...] = 1, global_tokens: int = 1) -> masks.Mask:
    """Longformer's pattern: a dilated window of ``window`` keys in total, and the first tokens global.

    Args:
        window: ``w``, keys of the window, half of them on each side of the query.
        dilation: ``d``, or a tuple of Python ints, one for each head.
        global_tokens: how many first tokens see all and are seen by all.
    """
    check_counts(window=window, global_tokens=global_tokens)
    return masks.Dilated(window // 2 + 1, dilation) | masks.GlobalFirst(global_tokens)


def _periodic(period: Sequence[Scheme], num_layers: int) -> Layers:
    """A period that repeats over ``num_layers``; the last repeat may be cut."""
    check_layers(num_layers)
    whole = num_layers >= len(period)
    check(whole, f"num_layers must be at least {len(period)}, one period of this recipe, found {num_layers}")
    repeats, rest = divmod(num_layers, len(period))
    patterns = [(tuple(period), repeats)] if repeats else []
    return Layers((*patterns, *([(tuple(period[:rest]), 1)] if rest else [])))


def hwfa_window(num_layers: int, length: int, alpha: float = 0.75) -> int:
    """The largest window ``w`` with ``(w - 1)(num_layers - 1) + 1 <= alpha length`` (kexue.fm/archives/9603).

    The receptive field of the last layer through the windows is then at most ``alpha`` of the training length.

    Raises:
        ValueError: if not even a window of 2 fits.
    """
    _check_several(num_layers)
    check_count("length", length)
    check(0 < alpha <= 1, f"alpha must be in (0, 1], found {alpha!r}")
    window = int((alpha * length - 1) // (num_layers - 1)) + 1
    check(window > 1, f"length {length} is too short for {num_layers} layers: no window of 2 tokens fits")
    return window


def _check_several(num_layers: int) -> None:
    check_layers(num_layers)
    check(num_layers > 1, f"num_layers must be at least 2, found {num_layers}")


def _hwfa(
    num_layers: int, length: int, alpha: float = 0.75, window: int | None = None, base: float = 10_000.0
) -> Layers:
    """HWFA (kexue.fm/archives/9603): windowed layers with RoPE, then one full layer without position and with log n.

    Args:
        num_layers: how many layers the model has, at least 2.
        length: ``L`` of log n, at which its factor is 1: the training length in tokens.
        alpha: the largest share of the training length that all windows together may reach; read only if ``window`` is
            left out.
        window: how many of the last keys a query sees in the windowed layers, its own included; when left out,
            the largest that ``alpha`` allows.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
    """
    _check_several(num_layers)
    window = hwfa_window(num_layers, length, alpha) if window is None else window
    local = Scheme(features=rotary.Rotary(rotary.Plain(base)), mask=masks.Window(window))
    return Layers((((local,), num_layers - 1), ((Scheme(scale=scales.LogN(length)),), 1)))


def _hwfa2(
    num_layers: int, length: int, full_layers: int = 2, window: int | None = None, base: float = 10_000.0
) -> Layers:
    """HWFA2 (kexue.fm/archives/9731): RoPE in all layers, windows in all except a few evenly spread ones with log n.

    The window is three times ``length / num_layers`` when left out (the article: two to four times). For longer texts
    use ``extend(layers="full", remap=ReRoPE(length // 2))``.

    Args:
        num_layers: how many layers the model has, more than ``full_layers``.
        length: ``L`` of log n, at which its factor is 1: the training length in tokens.
        full_layers: how many layers see all keys, at least 1.
        window: how many of the last keys a query sees in the windowed layers, its own included; when left out,
            ``3 length / num_layers``.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
    """
    check_layers(num_layers)
    check_counts(length=length, full_layers=full_layers)
    check(full_layers < num_layers, f"full_layers must be from 1 to {num_layers - 1}, found {full_layers}")
    window = max(2, 3 * length // num_layers) if window is None else window
    features = rotary.Rotary(rotary.Plain(base))
    local = Scheme(features=features, mask=masks.Window(window))
    full = {num_layers * (n + 1) // (full_layers + 1) for n in range(full_layers)}
    globe = Scheme(features=features, scale=scales.LogN(length))
    # Runs of equal layers, so that a model compiles one block for each run.
    runs = groupby(globe if layer in full else local for layer in range(num_layers))
    return Layers(tuple(((scheme,), len(list(run))) for scheme, run in runs))


def _gemma3(
    num_layers: int,
    window: int = 1024,
    local_base: float = 10_000.0,
    global_base: float = 1_000_000.0,
    factor: float = 1.0,
) -> Layers:
    """Gemma 3: five windowed layers, one full layer, QK-norm. 270M and 1B: window 512; 4B and up: factor 8.

    27B divides its logits by sqrt(168) instead of sqrt(128): the gain of the queries includes that.

    Args:
        num_layers: how many layers the model has, at least 6.
        window: how many of the last keys a query sees in the windowed layers, its own included.
        local_base: b of RoPE's theta_t = b^(-2t/d) in the windowed layers, d the size of a head.
        global_base: b of RoPE's theta_t = b^(-2t/d) in the full layers, d the size of a head.
        factor: target length over training length, at least 1; it divides the frequencies of the full layers.
    """
    wide = rotary.Plain(global_base) if factor == 1 else rotary.Linear(factor, base=global_base)
    local = Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rotary.Plain(local_base)), mask=masks.Window(window))
    return _periodic((local,) * 5 + (Scheme(norm=norms.QKNorm(), features=rotary.Rotary(wide)),), num_layers)


def _llama4(
    num_layers: int,
    chunk: int = 8192,
    base: float = 500_000.0,
    floor_scale: int = 8192,
    attn_scale: float = 0.1,
    factor: float = 1.0,
    original_length: int = 8192,
    qk_norm: bool = True,
) -> Layers:
    """Llama 4 (iRoPE): three layers of RoPE in chunks, one full layer without position and with a temperature.

    Scout: ``factor=16``, which divides frequencies of wavelengths above ``original_length``, and a QK-norm without gain
    in the layers with RoPE. Maverick: ``qk_norm=False``.

    Args:
        num_layers: how many layers the model has, at least 4.
        chunk: tokens of a chunk.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
        floor_scale: how many positions make one step of the temperature.
        attn_scale: the factor of the logarithm in the temperature.
        factor: divides the frequencies of long wavelengths, at least 1.
        original_length: L, the length in tokens that the model was trained on.
        qk_norm: whether the layers with RoPE have a QK-norm.
    """
    check_count("original_length", original_length)
    check_flag("qk_norm", qk_norm)
    rule = rotary.Plain(base) if factor == 1 else rotary.Llama3(factor, original_length, 1.0, 1.0, base=base)
    local = Scheme(
        norm=norms.QKNorm(gain=False, eps=1e-5) if qk_norm else None,
        features=rotary.Rotary(rule, pairing="interleaved"),
        mask=masks.Chunked(chunk),
    )
    return _periodic((local,) * 3 + (Scheme(scale=scales.Llama4Temperature(floor_scale, attn_scale)),), num_layers)


def _smollm3(num_layers: int, base: float = 5_000_000.0) -> Layers:
    """SmolLM3: RoPE, and no position in every fourth layer; all layers are full.

    Args:
        num_layers: how many layers the model has, at least 4.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
    """
    return _periodic((Scheme(features=rotary.Rotary(rotary.Plain(base))),) * 3 + (Scheme(),), num_layers)


def _gpt_oss(
    num_layers: int,
    window: int = 128,
    base: float = 150_000.0,
    factor: float = 32.0,
    original_length: int = 4096,
) -> Layers:
    """gpt-oss: windows in every other layer, YaRN without rounding and learned sinks in all of them.

    Args:
        num_layers: how many layers the model has, at least 2.
        window: how many of the last keys a query sees in the windowed layers, its own included.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
        factor: target length over training length, at least 1.
        original_length: L, the length in tokens that the model was trained on.
    """
    features = rotary.Rotary(rotary.YaRN(factor, original_length, base=base, truncate=False))
    local = Scheme(features=features, mask=masks.Window(window), sinks=sinks.LearnedSinks())
    return _periodic((local, Scheme(features=features, sinks=sinks.LearnedSinks())), num_layers)


def _rnope_swa(num_layers: int, window: int = 4096, base: float = 10_000.0) -> Layers:
    """RNoPE-SWA (arXiv 2501.18795; Command A): three windowed layers of RoPE, one full layer without position.

    Args:
        num_layers: how many layers the model has, at least 4.
        window: how many of the last keys a query sees in the windowed layers, its own included.
        base: b of RoPE's theta_t = b^(-2t/d), d the size of a head.
    """
    local = Scheme(features=rotary.Rotary(rotary.Plain(base)), mask=masks.Window(window))
    return _periodic((local,) * 3 + (Scheme(),), num_layers)


def _qwen3_next(
    num_layers: int,
    num_heads: int,
    key_dim: int = 128,
    value_dim: int | None = None,
    num_key_heads: int | None = None,
    convolution: int = 4,
    base: float = 10_000_000.0,
    share: float = 0.25,
) -> Layers:
    """Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet, one full layer with QK-norm and partial RoPE.

    The released models have an output gate in the full layers too: ``DecoderConfig(attention_gate="elementwise")``.

    Args:
        num_layers: how many layers the model has, at least 4.
        num_heads: heads of Gated DeltaNet; those of the full layers are the model's.
        key_dim: size of a query and a key of Gated DeltaNet.
        value_dim: size of a value; ``key_dim`` when left out.
        num_key_heads: heads of queries and keys, which divide ``num_heads``; ``num_heads`` when left out.
        convolution: how many of the last tokens the convolution reads, the token itself included.
        base: b of RoPE's theta_t = b^(-2t/d), d the rotated channels of a head.
        share: the share of the channels that is rotated.
    """
    delta = Scheme(linear=linear.GatedDelta(num_heads, key_dim, value_dim, num_key_heads, convolution))
    rule = rotary.Plain(base, partial_rotary_factor=share)
    full = Scheme(norm=norms.QKNorm(unit_offset=True), features=rotary.Rotary(rule))
    return _periodic((delta,) * 3 + (full,), num_layers)


PRESETS: dict[str, tuple[Callable[..., Any], Callable[[Any], Scheme | Layers]]] = {
    "nope": (lambda: None, lambda _: Scheme()),
    **_of_slot("embedding"),
    "rope": (rotary.Plain, _features(rotary.Rotary)),
    "p-rope": (rotary.Proportional, _features(rotary.Rotary)),
    "hope": (rotary.HoPE, _features(rotary.Rotary)),
    "clex": (rotary.CLEX, _clex),
    **_of_slot("features"),
    "axial": (_axial, _in("features")),
    "mrope": (rotary.MRoPE, _features(rotary.Rotary)),
    "rope-tie": (rotary.RoPETie, _features(rotary.Rotary)),
    **_of_slot("bias"),
    "kerple-log": (lambda: bias.Kerple("log"), _in("bias")),
    "kerple-power": (lambda: bias.Kerple("power"), _in("bias")),
    "scale-invariant": (bias.ScaleInvariant, _in("bias", features=_P_ROPE)),
    "coca-strict": (rotary.Plain, _features(partial(coca.Coca, "strict"))),
    "coca-tied": (rotary.Plain, _features(partial(coca.Coca, "tied"))),
    "coca-slack": (rotary.Plain, _features(partial(coca.Coca, "slack"))),
    "coca-relative": (rotary.Plain, _features(partial(coca.Coca, "relative"))),
    **_of_slot("remap", features=_ROPE),
    "inverse-leaky": (remap.inverse_leaky, _in("remap", features=_ROPE)),
    **_of_slot("mask", features=_ROPE),
    "longformer": (_longformer, _in("mask", features=_ROPE)),
    "learned-sinks": (sinks.LearnedSinks, _in("sinks", features=_ROPE)),
    "softmax-plus-one": (sinks.SoftmaxPlusOne, _in("sinks", features=_ROPE)),
    "token-sinks": (sinks.TokenSinks, _in("sinks", features=_ROPE)),
    **_of_slot("scale", features=_ROPE),
    "drope": (scales.DroPETemperature, _in("scale")),
    "key-norm": (norms.KeyNorm, _in("norm", features=_ROPE)),
    "cosine": (lambda length: scales.CosineScale(length), _in("scale", norm=norms.CosineNorm(), features=_ROPE)),
    "learned-cosine": (scales.LearnedCosineScale, _in("scale", norm=norms.CosineNorm(), features=_ROPE)),
    "qwen3": (
        partial(rotary.Plain, base=1_000_000.0),
        lambda rule: Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rule)),
    ),
    **_of_slot("training_positions", features=_ROPE),
    "hwfa": (_hwfa, lambda layers: layers),
    "hwfa2": (_hwfa2, lambda layers: layers),
    "gemma3": (_gemma3, lambda layers: layers),
    "llama4": (_llama4, lambda layers: layers),
    "smollm3": (_smollm3, lambda layers: layers),
    "gpt-oss": (_gpt_oss, lambda layers: layers),
    "rnope-swa": (_rnope_swa, lambda layers: layers),
    "qwen3-next": (_qwen3_next, lambda layers: layers),
    "linear-elu": (linear.Elu, _in("linear", features=_ROPE)),
    "linear-exp": (linear.Exponential, _in("linear", features=_ROPE)),
    "performer": (linear.Performer, _in("linear", features=_ROPE)),
    "linear-taylor": (linear.Taylor, _in("linear", features=_ROPE)),
    "linear-limit": (linear.Limit, _in("linear", features=_ROPE)),
    "linear-cosine": (linear.Cosine, _in("linear", features=_ROPE)),
    "gated-delta": (linear.GatedDelta, _in("linear")),
}
"""Schemes by name: a function that takes the options, and a function that makes a scheme from its result."""


def scheme_names() -> tuple[str, ...]:
    """The names that ``scheme`` knows."""
    return tuple(PRESETS)


def scheme_options(name: str) -> tuple[str, ...]:
    """The options of a preset: the hyper-parameters of its method.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    _check_preset(name)
    return tuple(inspect.signature(PRESETS[name][0]).parameters)


def _check_preset(name: Any) -> None:
    """Raises ValueError for an unknown name; the message has the correct form if it is the name of a spec."""
    try:
        check_known("scheme", name, PRESETS, listing="posjax.scheme_names() and README.md")
    except ValueError as error:
        slots = [f"; in a slot: scheme('rope', {slot}={{'name': {name!r}}})" for slot in slots_with(name)]
        raise ValueError(f"{error}{''.join(slots[:1])}") from None


_Recipe = Literal["hwfa", "hwfa2", "gemma3", "llama4", "smollm3", "gpt-oss", "rnope-swa", "qwen3-next"]


@overload
def scheme(name: _Recipe, /, **options) -> Layers: ...


@overload
def scheme(name: str, /, **options) -> Scheme: ...


def scheme(name: str, /, **options) -> Scheme | Layers:
    """A preset by name, with the hyper-parameters of its method as options.

    ``scheme("rope", base=500_000.0)``, ``scheme("alibi")``, ``scheme("t5", max_distance=24)``. The slots of a scheme
    are options too, with a spec or ``{"name": ..., option: value}``:
    ``scheme("rope", scale={"name": "log-n", "length": 512})``. Recipes whose layers differ (``"gemma3"``, ``"hwfa"``)
    take ``num_layers`` and return ``Layers``; they have no other slots.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one.
    """
    known = scheme_options(name)
    make, to_scheme = PRESETS[name]
    open_slots = () if "num_layers" in known else SLOT_NAMES
    # An option of the method itself, such as the bias of SSMax, wins over a slot of the same name.
    method_options = {key for key in options if key in known and not isinstance(options[key], Mapping)}
    slots = {key: options.pop(key) for key in open_slots if key in options and key not in method_options}
    built = to_scheme(build(f"scheme {name!r}", make, options, also=open_slots))
    return built.replace(**slots) if slots else built
