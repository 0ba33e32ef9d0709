"""A study from a config to a page: cell after cell, what is done never done again."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from posjax.rotary import Rotary
from posjax.scheme import Scheme
from train.checkpoint import read_config
from train.config import Config, SchemeConfig, dump
from train.data import documents, load_tokenizer
from train.monitor import enable_compilation_cache
from train.paths import path, write_file
from train.restore import restore
from train.settings.checks import check
from train.study import report
from train.study.cells import (
    RESULTS,
    Text,
    append_row,
    check_entries,
    chosen_entries,
    extension,
    is_done,
    passkey_cells,
    read_rows,
    text_cells,
)
from train.study.measure import measure
from train.study.search import is_to_be_searched, searched


def run_study(config: Config, console: Console | None = None) -> Path:
    """Measures a released model under every extension of ``compare.schemes``, and writes the report.

    Its directory, which is returned, gets ``config.yaml``, ``results.jsonl``, ``figure.png`` and ``index.html``. A cell
    is kept when it is finished; the same command, also with other schemes, lengths or texts, adds what is missing.

    Raises ValueError, before anything is computed, for what cannot be studied.
    """
    console = console or Console(highlight=False)
    check_entries(config)
    entries = chosen_entries(config)
    _check_schemes(config, entries)
    texts = read_texts(config)
    directory = path(config.directory)
    _check_directory(config, directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "config.yaml", dump(config))
    (directory / RESULTS).touch()
    enable_compilation_cache(config.monitor.compilation_cache)
    model = restore(config.init.path, config)[1]
    try:
        for step in _steps(config, entries, texts, directory, model, console):
            append_row(directory, step)
    finally:
        report.write(config, directory, read_rows(directory), console)
    return directory


def _steps(config: Config, entries, texts: Sequence[Text], directory: Path, model: nnx.Module, console: Console):
    """The rows of what is not done yet, one after the other."""
    entries = [_searched(config, entry, directory, model, console) for entry in entries]
    cells = [*text_cells(config, entries, texts)]
    cells += [*passkey_cells(config, entries)] if "passkey" in config.evaluate.tasks else []
    for number, cell in enumerate(cells, start=1):
        if is_done(cell, read_rows(directory)):
            continue
        found = {"error": None, **measure(config, model, cell)}
        jax.clear_caches()  # every cell is a program of its own
        console.print(f"[{number}/{len(cells)}] {cell.words}: {_in_words(found)}", markup=False)
        yield {**cell.key, **found}


def _check_schemes(config: Config, entries: Sequence[SchemeConfig]) -> None:
    """Raises ValueError, with the entry's label, for a slot, a method or an option that there is not.

    A method that there is may still not fit this model: then that is what its cells say.
    """
    rope = Scheme(features=Rotary())
    for entry in entries:
        change = extension(config, entry, max(config.evaluate.lengths))
        change.pop("layers", None)  # of models whose layers differ
        try:
            if not is_to_be_searched(entry):
                rope.extend(**change)
        except ValueError as error:
            raise ValueError(f"compare.schemes: {entry.label}: {error}") from None


def _searched(config: Config, entry: SchemeConfig, directory: Path, model: nnx.Module, console: Console):
    """The entry with what a search finds for it; as it is where the model or the text allows none."""
    try:
        return searched(config, entry, directory, model, console)
    except ValueError as error:
        console.print(f"{entry.label}: {error}", markup=False)
        return entry


def _in_words(found: dict) -> str:
    if found["error"]:
        return found["error"]
    number = f"{found['nll']:.4f} nats per token" if "nll" in found else f"{found['accuracy']:.0%} found"
    return f"{number}, {found['seconds']:.0f} s"


def read_texts(config: Config) -> list[Text]:
    """The documents that hold the longest length, the longest ones first: the end of each, ``compare.texts`` at most.

    Raises ValueError where there is none.
    """
    span, tokenizer = max(config.evaluate.lengths), load_tokenizer(config.data)
    found = documents(dataclasses.replace(config.data, held_out=0.0), "train")
    # A token has a byte at least, so shorter documents need not be tokenised.
    long = [document for document in found if len(document.text) > span]
    long.sort(key=lambda document: -len(document.text))
    texts = []
    for document in long:
        tokens = np.asarray(tokenizer.encode(document.text)[1:-1])
        if len(tokens) > span and len(texts) < config.compare.texts:
            texts.append(Text(document.name, tokens[-span - 1 :]))
    check(
        bool(texts),
        f"evaluate.lengths: no document has {span + 1} tokens; name longer ones under data.paths, or shorter lengths",
    )
    return texts


def _check_directory(config: Config, directory: Path) -> None:
    """Raises ValueError for a directory with other things than a study of this model."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    where = f"{directory} holds other things than a study; choose another name"
    check((directory / "config.yaml").is_file() and (directory / RESULTS).exists(), where)
    saved = read_config(directory)
    check(
        saved.init.values == config.init.values,
        f"{directory} holds the study of another model, {saved.init.path}; choose another name",
    )
