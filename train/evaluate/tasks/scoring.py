"""The score of a model on a task: the share of right answers."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from train.config.settings.evaluate import EvaluateConfig
from train.evaluate.mesh import whole
from train.evaluate.predictor import NOT_FINITE, Predictor, next_at
from train.evaluate.tasks.registry import Cases, cases
from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.vocabulary import Vocabulary
from train.runtime.lines import in_a_line

_NO_LOGITS = "the logits are not finite"


def task_rows(
    predictor: Predictor,
    parameters: Any,
    vocabulary: Vocabulary,
    config: EvaluateConfig,
    name: str,
    length: int,
) -> Iterator[dict[str, Any]]:
    """Yields a row of results for the task at this length, or one for each of its depths.

    `accuracy` is the mean over cases of the share of answers that are right, `answer_nll` the mean loss of their tokens
    in nats; `chance` is the accuracy of guessing, None if it is nearly 0. If the model refuses a length with
    ValueError, or its logits are not finite, the rows have that as their `error`. The model is compiled once, for
    batches of about ``evaluate.batch_tokens`` tokens.
    """
    groups = list(cases(name, config.section(name), vocabulary, length))
    samples = [sample for group in groups for sample in group.samples]
    try:
        found, error = _answered(predictor, parameters, samples, config.batch_tokens // length), _NO_LOGITS
    except ValueError as refusal:
        found, error = np.full((len(samples), 2), np.nan), in_a_line(refusal)
    for group, part in zip(groups, np.split(found, len(groups)), strict=True):
        yield {"task": name, "length": length, **_row(group, part, error)}


def _row(group: Cases, found: Float[np.ndarray, "cases 2"], error: str) -> dict[str, Any]:
    finite, choices = np.isfinite(found).all(), group.samples[0].choices
    accuracy, loss = found.mean(axis=0).tolist() if finite else (None, None)
    return {
        "depth": group.depth,
        "accuracy": accuracy,
        "answer_nll": loss,
        "chance": 1 / choices if choices else None,
        "cases": len(group.samples),
        "error": None if finite else error,
    }


def _answered(
    predictor: Predictor, parameters: Any, samples: Sequence[Sample], rows: int
) -> Float[np.ndarray, "samples 2"]:
    """For every sample the share of right answers, and the mean loss of their tokens in nats. Shares are NaN if any of
    the needed logits is not finite.

    Every token of an answer must be the likeliest one after the tokens before it. So an answer is right if and only if
    greedy decoding, given the text up to it, writes it. All tokens are read in one forward pass.
    """
    positions = [np.concatenate([np.arange(*span) for span in sample.answers]) for sample in samples]
    # A power of two, so that tasks with about as many tokens to answer share a program.
    most = 1 << (max(map(len, positions)) - 1).bit_length()
    at = np.stack([np.pad(position, (0, most - len(position)), mode="edge") - 1 for position in positions])
    tokens = np.stack([np.pad(sample.tokens, (0, 1)) for sample in samples])
    found, losses = _batched(predictor, parameters, rows, tokens, at.astype(np.int32))
    shares = [_share(sample, *pair) for sample, *pair in zip(samples, positions, found, strict=True)]
    means = [loss[: len(position)].mean() for position, loss in zip(positions, losses, strict=True)]
    return np.stack([shares, means], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _following(predictor: Predictor, parameters: Any, tokens: Any, at: Any) -> Any:
    """`next_at`, as every process can read it."""
    return jax.tree.map(whole, next_at(predictor, parameters, tokens, at, tokens.shape[1] - 1))


def _share(sample: Sample, positions: Int[np.ndarray, "positions"], found: Int[np.ndarray, "more"]) -> float:
    """The share of answers of which all tokens were found; NaN if a found token is `NOT_FINITE`."""
    found = found[: len(positions)]
    if (found == NOT_FINITE).any():
        return np.nan
    right = dict(zip(positions.tolist(), (found == sample.tokens[positions]).tolist(), strict=True))
    return float(np.mean([all(right[position] for position in range(*span)) for span in sample.answers]))


def _batched(
    predictor: Predictor, parameters: Any, rows: int, tokens: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`next_at` in batches of about `rows` rows; the last batch is filled up with copies of its last row."""
    count = len(tokens)
    rows = predictor.filled(max(1, min(rows, count)))
    filled = [np.pad(x, ((0, -count % rows), (0, 0)), mode="edge") for x in (tokens, at)]
    batches = zip(*(np.split(x, len(x) // rows) for x in filled), strict=True)
    found = [jax.device_get(_following(predictor, parameters, *batch)) for batch in batches]
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *found)
