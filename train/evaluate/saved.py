"""Measuring saved runs: the rows of `train.report`, from a run directory."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from train import report
from train.checkpoint import read_config, restore_model
from train.config import Config, SchemeConfig, differences, load
from train.data import documents, encode
from train.evaluate.perplexity import Measurement, check_lengths, measure
from train.loop import read_result
from train.machine import write_file
from train.model import evaluated_scheme

EVALUATION = "evaluation.jsonl"


def evaluate(directory: str | Path, overrides: Sequence[str] = (), console: Console | None = None) -> list[report.Row]:
    """Measures the run saved in `directory` at every length of ``evaluate.lengths``, and shows the tables.

    `overrides` may change what training did not depend on: ``evaluate.*``, and ``scheme.extend``, which evaluates the
    trained parameters under an extended scheme. The rows are returned and replace those in ``evaluation.jsonl``.

    Raises FileNotFoundError without a trained run, and ValueError for overrides that would need another training, for
    models without a perplexity and for held-out documents that are too short.
    """
    directory = Path(directory)
    config = load_saved(directory, overrides)
    rows = measure_entries(directory, config, [config.scheme])
    write_rows(directory / EVALUATION, rows)
    report.show(rows, console or Console())
    return rows


def load_saved(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a saved run, with overrides of what its training did not depend on.

    Raises FileNotFoundError without a run, and ValueError for overrides that would need another training.
    """
    saved = read_config(directory)
    config = load(directory / "config.yaml", overrides)
    changed = differences(saved, config)
    if changed:
        raise ValueError(f"{directory} is trained, so this cannot change: {'; '.join(changed)}")
    return config


def measure_entries(
    directory: Path, config: Config, entries: Sequence[SchemeConfig], told: Callable[[str], Any] = lambda _: None
) -> list[report.Row]:
    """Measures the trained parameters in `directory` under each scheme of `entries`; `told` gets a line for each row.

    The columns about training are None for extensions and for a run that is not finished.
    """
    held_out = held_out_tokens(config)
    _, model = restore_model(directory)
    fitted = read_result(directory)
    rows = []
    for entry in entries:
        about = {
            "label": entry.label,
            "base": config.scheme.label if entry.extend else None,
            "seed": config.seed,
            "train_length": config.train.length,
            "train_tokens_per_second": fitted.tokens_per_second if fitted and not entry.extend else None,
            "peak_memory_bytes": fitted.peak_memory_bytes if fitted and not entry.extend else None,
        }
        for found in measure_model(model, entry, config, held_out):
            rows.append({**about, **found.as_row()})
            told(f"{entry.label} at {found.length}: {_in_words(found)}")
    return rows


def held_out_tokens(config: Config) -> list[np.ndarray]:
    """The held-out documents as tokens.

    Raises ValueError when a model of this config cannot be measured on them at ``evaluate.lengths``.
    """
    check_causal(config)
    held_out = [encode(document.text) for document in documents(config.data, "held_out")]
    check_lengths(held_out, config.evaluate.lengths, config.train.length)
    return held_out


def _in_words(found: Measurement) -> str:
    return found.error or f"perplexity {found.window_perplexity:.2f}, last tokens {found.last_perplexity:.2f}"


def measure_model(
    model: nnx.Module, entry: SchemeConfig, config: Config, held_out: Sequence[np.ndarray]
) -> Iterator[Measurement]:
    """Measures a model under the scheme of `entry`, its extension included, which reads the length evaluated."""
    scheme = evaluated_scheme(entry, config.model.num_layers)
    graph, parameters = nnx.split(model.with_scheme(scheme))

    def apply(parameters, tokens, length):
        where = {"length": length}
        if scheme.positions is not None:
            drawn = scheme.positions.evaluate(length, key=jax.random.key(config.seed), batch=len(tokens))
            where |= {name: value for name, value in drawn._asdict().items() if value is not None}
        return nnx.merge(graph, parameters)(tokens, **where)

    return measure(
        apply,
        parameters,
        held_out,
        lengths=config.evaluate.lengths,
        train_length=config.train.length,
        tokens=config.evaluate.tokens,
        batch_tokens=config.evaluate.batch_tokens,
    )


def check_causal(config: Config) -> None:
    """Raises ValueError for models that do not predict the next token, since they give no text a probability."""
    if not config.model.causal:
        raise ValueError(
            "model.causal is false: a masked-token model gives a text no probability, so it has no perplexity to "
            "measure; train with model.causal=true to evaluate or compare"
        )


def write_rows(path: Path, rows: Sequence[report.Row]) -> None:
    """Writes rows as JSON lines, whole or not at all."""
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
