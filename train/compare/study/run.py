"""Runs a study, from a config to a page. Finished cells are not measured again."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from posjax.rotary import Rotary
from posjax.scheme import Scheme
from train.checkpoint.directory import RESULTS, read_config
from train.checkpoint.restore import restore
from train.compare.study import report
from train.compare.study.cells import (
    Cell,
    StudyText,
    cells_of,
    check_entries,
    chosen_entries,
    digest_of_model,
    is_to_be_searched,
    result,
    scored,
)
from train.compare.study.measure import measure
from train.compare.study.search import Search, search_of, with_factors
from train.config import Config, SchemeConfig, dump
from train.config.settings.checks import check
from train.data.sources import all_documents
from train.data.tokenizer import load_tokenizer
from train.evaluate.mesh import mesh_for
from train.evaluate.tasks import Vocabulary, check_tasks
from train.model.build import Setup, check_vocabulary, model_length
from train.model.extension import completed
from train.runtime.paths import append_row, read_rows, write_file
from train.runtime.reuse import prepare_process


def run_study(config: Config, console: Console | None = None) -> Path:
    """Measures a released model under every extension of ``compare.schemes``, and writes the report.

    Its directory, which is returned, gets ``config.yaml``, ``results.jsonl``, ``figure.png`` and ``index.html``. Each
    finished cell is saved; the same command, also with other schemes, lengths or texts, adds missing cells. The report
    covers only the cells of this config.

    Raises ValueError, before anything is computed, for a config that cannot be studied.
    """
    console = console or Console(highlight=False)
    check_entries(config)
    chosen = chosen_entries(config)
    _check_schemes(config)
    setup = Setup(config)
    check_vocabulary(setup)
    check_tasks(config.evaluate, Vocabulary(setup.tokenizer))
    texts, model_digest = read_texts(config), digest_of_model(config)
    search = _search(config, model_digest, chosen)
    directory = config.directory
    _open_directory(config, directory)
    prepare_process(config.monitor.compilation_cache)
    mesh = mesh_for(config, rows=1)
    study = _Study(config, model_digest, texts, search, directory, console, read_rows(directory / RESULTS), mesh)
    try:
        study.run(chosen)
    finally:
        report.write(config, directory, study.current(), console)
    return directory


@dataclasses.dataclass(frozen=True, eq=False)
class _Study:
    """A running study; `rows` grows with each measurement."""

    config: Config
    model_digest: str
    texts: Sequence[StudyText]
    search: Search | None
    directory: Path
    console: Console
    rows: list[Mapping[str, Any]]
    mesh: Mesh | None

    def run(self, entries: Sequence[SchemeConfig]) -> None:
        """Measures the missing cells, one after the other."""
        model = restore(self.config.init.path, self.config, mesh=self.mesh)[1]
        entries = [self._searched(entry, model) for entry in entries]
        cells = cells_of(self.config, self.model_digest, entries, self.texts)
        for number, cell in enumerate(cells, start=1):
            if result(cell, self.rows) is None:
                self._say(f"[{number}/{len(cells)}] {cell.description}: {self._measure(model, cell)}")
                jax.clear_caches()  # every cell compiles its own program

    def current(self) -> list[Mapping[str, Any]]:
        """The rows of this config's cells, without other rows in the directory."""
        entries = [self._known(entry) for entry in self.config.compare.schemes]
        cells = cells_of(self.config, self.model_digest, entries, self.texts)
        return [row for cell in cells if (row := result(cell, self.rows)) is not None]

    def _measure(self, model: nnx.Module, cell: Cell) -> str:
        """The result of a cell in words. It is saved only if something was computed; a refusal may not apply next
        time."""
        try:
            found = measure(self.config, model, cell, self.mesh)
        except jax.errors.JaxRuntimeError as error:
            _check_memory(error)
            found = {"error": _TOO_LARGE}
        row = {**cell.key, "error": None, **found}
        self.rows.append(row)
        if "seconds" in found:
            append_row(self.directory / RESULTS, row)
        return _in_words(row)

    def _searched(self, entry: SchemeConfig, model: nnx.Module) -> SchemeConfig:
        """The entry with the result of a search; unchanged if the model allows none."""
        known = self._known(entry)
        if self.search is None or not is_to_be_searched(known):
            return known
        if refusal := self.search.refusal(entry):
            self._log(entry, refusal)
            return entry
        try:
            log = partial(self._log, entry)
            return with_factors(entry, self.search.run(model, self.rows, self._keep, log, self.mesh))
        except jax.errors.JaxRuntimeError as error:
            _check_memory(error)
            self._log(entry, _TOO_LARGE)
            return entry

    def _known(self, entry: SchemeConfig) -> SchemeConfig:
        """The entry with the result of an earlier search."""
        found = self.search.known(self.rows) if self.search is not None and is_to_be_searched(entry) else None
        return entry if found is None else with_factors(entry, found)

    def _keep(self, row: Mapping[str, Any]) -> None:
        append_row(self.directory / RESULTS, row)
        self.rows.append(row)

    def _log(self, entry: SchemeConfig, line: str) -> None:
        self._say(f"{entry.label}: {line}")

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False)


_TOO_LARGE = "more memory is needed than this machine has"


def _check_memory(error: jax.errors.JaxRuntimeError) -> None:
    """Raises the error again, unless it is about too little memory."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error


def _search(config: Config, model_digest: str, chosen: Sequence[SchemeConfig]) -> Search | None:
    """The search of LongRoPE's factors; None if no entry needs it, or if its text is missing and no such entry is
    selected."""
    if not any(map(is_to_be_searched, config.compare.schemes)):
        return None
    try:
        return search_of(config, model_digest)
    except ValueError:
        if any(map(is_to_be_searched, chosen)):
            raise
        return None


def _check_schemes(config: Config) -> None:
    """Raises ValueError, with the entry's label, for a slot, method or option that does not exist.

    An existing method may still not fit this model; its cells then have an error.
    """
    rope = Scheme(features=Rotary())
    for entry in config.compare.schemes:
        change = completed(entry.extend, model_length(config), max(config.evaluate.lengths))
        change.pop("layers", None)  # for models whose layers differ
        try:
            if not is_to_be_searched(entry):
                rope.replace(**change)
        except ValueError as error:
            raise ValueError(f"compare.schemes: {entry.label}: {error}") from None


def _in_words(found: dict) -> str:
    if found["error"]:
        return found["error"]
    number = f"{found['nll']:.4f} nats per token" if "nll" in found else f"{found['accuracy']:.0%} found"
    return f"{number}, {found['seconds']:.0f} s"


def read_texts(config: Config) -> list[StudyText]:
    """The ends of documents that are long enough for the longest length, the longest documents first, at most
    ``compare.texts``.

    Raises ValueError if there is none, and for a length that is shorter than the scored part.
    """
    span, tokenizer = max(config.evaluate.lengths), load_tokenizer(config.data)
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


def _open_directory(config: Config, directory: Path) -> None:
    """Creates the directory, with the config. Raises ValueError if it has other content than this study."""
    if directory.exists() and any(directory.iterdir()):
        message = f"{directory} has files that are not of a study; choose another name"
        check((directory / "config.yaml").is_file() and (directory / RESULTS).exists(), message)
        saved = read_config(directory)
        check(not saved.steps, f"{directory} holds a comparison of schemes that were trained; choose another name")
        other = f"{directory} holds the study of another model, {saved.init.path}; choose another name"
        check(saved.init.values == config.init.values, other)
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "config.yaml", dump(config))
    (directory / RESULTS).touch()
