"""What is left out of the text: damaged files, and bad records (lines, rows) in the other files."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_NAMED_RECORDS = 3  # bad records of a file that are named
_NAMED_FILES = 5


class BadRecords(NamedTuple):
    """The number of bad records in a file, and what is wrong with the first few."""

    count: int
    first: list[str]


@dataclass
class LeftOut:
    """What is left out of some files, which are named by path, or by number while a corpus is built.

    Attributes:
        records: how many records were read, good or bad.
        corrupt: why a file is left out as a whole.
        bad: the bad records of a file.
    """

    records: int = 0
    corrupt: dict[Any, str] = field(default_factory=dict)
    bad: dict[Any, BadRecords] = field(default_factory=dict)

    def add_bad(self, file: Any, reason: str) -> None:
        """Counts a bad record."""
        count, first = self.bad.get(file, BadRecords(0, []))
        self.bad[file] = BadRecords(count + 1, [*first, reason][:_NAMED_RECORDS])

    def add_all(self, other: "LeftOut") -> None:
        """Adds what is left out of other files."""
        self.records += other.records
        self.corrupt |= other.corrupt
        self.bad |= other.bad

    def dump(self) -> dict[str, Any]:
        """A value for JSON, which `load` reads."""
        return {"records": self.records, "corrupt": self.corrupt, "bad": self.bad}

    @staticmethod
    def load(values: dict[str, Any]) -> "LeftOut":
        """The value that was dumped, with texts as names of files, since JSON has no other keys."""
        bad = {file: BadRecords(*found) for file, found in values["bad"].items()}
        return LeftOut(values["records"], values["corrupt"], bad)

    def renamed(self, name: Callable[[Any], Any]) -> "LeftOut":
        """The same with other names of files."""
        corrupt = {name(file): reason for file, reason in self.corrupt.items()}
        return LeftOut(self.records, corrupt, {name(file): found for file, found in self.bad.items()})


def report(left_out: LeftOut, files: int, bad_records: float, log: Callable[[str], Any]) -> None:
    """Logs what is left out of a number of files: the damaged ones in one line, bad records in a line for each file.

    Raises ValueError if all files are damaged, or if the share of bad records is above `bad_records`.
    """
    _report_corrupt(left_out.corrupt, files, log)
    if not left_out.bad:
        return
    bad = sum(found.count for found in left_out.bad.values())
    share = bad / left_out.records
    counts = f"data: {bad:,} of {left_out.records:,} records, in {len(left_out.bad)} of {files} files, are bad"
    if share > bad_records:
        raise ValueError(
            f"{counts}, more than data.bad_records={bad_records:g} allows: {named_bad(left_out)}; "
            f"data.bad_records={math.ceil(1000 * share) / 1000:g} would leave them out"
        )
    log(f"{counts} and left out")
    for path, found in list(left_out.bad.items())[:_NAMED_FILES]:
        log(f"data: {path}: {found.count:,} bad: {_listed(found.first, found.count, '; ')}")


def named_bad(left_out: LeftOut) -> str:
    """The first files with bad records, and what is wrong with the first record of each."""
    found = [f"{path} ({bad.first[0]})" for path, bad in list(left_out.bad.items())[:_NAMED_FILES]]
    return _listed(found, len(left_out.bad), ", ")


def _report_corrupt(corrupt: dict[str, str], files: int, log: Callable[[str], Any]) -> None:
    if not corrupt:
        return
    named = [f"{path} ({reason})" for path, reason in list(corrupt.items())[:_NAMED_FILES]]
    listed = _listed(named, len(corrupt), ", ")
    if len(corrupt) == files:
        raise ValueError(f"data: none of the files can be read, {files} in all: {listed}")
    log(f"data: {len(corrupt)} of {files} files are damaged and left out: {listed}")


def _listed(first: list[str], count: int, separator: str) -> str:
    """The first of `count` things, and how many more there are."""
    more = f"{separator}and {count - len(first)} more" if count > len(first) else ""
    return separator.join(first) + more
