"""The rows of an evaluation, and numbers over seeds: means, intervals, differences.

A report is made from rows of plain numbers, as in ``results.jsonl`` and ``evaluation.jsonl``. All have the `label` of
the scheme; `base`, the label of the trained scheme if this one extends it without retraining; the `seed`; `length`, the
evaluation length in tokens; `train_length`; `error`, the reason if there are no numbers; and `family`, see `family`,
which older rows lack.

Rows of perplexity, one for each (scheme, seed, length); in a study of a released model one for each text, whose name is
`text`, and of the last tokens alone:

    window_perplexity   over whole windows;  window_tokens: how many tokens were scored;  window_nll: nats per token
    last_perplexity     of the last `last_length` tokens, with all context before them;  last_tokens
    sliding_perplexity  of the tokens that a sliding window uncovers, if asked for;  sliding_tokens
    key_perplexity      LongPPL, of `key_tokens` that need a long context, if asked for;  key_compared: of how many
    position_ends, position_nll   the tokens of `window` by their position, see `train.evaluate.perplexity`
    tokens_per_second   evaluation, tokens computed;  memory_bytes: of the program, in a study
    train_tokens_per_second, peak_memory_bytes   of the training process; None for one that was not trained
    training            the held-out loss while it trained: lists of `tokens` seen and `held_out_loss`; or None

Trainings that end at a loss (``train.stop_loss``) also have

    stop_loss           the loss in nats per token;  updates: how many updates were allowed
    updates_to_loss     after how many it was reached; None if it was not

Rows of tasks, one for each (scheme, seed, task, length, depth):

    task, depth         the depth is None for a task that has none
    accuracy, chance    the share of right answers, and that of a guess or None;  cases

Rows of the trials that chose learning rates have the columns of perplexity; `learning_rate` and `position_factor`, what
was tried; and `chosen`, whether the scheme's seeds were trained with it. A trial that diverged has one row, without
lengths.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from posjax import Layers, Scheme, coca
from train.config.settings.evaluate import RULER, SECTIONS

Row = Mapping[str, Any]

MEASURES = ("window", "last", "sliding", "key")
FEW, FEW_TOKENS = 32, 256
"""For a curve of tokens at one position in windows: the least number of windows, and of tokens for each point."""
_CLEAR = 0.05  # the least advantage in accuracy over guessing that is worth a figure


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds, and the sample standard deviation when there are several; the mean over texts alone."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def has_zero(self) -> bool:
        """Whether the difference is within the noise of the seeds."""
        return self.low <= 0 <= self.high


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and spread over seeds; None if any seed has no number, since a mean over the others would be too good."""
    values = list(values)
    if not values or None in values:
        return None
    return Estimate(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def estimates(values: Mapping[Any, Iterable[float | None]]) -> dict[Any, Estimate]:
    """The estimate for each key, in ascending order; keys without one are left out."""
    found = {key: estimate(values[key]) for key in sorted(values)}
    return {key: value for key, value in found.items() if value is not None}


def interval(values: Sequence[float]) -> Interval:
    """``mean ± t s / sqrt(n)`` of at least two values, with s the sample standard deviation and t the 97.5 % point of
    Student's t of n - 1 degrees of freedom.
    """
    from scipy.stats import t  # a slow import that only comparisons of several seeds need

    mean = statistics.fmean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


# --- rows -------------------------------------------------------------------------------------------------------------


def grouped(rows: Sequence[Row], *columns: str) -> dict[Any, list[Row]]:
    """The rows by their value in a column, or by the tuple of values in several, in the order of the rows."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(itemgetter(*columns)(row), []).append(row)
    return found


def of(rows: Sequence[Row], label: str) -> list[Row]:
    """The rows of one scheme."""
    return [row for row in rows if row["label"] == label]


def labels(rows: Sequence[Row]) -> list[str]:
    """The schemes, in the order of the rows."""
    return list(grouped(rows, "label"))


def lengths(rows: Sequence[Row]) -> list[int]:
    """The evaluated lengths, in ascending order."""
    return sorted({row["length"] for row in rows})


def depths(rows: Sequence[Row]) -> list[float]:
    """The depths of a task, in ascending order; empty if it has no depth."""
    return sorted({row["depth"] for row in rows if row["depth"] is not None})


def seeds(rows: Sequence[Row]) -> int:
    """The number of seeds."""
    return len({row["seed"] for row in rows})


def texts(rows: Sequence[Row]) -> list[str]:
    """The texts of a study that were read, in order; empty for rows that are over all of the text."""
    return list(dict.fromkeys(row["text"] for row in rows if row.get("text") and not row["error"]))


def of_shared_texts(rows: Sequence[Row]) -> list[Row]:
    """The rows of a study without texts that some scheme has not read, so that all means are over the same ones.

    At each length the schemes with numbers count. A length at which none of the texts shared so far is read by all of
    them is left out, as the longest one of a study that goes on.
    """
    shared, kept = set(texts(rows)), []
    for length, mine in sorted(
        grouped([row for row in rows if row.get("text") and not row["error"]], "length").items()
    ):
        read = [{row["text"] for row in found} for found in grouped(mine, "label").values()]
        if both := shared.intersection(*read):
            shared, kept = both, [*kept, length]
    return [
        row for row in rows if not row.get("text") or row["error"] or (row["text"] in shared and row["length"] in kept)
    ]


def baseline(rows: Sequence[Row]) -> str:
    """The scheme that others are compared with: the first one that was trained."""
    return next((row["label"] for row in rows if row["base"] is None), rows[0]["label"])


def perplexity_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of perplexity."""
    return [row for row in rows if "task" not in row]


def tasks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every task, in the order of the documentation.

    Of trainings that end at a loss, only those that reached it: the others' answers say nothing about other lengths.
    """
    counted = [row for row in rows if not (row.get("stop_loss") and row["updates_to_loss"] is None)]
    found = {name: [row for row in counted if row.get("task") == name] for name in (*SECTIONS, *RULER)}
    return {name: mine for name, mine in found.items() if mine}


def measures(rows: Sequence[Row]) -> list[str]:
    """The measures of perplexity: over windows, of the last tokens, and, if present, in sliding windows, and of tokens
    that need a long context."""
    if texts(rows):
        return ["last"]
    asked = ("sliding", "key")
    return [name for name in MEASURES if name not in asked or any(row.get(f"{name}_tokens") for row in rows)]


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """The measures with enough windows for a curve."""
    return [name for name in measures(rows) if name != "last" or texts(rows) or endings(rows) >= FEW]


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


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for each scheme, or scheme and task, that lacks a number at some length, with the first reason."""
    failed = grouped([{"task": None, **row} for row in rows if row["error"]], "label", "task")
    return [
        f"{', '.join(filter(None, names))} at {', '.join(map(str, lengths(mine)))}: {mine[0]['error']}"
        for names, mine in failed.items()
    ]


# --- perplexity -------------------------------------------------------------------------------------------------------


def curve(rows: Sequence[Row], label: str, measure: str = "window") -> dict[int, Estimate]:
    """Perplexity at each length for one scheme; lengths without a number are left out. `measure`: see `MEASURES`.

    Over texts it is exp of the mean loss, so that no hard text decides alone.
    """
    mine = grouped(of(perplexity_rows(rows), label), "length")
    if texts(rows):
        losses = estimates({n: [row.get(f"{measure}_nll") for row in found] for n, found in mine.items()})
        return {n: Estimate(math.exp(loss.mean)) for n, loss in losses.items()}
    return estimates({n: [row.get(f"{measure}_perplexity") for row in found] for n, found in mine.items()})


def training_length_loss(rows: Sequence[Row]) -> float:
    """Nats per token of one training at its length, or at the next longer one measured; infinite if it diverged."""
    measured = [row for row in perplexity_rows(rows) if "length" in row]
    if not measured:
        return math.inf
    reached = [row for row in measured if row["length"] >= row["train_length"]]
    first = min(reached, key=itemgetter("length"), default=measured[-1])
    return math.inf if first["error"] else first["window_nll"]


def difference(rows: Sequence[Row], label: str, other: str, length: int) -> Interval | None:
    """The mean NLL of one scheme less that of another, in nats per token by the first measure, paired by seed or text.

    None if fewer than two have both, or if any of either has no number, since a mean over the others would be too good.
    """
    at_length = [row for row in perplexity_rows(rows) if row["length"] == length]
    pair, column = ("text" if texts(rows) else "seed"), f"{measures(rows)[0]}_nll"
    mine, theirs = ({row[pair]: row.get(column) for row in of(at_length, name)} for name in (label, other))
    shared = sorted(mine.keys() & theirs.keys())
    if len(shared) < 2 or None in (*mine.values(), *theirs.values()):
        return None
    return interval([mine[each] - theirs[each] for each in shared])


def positions(rows: Sequence[Row], label: str) -> tuple[tuple[int, ...], list[Estimate | None]]:
    """NLL by position for one scheme: the ends of its parts, and the NLL of each part.

    At the longest length with numbers and at least `FEW` windows, or with a text. A part of fewer than `FEW_TOKENS`
    tokens has no number. Empty if no part has a number.
    """
    placed = [row for row in of(perplexity_rows(rows), label) if row.get("position_ends")]
    mine = [row for row in placed if row.get("text") or windows(row) >= FEW]
    longest = [row for row in mine if row["length"] == max(lengths(mine))]
    if not longest:
        return (), []
    ends, parts = longest[0]["position_ends"], zip(*(row["position_nll"] for row in longest), strict=True)
    over = len(texts(longest)) or windows(longest[0])
    tokens = [over * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    found = [estimate(part) if n >= FEW_TOKENS else None for n, part in zip(tokens, parts, strict=True)]
    if texts(longest):
        found = [value and Estimate(value.mean) for value in found]
    return (tuple(ends), found) if any(found) else ((), [])


def trainings(rows: Sequence[Row]) -> dict[str, dict[int, Estimate]]:
    """The held-out loss of every trained scheme against the tokens seen, if it was measured."""
    found = {label: _training(mine) for label, mine in grouped(rows, "label").items()}
    return {label: curve for label, curve in found.items() if curve}


def _training(rows: Sequence[Row]) -> dict[int, Estimate]:
    by_seed = {row["seed"]: row["training"] for row in rows if row.get("training")}
    curves = [dict(zip(each["tokens"], each["held_out_loss"], strict=True)) for each in by_seed.values()]
    shared = set.intersection(*map(set, curves)) if curves else ()
    return estimates({tokens: [curve[tokens] for curve in curves] for tokens in shared})


def updates(rows: Sequence[Row]) -> dict[str, list[int | None]]:
    """The updates that every seed of a trained scheme took until the loss that ends it; None if it was not reached."""
    ending = [row for row in perplexity_rows(rows) if row.get("stop_loss") and row["base"] is None]
    by_seed = {label: {row["seed"]: row["updates_to_loss"] for row in of(ending, label)} for label in labels(ending)}
    return {label: list(found.values()) for label, found in by_seed.items()}


def stop(rows: Sequence[Row]) -> tuple[float, int]:
    """The loss that ends trainings, and how many updates were allowed."""
    ending = [row for row in rows if row.get("stop_loss")]
    return ending[0]["stop_loss"], max(row["updates"] for row in ending)


# --- tasks ------------------------------------------------------------------------------------------------------------


def accuracies(rows: Sequence[Row], label: str) -> dict[int, Estimate]:
    """Accuracy on one task at each length for one scheme: the mean over depths of each seed, then over seeds."""
    found: dict[int, list[float | None]] = {}
    for (length, _), mine in grouped(of(rows, label), "length", "seed").items():
        over_depths = estimate(row["accuracy"] for row in mine)
        found.setdefault(length, []).append(over_depths and over_depths.mean)
    return estimates(found)


def at_depth(rows: Sequence[Row], label: str) -> dict[tuple[float, int], float]:
    """Accuracy on one task at each (depth, length) for one scheme, the mean over seeds; missing ones are left out."""
    cells = grouped([row for row in of(rows, label) if row["depth"] is not None], "depth", "length")
    found = estimates({cell: [row["accuracy"] for row in mine] for cell, mine in cells.items()})
    return {cell: value.mean for cell, value in found.items()}


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


# --- families and words -----------------------------------------------------------------------------------------------

ABSOLUTE, ROTATIONS, BIASES = "absolute embeddings and none", "rotations", "biases"
WINDOWS, COCA, LINEAR = "windows and distances", "CoCA", "linear attention"
OTHER = "scales, norms, drawn positions"
FAMILIES = (ABSOLUTE, ROTATIONS, BIASES, WINDOWS, COCA, LINEAR, OTHER)
"""The families of methods, by which figures of many schemes are split, in the order of the figures."""


def family(scheme: Scheme | Layers) -> str:
    """One of `FAMILIES`, by the slots that the scheme fills.

    A scheme that fills several belongs to the first of: linear attention, biases, windows and remapped distances, CoCA,
    the rest beside rotations (scales, norms, sinks, drawn positions), rotations, embeddings. The slots of all layers
    count together.
    """
    layers = scheme.kinds if isinstance(scheme, Layers) else (scheme,)

    def filled(*slots: str) -> bool:
        return any(getattr(layer, slot) is not None for layer in layers for slot in slots)

    found = {
        LINEAR: filled("linear"),
        BIASES: filled("bias"),
        WINDOWS: filled("mask", "remap"),
        COCA: any(isinstance(layer.features, coca.Coca | coca.PartlyCollinear) for layer in layers),
        OTHER: filled("scale", "norm", "sinks", "training_positions"),
        ROTATIONS: filled("features"),
    }
    return next((name for name, is_so in found.items() if is_so), ABSOLUTE)


def number(value: float) -> str:
    """Three or four digits: 5.87, 31.4, 178, 2.1e+06."""
    if value >= 1e5:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def spoken(task: str) -> str:
    """The name of a task in words."""
    return "MQAR" if task == "mqar" else task.replace("_", " ").capitalize()
