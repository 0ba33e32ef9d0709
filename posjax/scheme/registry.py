"""The specs of each slot of a scheme, by the names that configurations use."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from posjax import absolute, bias, coca, linear, masks, norms, pope, remap, rotary, scales, sinks, training_positions
from posjax._checks import check, check_counts, describe, nearest
from posjax._slots import Features


def _lambda(window: int, first: int) -> masks.Mask:
    """The last ``window`` keys and the first few, ``Window | FirstTokens`` (LM-Infinite, arXiv 2308.16137).

    With the training length as ``window`` it is the baseline in which each token sees no more keys than in training,
    plus the first tokens that language models need (kexue.fm/archives/9948).

    Args:
        window: how many of the last keys a query sees, its own included.
        first: how many first positions every query sees.
    """
    check_counts(window=window, first=first)
    return masks.Window(window) | masks.FirstTokens(first)


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
        "fope": rotary.FoPE,
        "rope-pp": rotary.RoPEPP,
        "general": rotary.GeneralRotary,
        "pope": pope.PoPE,
        "coca": coca.Coca,
        "coca-planes": coca.PartlyCollinear,
    },
    "norm": {
        "key-norm": norms.KeyNorm,
        "qk-norm": norms.QKNorm,
        "cosine": norms.CosineNorm,
    },
    "scale": {
        "log-n": scales.LogN,
        "clipped-log-n": scales.ClippedLogN,
        "ssmax": scales.SSMax,
        "llama4": scales.Llama4Temperature,
        "ministral": scales.MinistralTemperature,
        "inkling": scales.InklingTemperature,
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
        "path": bias.PaTH,
        "relative": bias.Relative,
        "shaw": bias.Shaw,
        "scale-invariant": bias.ScaleInvariant,
    },
    "mask": {
        "window": masks.Window,
        "chunked": masks.Chunked,
        "dilated": masks.Dilated,
        "band": masks.Band,
        "global-first": masks.GlobalFirst,
        "lambda": _lambda,
        "first-tokens": masks.FirstTokens,
    },
    "remap": {
        "rerope": remap.ReRoPE,
        "leaky-rerope": remap.LeakyReRoPE,
        "self-extend": remap.SelfExtend,
        "lm-infinite": remap.LMInfinite,
        "streaming": remap.StreamingLLM,
        "dual-chunk": remap.DualChunk,
        "string": remap.STRING,
    },
    "sinks": {"learned": sinks.LearnedSinks, "plus-one": sinks.SoftmaxPlusOne, "by-token": sinks.TokenSinks},
    "linear": {
        "elu": linear.Elu,
        "exponential": linear.Exponential,
        "performer": linear.Performer,
        "taylor": linear.Taylor,
        "limit": linear.Limit,
        "cosine": linear.Cosine,
        "gated-delta": linear.GatedDelta,
    },
    "training_positions": dict(training_positions.RULES),
}
"""The specs of each slot, by the names that configurations use. A new method adds a line here, and its name is
that of a preset in most slots."""

BASES: dict[str, type] = {
    "embedding": absolute.Embedding,
    "frequencies": rotary.FrequencyRule,
    "features": Features,
    "norm": norms.HeadNorm,
    "scale": scales.Scale,
    "bias": bias.BiasSpec,
    "mask": masks.Mask,
    "remap": remap.Remap,
    "sinks": sinks.Sinks,
    "linear": linear.LinearLayer,
    "training_positions": training_positions.PositionRule,
}
"""The base class of the specs of each slot."""


def register(slot_name: str, name: str, spec: Callable[..., Any]) -> None:
    """Registers your own method by name in a slot, for configs, ``Scheme.extend``, ``replace`` and ``scheme``.

    Names are global for the process. They are the only state of the library.

    ``register("bias", "recency", Recency)`` once, where the class is defined; then
    ``posjax.scheme("rope", bias={"name": "recency", "rate": 2.0})``, and in a config
    ``scheme: {name: rope, bias: {name: recency, rate: 2.0}}``.

    Args:
        slot_name: a slot of ``Scheme``, or ``"frequencies"``.
        name: a new name in this slot. The same class may be registered again, as when a notebook runs a cell twice.
        spec: a frozen dataclass derived from the base class of the slot, or a function that returns an instance of one;
            its arguments are the options.

    Raises:
        ValueError: for an unknown slot, a name that is taken or empty, or a class that does not fit the slot.
    """
    check_known("slot", slot_name, SLOTS)
    check(isinstance(name, str) and bool(name), f"name must be a text that configs can use, found {name!r}")
    before = SLOTS[slot_name].get(name)
    free = before is None or _is_same(before, spec)
    check(free, f"name: {name!r} is taken in the slot {slot_name!r}, by {before}; choose another")
    check(callable(spec), f"spec must be a class, or a function that makes a spec, found {spec!r}")
    if isinstance(spec, type):
        _check_class(slot_name, spec)
    SLOTS[slot_name][name] = spec


def _is_same(before: Any, spec: Any) -> bool:
    """Whether two specs have the same module and qualified name, as when a definition is run again."""
    names = [(getattr(one, "__module__", None), getattr(one, "__qualname__", None)) for one in (before, spec)]
    return names[0] == names[1] and "<lambda>" not in (names[0][1] or "<lambda>")


def _check_class(slot_name: str, kind: type) -> None:
    """Raises ValueError unless the instances of a class fit a slot."""
    base = BASES[slot_name]
    subject = f"spec: {kind.__name__}"
    check(issubclass(kind, base), f"{subject} must be derived from {base.__name__} for the slot {slot_name!r}")
    missing = ", ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
    check(not missing, f"{subject} lacks {missing}, which the slot {slot_name!r} needs")
    check(kind.__hash__ is not None, f"{subject} is not hashable; write @dataclasses.dataclass(frozen=True)")


def slots_with(name: Any) -> list[str]:
    """The slots that have a spec with this name."""
    return [slot_name for slot_name, names in SLOTS.items() if isinstance(name, str) and name in names]


def slot(slot_name: str, name: str, **options):
    """A spec by name, for configurations: ``slot("frequencies", "dynamic-ntk", original_length=2048)``.

    Raises:
        ValueError: for an unknown slot, name or option, with the nearest known one.
    """
    check_known("slot", slot_name, SLOTS)
    check_known(slot_name, name, SLOTS[slot_name])
    made = build(f"{slot_name} {name!r}", SLOTS[slot_name][name], options)
    _check_class(slot_name, type(made))
    return made


def build(what: str, make: Callable, options: Mapping[str, Any], also: tuple[str, ...] = ()):
    """``make(**options)``; raises ValueError for a missing option, or one that neither ``make`` nor ``also`` has.

    Lists become tuples, because YAML has no tuples.
    """
    known = inspect.signature(make).parameters
    for option, value in options.items():
        check_known(f"{what} option", option, (*known, *also))
        check(
            not isinstance(value, jax.Array),
            f"{what}: {option} is an array, but a scheme is fixed before anything runs: use a Python number; pass a "
            "mask whose sizes are arrays to attend(mask=)",
        )
    missing = [name for name, option in known.items() if _is_needed(option) and name not in options]
    check(not missing, f"{what} needs {' and '.join(missing)}")
    try:
        made = make(**{name: _as_tuple(value) for name, value in options.items()})
        hash(made)
    except TypeError as error:
        shown_options = ", ".join(f"{name}={describe(value)}" for name, value in options.items())
        raise ValueError(f"{what}: {str(error).partition(') ')[2] or f'{error}, in {shown_options}'}") from None
    return made


def _is_needed(option: inspect.Parameter) -> bool:
    return option.default is option.empty and option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)


def _as_tuple(value):
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def check_known(what: str, name: Any, known: Collection[str], listing: str = "") -> None:
    """Raises ValueError with the nearest known names unless ``name`` is one of them; see ``nearest``."""
    if isinstance(name, str) and name in known:
        return
    raise ValueError(f"unknown {what} {describe(name)}{nearest(name, known, listing)}")
