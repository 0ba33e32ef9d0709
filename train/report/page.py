"""One HTML page with everything: figures, tables, notes, config and versions, without external resources."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from train.report import curves, figure, grids, reached
from train.report.findings import findings
from train.report.groups import MOST, baseline
from train.report.numbers import (
    FEW,
    FEW_TOKENS,
    Row,
    depths,
    is_above_chance,
    labels,
    last_length,
    measures,
    notes,
    perplexity_rows,
    positions,
    tasks,
    trainings,
)
from train.report.tables import Table, tables
from train.report.trials import tables_of_trials

INDEX, FIGURE = "index.html", "figure.png"
FIGURES = (FIGURE, "training.png", "reached.png", "positions.png", "tasks.png", "depths.png")
FILES = (INDEX, *FIGURES)
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
    for picture in drawn:
        (directory / picture.name).write_bytes(picture.png)
    for name in set(FIGURES) - {picture.name for picture in drawn}:
        (directory / name).unlink(missing_ok=True)
    (directory / INDEX).write_text(render(rows, drawn, about, trials), encoding="utf-8")


def pictures(rows: Sequence[Row], about: About) -> list[Picture]:
    """The figures for which the rows have enough numbers."""
    texts = perplexity_rows(rows)
    by_length = figure.draw(rows, about.title, f"{about.model}. {about.text}.")
    found = [Picture("figure.png", by_length, _ALT, _by_length(texts))]
    measured = trainings(rows)
    trained = [row for row in texts if row["label"] in measured]
    if trained:
        found.append(Picture("training.png", curves.draw_training(rows), _TRAINING_ALT, _caption(_TRAINING, trained)))
    if reached.times(rows):
        found.append(Picture("reached.png", reached.draw(rows), _REACHED_ALT, _REACHED))
    known = [label for label in labels(texts) if positions(texts, label)[0]]
    placed = [row for row in texts if row["label"] in known]
    if placed:
        caption = _caption(_POSITIONS.format(few=FEW, tokens=FEW_TOKENS), placed)
        found.append(Picture("positions.png", curves.draw_by_position(rows), _POSITIONS_ALT, caption))
    learned = [row for mine in tasks(rows).values() if is_above_chance(mine) for row in mine]
    if learned:
        found.append(Picture("tasks.png", curves.draw_tasks(rows), _TASKS_ALT, _caption(_TASKS, learned)))
    if depths(learned):
        found.append(Picture("depths.png", grids.draw(rows), _DEPTHS_ALT, _DEPTHS))
    return found


def _by_length(rows: Sequence[Row]) -> str:
    """The caption of the figure of perplexity against length."""
    sliding = [_SLIDING] if "sliding" in measures(rows) else []
    return _caption(" ".join([_WINDOWS.format(length=last_length(rows)), *sliding, _PERPLEXITY]), rows)


def _caption(text: str, rows: Sequence[Row]) -> str:
    """The text, and the explanation that all line figures of these rows share."""
    sentences = {
        "Dashed: not retrained.": any(row["base"] for row in rows),
        f"Grey, in every panel: {baseline(rows)}. All panels have the same axes.": len(labels(rows)) > MOST,
        _SEEDS: len({row["seed"] for row in rows}) > 1,
    }
    return " ".join([text, *(sentence for sentence, is_so in sentences.items() if is_so)])


_SEEDS = "Bands are one standard deviation over seeds; where seeds differ widely each is a thin line beside the mean."
_ALT = "Perplexity against evaluation length, one line for each scheme"
_WINDOWS = (
    "Whole window: all tokens of windows that do not overlap. In short windows most tokens have little context. Last "
    "tokens: only the last {length} tokens, the same ones at every length. There a falling line means that more "
    "context helps, and a rising line that it harms."
)
_SLIDING = "Sliding window: the new tokens of each step of a window, the same ones at every length."
_PERPLEXITY = "Perplexity is exp of the mean negative log-likelihood over tokens."
_TRAINING_ALT = "Held-out loss against training tokens, one line for each trained scheme"
_TRAINING = (
    "The loss of held-out rows at the training length while the schemes trained, from the same weights or seeds on. "
    "The axis ends 1.5 nats above the lowest value."
)
_REACHED_ALT = "The share of seeds that have not reached the loss against updates, one line for each trained scheme"
_REACHED = (
    "The share of trainings whose logged loss was not yet below the loss that ends a training. A line stays high if "
    "seeds did not reach it within all updates."
)
_POSITIONS_ALT = "Perplexity against the number of tokens before, one line for each scheme"
_POSITIONS = (
    "Perplexity by position: tokens with similar numbers of tokens before them in the window are averaged, at least "
    "{tokens} at a time. Each scheme has the longest windows of which there are at least {few}. Where a line turns "
    "upwards the model begins to fail. The axis ends at 40 times the lowest value."
)
_TASKS_ALT = "Accuracy against length, one panel for each task and one line for each scheme"
_TASKS = (
    "The share of right answers, over all depths if the task has depths. Dotted: the accuracy of a guess, if that is "
    "not negligible. A pass key is right if it is anywhere in the text that the model writes; any other answer is "
    "right if each of its tokens is the most likely one, given the true text before it."
)
_DEPTHS_ALT = "Accuracy by depth and length, one map for each task and scheme"
_DEPTHS = (
    "The share of right answers by the depth of the answer: 0 is the front of the text, 1 its end. Mean over seeds."
)


def render(rows: Sequence[Row], pictures: Sequence[Picture], about: About, trials: Sequence[Row] = ()) -> str:
    """The HTML page: findings, figures, tables, notes, config and versions in one file without external resources."""
    seeds = len({row["seed"] for row in rows})
    spread = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    return page(
        about,
        pictures,
        [*tables(rows), *reached.updates_to_loss(rows), *tables_of_trials(trials)],
        findings=findings(rows),
        notes=[*reached.note(rows), *notes(rows)],
        remark=spread,
    )


def page(
    about: About,
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    *,
    findings: Sequence[str] = (),
    notes: Sequence[str] = (),
    remark: str = "",
) -> str:
    """The page of these parts, from the template in this folder.

    Args:
        about: title, config and versions; `remark` follows its text.
        pictures, tables: in this order.
        findings: sentences above the figures.
        notes: which numbers are missing, and why.
    """
    versions = Table("", ("part", "version"), tuple((name, str(value)) for name, value in about.versions.items()))
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page.html").render(
        about=about,
        pictures=pictures,
        tables=tables,
        findings=findings,
        notes=notes,
        remark=remark,
        versions=versions,
    )
