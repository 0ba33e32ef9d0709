"""Languages whose difficulty is length: strings of formal languages, and grids.

The strings are tasks of Deletang et al. (arXiv 2207.02098, appendix A), by which Ruoss et al. (arXiv 2305.16843) and
kexue.fm/archives/9444 compare position encodings. Each has a level of the Chomsky hierarchy: regular (R) or
context-sensitive (CS). After a string comes one slot for each symbol of its answer; a bidirectional model predicts the
answer there.

A generator draws one example from a key and a length, which may be traced, into a buffer of static size. Symbol s is
token ``FIRST + s``; padding follows the example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, Key

PAD, SLOT, FIRST, VOCABULARY_SIZE = 0, 1, 2, 10
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # (rows, columns) that the first token of a grid asks for
COLOUR_COUNT = 4


class Example(NamedTuple):
    """One example, or a batch of them: tokens, the target of each position, and the mask of those that have one.

    ``grid`` is the (row, column) of every token of a grid, from 1, and (0, 0) elsewhere; None for strings.
    """

    tokens: Int32[Array, "*batch size"]
    targets: Int32[Array, "*batch size"]
    weights: Bool[Array, "*batch size"]
    grid: Int32[Array, "*batch size 2"] | None = None


def even_pairs(key: Key[Array, ""], length: Int[Array, ""], size: int) -> Example:
    """R. Is the number of ``ab`` and ``ba`` in a string over {a, b} odd? It is odd if and only if the first and last
    symbol differ."""
    symbols = jax.random.randint(key, size, 0, 2)
    return _ask(symbols, length, 1, symbols[0] != symbols[length - 1])


def cycle_navigation(key: Key[Array, ""], length: Int[Array, ""], size: int) -> Example:
    """R. Where does a walk end that starts at position 0 of 5 on a circle? Symbols: a step back, none, a step ahead."""
    symbols = jax.random.randint(key, size, 0, 3)
    return _ask(symbols, length, 1, jnp.sum(symbols - 1, where=jnp.arange(size) < length) % 5)


def bucket_sort(key: Key[Array, ""], length: Int[Array, ""], size: int) -> Example:
    """CS. The string over five ordered symbols, sorted."""
    symbols = jax.random.randint(key, size, 0, 5)
    return _ask(symbols, length, length, jnp.sort(jnp.where(jnp.arange(size) < length, symbols, 5)))


def _ask(symbols, length, slots, answers) -> Example:
    """The string, a number of slots after it, and the answer: one symbol, or an array that begins with it."""
    index = jnp.arange(symbols.size)
    asked = (index >= length) & (index < length + slots)
    answers = jnp.broadcast_to(answers, symbols.shape)[jnp.where(asked, index - length, 0)]
    tokens = jnp.where(index < length, FIRST + symbols, jnp.where(asked, SLOT, PAD))
    return Example(tokens, jnp.where(asked, FIRST + answers, 0), asked)


def grid_neighbours(key: Key[Array, ""], length: Int[Array, ""], size: int) -> Example:
    """A direction, and a grid of four colours row by row: what colour is each cell's neighbour in that direction?

    One side is ``length`` (at least 2), the other 2 .. length, in either orientation. With one axis, the distance to
    the cell below is the grid's width, which no token states; with two axes it is one step in every grid.
    """
    for_side, for_turn, for_colours, for_direction = jax.random.split(key, 4)
    long = jnp.maximum(length, 2)
    sides = jnp.stack([long, jax.random.randint(for_side, (), 2, long + 1)])
    height, width = jnp.where(jax.random.bernoulli(for_turn), sides, sides[::-1])
    direction = jax.random.randint(for_direction, (), 0, len(DIRECTIONS))
    colours = jax.random.randint(for_colours, size - 1, 0, COLOUR_COUNT)
    cell = jnp.arange(size - 1)
    inside, coordinates = cell < height * width, jnp.stack([cell // width, cell % width], axis=-1)
    neighbours = coordinates + jnp.array(DIRECTIONS)[direction]
    asked = inside & ((neighbours >= 0) & (neighbours < jnp.stack([height, width]))).all(-1)
    target = colours[jnp.where(asked, neighbours[:, 0] * width + neighbours[:, 1], 0)]
    return Example(
        jnp.append(FIRST + COLOUR_COUNT + direction, jnp.where(inside, FIRST + colours, PAD)),
        jnp.append(0, jnp.where(asked, FIRST + target, 0)),
        jnp.append(False, asked),
        jnp.pad(jnp.where(inside[:, None], coordinates + 1, 0), ((1, 0), (0, 0))),
    )


@dataclass(frozen=True)
class Language:
    """A generator, its level, the number of possible answers, and the buffer size for examples up to a length."""

    level: str
    classes: int
    example: Callable[[Key[Array, ""], Int[Array, ""], int], Example]
    size: Callable[[int], int] = lambda length: length + 1

    @partial(jax.jit, static_argnums=(0, 2, 3, 4))
    def sample(self, key: Key[Array, ""], batch: int, length: int, shorter: bool = False) -> Example:
        """``batch`` examples of the length; with ``shorter`` each has a length of its own, uniform over 1 .. length."""
        keys = jax.random.split(key, batch + 1)
        lengths = jax.random.randint(keys[0], batch, 1, length + 1) if shorter else jnp.full(batch, length)
        return jax.vmap(lambda k, n: self.example(k, n, self.size(length)))(keys[1:], lengths)


LANGUAGES: dict[str, Language] = {
    "even pairs": Language("R", 2, even_pairs),
    "cycle navigation": Language("R", 5, cycle_navigation),
    "bucket sort": Language("CS", 5, bucket_sort, lambda length: 2 * length),
    "grid neighbours": Language("grid", COLOUR_COUNT, grid_neighbours, lambda side: side**2 + 1),
}
"""Every language, by the name that configurations use."""
