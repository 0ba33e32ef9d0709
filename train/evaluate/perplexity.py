"""Perplexity against length: over whole windows, in sliding windows, of the last tokens with growing context, and by
position within a window.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from train.evaluate.key_tokens import KeyLoss, KeyTokens
from train.evaluate.mesh import whole
from train.evaluate.predictor import Predictor, next_at, next_nll
from train.evaluate.windows import Tokens, Windows, full_pieces, last_windows, pieces, whole_windows
from train.report.numbers import MEASURES
from train.runtime.lines import in_a_line

_LARGEST_NLL = 700.0  # exp of more exceeds float64


@dataclass(frozen=True)
class Perplexity:
    """What was measured at one evaluation length. NLL is in nats per token, the mean over all scored tokens.

    `window` scores every token of non-overlapping windows; `last` only the final `last_length` tokens of each window,
    the same ones at each length; `sliding` the new tokens of each step of a window, also the same at each length.
    `position_nll` splits the tokens of `window` by position: the mean over those with more than ``position_ends[n -
    1]`` and up to ``position_ends[n]`` tokens before them. If the model refused the length, `error` says why and the
    numbers are None.
    """

    length: int
    window_nll: float | None = None
    window_tokens: int = 0
    last_nll: float | None = None
    last_length: int = 0  # the number of final tokens
    last_tokens: int = 0
    sliding_nll: float | None = None
    sliding_tokens: int = 0
    position_ends: tuple[int, ...] = ()
    position_nll: tuple[float | None, ...] = ()  # None if a part has no token
    key_nll: float | None = None  # of tokens that need a long context, where that is asked for
    key_tokens: int = 0
    key_compared: int = 0  # the tokens among which they were found
    tokens_per_second: float | None = None  # tokens computed, compilation excluded
    memory_bytes: int | None = None  # of the compiled program with its arguments, where that is asked for
    error: str | None = None

    def as_row(self) -> dict[str, Any]:
        """All numbers, the perplexities among them, as plain values for JSON."""
        perplexities = {f"{name}_perplexity": perplexity(getattr(self, f"{name}_nll")) for name in MEASURES}
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        return {**dataclasses.asdict(self), **lists, **perplexities}


def perplexity(nll: float | None) -> float | None:
    """exp(nll), for a mean negative log-likelihood in nats; None for None."""
    return None if nll is None else math.exp(nll)


def perplexities(
    predictor: Predictor,
    models: Sequence[Any],
    documents: Sequence[Tokens],
    *,
    lengths: Sequence[int],
    last_length: int,
    tokens: int,
    batch_tokens: int,
    stride: int = 0,
    keys: KeyTokens | None = None,
) -> Iterator[list[Perplexity]]:
    """Yields, for each of `lengths`, the `Perplexity` of every one of the parameters `models`, in nats per token.

    1. *Whole window*: non-overlapping windows of each length, from about `tokens` tokens of the documents.
    2. *Last tokens*: `last_length` targets at the end of pieces that have full context at every length, in one
       document; documents shorter than the longest length are left out. At most `tokens` tokens are computed.
    3. *Sliding window*, unless `stride` is 0: a window of each length moves on by `stride` tokens and scores those, so
    each scored token has a context of more than ``length - stride`` tokens. The targets are the same at every length:
    those that the longest window can reach. At most `tokens` tokens are computed.

    4. *Key tokens*, with `keys`: those of the windows of the last tokens that need a long context, at the lengths above
    that of the short one; see `train.evaluate.key_tokens`.

    All are sums of NLL over all scored tokens divided by their number, never means of windows. A window is within one
    document and starts at position 0. The model is compiled once for each length, for batches of about `batch_tokens`
    tokens. If the model refuses a length beyond `last_length` with ValueError, the `Perplexity` has that error: for
    example, a learned embedding has no row for it.

    Raises ValueError, before anything compiles, for a length above every document's. No length may be below
    `last_length`.
    """
    check_lengths(documents, lengths)
    span = max(lengths)
    ends, chosen = full_pieces(documents, span, tokens), pieces(documents, span, tokens)
    slid = full_pieces(documents, span, tokens, stride) if stride else []

    def at(length: int) -> list[Perplexity]:
        windows = {"window": whole_windows(chosen, length), "last": last_windows(ends, length, last_length)}
        if slid:
            windows["sliding"] = last_windows(slid, length, stride)
        try:
            found = _measure_length(predictor, models, windows, length, max(1, batch_tokens // length))
            found = [dataclasses.replace(each, last_length=last_length) for each in found]
            if keys is None or length <= keys.sizes.short:
                return found
            losses = keys.losses(predictor, models, last_windows(ends, length, length))
            return [_with_keys(*pair) for pair in zip(found, losses, strict=True)]
        except ValueError as error:
            if length == last_length:
                raise
            return [Perplexity(length, error=in_a_line(error))] * len(models)

    return map(at, lengths)


def _with_keys(found: Perplexity, keys: KeyLoss) -> Perplexity:
    numbers = {"key_nll": keys.nll, "key_tokens": keys.tokens, "key_compared": keys.compared}
    return found if found.error else dataclasses.replace(found, **numbers)


def check_lengths(documents: Sequence[Sized], lengths: Sequence[int]) -> None:
    """Raises ValueError for a length that the longest document does not reach."""
    span, longest = max(lengths), max((len(document) for document in documents), default=0)
    if longest <= span:
        raise ValueError(
            f"evaluate.lengths: length {span} needs a held-out document of {span + 1} tokens, "
            f"the longest has {longest}; use shorter lengths or longer documents"
        )


def _measure_length(
    predictor: Predictor, models: Sequence[Any], windows: dict[str, Windows], length: int, rows: int
) -> list[Perplexity]:
    """All measurements at one length, through one compiled function of `rows` windows."""
    rows = predictor.filled(min(rows, max(len(each.tokens) for each in windows.values())))
    program, shapes = scoring(predictor, rows, length)
    score = program.lower(models[0], *shapes).compile()
    return [_measure_model(score, parameters, windows, length, rows) for parameters in models]


def _measure_model(score: Callable, parameters: Any, windows: dict[str, Windows], length: int, rows: int) -> Perplexity:
    start = time.perf_counter()
    losses = {name: losses_of(score, parameters, each, rows) for name, each in windows.items()}
    seconds = time.perf_counter() - start
    for each in losses.values():
        if each.error:
            return Perplexity(length, error=each.error)
    computed = sum(_batches(each, rows) for each in windows.values()) * rows * length
    numbers = {f"{name}_nll": each.mean() for name, each in losses.items()}
    numbers |= {f"{name}_tokens": each.scored for name, each in windows.items()}
    numbers |= losses["window"].by_position()
    return Perplexity(length, **numbers, tokens_per_second=computed / seconds)


@dataclass(frozen=True)
class PositionLosses:
    """The NLL of scored tokens, in nats, summed over windows, and the number of these tokens, both by position."""

    sums: Float[np.ndarray, "length"]
    counts: Float[np.ndarray, "length"]

    def mean(self, last: int = 0) -> float:
        """The mean over all tokens, or over those of the `last` positions."""
        count = self.counts[-last:].sum()
        return float(self.sums[-last:].sum() / count) if count else math.nan

    @property
    def error(self) -> str | None:
        """Why there is no number; None if there is one."""
        if not self.counts.any():
            return "no token of these windows is scored: none of them is in a turn of the assistant"
        mean = self.mean()
        return None if mean < _LARGEST_NLL else f"the loss is not finite ({mean} nats per token)"

    def by_position(self) -> dict[str, tuple]:
        """The ends of the parts of a window, and the mean in each part; None if nothing was scored there."""
        ends = position_ends(len(self.sums))
        starts = [0, *ends[:-1]]
        parts = zip(np.add.reduceat(self.sums, starts), np.add.reduceat(self.counts, starts), strict=True)
        means = tuple(float(total / count) if count else None for total, count in parts)
        return {"position_ends": ends, "position_nll": means}


def position_ends(length: int) -> tuple[int, ...]:
    """The ends of the parts into which a window is cut by position: 1, 2, 3, 4, 6, 8, 12, ..., 2^n, 3 2^(n-1), ...

    There are two parts for each doubling, so that all are about equally wide on a logarithmic axis; `length` ends the
    last one.
    """
    doublings = [2**n for n in range(length.bit_length())]
    ends = sorted({*doublings, *(3 * end // 2 for end in doublings if end > 1)})
    return (*(end for end in ends if end < length), length)


def scoring(predictor: Predictor, rows: int, length: int) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """A batch's jitted program, and the shapes of its arguments after the parameters.

    `(parameters, tokens [rows, length + 1], weights [rows, length]) -> summed NLL at each position [length]`
    """

    def position_nll(parameters, tokens, weights):
        nll = next_nll(predictor, parameters, tokens, length)
        return whole(jnp.sum(jnp.where(weights > 0, weights * nll, 0), axis=0))

    tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
    return jax.jit(position_nll), (tokens, jax.ShapeDtypeStruct((rows, length), jnp.float32))


def perplexity_in_one_window(
    predictor: Predictor,
    parameters: Any,
    tokens: Int[np.ndarray, "length+1"],
    last_length: int,
    by_position: bool = True,
) -> Perplexity:
    """The `last` NLL of one window in nats per token, from a single pass, with its memory.

    Also the NLL by position, which needs the logits of every token; without it only those of the `last` ones are
    computed. Raises ValueError for a length that the model refuses.
    """
    length, first = len(tokens) - 1, 0 if by_position else len(tokens) - 1 - last_length
    rows = predictor.filled(1)
    program, shapes = _scoring_from(predictor, rows, length, first)
    score = program.lower(parameters, *shapes).compile()
    windows = whole_windows([tokens], length)
    windows.weights[:, :first] = 0
    start = time.perf_counter()
    losses = losses_of(score, parameters, windows, rows)
    costs = {"tokens_per_second": length / (time.perf_counter() - start), "memory_bytes": _memory(score)}
    if losses.error:
        return Perplexity(length, error=losses.error, **costs)
    last = {"last_nll": losses.mean(last_length), "last_length": last_length, "last_tokens": last_length}
    return Perplexity(length, **last, **(losses.by_position() if by_position else {}), **costs)


def _scoring_from(
    predictor: Predictor, rows: int, length: int, first: int
) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """As `scoring`, with the logits of the positions from `first` on only; the NLL before them is 0."""
    if first == 0:
        return scoring(predictor, rows, length)

    def position_nll(parameters, tokens, weights):
        at = jnp.broadcast_to(jnp.arange(first, length), (rows, length - first))
        nll = next_at(predictor, parameters, tokens, at, length)[1]
        weights = weights[:, first:]
        total = whole(jnp.sum(jnp.where(weights > 0, weights * nll, 0), axis=0))
        return jnp.pad(total, (first, 0))

    return jax.jit(position_nll), scoring(predictor, rows, length)[1]


def _memory(compiled: Any) -> int | None:
    """The peak memory of a program in bytes; None if it is not known."""
    held = compiled.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return None if held is None else sum(getattr(held, name) for name in sizes)


def losses_of(score: Callable, parameters: Any, windows: Windows, rows: int) -> PositionLosses:
    """The losses of windows, by the program of `scoring` for batches of `rows` windows, summed in float64.

    The last batch is filled up with windows of weight 0.
    """
    missing = _batches(windows, rows) * rows - len(windows.tokens)
    filled = [np.pad(values, ((0, missing), (0, 0))) for values in windows]
    batches = zip(*(np.split(values, len(values) // rows) for values in filled), strict=True)
    sums = [score(parameters, *batch) for batch in batches]
    return PositionLosses(np.sum(np.asarray(sums, np.float64), axis=0), windows.weights.sum(axis=0, dtype=np.float64))


def _batches(windows: Windows, rows: int) -> int:
    return -(-len(windows.tokens) // rows)
