"""Argument checks whose messages name the argument, what was found and what would work."""

import math
import numbers
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises unless ``value`` is one of ``choices``; suggests the nearest one."""
    if value in choices:
        return
    near = get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}: unknown value {value!r}{hint} (known: {', '.join(sorted(choices))})")


def check_positive(name: str, value: Any) -> None:
    """Raises unless ``value`` is a finite number greater than zero."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    check(number and value > 0, f"{name} must be positive, found {value!r}")
    check(value < math.inf, f"{name} must be finite, found {value!r}")


def check_number(name: str, value: Any, at_least: float = -math.inf) -> None:
    """Raises unless ``value`` is a finite Python or NumPy number of at least ``at_least``."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    bound = "" if at_least == -math.inf else f" of at least {at_least}"
    check(number and value >= at_least, f"{name} must be a number{bound}, found {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raises unless ``value`` is a whole number greater than zero."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    check(whole and value > 0, f"{name} must be positive and whole, found {value!r}")


def check_even(name: str, value: int) -> None:
    """Raises unless ``value`` is a positive even integer."""
    check(value > 0 and value % 2 == 0, f"{name} must be a positive even number, found {value}")


def check_rank(name: str, array: Any, rank: int, layout: str) -> None:
    """Raises unless ``array`` has ``rank`` axes; ``layout`` names them, as in ``"[batch, length, heads, size]"``."""
    check(array.ndim == rank, f"{name} must have {rank} axes {layout}, found shape {tuple(array.shape)}")
