"""Measures saved runs: the rows of `train.report`, from a run directory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from posjax.scheme.choices import check_reach
from train import report
from train.checkpoint.directory import read_config
from train.checkpoint.restore import (
    config_of,
    entry_in_stage,
    is_run,
    parameters_in_words,
    restore,
    results_of,
)
from train.config import Config, SchemeConfig
from train.config.settings.checks import check
from train.data.pipeline import held_out_sample
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.evaluate.about import about, read_versions
from train.evaluate.decoder import predictor_of
from train.evaluate.key_tokens import Judge, KeyTokens
from train.evaluate.mesh import mesh_for, use_mesh
from train.evaluate.perplexity import check_lengths, perplexities
from train.evaluate.ruler.scoring import ruler_rows
from train.evaluate.ruler.tasks import check_ruler
from train.evaluate.tasks import Vocabulary, check_tasks, lengths_of, task_rows
from train.loop.fit import read_result
from train.model.build import RELEASED, Setup, check_vocabulary, evaluated_scheme, model_length, scheme_of
from train.monitor.logs import read_metrics
from train.report.numbers import family
from train.runtime.distributed import decide
from train.runtime.paths import path
from train.runtime.reuse import keep_memory_on_cpu
from train.runtime.rows import key_of, read_rows, write_rows

EVALUATION = "evaluation.jsonl"


def evaluate(directory: str | Path, overrides: Sequence[str] = (), console: Console | None = None) -> list[report.Row]:
    """Measures the run in `directory`, or the released model there, as ``evaluate`` says, and shows the tables.

    ``index.html`` and ``evaluation.jsonl`` go into the run's directory, or into ``{output}/{name}`` for a
    released model.

    `overrides` may change keys that did not affect the training: ``evaluate.*``, and ``scheme.extend``, which evaluates
    the trained parameters under an extended scheme. The rows are returned. In ``evaluation.jsonl`` they replace
    rows of the same label; rows of other labels stay if they were measured on the same text, and the page shows all.

    Raises FileNotFoundError without a trained run, and ValueError for overrides that would need a new training, for
    models without a perplexity and for held-out documents that are too short.
    """
    config = config_of(directory, overrides)
    held_out = evaluation_documents(Setup(config))
    target = results_of(directory, config)
    label, entry = _labels(directory, config)
    [rows] = measure_runs([SavedRun(directory, config, label)], held_out, [entry])
    text = {"lengths": config.evaluate.lengths, "tokens": config.evaluate.tokens, "last": last_length(config)}
    key = key_of({**text, "documents": list(map(len, held_out))})
    rows = [{"key": key, **row} for row in rows]
    decide(lambda: _tell(target, config, held_out, rows, console or Console()))
    return rows


def _labels(directory: str | Path, config: Config) -> tuple[str, SchemeConfig]:
    """The label of the model as it was trained or released, and the entry to measure, labelled to differ from it."""
    entry, own_label = config.scheme, read_config(path(directory)).scheme.label if is_run(directory) else RELEASED
    # A trained model must not have the label of the released one.
    label = config.name if is_run(directory) and own_label == RELEASED else own_label
    if config.stage(config.stage_number(entry.stage)).train.ema and not config.evaluate.averaged:
        label += ", not averaged"
    if entry.label != own_label:
        return label, entry
    names = [change.get("name", slot) if isinstance(change, Mapping) else slot for slot, change in entry.extend.items()]
    stage = f"{label}, {entry.stage}" if entry.stage else label
    return label, dataclasses.replace(entry, label=" + ".join([stage, *names]))


def _tell(
    target: Path, config: Config, held_out: Sequence[np.ndarray], rows: list[report.Row], console: Console
) -> None:
    """Writes and shows rows, with those of earlier evaluations on the same text under other labels."""
    new, key = {row["label"] for row in rows}, rows[0]["key"]
    earlier = [row for row in read_rows(target / EVALUATION) if row["label"] not in new and row.get("key") == key]
    rows = [*earlier, *rows]
    write_rows(target / EVALUATION, rows)
    report.write(target, rows, about(config, held_out, read_versions(target)))
    report.show(rows, console)
    if which := parameters_in_words(config.stage(config.stage_number(config.scheme.stage))):
        console.print(f"measured: {which}")
    console.print(f"figures: {target / 'index.html'} · numbers: {target / EVALUATION}")


@dataclass(frozen=True)
class SavedRun:
    """A saved run, and the config for its measurement. Without a `label` it has the label of its scheme."""

    directory: Path
    config: Config
    label: str = ""


def measure_runs(
    runs: Sequence[SavedRun],
    held_out: Sequence[np.ndarray],
    entries: Sequence[SchemeConfig],
    log: Callable[[str], Any] = lambda _: None,
) -> list[list[report.Row]]:
    """Measures several runs of one model and one scheme under each of `entries`; the rows of every run.

    Each length is compiled once for all of them.
    """
    keep_memory_on_cpu()
    config, restored = runs[0].config, {}
    rows: list[list[report.Row]] = [[] for _ in runs]
    mesh = mesh_for(config, config.evaluate.batch_tokens // max(config.evaluate.lengths))
    for entry in entries:
        if entry.stage not in restored:
            restored[entry.stage] = [restore(run.directory, run.config, entry.stage, mesh) for run in runs]
        found = [
            _Restored(n, run, *each) for n, (run, each) in enumerate(zip(runs, restored[entry.stage], strict=True))
        ]
        staged = entry_in_stage(entry, config, found[0].stage)
        scheme = evaluated_scheme(found[0].stage, staged)
        # A rule draws positions from the run's own seed, so each run then needs its own program.
        for part in [found] if scheme.training_positions is None else [[each] for each in found]:
            with use_mesh(mesh):
                for number, row in _rows_of_program(part, held_out, staged, scheme, mesh):
                    rows[number].append(row)
                    log(_in_words(row))
    return rows


@dataclass(frozen=True)
class _Restored:
    """Run number `number`, with the config of a stage and the model as it was trained there."""

    number: int
    run: SavedRun
    stage: Config
    model: nnx.Module


def _rows_of_program(
    found: Sequence[_Restored], held_out: Sequence[np.ndarray], entry: SchemeConfig, scheme: Any, mesh: Mesh | None
) -> Iterator[tuple[int, report.Row]]:
    """The rows of models that share one program, each with its run's number: of held-out text, then of tasks."""
    config, sizes = found[0].run.config, found[0].run.config.evaluate
    vocabulary = Vocabulary(load_tokenizer(config.data))
    measured = [predictor_of(each.model.with_scheme(scheme), config.seed, mesh) for each in found]
    predictor, models = measured[0][0], [parameters for _, parameters in measured]
    about = [{**_which(each, entry), **_costs(each.run.directory, entry)} for each in found]
    asked = {name: getattr(sizes, name) for name in ("lengths", "tokens", "batch_tokens", "stride")}
    asked["keys"] = _key_tokens(config, vocabulary.tokenizer, mesh)
    for at_length in perplexities(predictor, models, held_out, last_length=last_length(config), **asked):
        for each, columns, perplexity in zip(found, about, at_length, strict=True):
            yield each.number, {**columns, **perplexity.as_row()}
    for each in found if sizes.ruler.tasks else ():
        model = each.model.with_scheme(scheme)
        for row in ruler_rows(model, vocabulary.tokenizer, config, mesh):
            yield each.number, {**_which(each, entry), **row}
    for each, parameters in zip(found, models, strict=True):
        for task in sizes.tasks:
            for length in lengths_of(task, sizes, vocabulary):
                for row in task_rows(predictor, parameters, vocabulary, sizes, task, length):
                    yield each.number, {**_which(each, entry), **row}


def _key_tokens(config: Config, tokenizer: Tokenizer, mesh: Mesh | None) -> KeyTokens | None:
    """How key tokens are found, with the evaluator if there is one; None if they are not asked for."""
    sizes = config.evaluate.longppl
    if not sizes.short:
        return None
    if not sizes.evaluator:
        return KeyTokens(sizes, config.evaluate.batch_tokens)
    _, model = restore(sizes.evaluator, _evaluator(config, tokenizer), mesh=mesh)
    return KeyTokens(sizes, config.evaluate.batch_tokens, Judge(*predictor_of(model, config.seed, mesh)))


def _evaluator(config: Config, tokenizer: Tokenizer) -> Config:
    """The config of the evaluator.

    Raises ValueError unless it predicts the next token, has the tokens of the models that are measured, and reads the
    longest rows.
    """
    path, name = config.evaluate.longppl.evaluator, "evaluate.longppl.evaluator"
    found = config_of(path)
    check(found.model.causal, f"{name}: {path} is a masked-token model, which does not predict the next token")
    same = load_tokenizer(found.data).identity == tokenizer.identity
    check(same, f"{name}: {path} has another tokenizer, and so no key tokens for this model")
    check_reach(Setup(found).decoder.layers.reach, name, config.evaluate.lengths[-1])
    return found


def _which(found: _Restored, entry: SchemeConfig) -> dict[str, Any]:
    """The columns of a row that identify the measurement."""
    base = (found.run.label or found.stage.scheme.label) if entry.only_measured else None
    seed, length = found.run.config.seed, model_length(found.stage)
    kind = family(scheme_of(found.stage))
    return {"label": entry.label, "base": base, "family": kind, "seed": seed, "train_length": length, **_ending(found)}


def _ending(found: _Restored) -> dict[str, Any]:
    """The columns of a training that ends at a loss: the loss, the updates allowed, and those it took, None if the loss
    was not reached. Empty for other trainings."""
    train = found.stage.train
    if not train.stop_loss:
        return {}
    fitted = read_result(found.run.directory)
    reached = fitted is not None and fitted.final_loss is not None and fitted.final_loss < train.stop_loss
    return {"stop_loss": train.stop_loss, "updates": train.steps, "updates_to_loss": fitted.steps if reached else None}


def _costs(directory: Path, entry: SchemeConfig) -> dict[str, Any]:
    """The cost of an entry's training; None for an entry that was not trained."""
    fitted = None if entry.only_measured else read_result(directory)
    return {
        "train_tokens_per_second": fitted.tokens_per_second if fitted else None,
        "peak_memory_bytes": fitted.peak_memory_bytes if fitted else None,
        "train_seconds": fitted.seconds if fitted else None,
        "training": None if entry.only_measured else _training(directory),
    }


def _training(location: str | Path) -> dict[str, list] | None:
    """The held-out loss during training, by the tokens seen; None if it was not measured."""
    measured = [line for line in read_metrics(path(location)) if line.get("held_out_loss") is not None]
    return {key: [line[key] for line in measured] for key in ("tokens", "held_out_loss")} if measured else None


def last_length(config: Config) -> int:
    """The number of last tokens that are scored: the training length, for a curriculum the length of its shortest rows;
    or the shortest of ``evaluate.lengths``, if that is less or nothing is trained."""
    shortest = min(config.evaluate.lengths)
    if config.init.path and not config.steps:
        return shortest
    return min(shortest, *(stage.train.length for stage in config.every_stage))


def evaluation_documents(setup: Setup, trials: bool = False) -> list[np.ndarray]:
    """The held-out documents as tokens: those for reports, or those by which `trials` are compared.

    If ``compare.sweep`` has trials, every second document is for trials, and reports use only the others.

    Raises ValueError if a model of this config cannot be measured on them at ``evaluate.lengths``, or on the tasks of
    ``evaluate.tasks`` and ``evaluate.ruler``.
    """
    config = setup.config
    check_causal(config)
    check_vocabulary(setup)
    check_tasks(config.evaluate, Vocabulary(setup.tokenizer))
    check_ruler(config.evaluate, setup.tokenizer)
    if config.evaluate.longppl.evaluator:
        _evaluator(config, setup.tokenizer)
    held_out = held_out_sample(config, setup.tokenizer).documents()
    if config.compare.sweep.learning_rate:
        check(
            len(held_out) > 1,
            "compare.sweep: the held-out text is a single document, but trials need one that is not reported on; raise "
            "data.held_out",
        )
        held_out = held_out[int(trials) :: 2]
    check_lengths(held_out, config.evaluate.lengths)
    return held_out


def _in_words(row: report.Row) -> str:
    """A row as one line for the terminal."""
    prefix = f"{row['label']} at {row['length']}"
    if "task" in row:
        depth = "" if row["depth"] is None else f", depth {row['depth']:.2f}"
        return f"{prefix}: {row['task']}{depth}: {row['error'] or format(row['accuracy'], '.1%')}"
    last = "" if row["error"] else f", last tokens {row['last_perplexity']:.2f}"
    return f"{prefix}: " + (row["error"] or f"perplexity {row['window_perplexity']:.2f}{last}")


def check_causal(config: Config) -> None:
    """Raises ValueError for models that do not predict the next token, since they define no probability of a text."""
    if not config.model.causal:
        raise ValueError(
            "model.causal is false: a masked-token model gives a text no probability, so it has no perplexity to "
            "measure; train with model.causal=true to evaluate or compare"
        )
