"""A study: a released model under many extensions, in many short measurements (cells), each saved when finished."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from posjax.rotary import Rotary
from posjax.scheme import Scheme
from train.checkpoint.restore import restore
from train.compare.study.cells import Cell, cells_of, digest_of_model, is_to_be_searched, read_texts, scored
from train.compare.study.search import Search, search_of, with_factors
from train.config import CompareConfig, Config, MeshConfig, SchemeConfig
from train.config.settings.checks import check
from train.evaluate.decoder import predictor_of
from train.evaluate.mesh import mesh_for, use_mesh
from train.evaluate.perplexity import Perplexity, perplexity_in_one_window
from train.evaluate.tasks import Vocabulary, check_tasks, task_rows
from train.model.build import RELEASED, Setup, check_vocabulary, model_length, scheme_of
from train.model.extension import completed
from train.report.numbers import Row, of_shared_texts
from train.runtime.lines import in_a_line
from train.runtime.reuse import prepare_process
from train.runtime.rows import append_rows, read_rows

CELLS = "cells.jsonl"
"""In the directory of a study: the rows of every finished cell, and those of searches."""


class Study:
    """The model under ``init``, measured under every extension of ``compare.schemes``.

    It has what a comparison reports: the `documents` that are read, as tokens; no `failures` and `trials` of trainings;
    and, in place of a training's directory, its own.

    Raises ValueError, before anything is computed, for a config that cannot be studied.
    """

    def __init__(self, config: Config, console: Console):
        self._config, self._console = config, console
        self._store = config.directory / CELLS
        self.failures: dict[str, str] = {}
        self.trials: list[Row] = []
        _check_entries(config)
        self._chosen = config.compare.selected
        self._setup = Setup(config)
        self._vocabulary = Vocabulary(self._setup.tokenizer)
        check_vocabulary(self._setup)
        check_tasks(config.evaluate, self._vocabulary)
        self._texts, self._model = read_texts(self._setup), digest_of_model(self._setup)
        self.documents = [text.tokens for text in self._texts]
        self.trained_in = config.directory
        self._search = self._search_of(config.compare.schemes)
        self._kept: list[Row] = read_rows(self._store)

    def _search_of(self, entries: Sequence[SchemeConfig]) -> Search | None:
        """The search for the factors of the entries that need one; None if they need none, or none that is chosen does
        and the texts are too short."""
        try:
            return search_of(self._setup, self._model) if any(map(is_to_be_searched, entries)) else None
        except ValueError:
            if any(map(is_to_be_searched, self._chosen)):
                raise
            return None

    def run(self) -> None:
        """Measures the missing cells, one after the other."""
        prepare_process(self._config.monitor.compilation_cache)
        self._mesh = mesh_for(self._config, rows=1)
        model = restore(self._config.init.path, self._config, mesh=self._mesh)[1]
        cells = self._cells([self._searched(entry, model) for entry in self._chosen])
        for number, cell in enumerate(cells, start=1):
            if not self._rows_of(cell):
                what = cell.task or cell.text.name
                where = f"[{number}/{len(cells)}] {cell.entry.label} at {cell.length:,}, {what}"
                self._console.print(f"{where}: {self._add(cell, model)}", markup=False)
                jax.clear_caches()  # every cell compiles its own program

    def rows(self) -> list[Row]:
        """The rows of this config's finished cells, for the report; none until a text has a loss."""
        cells = self._cells([self._known(entry) for entry in self._config.compare.schemes])
        found = of_shared_texts([row for cell in cells for row in self._rows_of(cell)])
        return found if any(row.get("text") and not row["error"] for row in found) else []

    def _cells(self, entries: Sequence[SchemeConfig]) -> list[Cell]:
        return cells_of(self._setup, self._model, entries, self._texts)

    def _rows_of(self, cell: Cell) -> list[Row]:
        """The rows of a cell, under its own label; none if it is not measured yet."""
        return [{**row, "label": cell.entry.label} for row in self._kept if row["key"] == cell.key]

    def _add(self, cell: Cell, model: nnx.Module) -> str:
        """Measures a cell; the result in words. It is saved unless it is a refusal, which may not apply next time."""
        try:
            found = self._measured(cell, model)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            found = [_refused(cell, _refusal(error))]
        found = [{**cell.columns, **row} for row in found]
        self._kept += found
        if all(row["error"] is None or "not finite" in row["error"] for row in found):
            append_rows(self._store, found)
        return _in_words(found)

    def _measured(self, cell: Cell, model: nnx.Module) -> list[Row]:
        """The numbers of a cell. Raises ValueError if the extension or the model refuses it."""
        extend, refusal = cell.extension
        check(not refusal, refusal)
        scheme = scheme_of(self._config, cell.entry).extend(**extend)
        predictor, parameters = predictor_of(model.with_scheme(scheme), self._config.seed, self._mesh)
        with use_mesh(self._mesh):
            if cell.text is not None:
                window, by_position = cell.text.last(cell.length), self._config.compare.positions
                sizes = scored(self._config), by_position
                return [perplexity_in_one_window(predictor, parameters, window, *sizes).as_row()]
            arguments = (self._vocabulary, self._config.evaluate, cell.task, cell.length)
            return list(task_rows(predictor, parameters, *arguments))

    def _known(self, entry: SchemeConfig) -> SchemeConfig:
        """The entry with the result of an earlier search."""
        if self._search is None or not is_to_be_searched(entry):
            return entry
        found = [row["options"] for row in self._kept if row["key"] == self._search.key]
        return with_factors(entry, found[0]) if found else entry

    def _searched(self, entry: SchemeConfig, model: nnx.Module) -> SchemeConfig:
        """The entry with the result of a search; unchanged if the model allows none."""
        if not is_to_be_searched(self._known(entry)):
            return self._known(entry)

        def log(line: str) -> None:
            self._console.print(f"{entry.label}: {line}", markup=False)

        try:
            options = self._search.run(entry, model, self._once, log, self._mesh)
            return with_factors(entry, self._once(self._search.key, lambda: {"options": options})["options"])
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            log(_refusal(error))
        return entry

    def _once(self, key: str, make: Callable[[], Row]) -> Row:
        """The row with a key that was kept, or else makes and keeps it."""
        found = [row for row in self._kept if row["key"] == key]
        if not found:
            found = [{"key": key, **make()}]
            self._kept += found
            append_rows(self._store, found)
        return found[0]


def _refusal(error: ValueError | jax.errors.JaxRuntimeError) -> str:
    """Why a cell has no number, or a search no result. Raises the error again if it is one of the program."""
    if isinstance(error, ValueError):
        return in_a_line(error)
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return "more memory is needed than this machine has"


def _refused(cell: Cell, why: str) -> Row:
    """The row of a cell without numbers."""
    if cell.text is not None:
        return Perplexity(cell.length, error=why).as_row()
    cases = cell.config.evaluate.section(cell.task).cases
    return {"depth": None, "accuracy": None, "answer_nll": None, "chance": None, "cases": cases, "error": why}


def _in_words(rows: Sequence[Row]) -> str:
    first = rows[0]
    if first["error"]:
        return first["error"]
    if first.get("text"):
        return f"{first['last_nll']:.4f} nats per token, {first['tokens_per_second']:,.0f} tokens/s"
    return f"{np.mean([row['accuracy'] for row in rows]):.0%} right"


# --- what cannot be studied -------------------------------------------------------------------------------------------


def _check_entries(config: Config) -> None:
    """Raises ValueError for a study without extensions, with an entry that needs training, and for other keys that only
    a training reads."""
    schemes = config.compare.schemes
    check(bool(schemes), "compare.schemes is empty: list the extensions, as {name: released, extend: ...}")
    own = config.scheme == SchemeConfig(RELEASED)
    check(own, "scheme: a study measures the entries of compare.schemes; put what changes the model under extend there")
    for entry in schemes:
        _check_entry(config, entry)
    read_by_trainings = {
        "stages": bool(config.stages),
        "train.mesh": config.train.mesh != MeshConfig(),
        "compare.seeds": config.compare.seeds != CompareConfig().seeds,
        "evaluate.stride": config.evaluate.stride != 0,
    }
    for name, given in read_by_trainings.items():
        check(not given, f"{name}: a study does not read it; leave it out")


def _check_entry(config: Config, entry: SchemeConfig) -> None:
    """Raises ValueError, with the entry's label, if it needs training, or names what does not exist.

    An existing method may still not fit this model; its cells then have an error.
    """
    place = f"compare.schemes: {entry.label!r}"
    why = "is not the scheme of the model under init, so it must be trained; set train.steps, or name it released"
    check(entry.name == RELEASED, f"{place} {why}")
    beside = [*entry.options, *(["stage"] if entry.stage else [])]
    why = f"{place} has {' and '.join(beside)} beside its name, which only a training reads; put slots under extend"
    check(not beside, why)
    change = completed(entry.extend, model_length(config), max(config.evaluate.lengths))
    change.pop("layers", None)  # for models whose layers differ
    try:
        if not is_to_be_searched(entry):
            Scheme(features=Rotary()).replace(**change)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
