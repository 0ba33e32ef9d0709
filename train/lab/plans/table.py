"""``python -m train.lab.plans.table``: plans `configs/pods` and published runs of others, and writes the page.

A plan takes minutes, so results are kept in a file, one per line, and only missing ones are planned. Give names to plan
these again. ``--page`` plans nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from train.config import Config, load
from train.lab.plans.published import PUBLISHED, Published
from train.plan.plan import Plan, make_plan, mesh_text
from train.plan.pods import DCN_LATENCY, GIB, KNOWN, LATENCY, Pod, pod_of
from train.runtime.lines import in_a_line
from train.runtime.machine import versions
from train.runtime.paths import ROOT, write_file

RESULTS_FILE = ROOT / "configs" / "pods" / "plans.jsonl"
PAGE = ROOT / "docs" / "plans.md"

PODS = ("v5e:16x16", "v5p:8x8x8", "v6e:16x16", "7x:4x4x8")
SIZES, LENGTHS = ("1b", "8b", "70b"), ("8k", "128k", "1m")

_FULL = "model.remat=full"

OVERRIDES = {
    ("70b", "8k", "v5e:16x16"): ("train.mesh.context=4", "train.context.strategy=ring", "train.accumulate=8", _FULL),
    ("70b", "128k", "v5e:16x16"): ("train.accumulate=4", "train.mesh.context=32", _FULL),
    ("70b", "1m", "v5e:16x16"): ("train.mesh.context=256", "train.accumulate=4", "train.optimizer=adafactor", _FULL),
    ("70b", "8k", "v6e:16x16"): ("train.accumulate=2", _FULL),
    ("70b", "128k", "v6e:16x16"): ("train.accumulate=2", _FULL),
    ("70b", "1m", "v6e:16x16"): ("train.mesh.context=256", "train.accumulate=4", _FULL),
}
"""Overrides for pods that need another mesh or less memory than the config file."""


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
        yield Planned(run.name, run.topology, run.config, run.slices, _settings(run), run)
    for size, length, topology in itertools.product(SIZES, LENGTHS, PODS):
        yield _ours(size, length, topology)


def _settings(run: Published) -> str:
    """The settings of a published run; if they change, it is planned again."""
    parts = f" in {run.accumulate} parts" if run.accumulate > 1 else ""
    return f"{run.rows} rows of {run.length}{parts}, {run.strategy}, {run.remat} {run.flags}".strip()


def _ours(size: str, length: str, topology: str) -> Planned:
    path, pod = f"configs/pods/llama-{size}-{length}.yaml", pod_of(topology)
    # Four million tokens at once are too many for half the devices that the files are made for.
    halved = () if pod.devices >= 512 else ("train.accumulate=2",)
    # Chips with memory to spare need to recompute less.
    less_remat = ("model.remat=dots",) if size == "8b" and pod.hbm_bytes > 64 * GIB else ()
    overrides = OVERRIDES.get((size, length, topology), (*halved, *less_remat))
    command = " ".join(("python -m train plan", path, "--topology", topology, *overrides))
    return Planned(f"llama-{size}-{length}", topology, load(ROOT / path, overrides), command=command)


def measure(entry: Planned) -> dict[str, Any]:
    """The numbers of a plan, or why there is none."""
    try:
        return {"key": entry.key, "command": entry.command, **numbers(_plan(entry))}
    except ValueError as error:
        return {"key": entry.key, "command": entry.command, "problem": in_a_line(error, 300)}


def _plan(entry: Planned) -> Plan:
    return make_plan(entry.config, entry.pod, flags=entry.run.flags if entry.run else None)


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
    lines = RESULTS_FILE.read_text(encoding="utf-8").splitlines() if RESULTS_FILE.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def result(results: dict[str, dict[str, Any]], entry: Planned) -> dict[str, Any] | None:
    """The result for an entry; None if there is none, or if it was made with another command."""
    found = results.get(entry.key)
    return found if found and found["command"] == entry.command else None


def write(results: dict[str, dict[str, Any]]) -> None:
    """Writes the results file and the page."""
    write_file(RESULTS_FILE, "".join(json.dumps(found) + "\n" for found in results.values()))
    write_file(PAGE, page(results))


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page, from the template in this folder."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True)
    ours, theirs = ([entry for entry in entries() if (entry.run is None) == is_ours] for is_ours in (True, False))
    return environment.get_template("plans.md.jinja").render(
        each=_each,
        latency=LATENCY,
        dcn_latency=DCN_LATENCY,
        published=[_compared(entry, result(results, entry)) for entry in theirs],
        pods=[_planned(entry, result(results, entry)) for entry in ours],
        commands=[entry.command for entry in ours],
    )


def _each(name: str) -> str:
    """A number of the network, for each generation, as text."""
    return ", ".join(f"{getattr(chip.links, name):g} ({generation})" for generation, chip in KNOWN.items())


def _compared(entry: Planned, found: dict[str, Any] | None) -> str:
    published = (f"{entry.run.teraflops:.0f}", entry.run.count, f"{entry.run.comparable:.0f}")
    cells = [entry.name, entry.pod.name]
    if found is None or "problem" in found:
        why = "not planned yet" if found is None else found["problem"]
        return _row(*cells, "", *published, why, *[""] * 3, entry.run.guessed)
    predicted = found["teraflops"]
    executed = predicted * (1 + {"full": 1.0, "attention": 1 - found["attention"]}.get(found["remat"], 0.0) / 3)
    error = f"{predicted / entry.run.comparable - 1:+.0%}"
    shown = (f"{predicted:.0f}", error, f"{executed:.0f}")
    return _row(*cells, f"{found['mesh']}, {found['remat']}", *published, *shown, _share(found), entry.run.guessed)


def _planned(entry: Planned, found: dict[str, Any] | None) -> str:
    if found is None or "problem" in found:
        return _row(entry.name, entry.pod.name, "", "not planned yet" if found is None else found["problem"], *[""] * 4)
    gib = found["gib"]
    rest = gib["total"] - gib["parameters"] - gib["optimizer"]
    memory = f"{gib['parameters']:.1f}, {gib['optimizer']:.1f}, {rest:.1f}"
    speed = (_share(found), f"{found['seconds']:.3g}", f"{found['tokens']:,.0f}", f"{found['mfu']:.1%}")
    earlier = "" if "flags" in found else " *"
    return _row(entry.name + earlier, entry.pod.name, f"{found['mesh']}, {found['remat']}", memory, *speed)


def _share(found: dict[str, Any]) -> str:
    """The share of HBM used, as text."""
    return f"{found['hbm']:.0%}" + (": does not fit" if found["hbm"] > 1 else "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Plans what is missing or named; returns 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m train.lab.plans.table", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="as in 'llama-8b-1m on v5p:8x8x8', or a part of it")
    parser.add_argument("--page", action="store_true", help="write the page from the results there are")
    options = parser.parse_args()
    results, everything = read(), list(entries())
    chosen = [entry for entry in everything if any(name in entry.key for name in options.names)]
    if options.names and not chosen:
        print(
            f"error: no plan is named {options.names}; there are {[entry.key for entry in everything]}", file=sys.stderr
        )
        return 2
    if not options.names and not options.page:
        chosen = [entry for entry in everything if result(results, entry) is None]
    for entry in chosen:
        found = measure(entry)
        results = {**read(), entry.key: found}
        write(results)
        print(entry.key, found.get("problem") or f"{found['seconds']:.4g} s, MFU {found['mfu']:.1%}", flush=True)
    write(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
