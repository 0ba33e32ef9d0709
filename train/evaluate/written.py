"""The texts that a model writes after many prompts, a batch of rows at a time."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh

from posjax import nn
from posjax.scheme import Layers
from train.config.settings.checks import check
from train.evaluate.decoder import drawn_in_use, empty_cache, to_decode
from train.evaluate.mesh import use_mesh

_SHORTEST = 32  # tokens of a row that is padded
_NOT_FINITE = "the logits are not finite"
GREEDY = nn.Sampling(temperature=0)


def never(tokens: list[int]) -> bool:
    """Lets every row go on."""
    return False


def padded(layers: Layers, length: int, most: int) -> int:
    """The length of rows with padding, at most `most`: one of few, each of which is compiled; the length itself if the
    scheme depends on it."""
    if layers.reads_length or layers.training_positions is not None:
        return length
    return min(max(rounded(length), _SHORTEST), most)


def rounded(number: int) -> int:
    """The least 2^n or 3 x 2^n that is at least a number."""
    power = 1 << (number - 1).bit_length()
    return 3 * power // 4 if power > 2 and number <= 3 * power // 4 else power


@dataclass(frozen=True)
class Writer:
    """A model that continues prompts, over a mesh if there is one.

    Args:
        model: the decoder.
        rows: how many prompts are continued at a time.
        longest: the most tokens that the model sees.
        ends: tokens that end a text.
        seed: of draws.
        mesh: over which the model is split.
    """

    model: nn.Decoder
    rows: int
    longest: int
    ends: Set[int]
    seed: int = 0
    mesh: Mesh | None = None

    def after(
        self,
        prompts: Sequence[Sequence[int]],
        new: int,
        sampling: nn.Sampling = GREEDY,
        is_over: Callable[[list[int]], bool] = never,
    ) -> list[list[int]]:
        """The tokens after every prompt, without the one that ends them: at most `new`, and none after `is_over` says
        of the tokens of a row that it is.

        Raises ValueError for a prompt that leaves no room for them, and for logits that are not finite.
        """
        found: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        for start in range(0, len(order), self.rows):
            some = order[start : start + self.rows]
            for number, tokens in zip(
                some, self._batch([prompts[n] for n in some], new, sampling, is_over), strict=True
            ):
                found[number] = tokens
        return found

    def _batch(self, prompts, new: int, sampling: nn.Sampling, is_over) -> list[list[int]]:
        columns = padded(self.model.config.layers, len(prompts[0]), self.longest - new)
        check(columns >= len(prompts[0]), f"{len(prompts[0])} tokens and {new} new ones are more than {self.longest}")
        shape = self.rows, columns
        tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row in range(self.rows):  # the last batch is filled up with copies of its last prompt
            prompt = prompts[min(row, len(prompts) - 1)]
            tokens[row, columns - len(prompt) :], valid[row, columns - len(prompt) :] = prompt, True
        given = {"sampling": sampling, "stop": self.ends, "valid": valid, "key": jax.random.key(self.seed)}
        given |= {"init_cache": self._init_cache}
        with use_mesh(self.mesh):
            given["positions"] = drawn_in_use(self.model, columns + new, self.seed, self.rows).positions
            if is_over is never:
                written, counts = map(np.asarray, nn.generate(self._ready, tokens, new, **given))
                return [self._before_end(*pair) for pair in zip(written[: len(prompts)], counts, strict=False)]
            return self._until(nn.stream(self._ready, tokens, new, **given), len(prompts), is_over)

    def _before_end(self, tokens: np.ndarray, count: int) -> list[int]:
        check(count == len(tokens) or int(tokens[count]) in self.ends, _NOT_FINITE)
        return tokens[:count].tolist()

    def _until(self, steps: Iterator[np.ndarray], rows: int, is_over: Callable[[list[int]], bool]) -> list[list[int]]:
        """The tokens of the first rows, until each has ended or is over."""
        found: list[list[int]] = [[] for _ in range(rows)]
        going = set(range(rows))
        for column in steps:
            for row in sorted(going):
                check(column[row] >= 0, _NOT_FINITE)
                ended = int(column[row]) in self.ends
                if not ended:
                    found[row].append(int(column[row]))
                if ended or is_over(found[row]):
                    going.remove(row)
            if not going:
                break
        return found

    @cached_property
    def _ready(self) -> nn.Decoder:
        return to_decode(self.model, self.mesh)

    @cached_property
    def _init_cache(self) -> Callable[..., nn.DecoderCache]:
        """Always the same function, so that equal batches compile once."""
        return partial(empty_cache, mesh=self.mesh)
