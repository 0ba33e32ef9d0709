"""Which schemes share a panel: all where they are few, else those of one family, beside one that is in every panel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from train.report.families import FAMILIES
from train.report.numbers import Row, labels

MOST = 8
"""Lines of a panel."""
_OWN = 4  # schemes of one training from which on they have a panel of their own in a family that needs several


@dataclass(frozen=True)
class Group:
    """The schemes of a panel, and the one among them that all panels share; the title is empty for the only panel."""

    title: str
    labels: tuple[str, ...]
    reference: str | None = None


def groups(rows: Sequence[Row]) -> list[Group]:
    """One group of all schemes up to `MOST`; of more, groups of that size at most.

    Their families are those of the column `family`. A scheme and what extends it stay together, in panels of their own
    where they are many. Rows without that column are one family.
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
    """The trainings of each family by the name of what was trained: itself where it is listed, and its extensions."""
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
    """As few panels as hold the units whole, about equally full."""
    count = sum(map(len, units))
    full = -(-count // -(-count // room))
    parts: list[list[str]] = [[]]
    for unit in units:
        if len(parts[-1]) >= full or len(parts[-1]) + len(unit) > room:
            parts.append([])
        parts[-1] += unit
    return parts


def _numbered(titles: Sequence[str], n: int) -> str:
    """The n-th title, with its number among those that are equal."""
    times = titles.count(titles[n])
    return titles[n] + (f" ({titles[: n + 1].count(titles[n])} of {times})" if times > 1 else "")
