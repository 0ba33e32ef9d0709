"""One HTML page that carries everything: figures, tables, notes, config and versions, without outside resources."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.report import curves, figure, grids
from train.report.numbers import Row, held_out, last_length, notes, tasks, trainings
from train.report.tables import Table, tables

INDEX, FIGURE = "index.html", "figure.png"
FIGURES = (FIGURE, "training.png", "positions.png", "tasks.png", "depths.png")
FILES = (INDEX, *FIGURES)
"""What a report may leave in a directory."""


@dataclass(frozen=True)
class About:
    """What the page says besides the numbers: `text` and `model` in words, the config as YAML, the versions."""

    title: str
    text: str
    model: str
    config: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Picture:
    """A PNG with its file's name, what it shows in a few words, and the text below it."""

    name: str
    png: bytes
    alt: str
    caption: str


def write(directory: Path, rows: Sequence[Row], about: About) -> None:
    """Writes ``index.html``, which needs no other file, and its figures into `directory`; older ones go."""
    drawn = pictures(rows, about)
    for picture in drawn:
        (directory / picture.name).write_bytes(picture.png)
    for name in set(FIGURES) - {picture.name for picture in drawn}:
        (directory / name).unlink(missing_ok=True)
    (directory / INDEX).write_text(render(rows, drawn, about), encoding="utf-8")


def pictures(rows: Sequence[Row], about: About) -> list[Picture]:
    """The figures that the rows have numbers for."""
    length = last_length(held_out(rows))
    by_length = figure.draw(rows, about.title, f"{about.model}. {about.text}.")
    found = [Picture("figure.png", by_length, _ALT, _CAPTION.format(length=length))]
    if trainings(rows):
        found.append(Picture("training.png", curves.draw_training(rows), _TRAINING_ALT, _TRAINING))
    if any(row.get("position_ends") for row in rows):
        found.append(Picture("positions.png", curves.draw_positions(rows), _POSITIONS_ALT, _POSITIONS))
    if tasks(rows):
        found.append(Picture("tasks.png", curves.draw_tasks(rows), _TASKS_ALT, _TASKS))
    if any(row.get("depth") is not None for row in rows):
        found.append(Picture("depths.png", grids.draw(rows), _DEPTHS_ALT, _DEPTHS))
    return found


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 72rem;
       padding: 0 1.5rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem; }}
h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
p.about, figcaption {{ color: #555; margin-top: 0; }}
figure {{ margin: 1.5rem 0; }}
img {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .9rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th {{ border-bottom: 2px solid #999; font-weight: 600; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.4; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{about}</p>
{figures}
{tables}
<h2>Config</h2>
<pre id="config">{config}</pre>
<h2>Versions</h2>
{versions}
</body>
</html>
"""

_FIGURE = """<figure>
<img alt="{alt}" src="data:image/png;base64,{png}">
<figcaption>{caption}</figcaption>
</figure>"""

_ALT = "Perplexity against evaluation length, one line for each scheme"
_CAPTION = (
    "Whole window: every token of non-overlapping windows counts, so short windows suffer from their first tokens "
    "having little context. Last tokens: only the last {length} count, the same ones at every length, so a falling "
    "line says that more context helps and a rising one that it hurts. Sliding window, where there is one: the tokens "
    "that it uncovers with every step, the same ones at every length. Perplexity is exp of the mean negative "
    "log-likelihood over tokens."
)
_TRAINING_ALT = "Held-out loss against training tokens, one line for each trained scheme"
_TRAINING = (
    "The loss of held-out rows at the training length while the schemes trained, from the same weights or seeds on."
)
_POSITIONS_ALT = "Perplexity against the number of tokens before, one line for each scheme"
_POSITIONS = (
    "The tokens of the windows of the longest length that each scheme can be measured at, by how many tokens of the "
    "window stand before them. Where a line turns upwards the model begins to fail. The axis ends at 40 times the "
    "lowest value."
)
_TASKS_ALT = "Accuracy against length, one panel for each task and one line for each scheme"
_TASKS = (
    "The share of answers that are right, over all depths of tasks that have some. Dotted: the training length, and "
    "what a guess would get where that is worth a line. The pass key in a text counts if it is anywhere in what the "
    "model writes; any other answer if all its tokens are the likeliest ones, each given the true text before it."
)
_DEPTHS_ALT = "Accuracy by depth and length, one map for each task and scheme"
_DEPTHS = "The share of right answers by where in the text they stand: 0 is its front, 1 its end. Mean over seeds."


def render(rows: Sequence[Row], pictures: Sequence[Picture], about: About) -> str:
    """The HTML page: figures, tables, notes, config and versions in one file without outside resources."""
    seeds = len({row["seed"] for row in rows})
    spread = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    body = [html_table(table) for table in tables(rows)]
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes(rows))
    if remarks:
        body.append(f'<h2>Not measured</h2>\n<ul class="notes">{remarks}</ul>')
    return assemble(about, f"{about.model}. {about.text}. {spread}", pictures, body)


def assemble(about: About, heading: str, pictures: Sequence[Picture], body: Sequence[str]) -> str:
    """The page of these parts; `body` is HTML, such as `html_table` gives."""
    versions = Table("", ("part", "version"), tuple((name, str(value)) for name, value in about.versions.items()))
    return _PAGE.format(
        title=html.escape(about.title),
        about=html.escape(heading),
        figures="\n".join(map(_html_figure, pictures)),
        tables="\n".join(body),
        config=html.escape(about.config),
        versions=html_table(versions),
    )


def _html_figure(picture: Picture) -> str:
    png = base64.b64encode(picture.png).decode("ascii")
    return _FIGURE.format(alt=html.escape(picture.alt), png=png, caption=html.escape(picture.caption))


def html_table(table: Table) -> str:
    """A table as HTML, with its title above."""
    heading = f"<h2>{html.escape(table.title)}</h2>\n" if table.title else ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'{heading}<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
