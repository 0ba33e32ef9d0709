"""Options of extensions that follow from the length a model was made for and the length it is used at."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posjax import rotary
from posjax.rotary import FrequencyRule
from posjax.rotary.scalings import yarn_magnitude
from posjax.scheme import Layers, Scheme
from train.config.settings.checks import check

Sizes = Callable[[int, int], dict[str, Any]]


def _factor(own: int, length: int) -> dict[str, Any]:
    return {"factor": max(1.0, length / own)}


def _from_own(own: int, length: int) -> dict[str, Any]:
    return {"original_length": own}


def _both(own: int, length: int) -> dict[str, Any]:
    return _factor(own, length) | _from_own(own, length)


def _group(own: int, length: int, window: int) -> int:
    """The least power of 2 with which the longest distance, ``window + (length - window) / group``, is <= own / 2."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, (length - window) / (own / 2 - window)))))


def _self_extend(own: int, length: int) -> dict[str, Any]:
    window = max(1, own // 8)
    group = 1 if length <= own else _group(own, length, window)
    return {"window": max(1, window // group) * group, "group": group}


def _leaky(own: int, length: int) -> dict[str, Any]:
    window = max(1, own // 4)
    return {"window": window, "factor": 1.0 if length <= own else float(_group(own, length, window))}


def _string(own: int, length: int) -> dict[str, Any]:
    """Distances are moved by a third of ``own``; beyond ``own`` by more, to keep them below it while that can be."""
    window = max(1, min(128, own // 12))
    return {"length": own, "window": window, "shift": min(own, max(own // 3, length - own + window))}


_OPTIONS: dict[str, dict[str, Sizes]] = {
    "frequencies": {
        **dict.fromkeys(("linear", "ntk", "ntk-old", "ntk-fixed", "ntk-mixed"), _factor),
        **dict.fromkeys(("dynamic-linear", "dynamic-ntk", "dynamic-yarn", "hope"), _from_own),
        **dict.fromkeys(("yarn", "ntk-by-parts", "llama3", "longrope"), _both),
    },
    "remap": {
        "rerope": lambda own, _: {"window": max(1, own // 2)},
        "leaky-rerope": _leaky,
        "self-extend": _self_extend,
        "dual-chunk": lambda own, _: {"length": own},
        "string": _string,
        "streaming": lambda own, _: {"first": 4, "recent": own - 4},
        "lm-infinite": lambda own, _: {"n_local": own},
    },
    "mask": {
        "window": lambda own, _: {"size": own},
        "lambda": lambda own, _: {"window": own - 4, "first": 4},
    },
    "scale": {
        "clipped-log-n": lambda own, _: {"length": own},
        "log-n": lambda own, _: {"length": own},
        "drope": lambda own, length: {"extension": max(1.0, length / own)},
    },
}
"""The options that each method needs, by its slot and name. Windows are those that the authors recommend."""


def completed(extend: Mapping[str, Any], own: int, length: int) -> dict[str, Any]:
    """An extension with its omitted options filled in.

    Args:
        extend: slots of ``Scheme.extend``, as a config has them.
        own: the length that the model was made for.
        length: the length at which it is used.
    """
    return {slot: _completed(slot, change, own, length) for slot, change in extend.items()}


def _completed(slot: str, change: Any, own: int, length: int) -> Any:
    sizes = _OPTIONS.get(slot, {}).get(change.get("name")) if isinstance(change, Mapping) else None
    return change if sizes is None else {**sizes(own, length), **change}


def continued(scheme: Scheme | Layers, extend: Mapping[str, Any], own: int, length: int) -> dict[str, Any]:
    """An extension of a released model: it is `completed`, and continues the model's own rule and windows.

    * Layers with only a local window have seen all their distances in training: the extension skips them.
    * Up to its own length a model keeps its own frequencies, unless the extension names a factor or an original length,
      or is HoPE or LongRoPE.
    * Beyond that, if its RoPE is already scaled, a rule of the same kind replaces it (linear; or YaRN, NTK-by-parts and
      Llama 3's rule), with the model's original length and the product of both factors. The factor of the extension
      counts from the model's own length.
    * YaRN then multiplies the model's own temperature by ``m(product) / m(own factor)``, m(s) = 0.1 ln(s) + 1, so that
      a factor of 1 changes nothing.

    Args:
        scheme: of the model.
        extend, own, length: see `completed`.

    Raises:
        ValueError: for a model whose layers all have local windows, for a rule of another kind than the model's own,
          and for a rule that would lose the model's own temperature.
    """
    if not extend:
        return {}
    _check_named(extend)
    schemes = scheme.kinds if isinstance(scheme, Layers) else (scheme,)
    reached, layers = _reached(schemes, extend, own)
    _check_masking(reached, extend.get("remap"))
    found = completed({**layers, **extend}, own, length)
    rules = {each.features.frequencies for each in reached if each.rotates}
    scaled = sorted((rule for rule in rules if not isinstance(rule, UNSCALED)), key=repr)
    if scaled and isinstance(found.get("frequencies"), Mapping):
        found["frequencies"] = _continued(scaled[0], extend["frequencies"], found["frequencies"])
    if length <= own and _follows_length(extend.get("frequencies")):
        scheme.extend(**found)  # an extension that is invalid beyond the model's length is refused up to it too
        del found["frequencies"]
    return found if found.keys() - {"layers"} else {}


def _follows_length(change: Any) -> bool:
    """Whether the rule of this name changes no frequency up to the model's own length."""
    named = isinstance(change, Mapping) and change.get("name") in _OPTIONS["frequencies"].keys() - {"hope", "longrope"}
    return named and not change.keys() & {"factor", "original_length"}


UNSCALED = (rotary.Plain, rotary.Proportional, rotary.DynamicNTK, rotary.DynamicLinear, rotary.DynamicYaRN)
"""Rules that equal plain RoPE up to the length that the model was made for."""
_KINDS = (({"linear"}, rotary.Linear), ({"yarn", "ntk-by-parts", "llama3"}, (rotary.NTKByParts, rotary.Llama3)))
"""Names of rules, and the classes of rules that they can replace, by taking over factor and original length."""


def _check_named(extend: Mapping[str, Any]) -> None:
    """Raises ValueError for a slot whose description lacks a name."""
    for slot, change in extend.items():
        named = not isinstance(change, Mapping) or isinstance(change.get("name"), str)
        check(named, f"{slot}: expected {{name: ..., option: value}}, found {change!r}")


def _check_masking(schemes: Sequence[Scheme], change: Any) -> None:
    """Raises ValueError for a remapping that also masks: layers without rotation would not get the mask."""
    masks = isinstance(change, Mapping) and change["name"] in ("streaming", "lm-infinite")
    check(
        not masks or all(scheme.rotates for scheme in schemes),
        f"remap: {change['name'] if masks else ''!r} would leave the layers of this model that do not rotate without "
        "its mask; mask: {name: lambda} masks them all",
    )


def _reached(schemes: Sequence[Scheme], extend: Mapping[str, Any], own: int) -> tuple[Sequence[Scheme], dict[str, str]]:
    """The layers that an extension changes, as an option of `Layers.extend`.

    A window as long as the model's own length counts as no window.
    """
    full = [scheme for scheme in schemes if scheme.kept_keys is None or sum(scheme.kept_keys) >= own]
    if "layers" in extend or len(full) == len(schemes):
        return schemes, {}
    check(bool(full), "every layer of this model has a local window, so an extension has nothing to change")
    return full, {"layers": "full"}


def _continued(rule: FrequencyRule, given: Mapping[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The options of a rule that replaces the model's own: `given` in the config; `change`, all of them.

    If the config names both the factor and the original length, they are used as given.
    """
    if {"factor", "original_length"} <= given.keys():
        return change
    name = change["name"]
    names = next((names for names, kind in _KINDS if isinstance(rule, kind)), set())
    check(
        name in names,
        f"frequencies: {name!r} would replace the model's own {type(rule).__name__}; "
        f"{' or '.join(sorted(names)) or 'no rule'} can continue it",
    )
    inherited = _fields(rule) if rotary.SCALINGS[name] is type(rule) else {}
    if hasattr(rule, "original_length"):
        inherited["original_length"] = rule.original_length
    factor = rule.factor * change["factor"]
    check(
        name == "yarn" or rule.table_factor == rule.softmax_scale == 1,
        f"frequencies: {name!r} cannot keep the temperature of the model's own {type(rule).__name__}; use 'yarn'",
    )
    temperature = _temperature(rule, factor) if name == "yarn" else {}
    return {**inherited, **temperature, **given, "factor": factor}


def _temperature(rule: FrequencyRule, factor: float) -> dict[str, float]:
    """The temperature option of a YaRN by `factor` that replaces a rule; empty if the rule's temperature is YaRN's
    own."""
    grown = rule.table_factor * yarn_magnitude(factor) / yarn_magnitude(rule.factor)
    is_default = math.isclose(grown, yarn_magnitude(factor)) or getattr(rule, "mscale_all_dim", None)
    return {} if is_default else {"attention_factor": grown}


def _fields(rule: FrequencyRule) -> dict[str, Any]:
    """A rule's own options, without its temperature."""
    passed_over = {*(field.name for field in dataclasses.fields(FrequencyRule)), "attention_factor"}
    return {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.name not in passed_over}
