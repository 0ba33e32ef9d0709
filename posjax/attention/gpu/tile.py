"""One tile of logits within a kernel: where it lies, the numbers of its tokens, and its masks."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from posjax.attention.formulas import LOG2E, allowed, exact_difference
from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import BLOCK, Inputs, KernelConfig, own
from posjax.attention.gpu.ring import Step
from posjax.attention.tiles import Kind


class Axis(NamedTuple):
    """One axis of a tile.

    Args:
        dimension: 0 for rows, 1 for columns.
        index: of its first token.
        start: the position of token 0, if positions are a range.
        numbers: int32 vectors of its tokens: positions first, unless they are a range, then the numbers of masks.
        ranged: whether positions are a range.
        of_bias: a float32 vector, the numbers of a bias for each token, or None.
    """

    dimension: int
    index: Any
    start: Any
    numbers: tuple
    ranged: bool
    of_bias: Any = None

    @property
    def layout(self):
        """The layout of a vector along the axis."""
        return (mosaic.ROWS, mosaic.COLUMNS)[self.dimension]

    def repeated(self, vector, shape):
        """A vector along the axis, repeated over a tile."""
        return (mosaic.rows, mosaic.columns)[self.dimension](vector, shape)

    def positions(self, shape):
        """Positions of the tokens, repeated over a tile."""
        if self.ranged:
            return mosaic.counted(shape, self.dimension) + (self.start + self.index)
        return self.repeated(self.numbers[0], shape)

    def of_masks(self, shape):
        """Iterates over the numbers that masks of tokens compare, repeated over a tile."""
        return (self.repeated(x, shape) for x in self.numbers[0 if self.ranged else 1 :])


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of logits: queries by keys, or keys by queries.

    Args:
        config: the static part of the call.
        x: references to its arrays.
        batch: the batch row.
        head: the query head.
        q: the axis of the queries.
        k: the axis of the keys.
        shape: rows and columns.
    """

    config: KernelConfig
    x: Inputs
    batch: Any
    head: Any
    q: Axis
    k: Axis
    shape: tuple[int, int]

    @property
    def transposed(self) -> bool:
        """Whether rows are keys."""
        return self.q.dimension == 1

    @property
    def origin(self):
        """The first query of the block of this tile, which numbers of a bias are relative to."""
        return self.q.index - self.q.index % BLOCK

    def distances(self):
        """``p_j - p_i``, in float32."""
        q, k = self.q, self.k
        if not (q.ranged and k.ranged):
            return exact_difference(k.positions(self.shape), q.positions(self.shape))
        within = mosaic.counted(self.shape, k.dimension) - mosaic.counted(self.shape, q.dimension)
        return within.astype(jnp.float32) + exact_difference(k.start + k.index, q.start + q.index)

    def seen(self):
        """Which pairs the mask allows."""
        i, j = self.q.positions(self.shape), self.k.positions(self.shape)
        of_masks = self.q.of_masks(self.shape), self.k.of_masks(self.shape)
        return allowed(self.config.formula, i, j, *of_masks)

    def logits(self, scores, kind: Kind) -> "Logits":
        """Logits from scores, minus infinity where they are forbidden."""
        config = self.config
        numbers, factor, slope = scores, config.factor, None
        if config.bias.adds or config.softcap is not None:
            numbers, factor = config.bias.add(self, kind.reach, scores * config.factor), None
        if config.softcap is not None:
            ratio = _tanh(numbers * (1 / config.softcap))
            numbers = config.softcap * ratio
            slope = 1 - ratio * ratio
        if kind.masked and config.formula is not None:
            numbers = jnp.where(self.seen(), numbers, -jnp.inf)
        return Logits(numbers, factor, slope)


class Logits(NamedTuple):
    """The logits of a tile, in base 2, are ``numbers`` times ``factor``, a positive number or None for 1.

    Only the exponent, or the maximum of a row, is multiplied by the factor: one operation less for each pair.

    Args:
        numbers: float32, of a tile.
        factor: see above.
        slope: the derivative of the soft cap, or None.
    """

    numbers: Any
    factor: float | None
    slope: Any

    def highest(self):
        """The largest logit of each row."""
        top = self.numbers.max(axis=1)
        return top if self.factor is None else top * self.factor

    def weights(self, subtracted):
        """``2^(z - subtracted)``."""
        return jnp.exp2((self.numbers if self.factor is None else self.numbers * self.factor) - subtracted)


def _tanh(x):
    """``tanh x`` from an exponential: the GPU's own ``tanh`` is off by 2^-11."""
    power = jnp.exp2(jnp.minimum(jnp.abs(x) * (2 * LOG2E), 60.0))
    size = 1 - 2 / (power + 1)
    return jnp.where(x < 0, -size, size)


def axis(config: KernelConfig, x: Inputs, side: int, dimension: int, index, numbers: tuple = (), of_bias=None) -> Axis:
    """The axis of the queries (``side`` 0) or the keys (1) of a tile."""
    start = x.starts[side] if config.ranged[side] else None
    return Axis(dimension, index, start, numbers, config.ranged[side], of_bias)


def numbers_at(x: Inputs, side: int, batch, tokens, layout) -> tuple:
    """The numbers of some tokens, from main memory."""
    array = x.numbers[side]
    if array is None:
        return ()
    return mosaic.load_all(array.at[own(array, batch), :, tokens], layout)


def vectors_of(step: Step, config: KernelConfig, layout) -> tuple[tuple, Any]:
    """The numbers of the tokens of a step: those of positions and masks, and those of the bias, or None."""
    ints = () if step.ints is None else mosaic.load_all(step.ints, layout, config.interpret)
    if not config.bias.of_tokens:
        return ints, None
    return ints, mosaic.load_all(step.floats, layout, config.interpret)[0]
