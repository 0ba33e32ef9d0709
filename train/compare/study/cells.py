"""The cells of a study, in the order of measurement, and the model and the texts that they are about."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posjax.nn.huggingface.files import TensorFolder, is_local, open_location
from posjax.nn.huggingface.hub import on_disk
from posjax.nn.huggingface.load import is_gguf, tensor_folder
from posjax.nn.huggingface.peft import SETTINGS
from train.config import Config, SchemeConfig
from train.config.settings.checks import check
from train.data.sources import all_documents
from train.evaluate.search import check_searchable
from train.evaluate.tasks import Vocabulary, lengths_of
from train.evaluate.windows import ending
from train.model.build import Setup, extension_of, model_length
from train.runtime.rows import key_of


@dataclass(frozen=True)
class StudyText:
    """A text to read: a name, as many tokens as the longest cell needs, and the opening of the model's texts."""

    name: str
    tokens: np.ndarray
    opening: tuple[int, ...] = ()

    def last(self, length: int) -> np.ndarray:
        """The opening and the last tokens, ``length + 1`` together: ``length`` inputs, each with a target."""
        return ending(self.tokens, length, self.opening)


@dataclass(frozen=True, eq=False)
class Cell:
    """One measurement: of a text, or of a task.

    Args:
        config: the config of the study.
        model: the hash of the model; see `digest_of_model`.
        entry: the extension.
        length: the length in tokens.
        text: the text to read; None for a task.
        task: the name of the task; empty for a text.
    """

    config: Config
    model: str
    entry: SchemeConfig
    length: int
    text: StudyText | None = None
    task: str = ""

    @cached_property
    def extension(self) -> tuple[Mapping[str, Any], str]:
        """The slots of the entry with all options at this length; or its own slots, and why they do not fit."""
        try:
            if is_to_be_searched(self.entry):
                check_searchable(self.config)
                raise ValueError("no factors of LongRoPE were found for this model")
            return extension_of(self.config, self.entry, self.length), ""
        except ValueError as error:
            return self.entry.extend, str(error)

    @cached_property
    def key(self) -> str:
        """A hash of all that determines its numbers.

        Its label does not: extensions that change nothing up to the model's length share their cells.
        """
        if self.text is None:
            what = {"task": self.task, **self.config.evaluate.section(self.task).sizes()}
        else:
            what = {"text": [self.text.name, self.text.last(self.length).tolist()], "scored": scored(self.config)}
            what["positions"] = self.config.compare.positions
        return key_of({"model": self.model, "extend": self.extension[0], "length": self.length, **what})

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of its rows that identify it."""
        what = {"task": self.task} if self.text is None else {"text": self.text.name}
        found = {"key": self.key, "label": self.entry.label, "base": None, "family": _family(self.entry.extend)}
        found |= {"extend": self.extension[0], "seed": self.config.seed, "train_length": model_length(self.config)}
        return found | {"length": self.length, **what}


_FAMILIES = {"frequencies": "frequencies", "remap": "distances remapped", "mask": "windows"}


def _family(extend: Mapping[str, Any]) -> str:
    """What an extension changes first, by which figures of many extensions are split."""
    return next((title for slot, title in _FAMILIES.items() if slot in extend), "others")


def cells_of(setup: Setup, model: str, entries: Sequence[SchemeConfig], texts: Sequence[StudyText]) -> list[Cell]:
    """All cells: those of texts, shorter ones first and text by text, so that all extensions can be compared early.

    Then those of tasks.

    Args:
        setup: the config of the study, and what it means.
        model: the hash of the model.
        entries: the extensions, with the factors found by searches.
        texts: the texts to read.
    """
    config, vocabulary = setup.config, Vocabulary(setup.tokenizer)
    asked = [{"length": length, "text": text} for length in config.evaluate.lengths for text in texts]
    for task in config.evaluate.tasks:
        asked += [{"length": length, "task": task} for length in lengths_of(task, config.evaluate, vocabulary)]
    return [Cell(config, model, entry, **each) for each in asked for entry in entries]


def is_to_be_searched(entry: SchemeConfig) -> bool:
    """Whether an entry names LongRoPE without its factors."""
    change = entry.extend.get("frequencies")
    return isinstance(change, Mapping) and change.get("name") == "longrope" and "long_factor" not in change


def scored(config: Config) -> int:
    """The number of scored tokens at the end of a text."""
    return config.compare.scored or max(1, model_length(config) // 4)


def digest_of_model(setup: Setup) -> str:
    """A hash that differs between models with different weights, config, adapter, tokenizer or compute dtype.

    Local files are read completely; at a URL the file system's own checksum of the contents is used.
    """
    config, location, adapter = setup.config, setup.config.init.path, setup.config.init.adapter
    root = on_disk(location)
    marks = _marks(root, [""] if is_gguf(location) else [f"/{name}" for name in tensor_folder(location).files])
    marks += _marks(adapter, [f"/{name}" for name in (SETTINGS, *TensorFolder(adapter).files)]) if adapter else []
    return key_of([config.init.values, config.model.compute_dtype, setup.tokenizer.identity, marks])


def _marks(location: str | Path, ends: Sequence[str]) -> list[str]:
    """What changes with the contents of files, each named by the location and an end."""
    files, root = open_location(location)
    names = [f"{root}{end}" for end in ends]
    return [_file_digest(name) if is_local(files) else str(files.ukey(name)) for name in names]


def _file_digest(name: str) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_texts(setup: Setup) -> list[StudyText]:
    """The ends of documents that are long enough for the longest length, the longest documents first, at most
    ``compare.texts``.

    Raises ValueError if there is none, and for a length that is shorter than the scored part.
    """
    config, tokenizer = setup.config, setup.tokenizer
    span = max(config.evaluate.lengths)
    least = min(config.evaluate.lengths)
    check(least >= scored(config), f"evaluate.lengths: {least} is below compare.scored, {scored(config)} tokens")
    # A token has at least one byte, so shorter documents need not be tokenised.
    long = [document for document in all_documents(config.data) if len(document.text) > span]
    long.sort(key=lambda document: -len(document.text))
    texts = []
    for document in long:
        tokens = tokenizer.tokens(document.text)
        if len(tokens) > span:
            texts.append(StudyText(_new_name(document.name, texts), tokens[-span - 1 :], tokenizer.opening))
        if len(texts) == config.compare.texts:
            break
    check(
        bool(texts),
        f"evaluate.lengths: no document has {span + 1} tokens; name longer ones under data.paths, or shorter lengths",
    )
    return texts


def _new_name(name: str, texts: Sequence[StudyText]) -> str:
    """The name of a document; with a number if another one has the same name, as in another part of a mixture."""
    same = sum(text.name.partition(" #")[0] == name for text in texts)
    return f"{name} #{same + 1}" if same else name
