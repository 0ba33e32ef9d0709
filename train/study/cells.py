"""The cells of a study, in the order in which they are measured, and the file that keeps what is done."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.config import Config, SchemeConfig
from train.extension import completed
from train.model import own_length
from train.settings.checks import check, unknown

RESULTS = "results.jsonl"
TEXT, PASSKEY = "text", "passkey"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to be read: a name, and as many tokens as the longest cell needs."""

    name: str
    tokens: np.ndarray

    def last(self, length: int) -> np.ndarray:
        """The last ``length + 1`` tokens: as many inputs, each with a target."""
        return np.asarray(self.tokens[-length - 1 :], np.int32)

    def digest(self, length: int) -> str:
        """Differs between texts that end in different tokens."""
        return hashlib.sha256(self.last(length).tobytes()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One measurement.

    Args:
        entry: the extension.
        extend: its slots with all options, at this length.
        kind: ``"text"`` or ``"passkey"``.
        length: in tokens.
        text: that is read, of a cell of text.
        depth: of the pass key, of a cell of that kind.
        sizes: what else decides the numbers.
    """

    entry: SchemeConfig
    extend: Mapping[str, Any]
    kind: str
    length: int
    text: Text | None = None
    depth: float | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from all others; a row that has the same is its result."""
        text = {} if self.text is None else {"text": self.text.name, "digest": self.text.digest(self.length)}
        found = {"label": self.entry.label, "extend": self.extend, "kind": self.kind, "length": self.length}
        return json.loads(json.dumps(found | text | {"depth": self.depth, "sizes": self.sizes}))

    @property
    def words(self) -> str:
        """It, in a line."""
        what = f"pass key at depth {self.depth:.2f}" if self.text is None else self.text.name
        return f"{self.entry.label} at {self.length:,}: {what}"


def chosen_entries(config: Config) -> list[SchemeConfig]:
    """The extensions that are studied. Raises ValueError for a label in ``compare.only`` that is none of them."""
    entries, only = config.compare.schemes, config.compare.only
    labels = [entry.label for entry in entries]
    for label in only:
        if label not in labels:
            raise unknown("compare.only", label, labels, "label")
    return [entry for entry in entries if not only or entry.label in only]


def text_cells(config: Config, entries: Sequence[SchemeConfig], texts: Sequence[Text]) -> Iterator[Cell]:
    """The cells of text, shorter ones first, so that a first picture is there soon."""
    for length in config.evaluate.lengths:
        for entry in entries:
            extend = extension(config, entry, length)
            for text in texts:
                yield Cell(entry, extend, TEXT, length, text=text, sizes={"scored": scored(config)})


def passkey_cells(config: Config, entries: Sequence[SchemeConfig]) -> Iterator[Cell]:
    """The cells of the pass key: each length and depth."""
    section = config.evaluate.passkey
    for length in section.lengths or config.evaluate.lengths:
        for entry in entries:
            extend = extension(config, entry, length)
            for depth in np.linspace(0, 1, section.depths):
                yield Cell(entry, extend, PASSKEY, length, depth=float(depth), sizes={"cases": section.cases})


def extension(config: Config, entry: SchemeConfig, length: int) -> dict[str, Any]:
    """The slots of an entry with all options at a length."""
    return completed(entry.extend, own_length(config), length)


def scored(config: Config) -> int:
    """How many tokens at the end of a text are scored: as many as the shortest length has."""
    return min(config.evaluate.lengths)


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """What is done. A last line that was cut off by an interruption is left out."""
    place = directory / RESULTS
    lines = place.read_text(encoding="utf-8").split("\n") if place.exists() else [""]
    return [json.loads(line) for line in lines[:-1] if line]


def append_row(directory: Path, row: Mapping[str, Any]) -> None:
    """Keeps a result. What an interruption left of a line before is removed first."""
    place = directory / RESULTS
    whole = place.read_bytes() if place.exists() else b""
    end = whole.rfind(b"\n") + 1
    with place.open("r+b" if place.exists() else "wb") as file:
        file.truncate(end)
        file.seek(end)
        file.write(json.dumps(row).encode() + b"\n")


def is_done(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a result is there."""
    key = cell.key
    return any(all(row.get(name) == value for name, value in key.items()) for row in rows)


def check_entries(config: Config) -> None:
    """Raises ValueError for a study without extensions, or with an entry that would have to be trained."""
    check(
        bool(config.compare.schemes), "compare.schemes is empty: list the extensions, as {name: released, extend: ...}"
    )
    for entry in config.compare.schemes:
        check(
            entry.name == "released",
            f"compare.schemes: {entry.label!r} is not the scheme of the model under init, so it must be trained; set "
            "train.steps, or name it released",
        )
