"""The score of a model on a task: the share of right answers."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from train.config.settings.evaluate import TaskConfig
from train.evaluate.mesh import whole
from train.evaluate.predictor import NOT_FINITE, Predictor, next_at
from train.evaluate.tasks.passkey import Prompt
from train.evaluate.tasks.registry import Cases, cases
from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.vocabulary import Vocabulary
from train.runtime.lines import in_a_line

NO_LOGITS = "the logits are not finite"


class Refused(ValueError):
    """Raised if a model refuses a length, with the message of the model."""


def measure_task(
    predictor: Predictor,
    parameters: Any,
    vocabulary: Vocabulary,
    name: str,
    section: TaskConfig,
    length: int,
    batch_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Yields a row of results for the task at this length, or one for each of its depths.

    `accuracy` is the mean over cases of the share of answers that are right; `chance` is the accuracy of guessing, None
    if it is nearly 0. If the model refuses a length with ValueError, or its logits are not finite, the rows have that
    as their `error`. The model is compiled once, for batches of about `batch_tokens` tokens.
    """
    groups = list(cases(name, section, vocabulary, length))
    samples = [sample for group in groups for sample in group.samples]
    rows = batch_tokens // length
    try:
        if isinstance(samples[0], Prompt):
            shares = _continued(predictor, parameters, vocabulary, samples, section, rows)
        else:
            program = functools.partial(_following, predictor, parameters)
            shares, _ = forced(predictor, program, samples, length, rows)
        error = None
    except Refused as refusal:
        shares, error = np.full(len(samples), np.nan), str(refusal)
    for group, part in zip(groups, np.split(shares, len(groups)), strict=True):
        yield {"task": name, "length": length, **_row(group, part, error)}


def _row(group: Cases, shares: np.ndarray, error: str | None) -> dict[str, Any]:
    broken = None if np.isfinite(shares).all() else error or NO_LOGITS
    choices = getattr(group.samples[0], "choices", 0)
    return {
        "depth": group.depth,
        "accuracy": None if broken else float(shares.mean()),
        "chance": 1 / choices if choices else None,
        "cases": len(group.samples),
        "error": broken,
    }


def forced(
    predictor: Predictor, program: Callable, samples: Sequence[Sample], length: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """For every sample the share of right answers, and the mean loss of their tokens in nats. Shares are NaN if any of
    the needed logits is not finite.

    Every token of an answer must be the likeliest one after the tokens before it. So an answer is right if and only if
    greedy decoding, given the text up to it, writes it. All tokens are read in one forward pass of `length` tokens: all
    of a sample, or all but the last. `program` is `following` of the predictor and its parameters.
    """
    positions = [np.concatenate([np.arange(*span) for span in sample.answers]) for sample in samples]
    # A power of two, so that tasks with about as many tokens to answer share a program.
    most = 1 << (max(map(len, positions)) - 1).bit_length()
    at = np.stack([np.pad(position, (0, most - len(position)), mode="edge") - 1 for position in positions]).astype(
        np.int32
    )
    tokens = np.stack([np.pad(sample.tokens, (0, length + 1 - len(sample.tokens))) for sample in samples])
    found, losses = _batched(predictor, program, rows, tokens, at)
    shares = [_share(sample, *pair) for sample, *pair in zip(samples, positions, found, strict=True)]
    means = [loss[: len(position)].mean() for position, loss in zip(positions, losses, strict=True)]
    return np.array(shares), np.array(means)


def following(predictor: Predictor, parameters: Any, tokens: Any, at: Any) -> Any:
    """`next_at`, to be compiled; every process can read the results."""
    return jax.tree.map(whole, next_at(predictor, parameters, tokens, at, tokens.shape[1] - 1))


_following = jax.jit(following, static_argnums=0)


def _share(sample: Sample, positions: Int[np.ndarray, "positions"], found: Int[np.ndarray, "more"]) -> float:
    """The share of answers of which all tokens were found; NaN if a found token is `NOT_FINITE`."""
    found = found[: len(positions)]
    if (found == NOT_FINITE).any():
        return np.nan
    right = dict(zip(positions.tolist(), (found == sample.tokens[positions]).tolist(), strict=True))
    return float(np.mean([all(right[position] for position in range(*span)) for span in sample.answers]))


def _continued(
    predictor: Predictor,
    parameters: Any,
    vocabulary: Vocabulary,
    prompts: Sequence[Prompt],
    section: TaskConfig,
    rows: int,
) -> np.ndarray:
    """For every prompt 1 if the answer is anywhere in the text that greedy decoding writes after it, else 0."""
    tokens = np.stack([prompt.tokens for prompt in prompts])
    write = functools.partial(_greedy, predictor, section.new_tokens, parameters)
    found = _batched(predictor, write, rows, tokens)
    return np.array([_holds(vocabulary, prompt, text) for prompt, text in zip(prompts, found, strict=True)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _greedy(predictor: Predictor, new: int, parameters: Any, prompts: Any) -> Any:
    return whole(predictor.greedy(parameters, prompts, new))


def _holds(vocabulary: Vocabulary, prompt: Prompt, text: Int[np.ndarray, "new"]) -> float:
    """Whether the text, up to the end of the document, contains the answer; NaN if logits stop being finite before
    that."""
    ends = np.flatnonzero((text == vocabulary.tokenizer.eos) | (text == NOT_FINITE))
    if ends.size and text[ends[0]] == NOT_FINITE:
        return np.nan
    return float(prompt.answer in vocabulary.tokenizer.decode(text[: ends[0]] if ends.size else text))


def _batched(predictor: Predictor, function: Callable, rows: int, *arrays: np.ndarray) -> Any:
    """``function(*arrays)`` in batches of about `rows` rows; the last batch is filled up with copies of its last row.

    Raises Refused if the model refuses the length.
    """
    count = len(arrays[0])
    rows = predictor.filled(max(1, min(rows, count)))
    filled = [np.pad(x, ((0, -count % rows), (0, 0)), mode="edge") for x in arrays]
    batches = zip(*(np.split(x, len(x) // rows) for x in filled), strict=True)
    try:
        found = [jax.device_get(function(*batch)) for batch in batches]
    except ValueError as error:
        raise Refused(in_a_line(error)) from None
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *found)
