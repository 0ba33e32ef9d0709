"""What masks and biases have in common: values that an attention loop takes block by block."""

from typing import Self

from jaxtyping import Array, Int


class Blockwise:
    """A value over (query, key) pairs that can be narrowed to a block of either.

    A subclass that carries arrays with a token or a batch axis overrides the methods; for a pure function of positions
    the defaults are right, because the positions themselves are narrowed beside it.
    """

    def queries(self, start, size: int) -> Self:
        """The same value for the block of ``size`` queries from ``start``."""
        return self

    def keys(self, start, size: int) -> Self:
        """The same value for the block of ``size`` keys from ``start``."""
        return self

    def row(self, index) -> Self:
        """The same value for one row of the batch (kept as a batch of one)."""
        return self

    def pad(self, queries: int, keys: int) -> Self:
        """The same value with its arrays lengthened to ``queries`` and ``keys`` tokens."""
        return self

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raises ValueError unless the arrays it carries fit an attention call of these sizes."""

    @property
    def batched(self) -> bool:
        """Whether it carries arrays that differ between the rows of a batch."""
        return False

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        return True


def with_head_axis(positions: Int[Array, "*b n"]) -> Int[Array, "*b n"]:
    """``[n]`` as it is, ``[batch, n]`` as ``[batch, 1, n]``: the form in which masks and biases take positions."""
    return positions if positions.ndim == 1 else positions[:, None, :]
