"""The protocol of additive biases."""

from jaxtyping import Array, Float, Int

from posjax._slots import Blockwise


class Bias(Blockwise):
    """A bound bias: a registered pytree whose leaves are its parameters, ready to be evaluated on any tile.

    Gradients reach the leaves through every attention backend.
    """

    def values(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Float[Array, "*b heads q k"]:
        """The tile, ``[heads, q, k]`` for positions ``[n]`` and ``[batch, heads, q, k]`` for ``[batch, 1, n]``."""
        raise TypeError(f"{type(self).__name__} does not say its values")

    def apply(
        self,
        scores: Float[Array, "*b heads q k"],
        q_positions: Int[Array, "*b q"],
        kv_positions: Int[Array, "*b k"],
    ) -> Float[Array, "*b heads q k"]:
        """The tile of logits from a tile of scaled scores: ``scores + values``, unless the bias is also a factor."""
        return scores + self.values(q_positions, kv_positions).astype(scores.dtype)


def distance(q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Int[Array, "*b q k"]:
    """Integer distance ``i - j`` of every pair, positive for keys behind the query."""
    return q_positions[..., :, None] - kv_positions[..., None, :]


def heads_first(per_head: Float[Array, "heads"]) -> Float[Array, "heads 1 1"]:
    """A value per head, shaped to broadcast against a tile."""
    return per_head[:, None, None]
