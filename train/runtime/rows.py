"""Files of results: a row is a line of JSON. Rows with one key were measured together, of the same things."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.runtime.paths import write_file


def key_of(values: Any) -> str:
    """A hash of plain values, as of all that determines the numbers of a row."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(location: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no file. An incomplete last line, left by an interruption, is dropped."""
    text = location.read_text(encoding="utf-8") if location.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_rows(location: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of rows, atomically."""
    write_file(location, "".join(json.dumps(row) + "\n" for row in rows))


def append_rows(location: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows to a file, which is written anew, without an incomplete last line."""
    write_rows(location, [*read_rows(location), *rows])
