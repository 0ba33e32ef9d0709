"""The specs that can stand in each slot of a scheme, by the names that configurations use."""

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from posjax import absolute, bias, coca, far, linear, masks, pope, rotary, sampling, scales, sinks
from posjax._checks import check_count


def _lambda(window: int, sinks: int) -> masks.Mask:
    """The last ``window`` keys and the first ``sinks`` ones, ``Window | Sinks`` (LM-Infinite, arXiv 2308.16137).

    With the training length as ``window`` it is the baseline in which each token sees no more keys than in training,
    with the correction that language models need (kexue.fm/archives/9948).
    """
    for name, value in (("window", window), ("sinks", sinks)):
        check_count(name, value)
    return masks.Window(window) | masks.Sinks(sinks)


SLOTS: dict[str, dict[str, Callable[..., Any]]] = {
    "embedding": {
        "sinusoidal": absolute.Sinusoidal,
        "learned": absolute.Learned,
        "hierarchical": absolute.Hierarchical,
    },
    "frequencies": rotary.SCALINGS | {"axial": rotary.Axial, "mrope": rotary.MRoPE, "rope-tie": rotary.RoPETie},
    "features": {
        "rotary": rotary.Rotary,
        "vo-rope": rotary.ValueRotary,
        "xpos": rotary.XPos,
        "mixed": rotary.MixedRotary,
        "general": rotary.GeneralRotary,
        "pope": pope.PoPE,
        "coca": coca.Coca,
    },
    "norm": {
        "key-norm": scales.KeyNorm,
        "qk-norm": scales.QKNorm,
        "cosine": scales.CosineNorm,
    },
    "scale": {
        "log-n": scales.LogN,
        "clipped-log-n": scales.ClippedLogN,
        "ssmax": scales.SSMax,
        "llama4": scales.Llama4Temperature,
        "ministral": scales.MinistralTemperature,
        "yarn": scales.YaRNTemperature,
        "cosine": scales.CosineScale,
        "learned-cosine": scales.LearnedCosineScale,
        "constant": scales.Constant,
        "drope": scales.DroPETemperature,
        "gradient-maximal": scales.GradientMaximal,
    },
    "bias": {
        "alibi": bias.ALiBi,
        "t5": bias.T5,
        "kerple": bias.Kerple,
        "sandwich": bias.Sandwich,
        "fire": bias.FIRE,
        "fox": bias.FoX,
        "cope": bias.CoPE,
        "scale-invariant": bias.ScaleInvariant,
    },
    "mask": {
        "window": masks.Window,
        "chunked": masks.Chunked,
        "dilated": masks.Dilated,
        "band": masks.Band,
        "global-first": masks.GlobalFirst,
        "lambda": _lambda,
        "sinks": masks.Sinks,
    },
    "far": {
        "rerope": far.ReRoPE,
        "leaky-rerope": far.LeakyReRoPE,
        "self-extend": far.SelfExtend,
        "lm-infinite": far.LMInfinite,
        "streaming": far.StreamingLLM,
        "dual-chunk": far.DualChunk,
    },
    "sinks": {"learned": sinks.LearnedSinks, "plus-one": sinks.SoftmaxPlusOne},
    "linear": {
        "elu": linear.Elu,
        "exponential": linear.Exponential,
        "performer": linear.Performer,
        "taylor": linear.Taylor,
        "limit": linear.Limit,
        "cosine": linear.Cosine,
    },
    "positions": sampling.RULES,
}
"""What can stand in each slot, by the names that configurations use. A new method adds one line here."""


def slot(slot_name: str, name: str, **options):
    """A spec by name, for configurations: ``slot("frequencies", "dynamic-ntk", original_length=2048)``.

    Raises:
        ValueError: for an unknown slot, name or option, with the nearest known one.
    """
    check_known("slot", slot_name, SLOTS)
    check_known(slot_name, name, SLOTS[slot_name])
    return build(f"{slot_name} {name!r}", SLOTS[slot_name][name], options)


def build(what: str, make: Callable, options: Mapping[str, Any], also: tuple[str, ...] = ()):
    """``make(**options)``; an option it does not know (``also`` is known), or one that is missing, is a clear error.

    Lists, which is what YAML has for tuples, become tuples.
    """
    for option in options:
        check_known(f"{what} option", option, (*inspect.signature(make).parameters, *also))
    try:
        made = make(**{name: _as_tuple(value) for name, value in options.items()})
        hash(made)
    except TypeError as error:
        found = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(f"{what}: {str(error).partition(') ')[2] or f'{error}, in {found}'}") from None
    return made


def _as_tuple(value):
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def check_known(what: str, name: Any, known: Collection[str]) -> None:
    """Raises ValueError with the nearest known name unless ``name`` is one of them."""
    if isinstance(name, str) and name in known:
        return
    near = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}{hint} (known: {', '.join(known)})")
