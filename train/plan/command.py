"""``python -m train plan CONFIG --topology v5p:8x8x8``."""

from __future__ import annotations

from posjax._checks import check
from train.config import Config
from train.plan.plan import make_plan, plan_evaluation
from train.plan.pods import pod_of
from train.plan.report import new_console, show
from train.plan.sweep import sweep as rank


def plan(
    config: Config, topology: str, slices: int = 1, sweep: int = 0, flags: str | None = None, evaluate: bool = False
) -> None:
    """Plans every stage of a config on slices of a pod. With `sweep` above 0, compiles and ranks that many ways to run
    it instead; with `evaluate`, plans its evaluation.

    `flags` are those of the compiler; None for those recommended for the chip. Raises ValueError for a pod that does
    not exist, or a config that does not fit it.
    """
    check(sweep >= 0, f"--sweep: expected the number of ways to compile, found {sweep}")
    check(not (evaluate and sweep), "--sweep ranks ways to train, not evaluations; leave out --sweep or --evaluate")
    pod, console = pod_of(topology, slices), new_console()
    if evaluate:
        show(plan_evaluation(config, pod, flags=flags), console)
        return
    for name, stage in zip(config.stage_names, config.every_stage, strict=True):
        if len(config.stage_names) > 1:
            console.rule(name)
        if sweep:
            rank(stage, pod, sweep, console, flags)
        else:
            show(make_plan(stage, pod, flags=flags), console)
