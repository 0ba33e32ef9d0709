"""LongPPL: the perplexity of tokens that need a long context (Fang et al., arXiv 2410.23771).

A token is a *key token* if a long context makes it much likelier than a short one does, and likely at all:

    log p(x | long) - log p(x | short) > alpha   and   log p(x | long) > beta

The short context of a token is the last ``short`` to ``short + step - 1`` tokens before it: a window moves on by
``step`` tokens, all of which are compared in it. Tokens with fewer before them are not compared.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from train.config.settings.evaluate import LongPPLConfig
from train.evaluate.mesh import whole
from train.evaluate.predictor import Predictor, next_nll
from train.evaluate.windows import Windows


class Judge(NamedTuple):
    """A model that decides which tokens are key tokens."""

    predictor: Predictor
    parameters: Any


class KeyLoss(NamedTuple):
    """The mean loss of the key tokens in nats, None without one; how many they are, and of how many tokens."""

    nll: float | None
    tokens: int
    compared: int


@dataclass(frozen=True)
class KeyTokens:
    """How key tokens are found: see ``evaluate.longppl``; `judge` is the evaluator, if the models do not judge
    themselves."""

    sizes: LongPPLConfig
    batch_tokens: int
    judge: Judge | None = None

    def losses(self, predictor: Predictor, models: Sequence[Any], windows: Windows) -> list[KeyLoss]:
        """The losses of the key tokens of windows, for every one of the parameters `models`.

        Raises ValueError if a model refuses the length.
        """
        judged = None if self.judge is None else self._found(*self.judge, windows)
        return [self._loss(predictor, parameters, windows, judged) for parameters in models]

    def _loss(self, predictor: Predictor, parameters: Any, windows: Windows, judged: np.ndarray | None) -> KeyLoss:
        compared, long = windows.weights[:, self._first :] > 0, self._long(predictor, parameters, windows)
        is_key = self._keys(long, self._short(predictor, parameters, windows)) if judged is None else judged
        chosen = long[is_key & compared]
        return KeyLoss(float(chosen.mean()) if chosen.size else None, chosen.size, int(compared.sum()))

    def _found(self, predictor: Predictor, parameters: Any, windows: Windows) -> Bool[np.ndarray, "windows compared"]:
        return self._keys(*(losses(predictor, parameters, windows) for losses in (self._long, self._short)))

    def _keys(self, long: Float[np.ndarray, "*n"], short: Float[np.ndarray, "*n"]) -> Bool[np.ndarray, "*n"]:
        return (short - long > self.sizes.alpha) & (-long > self.sizes.beta)

    def _long(self, predictor: Predictor, parameters: Any, windows: Windows) -> Float[np.ndarray, "windows compared"]:
        """The losses of the tokens that are compared, in the context of their window."""
        return self._losses(predictor, parameters, windows.tokens)[:, self._first :]

    def _short(self, predictor: Predictor, parameters: Any, windows: Windows) -> Float[np.ndarray, "windows compared"]:
        """Their losses in the short context."""
        (count, length), step = windows.weights.shape, self.sizes.step
        starts, size = range(0, length - self._first, step), self._first + step
        padded = np.pad(windows.tokens, ((0, 0), (0, starts[-1] + size - length)))
        cut = np.stack([padded[:, start : start + size + 1] for start in starts], axis=1)
        losses = self._losses(predictor, parameters, cut.reshape(-1, size + 1))[:, self._first :]
        return losses.reshape(count, len(starts) * step)[:, : length - self._first]

    @property
    def _first(self) -> int:
        """The place in a window of the first token that is compared, among those that are scored."""
        return self.sizes.short - 1

    def _losses(
        self, predictor: Predictor, parameters: Any, tokens: Int[np.ndarray, "rows length+1"]
    ) -> Float[np.ndarray, "rows length"]:
        """The loss of every token but the first; the last batch is filled up with copies of its last row."""
        count, length = len(tokens), tokens.shape[1] - 1
        rows = predictor.filled(max(1, min(self.batch_tokens // length, count)))
        filled = np.pad(tokens, ((0, -count % rows), (0, 0)), mode="edge")
        batches = np.split(filled, len(filled) // rows)
        found = [jax.device_get(_token_nll(predictor, parameters, batch)) for batch in batches]
        return np.concatenate(found)[:count].astype(np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _token_nll(predictor: Predictor, parameters: Any, tokens: Any) -> Any:
    """`next_nll`, as every process can read it."""
    return whole(next_nll(predictor, parameters, tokens, tokens.shape[1] - 1))
