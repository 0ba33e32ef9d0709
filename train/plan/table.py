"""``python -m train.plan.table``: plans what is in `configs/pods` and what others have published, and writes the page.

A plan takes minutes, so results are kept in a file, one a line, and only what is missing there is planned; give names
to plan these anew. ``--page`` plans nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from train.config import Config, load
from train.machine import versions
from train.paths import write_file
from train.plan.plan import Plan, make_plan
from train.plan.pods import DCN_LATENCY, GIB, LATENCY, NETWORKS, Pod, pod
from train.plan.published import PUBLISHED
from train.plan.report import mesh_text
from train.schedule.compiling import ROOT

FILE = ROOT / "configs" / "pods" / "plans.jsonl"
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
"""Where a pod needs another mesh or less memory than the file asks for."""


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    name: str
    topology: str
    config: Config
    slices: int = 1
    command: str = ""
    teraflops: float | None = None  # published
    guessed: str = ""

    @property
    def pod(self) -> Pod:
        """What it runs on."""
        return pod(self.topology, self.slices)

    @property
    def key(self) -> str:
        """By which its result is found."""
        return f"{self.name} on {self.pod.name}"


def entries() -> Iterator[Entry]:
    """Published runs first, then ours."""
    for run in PUBLISHED:
        yield Entry(run.name, run.topology, run.config, run.slices, teraflops=run.teraflops, guessed=run.guessed)
    for size, length, topology in itertools.product(SIZES, LENGTHS, PODS):
        yield _ours(size, length, topology)


def _ours(size: str, length: str, topology: str) -> Entry:
    path, on = f"configs/pods/llama-{size}-{length}.yaml", pod(topology)
    # Four million tokens are too many at once for half the devices that the files are made for.
    halved = () if on.devices >= 512 else ("train.accumulate=2",)
    # Chips with memory to spare need to recompute less.
    kept = ("model.remat=dots",) if size == "8b" and on.hbm_bytes > 64 * GIB else ()
    overrides = OVERRIDES.get((size, length, topology), (*halved, *kept))
    command = " ".join(("python -m train plan", path, "--topology", topology, *overrides))
    return Entry(f"llama-{size}-{length}", topology, load(ROOT / path, overrides), command=command)


def measure(entry: Entry) -> dict[str, Any]:
    """The numbers of a plan, or why there is none."""
    try:
        return {"key": entry.key, "command": entry.command, **numbers(make_plan(entry.config, entry.pod))}
    except ValueError as error:
        return {"key": entry.key, "command": entry.command, "problem": " ".join(str(error).split())[:300]}


def numbers(plan: Plan) -> dict[str, Any]:
    """What the page tells of a plan."""
    memory, tally = plan.memory, plan.tally
    return {
        "mesh": mesh_text(plan.axes),
        "remat": plan.config.model.remat,
        "hbm": memory.total / plan.pod.hbm_bytes,
        "gib": {name: round(getattr(memory, name) / 2**30, 3) for name in ("parameters", "optimizer", "temp", "total")},
        "flops": plan.flops.total,
        "attention": plan.flops.attention / plan.flops.total,
        "seconds": plan.seconds,
        "compute": tally.compute,
        "kernels": tally.kernels,
        "exposed": tally.exposed,
        "gigabytes": {axes: round(size / 1e9, 2) for axes, size in _by_axes(plan).items()},
        "tokens": plan.tokens_per_second,
        "mfu": plan.mfu,
        "maxtext_mfu": plan.maxtext_mfu,
        "teraflops": plan.maxtext_mfu * plan.pod.peak_flops / 1e12,
        "unknown": dict(tally.unknown),
        "versions": versions(("jax", "libtpu")),
    }


def _by_axes(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for (axes, _), size in plan.tally.moved.items():
        if size:
            found[axes] = found.get(axes, 0.0) + size
    return found


def read() -> dict[str, dict[str, Any]]:
    """Results by key; the last one of a key counts."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def result(results: dict[str, dict[str, Any]], entry: Entry) -> dict[str, Any] | None:
    """What was planned for an entry; None if nothing was, or another command was planned."""
    found = results.get(entry.key)
    return found if found and found["command"] == entry.command else None


def write(results: dict[str, dict[str, Any]]) -> None:
    """Keeps the results and writes the page."""
    write_file(FILE, "".join(json.dumps(found) + "\n" for found in results.values()))
    write_file(PAGE, page(results))


_HEAD = """\
# Plans for pods

<!-- Written by python -m train.plan.table; do not edit. -->

`python -m train plan CONFIG --topology v5p:8x8x8` compiles the exact train step of a config for a pod with the TPU
compiler, on any machine, and tells the HBM of a chip by kind, the model FLOPs, the bytes of collectives by mesh axis,
and a predicted step. `--slices 4` plans for four of them, `--sweep` compiles several meshes, remat policies and context
strategies and ranks them.

Memory is the compiler's own plan and final; **everything about speed is predicted, not measured on a TPU**:

* fusions and copies by the cycles that the compiler expects of them, at the chip's clock, times the trips of loops: it
  expects little of memory (the sum of two float32 arrays of 268 MB at 470 GB/s on v5e, 1,233 on v5p, 724 on v6e, of
  819, 2,765 and 1,640 that the chips have), so what is bound by memory is rather predicted too slow;
* our attention kernels by the compiler's schedule of their tiles and the tiles that the mask needs, every row being one
  document;
* collectives by the bytes that a device sends over the links of its torus that the mesh axis lies along, one way
  {links} GB/s,
  and {latency:g} us a hop; they overlap only what the compiler scheduled between their start and end;
* what goes to other slices by what the compiler lets hosts send, {dcn} GB/s of a chip,
  as Google Cloud's pages of the chips have it, and {dcn_latency:g} us an exchange, which is assumed;
* flags of the compiler in `LIBTPU_INIT_ARGS` count: give the run those that it was planned with; here there are none;
* no input, host, stragglers or checkpoints. MFU counts only pairs that the mask allows, and no recomputation.
"""


_AGAINST = """\
## Against published runs

Others' numbers, by MaxText's count of FLOPs (half of all pairs), and what is predicted for the same shape on the same
chips with this trainer's step. Nothing is fitted. What was not published is guessed; what is recomputed is then the
least that fits by a rough count.

| run | pod | mesh, recomputed | TFLOP/s a chip, published | predicted | error | with recomputing | HBM | guessed |
|---|---|---|---|---|---|---|---|---|"""


_WHY = """
Why they differ:

* A step that recomputes layers, but for attention or whole, does up to a third more work than is counted. Where that
  is a guess it explains what is predicted too low: with it ("with recomputing") these rows are above what was
  published, but for two on v6e (8B 2% and 70B at 8k 8% below). The +20% of Ulysses at 64k is the same guess the other
  way: were layers recomputed whole there, three quarters of that would be left, less than was published.
* MaxText-32B's config is public and recomputes all, so its -21% has another reason: the compiler expects 14.1 s of
  fusions whose products take 10.6 s at the chip's peak, where the published run, recomputing counted, kept 89% of the
  peak. The flags of its recipe change nothing of what the compiler expects (tried with two layers). Products are thus
  predicted too slow on v5e.
* From one slice to four MaxText-32B lost 5%; predicted are 3%, a quarter of it waiting.
* The three rows above 100% ran in the memory there is. This step holds more there than theirs.
* What is predicted too high (128k on 7x) knows no input, no stragglers, and no collective that takes longer than its
  bytes do.
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    head = _HEAD.format(links=_each("link"), latency=LATENCY * 1e6, dcn=_each("dcn"), dcn_latency=DCN_LATENCY * 1e6)
    return "\n".join([head, _calibration(results), _pods(results)])


def _each(name: str) -> str:
    """A number of every generation's network."""
    return ", ".join(f"{getattr(network, name):g} ({chip})" for chip, network in NETWORKS.items())


def _calibration(results: dict[str, dict[str, Any]]) -> str:
    lines = [_compared(entry, result(results, entry)) for entry in entries() if entry.teraflops]
    return "\n".join([_AGAINST, *lines, _WHY])


def _compared(entry: Entry, found: dict[str, Any] | None) -> str:
    cells = [entry.name, entry.pod.name]
    if found is None or "problem" in found:
        why = "not planned yet" if found is None else found["problem"]
        return _row(*cells, "", f"{entry.teraflops:.0f}", why, "", "", "", entry.guessed)
    predicted = found["teraflops"]
    done = predicted * (1 + {"full": 1.0, "attention": 1 - found["attention"]}.get(found["remat"], 0.0) / 3)
    error = f"{predicted / entry.teraflops - 1:+.0%}"
    shown = (f"{entry.teraflops:.0f}", f"{predicted:.0f}", error, f"{done:.0f}", _share(found))
    return _row(*cells, f"{found['mesh']}, {found['remat']}", *shown, entry.guessed)


def _pods(results: dict[str, dict[str, Any]]) -> str:
    head = [
        "## Llama-shaped models",
        "",
        "The configs of `configs/pods`, 4,194,304 tokens a step. HBM is of a chip (of half a chip for 7x). Heads of",
        "64, those of the 1b models, are taken to cost as much as heads of 128.",
        "",
        "| config | pod | mesh | HBM GiB: parameters, optimizer, rest | share | step s | tokens/s/chip | MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = [entry for entry in entries() if entry.command]
    lines = [_planned(entry, result(results, entry)) for entry in ours]
    commands = [f"    {entry.command}" for entry in ours]
    return "\n".join(
        [
            *head,
            *lines,
            "",
            "Each line by a command, and all of them by `python -m train.plan.table`:",
            "",
            *commands,
            "",
        ]
    )


def _planned(entry: Entry, found: dict[str, Any] | None) -> str:
    if found is None or "problem" in found:
        return _row(entry.name, entry.pod.name, "", "not planned yet" if found is None else found["problem"], *[""] * 4)
    gib = found["gib"]
    rest = gib["total"] - gib["parameters"] - gib["optimizer"]
    memory = f"{gib['parameters']:.1f}, {gib['optimizer']:.1f}, {rest:.1f}"
    speed = (_share(found), f"{found['seconds']:.3g}", f"{found['tokens']:,.0f}", f"{found['mfu']:.1%}")
    return _row(entry.name, entry.pod.name, f"{found['mesh']}, {found['remat']}", memory, *speed)


def _share(found: dict[str, Any]) -> str:
    """Of the HBM."""
    return f"{found['hbm']:.0%}" + (": does not fit" if found["hbm"] > 1 else "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Plans what is missing or named; 2 for a name that is none."""
    parser = argparse.ArgumentParser(prog="python -m train.plan.table", description=__doc__.splitlines()[0])
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
