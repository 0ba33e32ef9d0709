"""The cells of a study, in the order of measurement."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from posjax.nn.huggingface.files import is_local, open_location
from posjax.nn.huggingface.load import is_gguf
from train.config import CompareConfig, Config, MeshConfig, SchemeConfig
from train.config.settings.checks import check, unknown
from train.data.tokenizer import load_tokenizer
from train.evaluate.search import check_searchable
from train.evaluate.tasks import Vocabulary, lengths_of
from train.evaluate.windows import ending
from train.model.build import RELEASED, extension_of, model_length

TEXT, PASSKEY = "text", "passkey"


@dataclasses.dataclass(frozen=True)
class StudyText:
    """A text to read: a name, as many tokens as the longest cell needs, and the opening of the model's texts."""

    name: str
    tokens: np.ndarray
    opening: tuple[int, ...] = ()

    def last(self, length: int) -> np.ndarray:
        """The opening and the last tokens, ``length + 1`` together: ``length`` inputs, each with a target."""
        return ending(self.tokens, length, self.opening)

    def digest(self, length: int) -> str:
        """A hash of the tokens: it differs between texts that end differently."""
        return hashlib.sha256(self.last(length).tobytes()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One measurement.

    Args:
        model_digest: the hash of the model; see `digest_of_model`.
        entry: the extension.
        extend: the slots of the extension with all options at this length; those of the entry if they do not fit the
          model.
        refusal: why the slots do not fit; empty if they do.
        kind: ``"text"`` or ``"passkey"``.
        length: the length in tokens.
        text: the text to read, for a cell of text.
        depth: the depth of the pass key, for a cell of that kind.
        sizes: all other settings that determine the numbers.
    """

    model_digest: str
    entry: SchemeConfig
    extend: Mapping[str, Any]
    refusal: str
    kind: str
    length: int
    text: StudyText | None = None
    depth: float | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @cached_property
    def key(self) -> dict[str, Any]:
        """The key that identifies it; a row with the same key is its result."""
        text = {} if self.text is None else {"text": self.text.name, "digest": self.text.digest(self.length)}
        found = {"model": self.model_digest, "label": self.entry.label, "extend": self.extend, "kind": self.kind}
        found |= {"length": self.length, "depth": self.depth, "sizes": self.sizes}
        return json.loads(json.dumps(found | text))

    @property
    def description(self) -> str:
        """A description in one line."""
        what = f"pass key at depth {self.depth:.2f}" if self.text is None else self.text.name
        return f"{self.entry.label} at {self.length:,}: {what}"


def chosen_entries(config: Config) -> list[SchemeConfig]:
    """The extensions to study. Raises ValueError for an unknown label in ``compare.only``."""
    entries, only = config.compare.schemes, config.compare.only
    labels = [entry.label for entry in entries]
    for label in only:
        if label not in labels:
            raise unknown("compare.only", label, labels, "label")
    return [entry for entry in entries if not only or entry.label in only]


def is_to_be_searched(entry: SchemeConfig) -> bool:
    """Whether an entry names LongRoPE without its factors."""
    change = entry.extend.get("frequencies")
    return isinstance(change, Mapping) and change.get("name") == "longrope" and "long_factor" not in change


def cells_of(
    config: Config, model_digest: str, entries: Sequence[SchemeConfig], texts: Sequence[StudyText]
) -> list[Cell]:
    """All cells: those of text, then those of the pass key if ``evaluate.tasks`` names it.

    Args:
        config: the config of the study.
        model_digest: the hash of the model.
        entries: the extensions, with the factors found by searches.
        texts: the texts to read.
    """
    cells = [*_text_cells(config, model_digest, entries, texts)]
    return cells + ([*_passkey_cells(config, model_digest, entries)] if PASSKEY in config.evaluate.tasks else [])


def _text_cells(
    config: Config, model_digest: str, entries: Sequence[SchemeConfig], texts: Sequence[StudyText]
) -> Iterator[Cell]:
    """The cells of text: shorter ones first, and text by text, so that all extensions can be compared early."""
    sizes = {"scored": scored(config)}
    for length in config.evaluate.lengths:
        extended = [(entry, *_extension(config, entry, length)) for entry in entries]
        for text in texts:
            for each in extended:
                yield Cell(model_digest, *each, TEXT, length, text=text, sizes=sizes)


def _passkey_cells(config: Config, model_digest: str, entries: Sequence[SchemeConfig]) -> Iterator[Cell]:
    """Each length that is long enough for a pass key, with each depth."""
    section = config.evaluate.passkey
    sizes = {"cases": section.cases}
    for length in lengths_of(PASSKEY, config.evaluate, Vocabulary(load_tokenizer(config.data))):
        for entry in entries:
            extended = _extension(config, entry, length)
            for depth in np.linspace(0, 1, section.depths):
                yield Cell(model_digest, entry, *extended, PASSKEY, length, depth=float(depth), sizes=sizes)


def _extension(config: Config, entry: SchemeConfig, length: int) -> tuple[Mapping[str, Any], str]:
    """The slots of an entry with all options at a length; or its own slots, and why they do not fit the model."""
    try:
        if is_to_be_searched(entry):
            check_searchable(config)
            raise ValueError("no factors of LongRoPE were found for this model")
        return extension_of(config, entry, length), ""
    except ValueError as error:
        return entry.extend, str(error)


def scored(config: Config) -> int:
    """The number of scored tokens at the end of a text."""
    return config.compare.scored or max(1, model_length(config) // 4)


def digest_of_model(config: Config) -> str:
    """A hash that differs between models with different weights, config, tokenizer or compute dtype.

    Local files are read completely; at a URL the file system's own checksum of the contents is used.
    """
    location = config.init.path
    files, root = open_location(location)
    names = [root] if is_gguf(location) else sorted(filter(_is_weights, files.ls(root, detail=False)))
    marks = [_file_digest(name) if is_local(files) else str(files.ukey(name)) for name in names]
    tokenizer = load_tokenizer(config.data).identity
    whole = json.dumps([config.init.values, config.model.compute_dtype, tokenizer, marks], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _file_digest(name: str) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def result(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of a cell; None if it is not measured yet.

    The row of another label is used if all else is equal, as for extensions that change nothing up to the model's
    length.
    """
    wanted = [(name, value) for name, value in cell.key.items() if name != "label"]
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted)]
    return {**found[0], "label": cell.entry.label} if found else None


def _ignored(config: Config) -> dict[str, bool]:
    """Whether the config sets keys that a study does not read: those of a training or of another kind of evaluation."""
    return {
        "stages": bool(config.stages),
        "train.mesh": config.train.mesh != MeshConfig(),
        "compare.seeds": config.compare.seeds != CompareConfig().seeds,
        "evaluate.stride": config.evaluate.stride != 0,
    }


def check_entries(config: Config) -> None:
    """Raises ValueError for a study without extensions, or with an entry that needs training."""
    check(
        bool(config.compare.schemes), "compare.schemes is empty: list the extensions, as {name: released, extend: ...}"
    )
    for entry in config.compare.schemes:
        check(
            entry.name == "released",
            f"compare.schemes: {entry.label!r} is not the scheme of the model under init, so it must be trained; set "
            "train.steps, or name it released",
        )
        beside = [*entry.options, *(["stage"] if entry.stage else [])]
        check(
            not beside,
            f"compare.schemes: {entry.label!r} has {' and '.join(beside)} beside its name, which only a training "
            "reads; put slots under extend",
        )
    own = config.scheme == SchemeConfig(RELEASED)
    check(own, "scheme: a study measures the entries of compare.schemes; put what changes the model under extend there")
    for name, given in _ignored(config).items():
        check(not given, f"{name}: a study does not read it; leave it out")
    for task in config.evaluate.tasks:
        check(task == PASSKEY, f"evaluate.tasks: a study has the task {PASSKEY!r} alone, found {task!r}")
