"""One HTML page with everything: figures, tables, notes, config and versions, without external resources."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from train.report import figures, numbers
from train.report.numbers import Row
from train.report.tables import (
    Table,
    counted_seeds,
    findings,
    tables,
)

INDEX, FIGURE = "index.html", "figure.png"
FILES = (INDEX, FIGURE, "training.png", "reached.png", "positions.png", "tasks.png", "depths.png")
"""The files that a report may write into a directory."""


@dataclass(frozen=True)
class About:
    """The page's information besides the numbers: `text` and `model` in words, the config as YAML, the versions."""

    title: str
    text: str
    model: str
    config: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Picture:
    """A PNG with its file's name, a short description, and the text below it."""

    name: str
    png: bytes
    alt: str
    caption: str

    @property
    def base64(self) -> str:
        """The PNG as base64 text."""
        return base64.b64encode(self.png).decode("ascii")


def write(directory: Path, rows: Sequence[Row], about: About, trials: Sequence[Row] = ()) -> None:
    """Writes ``index.html``, which needs no other file, and its figures into `directory`; removes older figures.

    `trials` are those that chose the learning rates, if there were any.
    """
    drawn = pictures(rows, about)
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    for picture in drawn:
        (directory / picture.name).write_bytes(picture.png)
    (directory / INDEX).write_text(render(rows, drawn, about, trials), encoding="utf-8")


def show(rows: Sequence[Row], console: Any, trials: Sequence[Row] = ()) -> None:
    """Prints the findings, the tables, and notes on a `rich.console.Console`."""
    for sentence in findings(rows):
        console.print(sentence, markup=False, highlight=False)
    for each in tables(rows, trials):
        each.show(console)
    for note in numbers.notes(rows):
        console.print(note, markup=False, highlight=False)


def render(rows: Sequence[Row], pictures: Sequence[Picture], about: About, trials: Sequence[Row] = ()) -> str:
    """The HTML page: findings, figures, tables, notes, config and versions in one file without external resources."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    versions = Table("", ("part", "version"), tuple((name, str(value)) for name, value in about.versions.items()))
    template = environment.get_template("page.html")
    return template.render(
        about=about,
        pictures=pictures,
        tables=tables(rows, trials),
        versions=versions,
        findings=findings(rows),
        notes=[*counted_seeds(rows), *numbers.notes(rows)],
        remark=_remark(rows),
    )


def _remark(rows: Sequence[Row]) -> str:
    """What a number of the page is the mean of."""
    texts, seeds = numbers.texts(rows), numbers.seeds(rows)
    if texts:
        return f"Each is read by itself: {', '.join(texts)}."
    return f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(rows: Sequence[Row], about: About) -> list[Picture]:
    """The figures for which the rows have enough numbers."""
    texts, trainings = numbers.perplexity_rows(rows), numbers.trainings(rows)
    placed = {label for label in numbers.labels(texts) if numbers.positions(texts, label)[0]}
    learned = [row for mine in figures.learned(rows).values() for row in mine]
    drawn = {
        FIGURE: (partial(figures.draw_by_length, title=about.title, text=f"{about.model}. {about.text}."), texts),
        "training.png": (figures.draw_training, [row for row in texts if row["label"] in trainings]),
        "reached.png": (figures.draw_reached, numbers.updates(rows) and texts),
        "positions.png": (figures.draw_by_position, [row for row in texts if row["label"] in placed]),
        "tasks.png": (figures.draw_tasks, learned),
        "depths.png": (figures.draw_depths, numbers.depths(learned) and learned),
    }
    return [Picture(name, draw(rows), _ALT[name], _caption(name, mine)) for name, (draw, mine) in drawn.items() if mine]


def _caption(name: str, rows: Sequence[Row]) -> str:
    """The text of a figure, and the explanation that the figures of means over seeds share."""
    sentences = {
        "Dashed: not retrained.": any(row["base"] for row in rows),
        f"Grey, in every panel: {numbers.baseline(rows)}. All panels have the same axes.": (
            len(numbers.labels(rows)) > figures.MOST
        ),
        _SEEDS: numbers.seeds(rows) > 1,
    }
    text = _CAPTION.get(name) or " ".join([*(_MEASURED[each] for each in numbers.measures(rows)), _PERPLEXITY])
    shared = [] if name in ("reached.png", "depths.png") else [each for each, is_so in sentences.items() if is_so]
    return " ".join([text, *shared])


_SEEDS = "Bands are one standard deviation over seeds; where seeds differ widely each is a thin line beside the mean."
_MEASURED = {
    "window": "Whole window: all tokens of windows that do not overlap. In short windows most tokens have little "
    "context.",
    "last": "Last tokens: only the last ones of a window, the same ones at every length. There a falling line means "
    "that more context helps, and a rising line that it harms.",
    "sliding": "Sliding window: the new tokens of each step of a window, the same ones at every length.",
    "key": "Tokens that need a long context (LongPPL): those that it makes much likelier than a short one does.",
}
_PERPLEXITY = "Perplexity is exp of the mean negative log-likelihood over tokens."
_ALT = {
    FIGURE: "Perplexity against evaluation length, one line for each scheme",
    "training.png": "Held-out loss against training tokens, one line for each trained scheme",
    "reached.png": "The share of seeds that have not reached the loss against updates, one line for each trained "
    "scheme",
    "positions.png": "Perplexity against the number of tokens before, one line for each scheme",
    "tasks.png": "Accuracy against length, one panel for each task and one line for each scheme",
    "depths.png": "Accuracy by depth and length, one map for each task and scheme",
}
_CAPTION = {
    "training.png": "The loss of held-out rows at the training length while the schemes trained, from the same weights "
    "or seeds on. The axis ends 1.5 nats above the lowest value.",
    "reached.png": "The share of trainings whose logged loss was not yet below the loss that ends a training. A line "
    "stays high if seeds did not reach it within all updates.",
    "positions.png": "Perplexity by position: tokens with similar numbers of tokens before them in the window are "
    f"averaged, at least {numbers.FEW_TOKENS} at a time. Each scheme has the longest windows of which there are at "
    f"least {numbers.FEW}. Where a line turns upwards the model begins to fail. The axis ends at 40 times the "
    "lowest value, or 5 times for a released model.",
    "tasks.png": "The share of right answers, over all depths if the task has depths. Dotted: the accuracy of a guess, "
    "if that is not negligible. An answer is right if each of its tokens is the most likely one, given the true text "
    "before it.",
    "depths.png": "The share of right answers by the depth of the answer: 0 is the front of the text, 1 its end. Mean "
    "over seeds.",
}
