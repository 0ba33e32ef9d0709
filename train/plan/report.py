"""``python -m train plan CONFIG --topology v5p:8x8x8``: makes plans and prints them on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.table import Table

from posjax._checks import check
from train.config import Config
from train.plan.gpus import FRACTION, Nodes, machine_of, memory_fraction
from train.plan.network import DCN
from train.plan.plan import Plan, compiled_with, make_plan, mesh_text, plan_evaluation
from train.plan.pods import DCN_LATENCY, GIB, LATENCY, Pod
from train.plan.roofline import LINKS, MEMORY, PRODUCTS
from train.plan.sweep import sweep as rank

_WIDTH = 120
"""The width of tables if there is no terminal."""


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
    pod, console = machine_of(topology, slices), new_console()
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


def new_console() -> Console:
    """The terminal, or the standard output that stands in for it."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def show(plan: Plan, console: Console) -> None:
    """Prints memory, traffic and the predicted step."""
    largest = (_largest(plan),) if plan.largest else ()
    traffic = (_traffic(plan),) if plan.tally.moved else ()
    console.print(Group(_memory(plan), *largest, *traffic, _step(plan)))
    console.print(assumptions(plan), highlight=False)
    if plan.problem:
        console.print(f"warning: the step {plan.problem}", highlight=False)
    if message := plan.setup.undivided:
        console.print(f"warning: {message}", highlight=False)
    console.print(f"The step was {compiled_with(plan.flags, plan.pod.generation)}", highlight=False)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan) -> Table:
    unit = "a GPU" if isinstance(plan.pod, Nodes) else "half a chip" if plan.pod.links.devices > 1 else "a chip"
    memory, hbm = plan.memory, plan.pod.hbm_bytes
    sizes = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "batch": memory.batch,
        "padding of these": memory.padding,
        "activations, gradients, gathered parameters": memory.temp,
        "program": memory.program,
        "all": memory.total,
        "available to a program": hbm,
    }
    rows = [(name, f"{size / GIB:,.2f}", f"{size / hbm:.1%}") for name, size in sizes.items()]
    return _table(f"HBM of {unit}: {plan.pod.name}, {mesh_text(plan.axes)}", ("", "GiB", "share"), rows)


def _largest(plan: Plan) -> Table:
    rows = [(each.array, f"{each.bytes / GIB:,.2f}") for each in plan.largest]
    return _table("Largest temporary arrays", ("array", "GiB"), rows)


def _traffic(plan: Plan) -> Table:
    moved = sorted(plan.tally.moved.items(), key=lambda item: -item[1])
    rows = [(axes, kind, f"{size / 1e9:,.2f}") for (axes, kind), size in moved if size]
    return _table("Collectives of a step, for each device", ("mesh axes", "kind", "GB"), rows)


def _step(plan: Plan) -> Table:
    tally, flops, train = plan.tally, plan.flops, plan.setup.config.train
    rows = {
        "rows at a time": f"{train.rows // train.accumulate}; at least {plan.rows_that_fit} fit",
        "model FLOPs": f"{plan.share * flops.total:.4g}, {flops.attention / flops.total:.1%} of them attention",
        "compute": f"{tally.compute:.4g} s",
        "attention kernels": f"{tally.kernels:.4g} s",
        "waiting for collectives": f"{tally.exposed:.4g} s of {sum(tally.busy.values()):.4g} s on the links",
        **({"between slices, of that": f"{tally.busy[DCN]:.4g} s"} if plan.pod.slices > 1 else {}),
        "step": f"{plan.seconds:.4g} s",
        f"tokens a second and {'GPU' if isinstance(plan.pod, Nodes) else 'chip'}": f"{plan.tokens_per_second:,.0f}",
        "MFU, allowed pairs only": f"{plan.mfu:.1%}",
        "MFU as MaxText counts it": f"{plan.maxtext_mfu:.1%}",
    }
    what = "A step" if plan.share == 1 else f"The loss of {train.rows} rows of {train.length:,} tokens"
    return _table(f"{what}, predicted", ("", ""), rows.items())


def assumptions(plan: Plan) -> str:
    """The assumptions of a prediction."""
    rates = _of_gpus if isinstance(plan.pod, Nodes) else _of_chips
    unknown = ", ".join(f"{name} x {count}" for name, count in plan.tally.unknown.items())
    return (
        f"Predicted, not measured: {rates(plan.pod)}; every row one document; collectives overlap only what is between "
        "their start and their end in the compiled program; no input, no host, no stragglers."
        + (f" Not included, because unknown: {unknown}." if unknown else "")
    )


def _of_chips(pod: Pod) -> str:
    clock = f"{pod.chip.gigahertz:g} GHz{' (assumed)' if pod.chip.clock_is_assumed else ''}"
    crossing = f"; {pod.links.dcn:g} GB/s of a chip to other slices, {DCN_LATENCY * 1e6:g} us (assumed) an exchange"
    return (
        f"compiler's cycles at {clock}; links of {pod.links.link:g} GB/s one way, {LATENCY * 1e6:g} us a hop"
        f"{crossing if pod.slices > 1 else ''}"
    )


def _of_gpus(nodes: Nodes) -> str:
    gpu = nodes.gpu
    return (
        f"a roofline, with {PRODUCTS:.0%} of the published {gpu.peak / 1e12:,.0f} TFLOP/s of products, {MEMORY:.0%} of "
        f"{gpu.bandwidth:,.0f} GB/s of memory, {LINKS:.0%} of {gpu.nvlink:g} GB/s of NVLink and, to other nodes, of "
        f"{gpu.network:g} GB/s (assumed); attention at the rate of a prototype of its kernels, measured on an H100; of "
        f"the memory the {memory_fraction():.0%} that jax takes by {FRACTION}"
    )
