"""Options of extensions that follow from the length a model was made for and the length it is used at."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Sizes = Callable[[int, int], dict[str, Any]]


def _factor(own: int, length: int) -> dict[str, Any]:
    return {"factor": max(1.0, length / own)}


def _from_own(own: int, length: int) -> dict[str, Any]:
    return {"original_length": own}


def _both(own: int, length: int) -> dict[str, Any]:
    return _factor(own, length) | _from_own(own, length)


def _group(own: int, length: int, window: int) -> int:
    """The least power of 2 that brings the longest distance, ``window + (length - window) / group``, to half of own."""
    return 1 << max(0, math.ceil(math.log2(max(1.0, (length - window) / (own / 2 - window)))))


def _self_extend(own: int, length: int) -> dict[str, Any]:
    window = max(1, own // 8)
    group = 1 if length <= own else _group(own, length, window)
    return {"window": max(1, window // group) * group, "group": group}


def _leaky(own: int, length: int) -> dict[str, Any]:
    window = max(1, own // 4)
    return {"window": window, "factor": 1.0 if length <= own else float(_group(own, length, window))}


_OPTIONS: dict[str, dict[str, Sizes]] = {
    "frequencies": {
        **dict.fromkeys(("linear", "ntk", "ntk-old", "ntk-fixed", "ntk-mixed"), _factor),
        **dict.fromkeys(("dynamic-linear", "dynamic-ntk", "dynamic-yarn", "hope"), _from_own),
        **dict.fromkeys(("yarn", "ntk-by-parts", "llama3"), _both),
        "longrope": _both,
    },
    "far": {
        "rerope": lambda own, _: {"window": max(1, own // 2)},
        "leaky-rerope": _leaky,
        "self-extend": _self_extend,
        "dual-chunk": lambda own, _: {"length": own},
        "streaming": lambda own, _: {"sinks": 4, "recent": own - 4},
        "lm-infinite": lambda own, _: {"n_local": own},
    },
    "mask": {
        "window": lambda own, _: {"size": own},
        "lambda": lambda own, _: {"window": own - 4, "sinks": 4},
    },
    "scale": {
        "clipped-log-n": lambda own, _: {"length": own},
        "log-n": lambda own, _: {"length": own},
        "drope": lambda own, length: {"extension": max(1.0, length / own)},
    },
}
"""What each method needs to know, by its slot and name. Windows are those that the authors advise."""


def completed(extend: Mapping[str, Any], own: int, length: int) -> dict[str, Any]:
    """An extension with the options that it leaves out.

    Args:
        extend: slots of ``Scheme.extend``, as a config has them.
        own: the length that the model was made for.
        length: the length at which it is used.
    """
    return {slot: _completed(slot, change, own, length) for slot, change in extend.items()}


def _completed(slot: str, change: Any, own: int, length: int) -> Any:
    sizes = _OPTIONS.get(slot, {}).get(change.get("name")) if isinstance(change, Mapping) else None
    return change if sizes is None else {**sizes(own, length), **change}
