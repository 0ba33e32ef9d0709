"""``python -m train plan CONFIG --topology v6e:16x16 --keep FOLDER --against FOLDER``: saves a compiled step, and
compares compiled steps, ours and others', measured in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from posjax._checks import check
from train.config import Config
from train.lab.steps import saved_step
from train.lab.steps.breakdown import Breakdown, Launches, Sent, Spent, measure, totals
from train.lab.steps.foreign_kernels import AnyKernels, Blocks, parse_blocks
from train.lab.steps.parts import PARTS, PASSES, Widths
from train.lab.steps.saved_step import SavedStep
from train.model.build import Setup
from train.model.flops import Flops, update_flops
from train.plan.compiling import compile_step
from train.plan.plan import check_split, compiled_with, kernels_of, plan_of, simulator_of
from train.plan.pods import GIB, Pod, pod_of
from train.plan.report import new_console
from train.plan.report import show as show_plan

_PASSES = PASSES[:3]
_SHOWN = 1e-3
"""Parts with a smaller share of a step are left out."""


@dataclass(frozen=True)
class StepOptions:
    """The folders of compiled steps to compare, and how our own step is compiled and saved."""

    against: tuple[Path, ...] = ()
    keep: Path | None = None
    blocks: Blocks | None = None  # block sizes of kernels whose calls do not state them
    flags: str | None = None  # compiler flags for our step; None for those recommended for the chip

    @classmethod
    def of(
        cls, against: Sequence[str], keep: str | None, blocks: str | None, flags: str | None, sweep: int, evaluate: bool
    ) -> StepOptions:
        """The options of the command line."""
        check(
            not sweep, "--sweep: only a single step can be kept or compared; leave out --sweep, or --keep and --against"
        )
        check(
            not evaluate, "--evaluate: only train steps can be kept or compared; leave it out, or --keep and --against"
        )
        for option, value, purpose in (("--keep", keep, "keep"), ("--flags", flags, "compile with them")):
            check(
                value is None or len(against) < 2,
                f"{option}: nothing is compiled where --against names several folders, so there is nothing to "
                f"{purpose}; leave out {option}, or all folders but one",
            )
        check(not blocks or against, "--blocks: these describe kernels in a folder of --against, found no folder")
        paths = tuple(map(Path, against)), Path(keep) if keep else None
        return cls(*paths, parse_blocks(blocks) if blocks else None, flags)


def compare_steps(config: Config, topology: str, slices: int, options: StepOptions) -> None:
    """Prints saved steps side by side. Unless there are several, our step is compiled, saved if asked, and shown too.

    Raises ValueError for a pod that does not exist, a config with stages or one that does not fit the pod, and a folder
    without a step.
    """
    pod, console, names = pod_of(topology, slices), new_console(), config.stage_names
    check(
        len(names) < 2,
        f"--keep and --against are of one step, but the config has the stages {', '.join(names)}; stages=[] and the "
        "settings of one of them would work",
    )
    (stage,) = config.every_stage
    steps = [saved_step.read(folder, pod) for folder in options.against]
    setup = check_split(stage, pod) if len(steps) < 2 else Setup(stage)
    if len(steps) < 2:
        ours = compile_step(stage, pod, flags=options.flags)
        if options.keep:
            saved_step.save(options.keep, ours, stage.train.batch_tokens)
        if not steps:
            show_plan(plan_of(setup, pod, ours), console)
            return
        steps.insert(0, SavedStep("ours", ours))
    breakdowns = [breakdown_of(one, stage, pod, options.blocks) for one in steps]
    show(breakdowns, update_flops(setup), stage.train.batch_tokens, pod, console)
    for one in steps:
        if one.step.flags is not None:
            console.print(f"{one.name}: {compiled_with(one.step.flags)}", highlight=False)


def breakdown_of(one: SavedStep, config: Config, pod: Pod, blocks: Blocks | None) -> Breakdown:
    """The time of a step by parts, for the model, mask and length of a config.

    `blocks` are the block sizes of kernels that are not ours, if their calls do not state them.
    """
    ours, train = kernels_of(Setup(config), pod, one.step.axes), config.train
    kernels = AnyKernels(ours.pod, ours.share, ours.spread, one.schedules, blocks)
    widths = Widths.of(Setup(config).decoder, train.length, pod.devices)
    simulator = simulator_of(pod, one.step, kernels)
    return measure(one.name, simulator, one.step.memory, one.tokens or train.batch_tokens, widths)


def show(breakdowns: Sequence[Breakdown], model: Flops, tokens: int, pod: Pod, console: Console) -> None:
    """Prints the time of each step by parts, side by side, then what each part executes and moves.

    Args:
        breakdowns: the measured steps.
        model: the FLOPs of a step of the config.
        tokens: the tokens of a step of the config.
        pod: the pod that all are compiled for.
        console: where to print.
    """
    console.print(Group(_summary(breakdowns, model.total / tokens, pod), *(_details(one, pod) for one in breakdowns)))
    console.print(_notes(breakdowns), highlight=False)


def _summary(breakdowns: Sequence[Breakdown], flops: float, pod: Pod) -> Table:
    title = f"Steps on {pod.name}: seconds of a device, predicted; parts as forward / again / backward"
    table = Table("", *(breakdown.name for breakdown in breakdowns), title=title)
    for name, value in _heads(flops, pod).items():
        table.add_row(name, *map(value, breakdowns))
    table.add_section()
    for part in PARTS:
        if any(totals(breakdown)[part] >= _SHOWN * breakdown.tally.seconds for breakdown in breakdowns):
            table.add_row(part, *(_passes(breakdown, part) for breakdown in breakdowns))
    table.add_row("attention kernels", *map(_kernels, breakdowns))
    table.add_row("waiting for collectives", *(f"{breakdown.tally.exposed:.3g}" for breakdown in breakdowns))
    table.add_section()
    for key in _keys(breakdown.collectives for breakdown in breakdowns):
        table.add_row(" ".join(key), *(_sent(breakdown.collectives.get(key)) for breakdown in breakdowns))
    return table


def _heads(flops: float, pod: Pod) -> dict:
    """The rows with one number per breakdown."""
    return {
        "HBM GiB: arguments": lambda one: f"{one.memory.arguments / GIB:.2f}",
        "HBM GiB: temporaries": lambda one: f"{one.memory.temp / GIB:.2f}",
        "HBM": lambda one: f"{one.memory.total / pod.hbm_bytes:.0%}",
        "tokens of a step and chip": lambda one: f"{one.tokens / pod.chips:,.0f}",
        "model TFLOP of a chip": lambda one: f"{flops * one.tokens / pod.chips / 1e12:,.4g}",
        "TFLOP executed, kernels left out": lambda one: f"{_executed(one, pod) / 1e12:,.4g}",
        "step": lambda one: f"{_least(one)}{one.tally.seconds:.4g}",
        "tokens a second and chip": lambda one: f"{_most(one)}{one.tokens / one.tally.seconds / pod.chips:,.0f}",
        "MFU": lambda one: f"{_most(one)}{one.tokens * flops / one.tally.seconds / pod.chips / pod.peak_flops:.1%}",
    }


def _executed(breakdown: Breakdown, pod: Pod) -> float:
    return breakdown.flops * pod.links.devices


def _has_unknown(breakdown: Breakdown) -> bool:
    return any(launches.seconds is None for launches in breakdown.kernels.values())


def _least(breakdown: Breakdown) -> str:
    return "> " if _has_unknown(breakdown) else ""


def _most(breakdown: Breakdown) -> str:
    return "< " if _has_unknown(breakdown) else ""


def _passes(breakdown: Breakdown, part: str) -> str:
    """``2.005 = .556 / .440 / 1.009``; time that belongs to no pass is only in the sum."""
    each = [breakdown.parts[part, name].seconds if (part, name) in breakdown.parts else 0.0 for name in _PASSES]
    whole = totals(breakdown)[part]
    return f"{whole:.3g} = " + " / ".join(f"{seconds:.3g}" for seconds in each) if sum(each) else f"{whole:.3g}"


def _kernels(breakdown: Breakdown) -> str:
    by_pass: dict[str, list[Launches]] = defaultdict(list)
    for (_, name), launches in breakdown.kernels.items():
        by_pass[name].append(launches)
    found = [by_pass[name] for name in PASSES if by_pass[name]]
    known = sum(one.seconds or 0.0 for launches in found for one in launches)
    return f"{_least(breakdown)}{known:.3g} = " + " / ".join(map(_launches, found)) if found else "none"


def _launches(found: list[Launches]) -> str:
    times = sum(one.times for one in found)
    unknown = any(one.seconds is None for one in found)
    return f"{times:g} x " + ("unknown" if unknown else f"{sum(one.seconds for one in found) / times * 1e3:.3g} ms")


def _keys(found: Iterable[dict]) -> list:
    return sorted({key for each in found for key in each})


def _sent(sent: Sent | None) -> str:
    return f"{sent.times:g} x, {sent.bytes / 1e9:.3g} GB, {sent.seconds:.3g} s" if sent else ""


def _details(breakdown: Breakdown, pod: Pod) -> Table:
    title = f"{breakdown.name}: what a device executes and moves"
    table = Table("part", "pass", "s", "Mcycles", "TFLOP", "of peak", "GB", "s by HBM", title=title)
    for (part, name), spent in sorted(breakdown.parts.items(), key=lambda item: -item[1].seconds):
        if spent.seconds >= _SHOWN / 10 * breakdown.tally.seconds:
            table.add_row(part, name, *_numbers(spent, pod))
    for (kernel, name), launches in breakdown.kernels.items():
        seconds = "unknown" if launches.seconds is None else f"{launches.seconds:.3g}"
        table.add_row(f"{launches.times:g} x {kernel}", name, seconds, *[""] * 5)
    return table


def _numbers(spent: Spent, pod: Pod) -> tuple[str, ...]:
    peak = pod.peak_flops / pod.links.devices
    return (
        f"{spent.seconds:.3g}",
        f"{spent.seconds / pod.seconds_per_cycle / 1e6:,.1f}",
        f"{spent.flops / 1e12:,.3g}" if spent.flops else "",
        f"{spent.flops / spent.seconds / peak:.0%}" if spent.flops else "",
        f"{spent.moved / 1e9:,.3g}",
        f"{spent.moved / pod.hbm_bandwidth:.3g}",
    )


def _notes(breakdowns: Sequence[Breakdown]) -> str:
    left_out = [
        f"{name} x {count} of {breakdown.name}"
        for breakdown in breakdowns
        for name, count in breakdown.tally.unknown.items()
    ]
    return (
        "Predicted, not measured: cycles that the compiler expects, and bytes of look-ups. TFLOP count matrix "
        "products outside kernels; GB are a lower bound of HBM traffic."
        + (f" Not included, because unknown: {', '.join(left_out)}." if left_out else "")
    )
