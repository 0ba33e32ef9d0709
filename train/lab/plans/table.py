"""``python -m train.lab.plans.table``: plans `configs/pods` and published runs of others, and writes the page.

A plan takes minutes, so results are kept in a file, one per line, and only missing ones are planned; delete a line to
plan it again. ``--page`` plans nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from train.config import Config, load
from train.lab.plans.published import PUBLISHED, RUNS, Published
from train.plan.plan import Plan, make_plan, mesh_text
from train.plan.pods import DCN_LATENCY, KNOWN, LATENCY, Pod, pod_of
from train.runtime.lines import in_a_line
from train.runtime.machine import versions
from train.runtime.paths import ROOT, write_file
from train.runtime.rows import read_rows, write_rows

RESULTS_FILE = ROOT / "configs" / "pods" / "plans.jsonl"
PAGE = ROOT / "docs" / "plans.md"


@dataclass(frozen=True)
class Planned:
    """One line of the table."""

    name: str
    topology: str
    config: Config
    slices: int = 1
    command: str = ""  # for our runs the command; for published runs their settings
    run: Published | None = None

    @property
    def pod(self) -> Pod:
        """The pod that it runs on."""
        return pod_of(self.topology, self.slices)

    @property
    def key(self) -> str:
        """The key of its result."""
        return f"{self.name} on {self.pod.name}"


def entries() -> Iterator[Planned]:
    """Published runs first, then ours."""
    for run in PUBLISHED:
        # If the settings of a published run change, it is planned again.
        parts = f" in {run.accumulate} parts" if run.accumulate > 1 else ""
        settings = f"{run.rows} rows of {run.length}{parts}, {run.strategy}, {run.remat} {run.flags}".strip()
        yield Planned(run.name, run.topology, run.config, run.slices, settings, run)
    for name, topology, *overrides in RUNS["ours"]:
        file = f"configs/pods/{name}.yaml"
        command = " ".join(("python -m train plan", file, "--topology", topology, *overrides))
        yield Planned(name, topology, load(ROOT / file, overrides), command=command)


def measure(entry: Planned) -> dict[str, Any]:
    """The numbers of a plan, or why there is none."""
    try:
        found = numbers(make_plan(entry.config, entry.pod, flags=entry.run.flags if entry.run else None))
    except ValueError as error:
        found = {"problem": in_a_line(error, 300)}
    return {"key": entry.key, "command": entry.command, **found}


def numbers(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan for the page."""
    memory = plan.memory
    return {
        "mesh": mesh_text(plan.axes),
        "remat": plan.setup.config.model.remat,
        "hbm": memory.total / plan.pod.hbm_bytes,
        "gib": {name: round(getattr(memory, name) / 2**30, 3) for name in ("parameters", "optimizer", "total")},
        "attention": plan.flops.attention / plan.flops.total,
        "seconds": plan.seconds,
        "tokens": plan.tokens_per_second,
        "mfu": plan.mfu,
        "teraflops": plan.maxtext_mfu * plan.pod.peak_flops / 1e12,
        "unknown": dict(plan.tally.unknown),
        "flags": plan.flags,
        "versions": versions(("jax", "libtpu")),
    }


def read() -> dict[str, dict[str, Any]]:
    """Results by key; for equal keys the last one counts."""
    return {found["key"]: found for found in read_rows(RESULTS_FILE)}


def result(results: dict[str, dict[str, Any]], entry: Planned) -> dict[str, Any] | None:
    """The result for an entry; None if there is none, or if it was made with another command."""
    found = results.get(entry.key)
    return found if found and found["command"] == entry.command else None


def write(results: dict[str, dict[str, Any]]) -> None:
    """Writes the results file and the page."""
    write_rows(RESULTS_FILE, results.values())
    write_file(PAGE, page(results))


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page, from the template in this folder."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True)
    everything = [(entry, result(results, entry)) for entry in entries()]
    return environment.get_template("plans.md.jinja").render(
        known=KNOWN,
        latency=LATENCY,
        dcn_latency=DCN_LATENCY,
        published=[each for each in everything if each[0].run],
        pods=[each for each in everything if not each[0].run],
    )


def main() -> None:
    """Plans what is missing, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m train.lab.plans.table", description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page from the results there are")
    results = read()
    missing = [entry for entry in entries() if result(results, entry) is None]
    for entry in [] if parser.parse_args().page else missing:
        found = measure(entry)
        results = {**read(), entry.key: found}
        write(results)
        print(entry.key, found.get("problem") or f"{found['seconds']:.4g} s, MFU {found['mfu']:.1%}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
