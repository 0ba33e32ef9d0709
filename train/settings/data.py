"""Which text to read."""

from dataclasses import dataclass
from typing import Literal

from train.settings.checks import check, check_fraction


@dataclass(frozen=True)
class DataConfig:
    """Which text to read. Every file (.txt, .py) or line (.jsonl) is a document; whole documents are held out."""

    source: Literal["stdlib", "files"] = "stdlib"  # Python's own standard library, or `paths`
    paths: tuple[str, ...] = ()  # files or globs of .txt and .jsonl
    text_key: str = "text"  # where a .jsonl line keeps its text
    held_out: float = 0.05  # share of the documents kept from training, for evaluation

    def __post_init__(self):
        check_fraction("data.held_out", self.held_out)
        if self.source == "files":
            check(bool(self.paths), "data.paths is empty: name the .txt or .jsonl files (or globs) to read")
        else:
            check(not self.paths, f"data.paths is read only with data.source=files, found source {self.source!r}")
