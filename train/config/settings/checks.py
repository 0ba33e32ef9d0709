"""Common checks of values; every error is a one-line ValueError that names the key."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_positive(section: str, owner: Any, *names: str) -> None:
    """Raises unless the named settings of a section are all above 0, or None."""
    for name in names:
        value = getattr(owner, name)
        check(value is None or value > 0, f"{section}.{name} must be positive, found {value}")


def check_not_negative(section: str, owner: Any, *names: str) -> None:
    """Raises unless the named settings of a section are all at least 0."""
    for name in names:
        value = getattr(owner, name)
        check(value >= 0, f"{section}.{name} must not be negative, found {value}")


def check_row_length(name: str, value: int) -> None:
    """Raises for rows of more tokens than int32 positions can count."""
    check(value < 2**31, f"{name} must be below 2**31, the number of positions, found {value}")


def check_fraction(name: str, value: float) -> None:
    """Raises unless the value is at least 0 and below 1."""
    check(0 <= value < 1, f"{name} must be at least 0 and below 1, found {value}")


def unknown(path: str, found: Any, known: Sequence[str], what: str) -> ValueError:
    """The error for an unknown name, which suggests the nearest known one."""
    listed = map(repr, known) if any("," in name for name in known) else known
    return ValueError(f"{path}: unknown {what} {found!r}{nearest(str(found), known)} (known: {', '.join(listed)})")


def nearest(found: str, known: Sequence[str], form: str = "{!r}") -> str:
    """The part of a message that suggests the nearest known name, in a form; empty if no name is near."""
    near = get_close_matches(found, known, n=1)
    return f"; did you mean {form.format(near[0])}?" if near else ""


def divisor_near(number: int, most: int) -> int:
    """A divisor of ``number`` up to ``most``, for a message: the largest, if it is within 65,536 of ``most``.

    A config may have very large numbers, and a message is not worth a long search.
    """
    top = min(number, most)
    return next((n for n in range(top, max(0, top - 2**16), -1) if number % n == 0), math.gcd(number, most))


def check_seed(name: str, seed: int) -> None:
    """Raises unless the value fits an unsigned integer of 32 bits."""
    check(0 <= seed < 2**32, f"{name} must be at least 0 and below 2**32, found {seed}")


def check_distinct(name: str, values: Sequence[Any], remedy: str) -> None:
    """Raises if a value appears twice; ``remedy`` says what to do."""
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    check(not twice, f"{name}: {twice[0] if twice else None!r} appears twice; {remedy}")


def check_chunks(vocabulary: int, chunks: int) -> None:
    """Raises ValueError for ``train.loss_chunks`` that do not divide the vocabulary."""
    if vocabulary % chunks:
        fits = divisor_near(vocabulary, chunks)
        raise ValueError(
            f"train.loss_chunks must divide the vocabulary of {vocabulary} tokens, found {chunks}; {fits} would work"
        )
