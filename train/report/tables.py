"""The tables of a report and its findings in sentences, for the terminal and for the page."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.report import numbers
from train.report.numbers import Estimate, Row

Format = Callable[[float], str]


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for the page: the first column is text, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Any) -> None:
        """Prints the table on a `rich.console.Console`."""
        import rich.box
        import rich.markup
        import rich.table

        drawn = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
        for index, name in enumerate(self.header):
            drawn.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            drawn.add_row(*map(rich.markup.escape, row))
        console.print(self.title, style="bold", markup=False, highlight=False)
        console.print(drawn)


def table(title: str, columns: Sequence[str], body: Mapping[str, Sequence[str]], first: str = "scheme") -> Table:
    """A table with a row of text for each scheme, by its label."""
    return Table(title, (first, *columns), tuple((label, *cells) for label, cells in body.items()))


def shown(value: Estimate | None, written: Format = numbers.number) -> str:
    """A mean with its spread; a dash if there is none."""
    if value is None:
        return "-"
    return written(value.mean) + (f" ±{written(value.spread)}" if value.spread is not None else "")


def percent(share: float) -> str:
    """A share in %."""
    return f"{100 * share:.1f}"


def whole(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def headings(lengths: Sequence[int], train_length: int | None) -> list[str]:
    """Lengths in tokens, and as multiples of the training length if there is one."""
    return [f"{n} ({n / train_length:.3g}x)" if train_length else str(n) for n in lengths]


# --- tables -----------------------------------------------------------------------------------------------------------

_TITLES = {
    "window": "Perplexity over the whole window ({tokens:,} tokens scored at each length)",
    "last": "Perplexity of the last {length} tokens, context growing (the same {tokens:,} at each length)",
    "sliding": "Perplexity in sliding windows (the same {tokens:,} tokens at each length)",
    "key": "Perplexity of tokens that need a long context (LongPPL; at most {tokens:,} at a length)",
}


def tables(rows: Sequence[Row], trials: Sequence[Row] = ()) -> list[Table]:
    """Perplexity at each length, by every measure; differences; costs; accuracy on tasks; the updates until a loss, and
    the rates that `trials` chose."""
    perplexities = numbers.perplexity_rows(rows)
    return [
        *(_perplexities(perplexities, measure) for measure in numbers.measures(perplexities)),
        *_differences(perplexities),
        *_costs(perplexities),
        *_times(perplexities),
        *_passes(perplexities),
        *(_accuracies(name, mine) for name, mine in numbers.tasks(rows).items()),
        *updates_to_loss(perplexities),
        *chosen_rates(trials),
    ]


def _perplexities(rows: Sequence[Row], measure: str) -> Table:
    scored = max(row.get(f"{measure}_tokens", 0) for row in rows) * max(1, len(numbers.texts(rows)))
    title = _TITLES[measure].format(tokens=scored, length=numbers.last_length(rows))
    return _by_length(title, rows, lambda label: numbers.curve(rows, label, measure), numbers.number)


def _accuracies(name: str, rows: Sequence[Row]) -> Table:
    cases, depths = rows[0]["cases"], len({row["depth"] for row in rows})
    places = "each length" if depths == 1 else f"each of {depths} depths of each length"
    chance = f"; a guess has {percent(rows[0]['chance'])}" if rows[0]["chance"] else ""
    title = f"{numbers.spoken(name)}: right answers in % ({cases} case{'s' * (cases > 1)} at {places}{chance})"
    return _by_length(title, rows, lambda label: numbers.accuracies(rows, label), percent)


def _by_length(title: str, rows: Sequence[Row], points: Callable[[str], dict[int, Estimate]], written: Format) -> Table:
    found = {label: points(label) for label in numbers.labels(rows)}
    body = {label: [shown(mine.get(n), written) for n in numbers.lengths(rows)] for label, mine in found.items()}
    return table(title, headings(numbers.lengths(rows), numbers.train_length(rows)), body)


def _differences(rows: Sequence[Row]) -> list[Table]:
    """The difference of every scheme from the first one, by the same seeds."""
    first, own = numbers.baseline(rows), numbers.train_length(rows)
    at = sorted({own if own in numbers.lengths(rows) else numbers.lengths(rows)[0], *numbers.lengths(rows)[-2:]})
    found = {
        label: [numbers.difference(rows, label, first, n) for n in at]
        for label in numbers.labels(rows)
        if label != first
    }
    if not any(any(each) for each in found.values()):
        return []
    texts = numbers.texts(rows)
    over = (
        f"of the last tokens, by {len(texts)} texts"
        if texts
        else f"over the whole window, by {numbers.seeds(rows)} seeds"
    )
    title = (
        f"Paired differences from {first} in nats per token {over}: mean [95 % interval by Student's t]; ≈ is within "
        "noise, as the interval includes 0"
    )
    return [table(title, headings(at, own), {label: list(map(_written, each)) for label, each in found.items()})]


def _written(found: numbers.Interval | None) -> str:
    if found is None:
        return "-"
    return f"{'≈ ' if found.has_zero else ''}{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _costs(rows: Sequence[Row]) -> list[Table]:
    """Speed and memory of the trainings that had a process of their own; empty if there are none.

    Those that trained together as one program have no speed, and the memory of their process is that of all.
    """
    alone = [row for row in rows if row.get("train_tokens_per_second")]
    if not alone:
        return []
    mine = numbers.grouped([row for row in alone if row["length"] == numbers.lengths(alone)[0]], "label")
    speeds = {label: numbers.estimate(row["train_tokens_per_second"] for row in found) for label, found in mine.items()}
    memory = {label: numbers.estimate(row.get("peak_memory_bytes") for row in found) for label, found in mine.items()}
    columns = {"training tokens/s": (speeds, whole), "training peak MiB": (memory, lambda size: whole(size / 2**20))}
    known = {name: column for name, column in columns.items() if any(column[0].values())}
    meaning = "mean and spread over seeds" if numbers.seeds(alone) > 1 else _SINGLE
    body = {label: [shown(values[label], written) for values, written in known.values()] for label in mine}
    return [table(f"Cost of training, each in a process of its own ({meaning})", list(known), body)]


_SINGLE = "single runs, which vary by some ten percent under other load on the machine"


def _times(rows: Sequence[Row]) -> list[Table]:
    """What the wall-clock time of training was spent on, if it is known."""
    found = numbers.grouped([row for row in rows if row.get("train_seconds")], "label")
    kinds = list(dict.fromkeys(kind for mine in found.values() for row in mine for kind in row["train_seconds"]))

    def share(mine: Sequence[Row], kind: str) -> str:
        return percent(
            statistics.fmean(row["train_seconds"][kind] / sum(row["train_seconds"].values()) for row in mine)
        )

    body = {label: [share(mine, kind) for kind in kinds] for label, mine in found.items()}
    return [table("Time of training in % of the wall-clock: steps are the goodput", kinds, body)] if body else []


def _passes(rows: Sequence[Row]) -> list[Table]:
    """Tokens a second and the memory of one pass of a study, at its longest length; empty without a study."""
    read = [row for row in rows if row.get("memory_bytes")]
    longest = [row for row in read if row["length"] == numbers.lengths(read)[-1]]
    body = {
        # The fastest of the texts: other load can only slow it down.
        label: (whole(max(row["tokens_per_second"] for row in mine)), whole(mine[0]["memory_bytes"] / 2**20))
        for label, mine in numbers.grouped(longest, "label").items()
    }
    header = ("tokens/s", "MiB of parameters and activations")
    return [table(f"Cost of one pass over {longest[0]['length']:,} tokens", header, body)] if body else []


# --- trainings that end at a loss, and trials -------------------------------------------------------------------------


def updates_to_loss(rows: Sequence[Row]) -> list[Table]:
    """The updates of every seed, with the median first; empty if trainings do not end at a loss."""
    if not (found := numbers.updates(rows)):
        return []
    loss, most = numbers.stop(rows)
    title = f"Updates until the loss was below {loss:g} nats per token, of {most:,}"
    body = {label: (_reached(mine), _median(mine), _each(mine)) for label, mine in found.items()}
    return [table(title, ("reached", "median", "every seed"), body)]


def _reached(updates: Sequence[int | None]) -> str:
    return f"{len(updates) - updates.count(None)} of {len(updates)}"


def _median(updates: Sequence[int | None]) -> str:
    """The median over all seeds; unknown if half of them or more have not reached the loss."""
    middle = statistics.median_high(math.inf if each is None else each for each in updates)
    return "-" if middle == math.inf else whole(middle)


def _each(updates: Sequence[int | None]) -> str:
    known = sorted(each for each in updates if each is not None)
    return ", ".join([*map(str, known), *["-"] * updates.count(None)])


def counted_seeds(rows: Sequence[Row]) -> list[str]:
    """A line that says how many seeds count in the tasks; empty if all do."""
    short = [f"{label} {_reached(mine)}" for label, mine in numbers.updates(rows).items() if None in mine]
    if not short:
        return []
    return [
        f"Accuracy on tasks is that of trainings whose loss fell below {numbers.stop(rows)[0]:g}: {', '.join(short)}."
    ]


def chosen_rates(trials: Sequence[Row]) -> list[Table]:
    """The rates of every scheme, and how its best trial compares with the second best; empty without trials."""
    body = {label: _choice(mine) for label, mine in numbers.grouped(trials, "label").items()}
    header = ("learning rate", "factor for positions", "loss", "second best", "trials")
    title = "Learning rates, chosen by the loss at the training length on text that is used for no other number"
    return [table(title, header, body)] if body else []


def _choice(trials: Sequence[Row]) -> tuple[str, ...]:
    tried = numbers.grouped(trials, "learning_rate", "position_factor")
    best, *others = sorted(map(numbers.training_length_loss, tried.values()))
    rate, factor = next(choice for choice, rows in tried.items() if rows[0]["chosen"])
    second = f"{others[0] - best:.4f}" if others else "-"
    return f"{rate:.3g}", f"{factor:.3g}", f"{best:.4f}", second, str(len(tried))


# --- findings ---------------------------------------------------------------------------------------------------------


def findings(rows: Sequence[Row]) -> list[str]:
    """A sentence on perplexity, then one for every kind of figure that is omitted because it would be empty."""
    return [
        *_on_perplexity(numbers.perplexity_rows(rows)),
        *_on_few_windows(numbers.perplexity_rows(rows)),
        *_on_guesses(rows),
    ]


_MOST_NAMED = 4  # schemes of the same perplexity are counted from this number on


def _on_perplexity(rows: Sequence[Row]) -> list[str]:
    """The best and the worst scheme at the longest length for which several have numbers; in a study, at each."""
    curves = {label: numbers.curve(rows, label, numbers.measures(rows)[0]) for label in numbers.labels(rows)}
    found = {n: {label: mine[n].mean for label, mine in curves.items() if n in mine} for n in numbers.lengths(rows)}
    most = max(map(len, found.values()), default=0)
    compared = [n for n, means in found.items() if len(means) >= min(2, most) > 0]
    at = compared if numbers.texts(rows) else compared[-1:]
    return [_best_and_worst(rows, found[n], n) + _beside(found, n) + "." for n in at]


def _best_and_worst(rows: Sequence[Row], means: Mapping[str, float], length: int) -> str:
    where, order = _where(length, numbers.train_length(rows)), sorted(means, key=means.__getitem__)
    lowest = numbers.number(means[order[0]])
    best = [label for label in order if numbers.number(means[label]) == lowest]
    if len(order) == 1:
        return f"{where} {order[0]} has a perplexity of {lowest}"
    if best == order:
        return f"{where} all schemes have the same perplexity ({lowest})"
    named = " and ".join(best) if len(best) < _MOST_NAMED else f"{len(best)} schemes"
    verb, worst = "has" if len(best) == 1 else "have", f"{order[-1]} the highest ({numbers.number(means[order[-1]])})"
    behind = _distance(rows, order[0], order[len(best)], length)
    return f"{where} {named} {verb} the lowest perplexity ({lowest}), {worst}{behind}"


def _beside(found: Mapping[int, Mapping[str, float]], length: int) -> str:
    """The perplexity of a single scheme at its shortest length; empty for several."""
    label, *others = found[length]
    short = min(n for n, means in found.items() if label in means)
    return f", {numbers.number(found[short][label])} at {short:,} tokens" if not others and short < length else ""


def _where(length: int, own: int | None) -> str:
    if own is None:
        return f"At {length:,} tokens"
    times = "the" if length == own else f"{length / own:.3g} times the"
    return f"At {times} training length ({length:,} tokens)"


def _distance(rows: Sequence[Row], best: str, second: str, length: int) -> str:
    """Whether the best differs from the second by more than the noise of seeds or texts; empty with one."""
    found = numbers.difference(rows, second, best, length)
    if found is None:
        return ""
    size = f"{found.mean:.3f} nats per token, 95 % interval {found.low:.3f} to {found.high:.3f}"
    noise = f"the noise of the {'texts' if numbers.texts(rows) else 'seeds'} ({size})"
    if found.low > 0:
        return f"; {best} is ahead of the next, {second}, by more than {noise}"
    return f"; between {best} and the next, {second}, the difference is within {noise}"


def _on_few_windows(rows: Sequence[Row]) -> list[str]:
    """The curves that are omitted because too few windows were measured."""
    last = f"the last {numbers.last_length(rows)} tokens ({numbers.endings(rows)} windows, see the table)"
    placed = any(numbers.positions(rows, label)[0] for label in numbers.labels(rows))
    omitted = {
        last: any(row.get("last_tokens") for row in rows) and "last" not in numbers.shown_measures(rows),
        "perplexity by position": any(row.get("position_ends") for row in rows) and not placed,
    }
    what = " and ".join(name for name, is_so in omitted.items() if is_so)
    least = f"a curve takes {numbers.FEW}, and a point by position {numbers.FEW_TOKENS} tokens"
    return [f"No curve is shown of {what}: too few windows were measured ({least})."] if what else []


def _on_guesses(rows: Sequence[Row]) -> list[str]:
    """The tasks that no scheme has learned."""
    measured = {
        name: mine for name, mine in numbers.tasks(rows).items() if any(row["accuracy"] is not None for row in mine)
    }
    idle = ", ".join(numbers.spoken(name) for name, mine in measured.items() if not numbers.is_above_chance(mine))
    return [f"{idle}: no scheme is above a guess by more than noise, so there is no figure."] if idle else []
