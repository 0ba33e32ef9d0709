"""Perplexity against length: over whole windows, and of the last tokens while the context grows."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from train.evaluate.windows import Tokens, Windows, full_pieces, last_windows, pieces, whole_windows

# (parameters, tokens [rows, length], length) -> logits [rows, length, vocabulary]. `length` is a Python integer.
Apply = Callable[[Any, Int[Array, "rows length"], int], Float[Array, "rows length vocabulary"]]

_LARGEST_NLL = 700.0  # exp of more is no float64


@dataclass(frozen=True)
class Measurement:
    """What was measured at one evaluation length. NLL is in nats per token, the mean over all scored tokens.

    `window` scores every token of non-overlapping windows; `last` only the final tokens, the same ones at each length,
    as many as the training length. Where the model refused the length, `error` says why and the numbers are None.
    """

    length: int
    window_nll: float | None = None
    window_tokens: int = 0
    last_nll: float | None = None
    last_tokens: int = 0
    tokens_per_second: float | None = None  # tokens computed, compilation excluded
    error: str | None = None

    @property
    def window_perplexity(self) -> float | None:
        """exp(NLL) over whole windows."""
        return perplexity(self.window_nll)

    @property
    def last_perplexity(self) -> float | None:
        """exp(NLL) of the last tokens."""
        return perplexity(self.last_nll)

    def as_row(self) -> dict[str, Any]:
        """All numbers, the two perplexities among them, as plain values for JSON."""
        perplexities = {"window_perplexity": self.window_perplexity, "last_perplexity": self.last_perplexity}
        return {**dataclasses.asdict(self), **perplexities}


def perplexity(nll: float | None) -> float | None:
    """exp(nll), for a mean negative log-likelihood in nats; None for None."""
    return None if nll is None else math.exp(nll)


def measure(
    apply: Apply,
    parameters: Any,
    documents: Sequence[Tokens],
    *,
    lengths: Sequence[int],
    train_length: int,
    tokens: int,
    batch_tokens: int,
) -> Iterator[Measurement]:
    """Yields one `Measurement` for each of `lengths`, in nats per token.

    1. *Whole window*: non-overlapping windows of each length, from about `tokens` tokens of the documents.
    2. *Last tokens*: `train_length` targets at the end of pieces that have full context at every length, in one
       document; documents shorter than the longest length are left out. At most `tokens` tokens are computed.

    Both are sums of NLL over all scored tokens divided by their number, never means of windows. A window lies in one
    document and starts at position 0. `apply` is compiled once for each length, for batches of about `batch_tokens`
    tokens. A length beyond the training length that `apply` refuses with ValueError gives a `Measurement` with that
    error: a learned embedding has no row for it.

    Raises ValueError, before anything compiles, for a length below `train_length` or above every document's.
    """
    check_lengths(documents, lengths, train_length)
    span = max(lengths)
    ends = full_pieces(documents, span, tokens)
    chosen = pieces(documents, span, tokens)

    def at(length: int) -> Measurement:
        window, last = whole_windows(chosen, length), last_windows(ends, length, train_length)
        try:
            return _measure_length(apply, parameters, window, last, max(1, batch_tokens // length))
        except ValueError as error:
            if length == train_length:
                raise
            return Measurement(length, error=_one_line(error))

    return map(at, lengths)


def check_lengths(documents: Sequence[Sized], lengths: Sequence[int], train_length: int) -> None:
    """Raises ValueError for a length below the training length, or above what the longest document can fill."""
    shortest, span = min(lengths), max(lengths)
    if shortest < train_length:
        raise ValueError(f"evaluate.lengths: {shortest} is below train.length, {train_length}; leave it out")
    longest = max((len(document) for document in documents), default=0)
    if longest <= span:
        raise ValueError(
            f"evaluate.lengths: length {span} needs a held-out document of {span + 1} tokens, "
            f"the longest has {longest}; use shorter lengths or longer documents"
        )


def _measure_length(apply: Apply, parameters: Any, window: Windows, last: Windows, rows: int) -> Measurement:
    """Both measurements at one length, through one compiled function of `rows` windows."""
    length = window.weights.shape[1]
    rows = min(rows, max(len(window.tokens), len(last.tokens)))
    score = _compiled(apply, parameters, rows, length)
    _warm(score, parameters, rows, length)
    start = time.perf_counter()
    window_nll, last_nll = (_mean_nll(score, parameters, windows, rows) for windows in (window, last))
    seconds = time.perf_counter() - start
    if not max(window_nll, last_nll) < _LARGEST_NLL:
        return Measurement(length, error=f"the loss is not finite ({window_nll} and {last_nll} nats per token)")
    computed = (_batches(window, rows) + _batches(last, rows)) * rows * length
    return Measurement(length, window_nll, window.scored, last_nll, last.scored, computed / seconds)


def _compiled(apply: Apply, parameters: Any, rows: int, length: int) -> Callable[..., Float[Array, "rows"]]:
    """`(parameters, tokens [rows, length + 1], weights [rows, length]) -> summed NLL of each row`, compiled."""

    def row_nll(parameters, tokens, weights):
        logits = apply(parameters, tokens[:, :-1], length).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.sum(jnp.where(weights > 0, weights * nll, 0), axis=-1)

    tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
    weights = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    return jax.jit(row_nll).lower(parameters, tokens, weights).compile()


def _warm(score: Callable, parameters: Any, rows: int, length: int) -> None:
    """One call before the clock starts: the first touches memory that the others find ready."""
    tokens, weights = np.zeros((rows, length + 1), np.int32), np.zeros((rows, length), np.float32)
    jax.block_until_ready(score(parameters, tokens, weights))


def _mean_nll(score: Callable, parameters: Any, windows: Windows, rows: int) -> float:
    """Sum of NLL over sum of weights, in float64; the last batch is filled up with windows that do not count."""
    missing = _batches(windows, rows) * rows - len(windows.tokens)
    filled = [np.pad(values, ((0, missing), (0, 0))) for values in windows]
    batches = zip(*(np.split(values, len(values) // rows) for values in filled), strict=True)
    sums = [score(parameters, *batch) for batch in batches]
    return float(np.sum(np.asarray(sums, np.float64))) / windows.scored


def _batches(windows: Windows, rows: int) -> int:
    return -(-len(windows.tokens) // rows)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
