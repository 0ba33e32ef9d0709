"""The rows of an evaluation, and means over seeds.

A report is made from rows of plain numbers, as in ``results.jsonl`` and ``evaluation.jsonl``. All have the `label` of
the scheme; `base`, the label of the trained scheme if this one extends it without retraining; the `seed`; `length`, the
evaluation length in tokens; `train_length`; `error`, the reason if there are no numbers; and `family`, see
`train.report.families`, which older rows lack. Trainings that end at a loss have more columns, see
`train.report.reached`.

A trial that diverged has one row, without lengths.

Rows of perplexity, one for each (scheme, seed, length):

    window_perplexity   over whole windows;  window_tokens: how many tokens were scored;  window_nll: nats per token
    last_perplexity     of the last `last_length` tokens, with all context before them;  last_tokens
    sliding_perplexity  of the tokens that a sliding window uncovers, if asked for;  sliding_tokens
    position_ends, position_nll   the tokens of `window` by their position, see `train.evaluate.perplexity`
    tokens_per_second   evaluation, tokens computed
    train_tokens_per_second, peak_memory_bytes   of the training process; None for one that was not trained
    training            the held-out loss while it trained: lists of `tokens` seen and `held_out_loss`; or None

Rows of tasks, one for each (scheme, seed, task, length, depth):

    task, depth         the depth is None for a task that has none
    accuracy, chance    the share of right answers, and that of a guess or None;  cases
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.config.settings.evaluate import SECTIONS

Row = Mapping[str, Any]

MEASURES = ("window", "last", "sliding")
FEW, FEW_TOKENS = 32, 256
"""For a curve of tokens at one position in windows: the least number of windows, and of tokens for each point."""
_CLEAR = 0.05  # the least advantage in accuracy over guessing that is worth a figure


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds, and the sample standard deviation when there are several."""

    mean: float
    spread: float | None = None


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and spread over seeds; None if any seed has no number, since a mean over the others would be too good."""
    values = list(values)
    if not values or any(value is None for value in values):
        return None
    return Estimate(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def perplexity_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of perplexity."""
    return [row for row in rows if "task" not in row]


def training_length_loss(rows: Sequence[Row]) -> float:
    """Nats per token of one training at its length, or at the next longer one measured; infinite if it diverged."""
    measured = [row for row in perplexity_rows(rows) if "length" in row]
    if not measured:
        return math.inf
    reached = [row for row in measured if row["length"] >= row["train_length"]]
    first = min(reached, key=lambda row: row["length"], default=measured[-1])
    return math.inf if first["error"] else first["window_nll"]


def tasks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every task, in the order of the documentation.

    Of trainings that end at a loss, only those that reached it: the others' answers say nothing about other lengths.
    """
    counted = [row for row in rows if not (row.get("stop_loss") and row["updates_to_loss"] is None)]
    found = {name: [row for row in counted if row.get("task") == name] for name in SECTIONS}
    return {name: mine for name, mine in found.items() if mine}


def measures(rows: Sequence[Row]) -> list[str]:
    """The measures of perplexity: over windows, of the last tokens, and, if present, in sliding windows."""
    return [name for name in MEASURES if name != "sliding" or any(row.get("sliding_tokens") for row in rows)]


def last_length(rows: Sequence[Row]) -> int:
    """The number of last tokens, as `train.evaluate.saved.last_length` chose it."""
    return next((row["last_length"] for row in rows if row.get("last_length")), rows[0]["train_length"])


def train_length(rows: Sequence[Row]) -> int | None:
    """The training length, if all rows with numbers have the same."""
    found = {row["train_length"] for row in rows if not row["error"]} or {row["train_length"] for row in rows}
    return found.pop() if len(found) == 1 else None


def windows(row: Row) -> int:
    """The number of windows that a row of perplexity was computed from."""
    return (row.get("window_tokens") or 0) // row["length"]


def endings(rows: Sequence[Row]) -> int:
    """The maximal number of windows that the numbers of the last tokens were computed from."""
    return max(row.get("last_tokens") or 0 for row in rows) // last_length(rows)


def grouped(rows: Sequence[Row], *columns: str) -> dict[tuple, list[Row]]:
    """The rows by their values in these columns, in the order of the rows; a column that a row lacks counts as None."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return found


def each_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows, grouped by seed."""
    return list(grouped(rows, "seed").values())


def labels(rows: Sequence[Row]) -> list[str]:
    """The schemes, in the order of the rows."""
    return list(dict.fromkeys(row["label"] for row in rows))


def lengths(rows: Sequence[Row]) -> list[int]:
    """The evaluated lengths, in ascending order."""
    return sorted({row["length"] for row in rows})


def curve(rows: Sequence[Row], label: str, measure: str) -> dict[int, Estimate]:
    """Perplexity at each length for one scheme; lengths without a number are left out. `measure`: see `MEASURES`."""
    mine = [row for row in perplexity_rows(rows) if row["label"] == label]
    found = {n: estimate(row.get(f"{measure}_perplexity") for row in mine if row["length"] == n) for n in lengths(mine)}
    return {length: value for length, value in found.items() if value is not None}


def positions(rows: Sequence[Row], label: str) -> tuple[tuple[int, ...], list[Estimate | None]]:
    """NLL by position for one scheme: the ends of its parts, and the NLL of each part.

    At the longest length with numbers and at least `FEW` windows. A part of fewer than `FEW_TOKENS` tokens has no
    number. Empty if no part has a number.
    """
    mine = [
        row
        for row in perplexity_rows(rows)
        if row["label"] == label and row.get("position_ends") and windows(row) >= FEW
    ]
    longest = [row for row in mine if row["length"] == max(lengths(mine))]
    if not longest:
        return (), []
    ends, parts = longest[0]["position_ends"], zip(*(row["position_nll"] for row in longest), strict=True)
    tokens = [windows(longest[0]) * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    found = [estimate(part) if n >= FEW_TOKENS else None for n, part in zip(tokens, parts, strict=True)]
    return (tuple(ends), found) if any(found) else ((), [])


def trainings(rows: Sequence[Row]) -> dict[str, dict[int, Estimate]]:
    """The held-out loss of every trained scheme against the tokens seen, if it was measured."""
    found = {label: _training([row for row in rows if row["label"] == label]) for label in labels(rows)}
    return {label: curve for label, curve in found.items() if curve}


def _training(rows: Sequence[Row]) -> dict[int, Estimate]:
    by_seed = {row["seed"]: row["training"] for row in rows if row.get("training")}
    curves = [dict(zip(each["tokens"], each["held_out_loss"], strict=True)) for each in by_seed.values()]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return {tokens: estimate(curve[tokens] for curve in curves) for tokens in shared}


def accuracies(rows: Sequence[Row], label: str) -> dict[int, Estimate]:
    """Accuracy on one task at each length for one scheme: the mean over depths of each seed, then over seeds."""
    mine = [row for row in rows if row["label"] == label]
    found = {n: estimate(_over_depths([row for row in mine if row["length"] == n])) for n in lengths(mine)}
    return {length: value for length, value in found.items() if value is not None}


def _over_depths(rows: Sequence[Row]) -> list[float | None]:
    """The mean of the rows of every seed; None if one has no number."""
    by_seed = [[row["accuracy"] for row in mine] for mine in each_seed(rows)]
    return [None if None in values else statistics.fmean(values) for values in by_seed]


def is_above_chance(rows: Sequence[Row]) -> bool:
    """Whether some scheme at some length has clearly more right answers on a task than guessing: by a twentieth of all,
    and by three standard errors for that number of cases.
    """
    points = grouped([row for row in rows if row["accuracy"] is not None], "label", "length")
    return any(map(_beats_guess, points.values()))


def _beats_guess(rows: Sequence[Row]) -> bool:
    cases, guess = sum(row["cases"] for row in rows), rows[0]["chance"] or 0.0
    share = max(guess, 1 / cases)
    right = sum(row["accuracy"] * row["cases"] for row in rows) / cases
    return right > guess + max(_CLEAR, 3 * math.sqrt(share * (1 - share) / cases))


def depths(rows: Sequence[Row]) -> list[float]:
    """The depths of a task, in ascending order; empty if it has no depth."""
    return sorted({row["depth"] for row in rows if row["depth"] is not None})


def at_depth(rows: Sequence[Row], label: str) -> dict[tuple[float, int], float]:
    """Accuracy on one task at each (depth, length) for one scheme, the mean over seeds; missing ones are left out."""
    cells = grouped([row for row in rows if row["label"] == label], "depth", "length")
    found = {cell: estimate(row["accuracy"] for row in mine) for cell, mine in cells.items()}
    return {cell: value.mean for cell, value in found.items() if value is not None}


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for each scheme, or scheme and task, that lacks a number at some length, with the first reason."""
    failed = grouped([row for row in rows if row["error"]], "label", "task")
    return [
        f"{', '.join(filter(None, names))} at {_joined(row['length'] for row in mine)}: {mine[0]['error']}"
        for names, mine in failed.items()
    ]


def _joined(lengths: Iterable[int]) -> str:
    return ", ".join(str(length) for length in sorted(set(lengths)))
