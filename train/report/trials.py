"""The trials that chose the learning rates of a comparison, as tables.

Rows of trials have the columns of perplexity, and

    learning_rate, position_factor   what was tried;  chosen: whether the scheme's seeds were trained with it
"""

from collections.abc import Sequence

from train.report.numbers import Row, grouped, labels, lengths, training_length_loss
from train.report.tables import Table, number

_CHOICE = "learning_rate", "position_factor"


def tables_of_trials(trials: Sequence[Row]) -> list[Table]:
    """The choice for each scheme, and every trial; empty without trials."""
    return [*chosen_rates(trials), _every_trial(trials)] if trials else []


def chosen_rates(trials: Sequence[Row]) -> list[Table]:
    """The rates of every scheme, and how its best trial compares with the second best; empty without trials."""
    if not trials:
        return []
    body = []
    for label in labels(trials):
        mine = grouped([row for row in trials if row["label"] == label], *_CHOICE)
        losses = sorted(training_length_loss(rows) for rows in mine.values())
        (rate, factor), _ = next((choice, rows) for choice, rows in mine.items() if rows[0]["chosen"])
        second = f"{losses[1] - losses[0]:.4f}" if len(losses) > 1 else "-"
        body.append((label, f"{rate:.3g}", f"{factor:.3g}", f"{losses[0]:.4f}", second, str(len(losses))))
    header = ("scheme", "learning rate", "factor for positions", "loss", "second best", "trials")
    title = "Learning rates, chosen by the loss at the training length on text that is used for no other number"
    return [Table(title, header, tuple(body))]


def _every_trial(trials: Sequence[Row]) -> Table:
    measured = lengths([row for row in trials if "length" in row])
    body = []
    for label in labels(trials):
        mine = grouped([row for row in trials if row["label"] == label], *_CHOICE)
        for (rate, factor), rows in sorted(mine.items()):
            found = {row.get("length"): row.get("window_perplexity") for row in rows}
            shown = (number(found[n]) if found.get(n) else "-" for n in measured)
            mark = "chosen" if rows[0]["chosen"] else rows[0]["error"] or ""
            body.append((label, f"{rate:.3g}", f"{factor:.3g}", *shown, mark))
    header = ("scheme", "learning rate", "factor for positions", *map(str, measured), "")
    return Table("Every trial: perplexity over whole windows of the text of the trials", header, tuple(body))
