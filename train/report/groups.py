"""Which schemes share a panel: all if they are few, else those of one family, with a reference in every panel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from train.report.families import FAMILIES
from train.report.numbers import Row, labels

MOST = 8
"""The maximal number of lines in a panel."""
_OWN = 4  # a training with at least this many schemes gets panels of its own, in a family of several panels


@dataclass(frozen=True)
class Group:
    """The schemes of a panel, and the reference that all panels share; the title is empty if there is one panel
    only."""

    title: str
    labels: tuple[str, ...]
    reference: str | None = None


def groups(rows: Sequence[Row]) -> list[Group]:
    """One group of all schemes if they are at most `MOST`; otherwise groups of at most that size.

    Families are read from the column `family`. A scheme and its extensions stay together, in panels of their own if
    they are many. Rows without that column form one family.
    """
    names, reference = labels(rows), baseline(rows)
    if len(names) <= MOST:
        return [Group("", tuple(names))]
    found = [
        (title, part)
        for family, units in _families(rows).items()
        for title, parts in _panels(family, units, reference)
        for part in parts
    ]
    titles = [title for title, _ in found]
    return [Group(_numbered(titles, n), (reference, *part), reference) for n, (_, part) in enumerate(found)]


def baseline(rows: Sequence[Row]) -> str:
    """The scheme that others are compared with: the first one that was trained."""
    return next((row["label"] for row in rows if row["base"] is None), rows[0]["label"])


def _families(rows: Sequence[Row]) -> dict[str, dict[str, list[str]]]:
    """For each family its trainings, by the trained scheme's name: that scheme, if it is listed, and its extensions."""
    units: dict[str, list[str]] = {}
    for label, base in {row["label"]: row["base"] for row in rows}.items():
        units.setdefault(base or label, []).append(label)
    known = {row["base"] or row["label"]: row["family"] for row in rows if row.get("family")}
    order = [*FAMILIES, *dict.fromkeys(known.values()), ""]
    found = {name: {root: unit for root, unit in units.items() if known.get(root, "") == name} for name in order}
    return {name: mine for name, mine in found.items() if mine}


def _panels(family: str, units: dict[str, list[str]], reference: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The panels of a family without the reference: a title, and the schemes of each panel that has it."""
    title, room = family[:1].upper() + family[1:] or "Schemes", MOST - 1
    units = {root: [label for label in unit if label != reference] for root, unit in units.items()}
    several = sum(map(len, units.values())) > room
    apart = {root: unit for root, unit in units.items() if several and len(unit) >= _OWN}
    together = [unit for root, unit in units.items() if unit and root not in apart]
    if together:
        yield title, _packed(together, room)
    for root, unit in apart.items():
        others = [[label] for label in unit if label != root]
        repeated = [root] if root in unit else []
        yield f"{root}, extended", [repeated + part for part in _packed(others, room - len(repeated))]


def _packed(units: Sequence[list[str]], room: int) -> list[list[str]]:
    """The fewest panels that hold the units without splitting them, about equally full."""
    count = sum(map(len, units))
    full = -(-count // -(-count // room))
    parts: list[list[str]] = [[]]
    for unit in units:
        if len(parts[-1]) >= full or len(parts[-1]) + len(unit) > room:
            parts.append([])
        parts[-1] += unit
    return parts


def _numbered(titles: Sequence[str], n: int) -> str:
    """The n-th title, numbered among equal titles."""
    times = titles.count(titles[n])
    return titles[n] + (f" ({titles[: n + 1].count(titles[n])} of {times})" if times > 1 else "")
