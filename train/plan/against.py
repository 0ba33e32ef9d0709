"""Compares compiled steps, ours and others', measured in the same way, on a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.table import Table

from train.model.flops import Flops
from train.plan.parts import PARTS, PASSES
from train.plan.pods import GIB, Pod
from train.plan.ruler import Launches, Reading, Sent, Spent, totals

_PASSES = PASSES[:3]
_SHOWN = 1e-3
"""Parts with a smaller share of a step are left out."""


def show(readings: Sequence[Reading], model: Flops, tokens: int, on: Pod, console: Console) -> None:
    """Prints the time of each step by parts, side by side, then what each part executes and moves.

    Args:
        readings: the measured steps.
        model: the FLOPs of a step of the config.
        tokens: the tokens of a step of the config.
        on: the pod that all are compiled for.
        console: where to print.
    """
    console.print(Group(_summary(readings, model.total / tokens, on), *(_details(one, on) for one in readings)))
    console.print(_notes(readings), highlight=False)


def _summary(readings: Sequence[Reading], flops: float, on: Pod) -> Table:
    title = f"Steps on {on.name}: seconds of a device, predicted; parts as forward / again / backward"
    table = Table("", *(reading.name for reading in readings), title=title)
    for name, value in _heads(flops, on).items():
        table.add_row(name, *map(value, readings))
    table.add_section()
    for part in PARTS:
        if any(totals(reading)[part] >= _SHOWN * reading.tally.seconds for reading in readings):
            table.add_row(part, *(_passes(reading, part) for reading in readings))
    table.add_row("attention kernels", *map(_kernels, readings))
    table.add_row("waiting for collectives", *(f"{reading.tally.exposed:.3g}" for reading in readings))
    table.add_section()
    for key in _keys(reading.collectives for reading in readings):
        table.add_row(" ".join(key), *(_sent(reading.collectives.get(key)) for reading in readings))
    return table


def _heads(flops: float, on: Pod) -> dict:
    """The rows with one number per reading."""
    return {
        "HBM GiB: arguments": lambda one: f"{one.memory.arguments / GIB:.2f}",
        "HBM GiB: temporaries": lambda one: f"{one.memory.temp / GIB:.2f}",
        "HBM": lambda one: f"{one.memory.total / on.hbm_bytes:.0%}",
        "tokens of a step and chip": lambda one: f"{one.tokens / on.chips:,.0f}",
        "model TFLOP of a chip": lambda one: f"{flops * one.tokens / on.chips / 1e12:,.4g}",
        "TFLOP executed, kernels left out": lambda one: f"{_executed(one, on) / 1e12:,.4g}",
        "step": lambda one: f"{_least(one)}{one.tally.seconds:.4g}",
        "tokens a second and chip": lambda one: f"{_most(one)}{one.tokens / one.tally.seconds / on.chips:,.0f}",
        "MFU": lambda one: f"{_most(one)}{one.tokens * flops / one.tally.seconds / on.chips / on.peak_flops:.1%}",
    }


def _executed(reading: Reading, on: Pod) -> float:
    return reading.flops * on.network.devices


def _has_unknown(reading: Reading) -> bool:
    return any(launches.seconds is None for launches in reading.kernels.values())


def _least(reading: Reading) -> str:
    return "> " if _has_unknown(reading) else ""


def _most(reading: Reading) -> str:
    return "< " if _has_unknown(reading) else ""


def _passes(reading: Reading, part: str) -> str:
    """``2.005 = .556 / .440 / 1.009``; time that belongs to no pass is only in the sum."""
    each = [reading.parts[part, name].seconds if (part, name) in reading.parts else 0.0 for name in _PASSES]
    whole = totals(reading)[part]
    return f"{whole:.3g} = " + " / ".join(f"{seconds:.3g}" for seconds in each) if sum(each) else f"{whole:.3g}"


def _kernels(reading: Reading) -> str:
    by_pass: dict[str, list[Launches]] = defaultdict(list)
    for (_, name), launches in reading.kernels.items():
        by_pass[name].append(launches)
    found = [by_pass[name] for name in PASSES if by_pass[name]]
    known = sum(one.seconds or 0.0 for launches in found for one in launches)
    return f"{_least(reading)}{known:.3g} = " + " / ".join(map(_launches, found)) if found else "none"


def _launches(found: list[Launches]) -> str:
    times = sum(one.times for one in found)
    unknown = any(one.seconds is None for one in found)
    return f"{times:g} x " + ("unknown" if unknown else f"{sum(one.seconds for one in found) / times * 1e3:.3g} ms")


def _keys(found: Iterable[dict]) -> list:
    return sorted({key for each in found for key in each})


def _sent(sent: Sent | None) -> str:
    return f"{sent.times:g} x, {sent.bytes / 1e9:.3g} GB, {sent.seconds:.3g} s" if sent else ""


def _details(reading: Reading, on: Pod) -> Table:
    title = f"{reading.name}: what a device executes and moves"
    table = Table("part", "pass", "s", "Mcycles", "TFLOP", "of peak", "GB", "s by HBM", title=title)
    for (part, name), spent in sorted(reading.parts.items(), key=lambda item: -item[1].seconds):
        if spent.seconds >= _SHOWN / 10 * reading.tally.seconds:
            table.add_row(part, name, *_numbers(spent, on))
    for (kernel, name), launches in reading.kernels.items():
        seconds = "unknown" if launches.seconds is None else f"{launches.seconds:.3g}"
        table.add_row(f"{launches.times:g} x {kernel}", name, seconds, *[""] * 5)
    return table


def _numbers(spent: Spent, on: Pod) -> tuple[str, ...]:
    peak = on.peak_flops / on.network.devices
    return (
        f"{spent.seconds:.3g}",
        f"{spent.seconds / on.seconds_per_cycle / 1e6:,.1f}",
        f"{spent.flops / 1e12:,.3g}" if spent.flops else "",
        f"{spent.flops / spent.seconds / peak:.0%}" if spent.flops else "",
        f"{spent.moved / 1e9:,.3g}",
        f"{spent.moved / on.hbm_bandwidth:.3g}",
    )


def _notes(readings: Sequence[Reading]) -> str:
    left_out = [
        f"{name} x {count} of {reading.name}" for reading in readings for name, count in reading.tally.unknown.items()
    ]
    return (
        "Predicted, not measured: cycles that the compiler expects, and bytes of look-ups. TFLOP count matrix "
        "products outside kernels; GB are a lower bound of HBM traffic."
        + (f" Not included, because unknown: {', '.join(left_out)}." if left_out else "")
    )
