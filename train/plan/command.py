"""``python -m train plan CONFIG --topology v5p:8x8x8``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from posjax._checks import check
from train.config import Config
from train.model.flops import update_flops
from train.plan import against, kept, report
from train.plan.compiling import compile_step
from train.plan.others import Blocks, parse_blocks
from train.plan.plan import check_split, make_plan, plan_evaluation, plan_of, read_step
from train.plan.pods import Pod, pod
from train.plan.ruler import Reading
from train.plan.sweep import sweep as rank

_WIDTH = 120
"""The width of tables if there is no terminal."""


@dataclass(frozen=True)
class StepOptions:
    """The folders of compiled steps to compare, and how our own step is compiled and kept."""

    against: tuple[Path, ...] = ()
    keep: Path | None = None
    blocks: Blocks | None = None  # block sizes of kernels whose calls do not state them
    flags: str | None = None  # compiler flags for our step; None for those recommended for the chip
    evaluate: bool = False  # our program is that of `evaluate`

    @classmethod
    def of(
        cls,
        against: Sequence[str],
        keep: str | None,
        blocks: str | None,
        flags: str | None = None,
        evaluate: bool = False,
    ) -> StepOptions:
        """The options of the command line."""
        check(
            not evaluate or not (against or keep),
            "--evaluate: only train steps can be kept or compared; leave it out, or --keep and --against",
        )
        paths = tuple(map(Path, against)), Path(keep) if keep else None
        for option, value, purpose in (("--keep", keep, "keep"), ("--flags", flags, "compile with them")):
            check(
                value is None or len(against) < 2,
                f"{option}: nothing is compiled where --against names several folders, so there is nothing to "
                f"{purpose}; leave out {option}, or all folders but one",
            )
        check(not blocks or against, "--blocks: these describe kernels in a folder of --against, found no folder")
        return cls(*paths, parse_blocks(blocks) if blocks else None, flags, evaluate)


def plan(config: Config, topology: str, slices: int = 1, sweep: int = 0, options: StepOptions | None = None) -> None:
    """Plans every stage of a config on slices of a pod. With `sweep` above 0, compiles and ranks that many ways to run
    it instead.

    `options` says which kept steps are compared with ours, and how ours is compiled and kept. Raises ValueError for a
    pod that does not exist, a config that does not fit it, or a folder without a step.
    """
    options = options or StepOptions()
    check(sweep >= 0, f"--sweep: expected the number of ways to compile, found {sweep}")
    on, console = pod(topology, slices), Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    if options.evaluate:
        check(not sweep, "--sweep ranks ways to train, not evaluations; leave out --sweep or --evaluate")
        report.show(plan_evaluation(config, on, flags=options.flags), console)
        return
    if options.against or options.keep:
        _check_alone(config, sweep)
        _compare(config, on, options, console)
        return
    for name, stage in zip(config.stage_names, config.every_stage, strict=True):
        if len(config.stage_names) > 1:
            console.rule(name)
        _plan_stage(stage, on, sweep, console, options.flags)


def _plan_stage(config: Config, on: Pod, sweep: int, console: Console, flags: str | None) -> None:
    if sweep:
        rank(config, on, sweep, console, flags)
        return
    report.show(make_plan(config, on, flags=flags), console)


def _check_alone(config: Config, sweep: int) -> None:
    check(not sweep, "--sweep: only a single step can be kept or compared; leave out --sweep, or --keep and --against")
    names = config.stage_names
    check(
        len(names) < 2,
        f"--keep and --against are of one step, but the config has the stages {', '.join(names)}; stages=[] and the "
        "settings of one of them would work",
    )


def _compare(config: Config, on: Pod, options: StepOptions, console: Console) -> None:
    """Prints kept steps side by side. Unless there are several, our step is compiled, kept if asked, and shown too."""
    (stage,) = config.every_stage
    theirs = [kept.read(folder, on) for folder in options.against]
    readings = [_reading(stage, on, one, options.blocks) for one in theirs]
    if len(theirs) < 2:
        check_split(stage, on)
        ours = compile_step(stage, on, flags=options.flags)
        if options.keep:
            kept.keep(options.keep, ours, stage.train.batch_tokens)
        if not theirs:
            report.show(plan_of(stage, on, ours), console)
            return
        readings.insert(0, read_step("ours", stage, on, ours))
        theirs.insert(0, kept.Kept("ours", ours))
    against.show(readings, update_flops(stage), stage.train.batch_tokens, on, console)
    for one in theirs:
        if one.step.flags is not None:
            console.print(f"{one.name}: {report.compiled_with(one.step.flags)}", highlight=False)


def _reading(config: Config, on: Pod, one: kept.Kept, blocks: Blocks | None) -> Reading:
    return read_step(one.name, config, on, one.step, one.tokens, one.schedules, blocks)
