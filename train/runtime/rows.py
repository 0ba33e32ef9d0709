"""Files of results: a row is a line of JSON."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.runtime.paths import write_file


def read_rows(location: Path) -> list[dict[str, Any]]:
    """The rows of a file. An incomplete last line, left by an interruption, is dropped."""
    text = location.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write_rows(location: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of rows, atomically."""
    write_file(location, "".join(json.dumps(row) + "\n" for row in rows))


def append_row(location: Path, row: Mapping[str, Any]) -> None:
    """Adds a row to a file, which is written anew, without an incomplete last line."""
    write_rows(location, [*read_rows(location), row])
