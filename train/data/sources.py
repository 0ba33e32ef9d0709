"""Where documents come from: the files of every part of the mixture, and the documents in them."""

import glob
import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from train.config import DataConfig
from train.config.settings.checks import check
from train.data.readers import BadRecord, Conversation, CorruptFile, Document, Wanted, check_readable, texts
from train.data.storage import find, is_url, open_url

_HOPELESS = 1000  # bad records; a file that begins with so many is taken to have no good one
_NAMED_FILES = 5  # files with something left out that are named
_STAMPS = ("etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "created")

Log = Callable[[str], Any]
"""Takes progress messages for the user, on what is left out and what takes long."""


def silent(_: str) -> None:
    """Discards the line."""


class SourceFile(NamedTuple):
    """A file of text. Size and stamp (its ETag or time of change) show whether it has changed since it was read."""

    name: str
    path: str
    size: int
    stamp: str


@dataclass
class LeftOut:
    """What is left out of some files: damaged files, and bad records (lines, rows) in the other files.

    Attributes:
        records: how many records were read, good or bad.
        corrupt: why a file is left out as a whole, by path.
        bad: how many records of a file are bad, and what is wrong with the first, by path.
    """

    records: int = 0
    corrupt: dict[str, str] = field(default_factory=dict)
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add_bad(self, path: str, reason: str) -> int:
        """Counts a bad record. Returns how many the file has so far."""
        count, first = self.bad.get(path, (0, reason))
        self.bad[path] = count + 1, first
        return count + 1

    def add_all(self, other: "LeftOut") -> None:
        """Adds what is left out of other files."""
        self.records += other.records
        self.corrupt |= other.corrupt
        self.bad |= other.bad

    def named_bad(self) -> str:
        """The first files with bad records, and what is wrong with the first record of each."""
        return _listed([f"{path} ({count:,}: {first})" for path, (count, first) in self.bad.items()])


def report(left_out: LeftOut, files: int, bad_records: float, log: Log) -> None:
    """Logs what is left out of a number of files: a line for damaged files, and one for bad records.

    Raises ValueError if all files are damaged, or if the share of bad records is above `bad_records`.
    """
    if left_out.corrupt:
        listed = _listed([f"{path} ({reason})" for path, reason in left_out.corrupt.items()])
        if len(left_out.corrupt) == files:
            raise ValueError(f"data: none of the files can be read, {files} in all: {listed}")
        log(f"data: {len(left_out.corrupt)} of {files} files are damaged and left out: {listed}")
    if left_out.bad:
        bad = sum(count for count, _ in left_out.bad.values())
        share = bad / left_out.records
        counts = f"data: {bad:,} of {left_out.records:,} records, in {len(left_out.bad)} of {files} files, are bad"
        if share > bad_records:
            raise ValueError(
                f"{counts}, more than data.bad_records={bad_records:g} allows: {left_out.named_bad()}; "
                f"data.bad_records={math.ceil(1000 * share) / 1000:g} would leave them out"
            )
        log(f"{counts} and left out: {left_out.named_bad()}")


def _listed(found: Sequence[str]) -> str:
    """The first few of several things, and how many more there are."""
    more = [f"and {len(found) - _NAMED_FILES} more"] if len(found) > _NAMED_FILES else []
    return ", ".join([*found[:_NAMED_FILES], *more])


def all_documents(config: DataConfig, log: Log = silent) -> list[Document]:
    """All documents, by part of the mixture, file and offset in it, held-out ones too; empty ones are left out.

    They are all in memory, and not tokenised: for reading them, or for a small corpus. Damaged files and bad records
    are reported and left out.

    Raises FileNotFoundError for a path that names nothing, and ValueError if no text can be read, or if too many
    records are bad, or for conversations.
    """
    check(not config.has_conversations, "data.messages_key: plain text is read here; name a text by data.text_key")
    found = []
    for files, part in zip(list_files(config), config.parts, strict=True):
        documents, left_out = [], LeftOut()
        for file in files:
            try:
                documents += list(read_documents(file, Wanted(part.text_key), config.bad_records, left_out))
            except CorruptFile as error:
                left_out.corrupt[file.path] = str(error)
        report(left_out, len(files), config.bad_records, log)
        if not documents:
            raise no_text(files, left_out)
        found += documents
    return found


def read_documents(
    file: SourceFile, wanted: Wanted, bad_records: float, left_out: LeftOut
) -> Iterator[Document | Conversation]:
    """The documents of a file that have text; all its records, and the bad ones, are counted in `left_out`.

    Raises CorruptFile at the first damage to the file. Raises ValueError if its first 1,000 records are all bad, unless
    `bad_records` is 1: then most likely the name of the texts is wrong, and reading on would take long.
    """
    for number, record in enumerate(texts(file.path, wanted), start=1):
        left_out.records += 1
        if isinstance(record, BadRecord):
            count = left_out.add_bad(file.path, record.reason)
            check(
                not (number == count == _HOPELESS and bad_records < 1),
                f"data: {file.path}: its first {count:,} records are all bad: {left_out.bad[file.path][1]}; "
                "data.bad_records=1 would leave them out",
            )
        elif record.text:
            yield record._replace(name=file.name + record.name)


def no_text(files: Sequence[SourceFile], left_out: LeftOut) -> ValueError:
    """The error for files that hold no text at all."""
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    bad = f" or bad: {left_out.named_bad()}" if left_out.bad else ""
    return ValueError(f"data: no text in {files[0].path}{more}; every document is empty{bad}")


def name_hash(name: str) -> int:
    """An integer below 2^48 that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:6], "big")


def list_files(config: DataConfig) -> list[list[SourceFile]]:
    """The files of every part of the mixture, by name.

    Raises FileNotFoundError for a path that names nothing, and ValueError for files that have the same name, are in two
    parts, or have no known format.
    """
    if config.source == "stdlib":
        return [standard_library()]
    parts = [_list_part(part.paths, bool(part.messages_key)) for part in config.parts]
    owner: dict[str, int] = {}
    for number, part in enumerate(parts):
        for file in part:
            if owner.setdefault(file.path, number) != number:
                raise ValueError(f"data.mixture: {file.path} is in part {owner[file.path]} and in part {number}")
    return parts


def standard_library() -> list[SourceFile]:
    """The .py files of Python's own standard library.

    Left out are third-party packages, test directories, and two packages that are not code: the help texts of
    ``pydoc_data`` and the tables of ``encodings``, which repeat each other nearly line by line.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
    paths = [path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts)]
    if not paths:
        raise ValueError(f"data.source=stdlib: no .py files under {root}; use data.source=files and data.paths")
    found = [(path.relative_to(root).as_posix(), path, path.stat()) for path in paths]
    return sorted(SourceFile(name, str(path), stat.st_size, str(stat.st_mtime)) for name, path, stat in found)


def _list_part(patterns: tuple[str, ...], conversations: bool) -> list[SourceFile]:
    """The files that the patterns match, named by the part of the path after the fixed folders (or by the file's
    name)."""
    files: dict[str, SourceFile] = {}
    seen: set[str] = set()
    for pattern in patterns:
        for file in _matches(pattern):
            location = resolved(file.path)
            if location in seen:  # under two names it could be both trained on and held out
                continue
            seen.add(location)
            check_readable(file.path, conversations)
            if files.setdefault(file.name, file) is not file:
                clash = f"{files[file.name].path} and {file.path} are both called {file.name!r}"
                raise ValueError(f"data.paths: {clash}; use one common glob")
    return sorted(files.values())


def resolved(path: str) -> str:
    """The canonical path or URL of a file, with links resolved."""
    return path if is_url(path) else str(Path(path).resolve())


def _matches(pattern: str) -> list[SourceFile]:
    found = find(pattern, "data.paths")
    start = _fixed_part(open_url(pattern, "data.paths")[1])
    files = [_source_file(path, info, start) for path, info in found.items() if info["type"] == "file"]
    if not files:
        hint = f"; for all of a folder write {pattern.rstrip('/')}/**/*.txt" if len(found) == 1 else ""
        raise FileNotFoundError(f"data.paths: no file matches {pattern!r}{hint}")
    return files


def _source_file(path: str, info: dict[str, Any], start: str) -> SourceFile:
    stamp = next((str(info[key]) for key in _STAMPS if key in info), "")
    name = PurePosixPath(info["name"]).relative_to(start).as_posix()
    return SourceFile(name, path, int(info["size"] or 0), stamp)


def _fixed_part(pattern: str) -> str:
    """The folders of a pattern before its first wildcard; of a plain path, its folder."""
    parts = PurePosixPath(pattern).parts[:-1]
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(PurePosixPath(*parts[:fixed]))
