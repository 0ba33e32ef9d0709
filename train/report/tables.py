"""The tables of a report, for the terminal and for the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.report.numbers import (
    Estimate,
    Row,
    accuracies,
    curve,
    estimate,
    held_out,
    labels,
    last_length,
    lengths,
    measures,
    notes,
    tasks,
)

_TITLES = {
    "window": "Perplexity over the whole window ({tokens:,} tokens scored at each length)",
    "last": "Perplexity of the last {length} tokens, context growing (the same {tokens:,} at each length)",
    "sliding": "Perplexity in sliding windows (the same {tokens:,} tokens at each length)",
}


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for the page: the first column is text, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Perplexity at each length, by every measurement, what training and evaluation cost, and accuracy on tasks."""
    perplexities = held_out(rows)
    length, found = perplexities[0]["train_length"], []
    for measure in measures(perplexities):
        scored = max(row.get(f"{measure}_tokens", 0) for row in perplexities)
        curves = {label: curve(perplexities, label, measure) for label in labels(perplexities)}
        title = _TITLES[measure].format(tokens=scored, length=last_length(perplexities))
        found.append(_by_length(title, curves, lengths(perplexities), length, number))
    return [
        *found,
        _costs(perplexities),
        *_times(perplexities),
        *(_accuracies(name, mine) for name, mine in tasks(rows).items()),
    ]


def _accuracies(name: str, rows: Sequence[Row]) -> Table:
    """Accuracy on a task."""
    cases, depths = rows[0]["cases"], len({row["depth"] for row in rows})
    over = (
        f"{cases} cases at each length" if depths == 1 else f"{cases} cases at each of {depths} depths of each length"
    )
    chance = f"; a guess has {_percent(rows[0]['chance'])}" if rows[0]["chance"] else ""
    curves = {label: accuracies(rows, label) for label in labels(rows)}
    title = f"{spoken(name)}: right answers in % ({over}{chance})"
    return _by_length(title, curves, lengths(rows), rows[0]["train_length"], _percent)


def spoken(task: str) -> str:
    """The name of a task in words."""
    return "MQAR" if task == "mqar" else task.replace("_", " ").capitalize()


def _by_length(
    title: str,
    curves: dict[str, dict[int, Estimate]],
    lengths: Sequence[int],
    train_length: int,
    written: Callable[[float], str],
) -> Table:
    header = ("scheme", *(f"{n} ({n / train_length:.3g}x)" for n in lengths))
    body = tuple((label, *(_shown(found.get(n), written) for n in lengths)) for label, found in curves.items())
    return Table(title, header, body)


def _costs(rows: Sequence[Row]) -> Table:
    ends = sorted({lengths(rows)[0], lengths(rows)[-1]})
    header = ("scheme", "training tokens/s", "training peak MiB", *(f"eval tokens/s at {n}" for n in ends))
    body = []
    for label in labels(rows):
        mine = [row for row in rows if row["label"] == label]
        first = [row for row in mine if row["length"] == ends[0]]
        speed = _shown(estimate(row["train_tokens_per_second"] for row in first), _thousands)
        memory = _shown(estimate(row["peak_memory_bytes"] for row in first), _mebibytes)
        speeds = ([row["tokens_per_second"] for row in mine if row["length"] == n] for n in ends)
        body.append((label, speed, memory, *(_shown(estimate(each), _thousands) for each in speeds)))
    return Table("Cost (each trained scheme in a process of its own)", header, tuple(body))


def _times(rows: Sequence[Row]) -> list[Table]:
    """What the wall-clock time of training was spent on, where it is known."""
    seconds = {label: [row.get("train_seconds") for row in rows if row["label"] == label] for label in labels(rows)}
    known = {label: [each for each in found if each] for label, found in seconds.items()}
    kinds = [kind for found in known.values() for each in found for kind in each]
    header = tuple(dict.fromkeys(kinds))
    body = []
    for label, found in known.items():
        shares = ([each[kind] / sum(each.values()) for each in found] for kind in header)
        if found:
            body.append((label, *(_percent(sum(each) / len(each)) for each in shares)))
    title = "Time of training in % of the wall-clock: steps are the goodput"
    return [Table(title, ("scheme", *header), tuple(body))] if body else []


def _shown(value: Estimate | None, number: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return number(value.mean) + (f" ±{number(value.spread)}" if value.spread is not None else "")


def number(value: float) -> str:
    """Three or four digits: 5.87, 31.4, 178, 2.1e+06."""
    if value >= 1e5:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"


def show(rows: Sequence[Row], console: Any, others: Sequence[Table] = ()) -> None:
    """Prints the tables, others behind them, and notes on a `rich.console.Console`."""
    for table in (*tables(rows), *others):
        show_table(table, console)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def show_table(table: Table, console: Any) -> None:
    """Prints a table on a `rich.console.Console`."""
    import rich.box
    import rich.table

    drawn = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    for index, name in enumerate(table.header):
        drawn.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_escaped, row))
    console.print(table.title, style="bold", markup=False, highlight=False)
    console.print(drawn)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
