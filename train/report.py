"""What a comparison found: a figure, tables for the terminal, and one HTML page that carries everything.

All of it is made from rows of plain numbers, one for each (scheme, seed, evaluation length), as ``results.jsonl``
keeps them:

    label, base         the scheme, and for one extended without retraining the label of the scheme that was trained
    seed, length        the seed and the evaluation length, in tokens
    train_length        the training length, in tokens
    window_perplexity   over whole windows;  window_tokens: how many tokens were scored
    last_perplexity     of the last `train_length` tokens, with all context before them;  last_tokens
    tokens_per_second   evaluation, tokens computed;  error: why there are no numbers
    train_tokens_per_second, peak_memory_bytes   of the training process; None for one that was not trained
"""

import base64
import html
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Okabe and Ito's palette, tellable apart with any colour vision; without its yellow, too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_DASHES = ((4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
# Perplexities more than this many times the lowest one leave the figure at the top; the note below says which.
_CLIP = 40.0
_MEASURES = ("window", "last")


@dataclass(frozen=True)
class About:
    """What the page says besides the numbers: `text` and `model` in words, the config as YAML, the versions."""

    title: str
    text: str
    model: str
    config: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds, and the sample standard deviation when there are several."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for the page: the first column is text, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def write(directory: str | Path, rows: Sequence[Row], about: About) -> None:
    """Writes ``figure.png`` and ``index.html``, which needs no other file, into `directory`."""
    directory = Path(directory)
    draw(rows, directory / "figure.png", about)
    page = render(rows, (directory / "figure.png").read_bytes(), about)
    (directory / "index.html").write_text(page, encoding="utf-8")


# Numbers


def labels(rows: Sequence[Row]) -> list[str]:
    """The schemes, in the order of the rows."""
    return list(dict.fromkeys(row["label"] for row in rows))


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and spread over seeds; None if any seed has no number, since a mean over the others would flatter."""
    values = list(values)
    if not values or any(value is None for value in values):
        return None
    return Estimate(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def curve(rows: Sequence[Row], label: str, measure: str) -> dict[int, Estimate]:
    """Perplexity at each length for one scheme; lengths without a number are left out. `measure`: window, last."""
    mine = [row for row in rows if row["label"] == label]
    lengths = sorted({row["length"] for row in mine})
    found = {n: estimate(row[f"{measure}_perplexity"] for row in mine if row["length"] == n) for n in lengths}
    return {length: value for length, value in found.items() if value is not None}


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for each scheme that has no number at some length, with the reason at the first of them."""
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if row["error"]:
            failed.setdefault(row["label"], []).append(row)
    return [f"{label} at {_joined(r['length'] for r in mine)}: {mine[0]['error']}" for label, mine in failed.items()]


def _joined(lengths: Iterable[int]) -> str:
    return ", ".join(str(length) for length in sorted(set(lengths)))


# Tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """Perplexity at each length, by both measurements, and what training and evaluation cost."""
    length = rows[0]["train_length"]
    scored = {measure: max(row[f"{measure}_tokens"] for row in rows) for measure in _MEASURES}
    window = f"Perplexity over the whole window ({scored['window']:,} tokens scored at each length)"
    last = f"Perplexity of the last {length} tokens, context growing (the same {scored['last']:,} at each length)"
    return [_perplexities(rows, "window", window), _perplexities(rows, "last", last), _costs(rows)]


def _perplexities(rows: Sequence[Row], measure: str, title: str) -> Table:
    lengths = sorted({row["length"] for row in rows})
    header = ("scheme", *(_length_name(n, rows[0]["train_length"]) for n in lengths))
    curves = {label: curve(rows, label, measure) for label in labels(rows)}
    body = tuple((label, *(_shown(found.get(n), _number) for n in lengths)) for label, found in curves.items())
    return Table(title, header, body)


def _length_name(length: int, train_length: int) -> str:
    times = length / train_length
    return f"{length} ({times:.3g}x)"


def _costs(rows: Sequence[Row]) -> Table:
    lengths = sorted({row["length"] for row in rows})
    header = ("scheme", "training tokens/s", "training peak MiB", *(f"eval tokens/s at {n}" for n in _ends(lengths)))
    body = []
    for label in labels(rows):
        mine = [row for row in rows if row["label"] == label]
        first = [row for row in mine if row["length"] == lengths[0]]
        speed = _shown(estimate(row["train_tokens_per_second"] for row in first), _thousands)
        memory = _shown(estimate(row["peak_memory_bytes"] for row in first), _mebibytes)
        evaluation = (
            _shown(estimate(row["tokens_per_second"] for row in mine if row["length"] == n), _thousands)
            for n in _ends(lengths)
        )
        body.append((label, speed, memory, *evaluation))
    return Table("Cost (each trained scheme in a process of its own)", header, tuple(body))


def _ends(lengths: Sequence[int]) -> list[int]:
    return sorted({lengths[0], lengths[-1]})


def _shown(value: Estimate | None, number: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return number(value.mean) + (f" ±{number(value.spread)}" if value.spread is not None else "")


def _number(value: float) -> str:
    """Three or four digits: 5.87, 31.4, 178, 2.1e+06."""
    if value >= 1e5:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"


def show(rows: Sequence[Row], console: Any) -> None:
    """Prints the tables and notes on a `rich.console.Console`."""
    import rich.box
    import rich.table

    for table in tables(rows):
        drawn = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
        for index, name in enumerate(table.header):
            drawn.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*map(_escaped, row))
        console.print(table.title, style="bold", markup=False, highlight=False)
        console.print(drawn)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


# Figure


@dataclass(frozen=True)
class _Line:
    """How one scheme is drawn: a colour for each trained model, a dash for each way of extending it."""

    colour: str
    marker: str
    dashes: tuple[float, ...] | None


def _lines(rows: Sequence[Row]) -> dict[str, _Line]:
    base = {row["label"]: row["base"] for row in rows}
    trained = [label for label in base if base[label] is None]
    trained += sorted({name for name in base.values() if name is not None and name not in trained})
    styles: dict[str, _Line] = {}
    for label in base:
        root = base[label] or label
        siblings = [name for name in base if base[name] == root]
        dashes = _DASHES[siblings.index(label) % len(_DASHES)] if label in siblings else None
        styles[label] = _Line(
            _COLOURS[trained.index(root) % len(_COLOURS)], _MARKERS[trained.index(root) % len(_MARKERS)], dashes
        )
    return styles


_FEW = 20  # lines that a legend names at its ease


def draw(rows: Sequence[Row], path: str | Path, about: About) -> None:
    """Writes the figure: perplexity against length, as a PNG of 1800 x 900 pixels, or higher for many schemes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    length = rows[0]["train_length"]
    figure = Figure(figsize=(12, max(6, 0.9 + 0.17 * len(labels(rows)))), dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("Whole window", f"Last {length} tokens only, context growing")
    for panel, measure, title in zip(panels, _MEASURES, titles, strict=True):
        _draw_panel(panel, rows, measure)
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("evaluation length in tokens (times the training length)")
    panels[0].set_ylabel("perplexity per token on held-out text")
    _scale(panels, rows)
    _around(figure, panels, rows, about)
    figure.savefig(path)


def _draw_panel(panel: Any, rows: Sequence[Row], measure: str) -> None:
    """One line for each scheme, in its style, with a band of one standard deviation when there are several seeds."""
    for label, style in _lines(rows).items():
        points = curve(rows, label, measure)
        lengths, means = list(points), [point.mean for point in points.values()]
        spreads = [point.spread or 0.0 for point in points.values()]
        extended = style.dashes is not None
        (line,) = panel.plot(
            lengths, means, color=style.colour, marker=style.marker, label=label, linewidth=1.8, markersize=6,
            markerfacecolor="white" if extended else style.colour, markeredgewidth=1.4, zorder=3 - extended,
        )  # fmt: skip
        if extended:
            line.set_dashes(style.dashes)
        if any(spreads):
            low = [max(mean - spread, 1.0) for mean, spread in zip(means, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            panel.fill_between(lengths, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _scale(panels: Sequence[Any], rows: Sequence[Row]) -> None:
    """Logarithmic axes with ticks at the lengths, the training length marked, and a top that explosions do not set."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lengths, train_length = sorted({row["length"] for row in rows}), rows[0]["train_length"]
    low, top = _limits(rows)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylim(low, top)
        panel.xaxis.set_major_locator(FixedLocator(lengths))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}\n({x / train_length:.3g}x)"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_locator(FixedLocator(_ticks(low, top)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.tick_params(labelleft=True)
        panel.grid(True, which="major", color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.axvline(train_length, color="#555555", linestyle=":", linewidth=1.3, zorder=1)
        panel.annotate(
            f"training length {train_length}", (train_length, 0.98), xycoords=("data", "axes fraction"),
            xytext=(4, 0), textcoords="offset points", rotation=90, va="top", fontsize=8, color="#555555",
        )  # fmt: skip


def _means(rows: Sequence[Row]) -> list[tuple[float, str, int, str]]:
    """(perplexity, scheme, length, measure) of every point of the figure."""
    every = [(label, measure) for label in labels(rows) for measure in _MEASURES]
    return [
        (point.mean, label, length, measure)
        for label, measure in every
        for length, point in curve(rows, label, measure).items()
    ]


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    values = [mean for mean, *_ in _means(rows)] or [1.0]
    return min(values) / 1.08, min(max(values) * 1.12, min(values) * _CLIP)


def _ticks(low: float, top: float) -> list[float]:
    """Round numbers between the limits, about a dozen at most."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if top / low < 20 else (1, 2, 5)
    if top / low < 2:
        steps = tuple(tenths / 10 for tenths in range(10, 100, 2))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low <= tick <= top]


def _around(figure: Any, panels: Sequence[Any], rows: Sequence[Row], about: About) -> None:
    """Title above, legend beside, notes below; the panels take what room is left."""
    above = textwrap.wrap(f"{about.model}. {about.text}.", 165)
    below = [line for note in _clipped(rows) + notes(rows) for line in textwrap.wrap(note, 185)]
    figure.text(0.01, 0.985, about.title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 0.935, "\n".join(above), fontsize=9, color="#444444", va="top")
    figure.text(0.01, 0.015, "\n".join(below), fontsize=8, color="#444444", va="bottom")
    _legend(figure, panels[0], any(row["base"] for row in rows))
    top, bottom = 0.915 - 0.03 * len(above), 0.02 + 0.026 * len(below)
    figure.set_layout_engine("constrained", rect=(0.006, bottom, 0.99, top - bottom), wspace=0.04)


def _legend(figure: Any, panel: Any, extended: bool) -> None:
    """One legend for both panels, the worst scheme at its longest length first, as the lines lie."""
    lines = sorted(panel.get_lines(), key=lambda line: -(line.get_ydata()[-1] if len(line.get_ydata()) else 0.0))
    lines = [line for line in lines if not line.get_label().startswith("_")]
    heading = "solid: as trained\ndashed: not retrained" if extended else None
    few = len(lines) <= _FEW
    legend = figure.legend(
        handles=lines, title=heading, title_fontsize=8.5, fontsize=9 if few else 7.5, loc="outside center right",
        frameon=False, handlelength=3.2, labelspacing=0.9 if few else 0.5,
    )  # fmt: skip
    legend.get_title().set_color("#555555")


def _clipped(rows: Sequence[Row]) -> list[str]:
    """One line naming what lies above the top of the figure, if anything does."""
    top = _limits(rows)[1]
    above: dict[str, tuple[float, str, int, str]] = {}
    for point in _means(rows):
        if point[0] > top:
            above[point[1]] = max(point, above.get(point[1], point))
    reached = ", ".join(f"{label} {_number(mean)} at {length}" for mean, label, length, _ in above.values())
    return [f"Above the top of the figure: {reached}."] if above else []


# Page

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
<figure>
<img alt="Perplexity against evaluation length, one line for each scheme" src="data:image/png;base64,{figure}">
<figcaption>{caption}</figcaption>
</figure>
{tables}
<h2>Config</h2>
<pre id="config">{config}</pre>
<h2>Versions</h2>
{versions}
</body>
</html>
"""

_CAPTION = (
    "Left: every token of non-overlapping windows counts, so short windows suffer from their first tokens having "
    "little context. Right: only the last {length} tokens count, the same ones at every length, so a falling line says "
    "that more context helps and a rising one that it hurts. Perplexity is exp of the mean negative log-likelihood "
    "over tokens."
)


def render(rows: Sequence[Row], png: bytes, about: About) -> str:
    """The HTML page: figure, tables, notes, config and versions in one file without outside resources."""
    seeds = len({row["seed"] for row in rows})
    spread = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    body = [_html_table(table) for table in tables(rows)]
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes(rows))
    if remarks:
        body.append(f'<h2>Not measured</h2>\n<ul class="notes">{remarks}</ul>')
    versions = Table("", ("part", "version"), tuple((name, str(value)) for name, value in about.versions.items()))
    return _PAGE.format(
        title=html.escape(about.title),
        about=html.escape(f"{about.model}. {about.text}. {spread}"),
        figure=base64.b64encode(png).decode("ascii"),
        caption=html.escape(_CAPTION.format(length=rows[0]["train_length"])),
        tables="\n".join(body),
        config=html.escape(about.config),
        versions=_html_table(versions),
    )


def _html_table(table: Table) -> str:
    heading = f"<h2>{html.escape(table.title)}</h2>\n" if table.title else ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'{heading}<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
