"""``python -m train plan CONFIG --topology v5p:8x8x8``."""

from __future__ import annotations

from rich.console import Console

from posjax._checks import check
from train.config import Config
from train.plan.plan import make_plan, stages
from train.plan.pods import Pod, pod
from train.plan.report import show
from train.plan.sweep import sweep as rank

_WIDTH = 120
"""Of tables where there is no terminal."""


def plan(config: Config, topology: str, slices: int = 1, sweep: int = 0) -> None:
    """Plans every stage of a config on slices of a pod, or compiles `sweep` ways to run it there and ranks them.

    Raises ValueError for a pod that does not exist, or a config that does not fit it.
    """
    check(sweep >= 0, f"--sweep: expected how many ways to compile, found {sweep}")
    on, console = pod(topology, slices), Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    for name, stage in stages(config):
        if len(config.stage_names) > 1:
            console.rule(name)
        _plan_stage(stage, on, sweep, console)


def _plan_stage(config: Config, on: Pod, sweep: int, console: Console) -> None:
    if sweep:
        rank(config, on, sweep, console)
    else:
        show(make_plan(config, on), console)
