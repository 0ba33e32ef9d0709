"""The tables of a report, for the terminal and for the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.report.findings import findings
from train.report.formats import headings, mebibytes, number, percent, shown, spoken, thousands
from train.report.groups import baseline
from train.report.numbers import (
    Estimate,
    Row,
    accuracies,
    curve,
    estimate,
    labels,
    last_length,
    lengths,
    measures,
    notes,
    perplexity_rows,
    tasks,
    train_length,
)
from train.report.pairs import Interval, difference

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
    """Perplexity at each length, by every measure; differences; the cost of training; and accuracy on tasks."""
    perplexities = perplexity_rows(rows)
    found = []
    for measure in measures(perplexities):
        scored = max(row.get(f"{measure}_tokens", 0) for row in perplexities)
        curves = {label: curve(perplexities, label, measure) for label in labels(perplexities)}
        title = _TITLES[measure].format(tokens=scored, length=last_length(perplexities))
        found.append(_by_length(title, curves, lengths(perplexities), train_length(perplexities), number))
    return [
        *found,
        *_differences(perplexities),
        *_costs(perplexities),
        *_times(perplexities),
        *(_accuracies(name, mine) for name, mine in tasks(rows).items()),
    ]


def _differences(rows: Sequence[Row]) -> list[Table]:
    """The difference of every scheme from the first one, by the same seeds."""
    first, seeds = baseline(rows), len({row["seed"] for row in rows})
    own = train_length(rows)
    at = sorted({own if own in lengths(rows) else lengths(rows)[0], *lengths(rows)[-2:]})
    others = [label for label in labels(rows) if label != first]
    found = {label: [difference(rows, label, first, n) for n in at] for label in others}
    if not any(any(each) for each in found.values()):
        return []
    title = (
        f"Paired differences from {first} in nats per token over the whole window, by {seeds} seeds: mean [95 % "
        "interval by Student's t]; ≈ is within noise, as the interval includes 0"
    )
    body = tuple((label, *map(_written, each)) for label, each in found.items())
    return [Table(title, ("scheme", *headings(at, own)), body)]


def _written(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{'≈ ' if found.has_zero else ''}{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _accuracies(name: str, rows: Sequence[Row]) -> Table:
    """Accuracy on a task."""
    cases, depths = rows[0]["cases"], len({row["depth"] for row in rows})
    over = (
        f"{cases} cases at each length" if depths == 1 else f"{cases} cases at each of {depths} depths of each length"
    )
    chance = f"; a guess has {percent(rows[0]['chance'])}" if rows[0]["chance"] else ""
    curves = {label: accuracies(rows, label) for label in labels(rows)}
    title = f"{spoken(name)}: right answers in % ({over}{chance})"
    return _by_length(title, curves, lengths(rows), train_length(rows), percent)


def _by_length(
    title: str,
    curves: dict[str, dict[int, Estimate]],
    lengths: Sequence[int],
    train_length: int | None,
    written: Callable[[float], str],
) -> Table:
    header = ("scheme", *headings(lengths, train_length))
    body = tuple((label, *(shown(found.get(n), written) for n in lengths)) for label, found in curves.items())
    return Table(title, header, body)


def _costs(rows: Sequence[Row]) -> list[Table]:
    """Speed and memory of the trainings that had a process of their own; empty if there are none.

    Those that trained together as one program have no speed, and the memory of their process is that of all.
    """
    alone = [row for row in rows if row.get("train_tokens_per_second")]
    if not alone:
        return []
    shortest, names = lengths(alone)[0], labels(alone)
    speed = {label: _measured(alone, label, "train_tokens_per_second", shortest) for label in names}
    memory = {label: _measured(alone, label, "peak_memory_bytes", shortest) for label in names}
    columns = {"training tokens/s": _alike(speed, max, thousands), "training peak MiB": _alike(memory, min, mebibytes)}
    known = {name: cells for name, cells in columns.items() if set(cells.values()) != {"-"}}
    body = tuple((label, *(cells[label] for cells in known.values())) for label in names)
    meaning = _ALIKE if len({row["seed"] for row in alone}) > 1 else _SINGLE
    return [Table(f"Cost of training, each in a process of its own ({meaning})", ("scheme", *known), body)]


_ALIKE = "≈ is as good as the best, within the spreads of the two"
_SINGLE = "single runs, which vary by some ten percent under other load on the machine"


def _measured(rows: Sequence[Row], label: str, column: str, length: int) -> Estimate | None:
    return estimate(row.get(column) for row in rows if (row["label"], row["length"]) == (label, length))


def _alike(values: dict[str, Estimate | None], best: Callable, written: Callable[[float], str]) -> dict[str, str]:
    """Every value as text, with a sign if it is as good as the best."""
    top = best((value for value in values.values() if value is not None), key=lambda value: value.mean, default=None)
    return {label: _mark(value, top) + shown(value, written) for label, value in values.items()}


def _mark(value: Estimate | None, best: Estimate | None) -> str:
    """A sign for values that differ from the best by less than the standard deviation of such differences."""
    if value is None or value is best or value.spread is None or best.spread is None:
        return ""
    return "≈ " if abs(value.mean - best.mean) <= math.hypot(value.spread, best.spread) else ""


def _times(rows: Sequence[Row]) -> list[Table]:
    """What the wall-clock time of training was spent on, if it is known."""
    seconds = {label: [row.get("train_seconds") for row in rows if row["label"] == label] for label in labels(rows)}
    known = {label: [each for each in found if each] for label, found in seconds.items()}
    kinds = [kind for found in known.values() for each in found for kind in each]
    header = tuple(dict.fromkeys(kinds))
    body = []
    for label, found in known.items():
        shares = ([each[kind] / sum(each.values()) for each in found] for kind in header)
        if found:
            body.append((label, *(percent(sum(each) / len(each)) for each in shares)))
    title = "Time of training in % of the wall-clock: steps are the goodput"
    return [Table(title, ("scheme", *header), tuple(body))] if body else []


def show(rows: Sequence[Row], console: Any, others: Sequence[Table] = ()) -> None:
    """Prints the findings, the tables, further tables, and notes on a `rich.console.Console`."""
    for sentence in findings(rows):
        console.print(sentence, markup=False, highlight=False)
    for table in (*tables(rows), *others):
        show_table(table, console)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def show_table(table: Table, console: Any) -> None:
    """Prints a table on a `rich.console.Console`."""
    import rich.box
    import rich.markup
    import rich.table

    drawn = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    for index, name in enumerate(table.header):
        drawn.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(rich.markup.escape, row))
    console.print(table.title, style="bold", markup=False, highlight=False)
    console.print(drawn)
