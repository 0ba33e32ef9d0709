"""The format of numbers and names in tables and sentences."""

from collections.abc import Callable, Sequence

from train.report.numbers import Estimate


def number(value: float) -> str:
    """Three or four digits: 5.87, 31.4, 178, 2.1e+06."""
    if value >= 1e5:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def percent(value: float) -> str:
    """A share in %."""
    return f"{100 * value:.1f}"


def thousands(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def mebibytes(value: float) -> str:
    """Bytes in MiB."""
    return f"{value / 2**20:,.0f}"


def shown(value: Estimate | None, number: Callable[[float], str]) -> str:
    """A mean with its spread; a dash if there is none."""
    if value is None:
        return "-"
    return number(value.mean) + (f" ±{number(value.spread)}" if value.spread is not None else "")


def headings(lengths: Sequence[int], train_length: int | None) -> list[str]:
    """Lengths in tokens, and as multiples of the training length if there is one."""
    return [f"{n} ({n / train_length:.3g}x)" if train_length else str(n) for n in lengths]


def spoken(task: str) -> str:
    """The name of a task in words."""
    return "MQAR" if task == "mqar" else task.replace("_", " ").capitalize()
