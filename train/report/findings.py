"""The main results, in sentences."""

from collections.abc import Sequence

from train.report.formats import number, spoken
from train.report.numbers import (
    FEW,
    FEW_TOKENS,
    Row,
    curve,
    endings,
    is_above_chance,
    labels,
    last_length,
    lengths,
    perplexity_rows,
    positions,
    tasks,
    train_length,
)
from train.report.pairs import difference


def findings(rows: Sequence[Row]) -> list[str]:
    """A sentence on perplexity, then one for every kind of figure that is omitted because it would be empty."""
    return [*_on_perplexity(perplexity_rows(rows)), *_on_few_windows(perplexity_rows(rows)), *_on_guesses(rows)]


def _on_perplexity(rows: Sequence[Row]) -> list[str]:
    """The best and the worst scheme at the longest length for which several have numbers."""
    found = {n: _at(rows, n) for n in lengths(rows)}
    most = max(map(len, found.values()), default=0)
    longest = max((n for n, means in found.items() if len(means) >= min(2, most) > 0), default=0)
    if not longest:
        return []
    means, where = found[longest], _where(rows, longest)
    if len(means) == 1:
        return [_alone(rows, longest, *means, where)]
    order = sorted(means, key=means.__getitem__)
    best = [name for name in order if number(means[name]) == number(means[order[0]])]
    if len(best) == len(order):
        return [f"{where} all schemes have the same perplexity ({number(means[order[0]])})."]
    named = f"{' and '.join(best)} {'has' if len(best) == 1 else 'have'} the lowest perplexity"
    worst = f"{order[-1]} the highest ({number(means[order[-1]])})"
    return [f"{where} {named} ({number(means[best[0]])}), {worst}{_distance(rows, *order[:2], longest)}."]


def _at(rows: Sequence[Row], length: int) -> dict[str, float]:
    """The perplexity of every scheme that has one at a length."""
    found = {label: curve(rows, label, "window").get(length) for label in labels(rows)}
    return {label: value.mean for label, value in found.items() if value is not None}


def _where(rows: Sequence[Row], length: int) -> str:
    own = train_length(rows)
    if own is None:
        return f"At {length:,} tokens"
    times = "the" if length == own else f"{length / own:.3g} times the"
    return f"At {times} training length ({length:,} tokens)"


def _alone(rows: Sequence[Row], length: int, label: str, where: str) -> str:
    """The only scheme's perplexity, with that at the shortest length."""
    points = curve(rows, label, "window")
    short = min(points)
    beside = f", {number(points[short].mean)} at {short:,} tokens" if short < length else ""
    return f"{where} {label} has a perplexity of {number(points[length].mean)}{beside}."


def _distance(rows: Sequence[Row], best: str, second: str, length: int) -> str:
    """Whether the best differs from the second by more than the noise of seeds; empty with one seed."""
    found = difference(rows, second, best, length)
    if found is None:
        return ""
    size = f"{found.mean:.3f} nats per token, 95 % interval {found.low:.3f} to {found.high:.3f}"
    if found.low > 0:
        return f"; {best} is ahead of the second, {second}, by more than the noise of the seeds ({size})"
    return f"; between {best} and the second, {second}, the difference is within the noise of the seeds ({size})"


def _on_few_windows(rows: Sequence[Row]) -> list[str]:
    """The curves that are omitted because too few windows were measured."""
    found = []
    if any(row.get("last_tokens") for row in rows) and endings(rows) < FEW:
        found.append(
            f"the last {last_length(rows)} tokens ({endings(rows)} windows, of which the table has the numbers)"
        )
    if any(row.get("position_ends") for row in rows) and not any(positions(rows, label)[0] for label in labels(rows)):
        found.append("perplexity by position")
    what = " and ".join(found)
    least = f"a curve takes {FEW}, and a point by position {FEW_TOKENS} tokens"
    return [f"No curve is shown of {what}: too few windows were measured ({least})."] if found else []


def _on_guesses(rows: Sequence[Row]) -> list[str]:
    """The tasks that no scheme has learned."""
    idle = [spoken(name) for name, mine in tasks(rows).items() if _is_guessed(mine)]
    what = ", ".join(idle)
    return [f"{what}: no scheme is above a guess by more than noise, so there is no figure."] if idle else []


def _is_guessed(rows: Sequence[Row]) -> bool:
    return any(row["accuracy"] is not None for row in rows) and not is_above_chance(rows)
