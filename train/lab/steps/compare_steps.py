"""``python -m train plan CONFIG --topology v6e:16x16 --keep FOLDER --against FOLDER``: saves a compiled step, and
compares compiled steps, ours and others', measured in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from posjax._checks import check
from train.config import Config
from train.lab.steps import saved_step
from train.lab.steps.breakdown import Breakdown, Total, measure
from train.lab.steps.foreign_kernels import AnyKernels
from train.lab.steps.parts import AGAIN, BACKWARD, FORWARD, PARTS, PASSES, Widths
from train.lab.steps.saved_step import SavedStep
from train.model.build import Setup
from train.model.flops import update_flops
from train.plan.compiling import compile_step
from train.plan.plan import check_split, compiled_with, kernels_of, plan_of, simulator_of
from train.plan.pods import GIB, Pod, pod_of
from train.plan.report import new_console
from train.plan.report import show as show_plan
from train.runtime.chips import GPUS

_SHOWN = 1e-3
"""Parts with a smaller share of a step are left out."""


def compare_steps(
    config: Config,
    topology: str,
    slices: int,
    *,
    against: Sequence[str],
    keep: str | None,
    flags: str | None,
    sweep: int,
    evaluate: bool,
) -> None:
    """Prints saved steps side by side. Unless there are several, our step is compiled, saved if asked, and shown too.

    Raises ValueError for options that do not go together, a pod that does not exist, a config with stages or one that
    does not fit the pod, and a folder without a step.

    Args:
        config: of our step; its model, mask and length are those of all steps.
        topology: the pod.
        slices: how many of these slices.
        against: folders of compiled steps.
        keep: the folder in which to save our step.
        flags: compiler flags for our step; None for those recommended for the chip.
        sweep, evaluate: other options of the command line, which must be 0 and False.
    """
    check(not sweep, "--sweep: only a single step can be kept or compared; leave out --sweep, or --keep and --against")
    check(not evaluate, "--evaluate: only train steps can be kept or compared; leave it out, or --keep and --against")
    for option, value, purpose in (("--keep", keep, "keep"), ("--flags", flags, "compile with them")):
        check(
            value is None or len(against) < 2,
            f"{option}: nothing is compiled where --against names several folders, so there is nothing to {purpose}; "
            f"leave out {option}, or all folders but one",
        )
    check(topology.partition(":")[0] not in GPUS, f"--topology: steps are compared on TPUs alone, found {topology!r}")
    pod, console, names = pod_of(topology, slices), new_console(), config.stage_names
    check(
        len(names) < 2,
        f"--keep and --against are of one step, but the config has the stages {', '.join(names)}; stages=[] and the "
        "settings of one of them would work",
    )
    (stage,) = config.every_stage
    steps = [saved_step.read(Path(folder), pod) for folder in against]
    setup = check_split(stage, pod) if len(steps) < 2 else Setup(stage)
    if len(steps) < 2:
        ours = compile_step(stage, pod, flags=flags)
        if keep:
            saved_step.save(Path(keep), ours, stage.train.batch_tokens)
        if not steps:
            show_plan(plan_of(setup, pod, ours), console)
            return
        steps.insert(0, SavedStep("ours", ours))
    breakdowns = [breakdown_of(one, setup, pod) for one in steps]
    console.print(_table(breakdowns, update_flops(setup).total / stage.train.batch_tokens, pod))
    console.print(_notes(breakdowns), highlight=False)
    for one in steps:
        if one.step.flags is not None:
            console.print(f"{one.name}: {compiled_with(one.step.flags, pod.generation)}", highlight=False)


def breakdown_of(one: SavedStep, setup: Setup, pod: Pod) -> Breakdown:
    """The time of a step by parts, for the model, mask and length of a setup."""
    ours, train = kernels_of(setup, pod, one.step.axes), setup.config.train
    kernels = AnyKernels(ours.pod, ours.share, ours.spread, one.schedules)
    widths = Widths.of(setup.decoder, train.length, pod.devices)
    simulator = simulator_of(pod, one.step, kernels)
    return measure(one.name, simulator, one.step.memory, one.tokens or train.batch_tokens, widths)


def _table(breakdowns: Sequence[Breakdown], flops: float, pod: Pod) -> Table:
    """The steps beside each other; `flops` are those of the model for a token."""
    title = f"Steps on {pod.name}: seconds of a device, predicted; parts as forward / again / backward"
    table = Table("", *(breakdown.name for breakdown in breakdowns), title=title)
    for name, value in _heads(flops, pod).items():
        table.add_row(name, *map(value, breakdowns))
    table.add_section()
    for part in PARTS:
        if any(_whole(breakdown, part) >= _SHOWN * breakdown.tally.seconds for breakdown in breakdowns):
            table.add_row(part, *(_passes(breakdown, part) for breakdown in breakdowns))
    table.add_row("kernels", *(f"{_bound('>', breakdown)}{breakdown.tally.kernels:.3g}" for breakdown in breakdowns))
    table.add_row("waiting for collectives", *(f"{breakdown.tally.exposed:.3g}" for breakdown in breakdowns))
    table.add_section()
    for key in _keys(breakdown.kernels for breakdown in breakdowns):
        table.add_row(" ".join(key).strip(), *(_launches(breakdown.kernels.get(key)) for breakdown in breakdowns))
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
        "TFLOP executed, kernels left out": lambda one: f"{one.flops * pod.links.devices / 1e12:,.4g}",
        "step": lambda one: f"{_bound('>', one)}{one.tally.seconds:.4g}",
        "tokens a second and chip": lambda one: f"{_bound('<', one)}{one.tokens / one.tally.seconds / pod.chips:,.0f}",
        "MFU": lambda one: (
            f"{_bound('<', one)}{one.tokens * flops / one.tally.seconds / pod.chips / pod.peak_flops:.1%}"
        ),
    }


def _bound(sign: str, breakdown: Breakdown) -> str:
    """The sign before a number that is only a bound."""
    return f"{sign} " if breakdown.has_unknown else ""


def _whole(breakdown: Breakdown, part: str) -> float:
    """Seconds of a part, over all passes."""
    return sum(breakdown.parts[part, name] for name in PASSES)


def _passes(breakdown: Breakdown, part: str) -> str:
    """``2.005 = .556 / .440 / 1.009``; time that belongs to no pass is only in the sum."""
    each, whole = [breakdown.parts[part, name] for name in (FORWARD, AGAIN, BACKWARD)], _whole(breakdown, part)
    return f"{whole:.3g} = " + " / ".join(f"{seconds:.3g}" for seconds in each) if sum(each) else f"{whole:.3g}"


def _launches(found: Total | None) -> str:
    if found is None:
        return ""
    each = "unknown" if found.seconds is None else f"{found.seconds / found.times * 1e3:.3g} ms"
    return f"{found.times:g} x {each}"


def _keys(found: Iterable[dict]) -> list:
    return sorted({key for each in found for key in each})


def _sent(sent: Total | None) -> str:
    return f"{sent.times:g} x, {sent.bytes / 1e9:.3g} GB, {sent.seconds:.3g} s" if sent else ""


def _notes(breakdowns: Sequence[Breakdown]) -> str:
    left_out = [
        f"{name} x {count} of {breakdown.name}"
        for breakdown in breakdowns
        for name, count in breakdown.tally.unknown.items()
    ]
    return (
        "Predicted, not measured: cycles that the compiler expects, and bytes of look-ups. TFLOP count matrix "
        "products outside kernels." + (f" Not included, because unknown: {', '.join(left_out)}." if left_out else "")
    )
