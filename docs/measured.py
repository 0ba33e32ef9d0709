"""What a comparison of small decoders found about a method, from ``zoo.jsonl`` beside this file."""

import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from methods import Method, page_of

_HERE = Path(__file__).parent
_ENTRIES = yaml.safe_load((_HERE.parent / "configs" / "zoo.yaml").read_text(encoding="utf-8"))["compare"]["schemes"]
LENGTHS = (128, 512, 2048)
CONTROL = "rope"


def rows(method: Method) -> list[tuple[str, ...]]:
    """The table on a method's page: a row for every entry of the comparison that shows it, and one for plain RoPE.

    A row has the label, what the entry trains, the best rates of its trials, and perplexities. The table is empty for a
    method that was not measured.
    """
    labels = {_label(entry): entry for entry in map(_as_mapping, _ENTRIES) if method in _shown(entry)}
    found = [label for label in labels if label in perplexities()]
    if not found:
        return []
    listed = dict.fromkeys([*found, CONTROL])
    return [
        (label, _trains(labels.get(label, {})), rates().get(label, ""), *map(_shown_number, perplexities()[label]))
        for label in listed
    ]


def ends(method: Method) -> tuple[str, str]:
    """Perplexities at the first and the last length, of the first entry that shows a method; empty if none does."""
    found = [row for row in rows(method) if row[0] != CONTROL or method.name == CONTROL]
    return (found[0][-len(LENGTHS)], found[0][-1]) if found else ("", "")


@functools.cache
def perplexities() -> dict[str, list[float]]:
    """The mean perplexity over the seeds at each of `LENGTHS`, by label."""
    losses = defaultdict(list)
    for row in _results():
        if not row.get("trial"):
            losses[row["label"], row["length"]].append(row["window_nll"])
    labels = dict.fromkeys(label for label, _ in losses)
    return {label: [float(np.mean(np.exp(losses[label, length]))) for length in LENGTHS] for label in labels}


@functools.cache
def rates() -> dict[str, str]:
    """The learning rate of the best trial at the training length, by label; with its factor if several were tried."""
    trials = defaultdict(list)
    for row in _results():
        if row.get("trial") and row["length"] == LENGTHS[0]:
            trials[row["label"]].append((row["window_nll"], row["learning_rate"], row["position_factor"]))
    return {label: _best(found) for label, found in trials.items()}


def _best(trials: Sequence[tuple[float, float, float]]) -> str:
    _, rate, factor = min(trials)
    shown = f"{1000 * rate:g}e-3"
    return f"{shown}; positions x {factor:g}" if len({each[2] for each in trials}) > 1 else shown


@functools.cache
def _results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_HERE / "zoo.jsonl").read_text(encoding="utf-8").splitlines()]


def _as_mapping(entry: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": entry} if isinstance(entry, str) else entry


def _label(entry: Mapping[str, Any]) -> str:
    return entry.get("label", entry["name"])


def _shown(entry: Mapping[str, Any]) -> list[Method]:
    """The pages that an entry belongs to: those of the methods it is extended by, else that of its preset."""
    extensions = {slot: spec for slot, spec in entry.get("extend", {}).items() if isinstance(spec, Mapping)}
    if extensions:
        return [page_of(slot, spec["name"]) for slot, spec in extensions.items()]
    return [Method(f"methods/{entry['name']}", entry["name"])] if "extend" not in entry else []


def _trains(entry: Mapping[str, Any]) -> str:
    return f"nothing, on trained {entry['name']}" if "extend" in entry else "from the start"


def _shown_number(value: float) -> str:
    return f"{value:.2f}"
