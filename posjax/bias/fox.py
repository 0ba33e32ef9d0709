"""FoX: forget gates, a bias that is a function of the tokens (Lin et al., arXiv 2503.02130)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from posjax._checks import check, check_count, check_flags, check_positive, check_rank, describe, params_of
from posjax._numbers import at_least_float32, widened
from posjax.bias.base import Bias, BiasSpec

_LAYOUT = "[batch, heads, length]"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForgetBias(Bias):
    """``b_h(i, j) = c_i - c_j`` with ``c`` the cumulative sums of the log forget gates, ``[batch, heads, length]``.

    ``-|c_i - c_j|`` when symmetric. The difference of two sums has their rounding error: 6e-8 of ``c``, or 0.004 once
    100,000 gates of 1/2 have been summed, and 0.01 after 262,000.
    """

    q_gates: Float[Array, "batch heads q"]
    kv_gates: Float[Array, "batch heads k"]
    symmetric: bool = dataclasses.field(default=False, metadata={"static": True})

    axes: ClassVar = {"q_gates": ("batch", "heads", "queries"), "kv_gates": ("batch", "heads", "keys")}
    reads_positions: ClassVar[bool] = False

    def __post_init__(self):
        check_flags(self)

    @property
    def grows_ahead(self):
        """True unless the bias is symmetric."""
        return not self.symmetric

    def values(self, q_positions, kv_positions):
        """``c_i - c_j``, or ``-|c_i - c_j|``, as ``[batch, heads, q, k]``; positions are not used."""
        difference = self.q_gates[..., :, None] - self.kv_gates[..., None, :]
        return -jnp.abs(difference) if self.symmetric else difference


def accumulate(
    log_gates: Float[Array, "batch length heads"],
    start: Float[Array, "batch heads"] | None = None,
    valid: Bool[Array, "batch length"] | None = None,
) -> Float[Array, "batch heads length"]:
    """Cumulative sums ``c_t = sum_{l <= t} log f_l`` of a chunk, float32, as ``FoX.bind`` takes them.

    Args:
        log_gates: from ``FoX.prepare``.
        start: sum over the earlier chunks, which is the last column ``c[:, :, -1]`` of their result; None means 0.
        valid: False at padding, which forgets nothing.
    """
    if valid is not None:
        log_gates = jnp.where(valid[..., None], log_gates, 0)
    total = jnp.cumsum(jnp.moveaxis(widened(log_gates), 1, 2), axis=2)
    return total if start is None else total + start[..., None]


@dataclasses.dataclass(frozen=True)
class FoX(BiasSpec):
    """Spec of the forgetting transformer (Lin et al., arXiv 2503.02130), usually without another position method.

    Each token has a forget gate per head, ``f_t = sigmoid(w_h . x_t + b_h)``, and
    ``b_h(i, j) = sum_{l=j+1..i} log f_l = c_i - c_j`` with ``c`` the cumulative sum of ``log f``. A constant gate
    ``f = e^-m`` is ALiBi with slope ``m``. Used in three steps:

        log_gates = spec.prepare(params, x)          x: the tokens that queries and keys are projected from
        c = accumulate(log_gates)                    with a cache: its sum as ``start``, ``c`` cached with the keys
        bias = spec.bind(num_heads=..., q_gates=c, kv_gates=c)

    It depends on the order of the tokens, not on positions. Packed documents need nothing more: sums before a document
    cancel, up to the rounding of float32 (see ``ForgetBias``).

    Args:
        symmetric: ``-|c_i - c_j|``, for bidirectional attention.
        data_dependent: if False, the gates are learned constants, one for each head.
        decay_times: ``(shortest, longest)`` number of tokens ``T`` after which a head initially decays to ``1/e``,
            spaced geometrically over the heads: ``b = -log(expm1(1 / T))``. None: ``b = 0``, which is 1.4 tokens.
    """

    symmetric: bool = False
    data_dependent: bool = True
    decay_times: tuple[float, float] | None = None
    reads_tokens: ClassVar[bool] = True
    gated: ClassVar[bool] = True
    shift_invariant = True

    def __post_init__(self):
        check_flags(self)
        needed = self.data_dependent or self.decay_times is not None
        check(needed, "decay_times must be given when data_dependent is False, or all heads are equal")
        if self.decay_times is not None:
            message = f"decay_times must be (shortest, longest), found {describe(self.decay_times)}"
            check(isinstance(self.decay_times, tuple | list) and len(self.decay_times) == 2, message)
            for time in self.decay_times:
                check_positive("decay_times", time)
            check(self.decay_times[0] <= self.decay_times[1], message)

    @property
    def one_sided(self) -> str | None:
        """``"symmetric=True"``, or None if it is set."""
        return None if self.symmetric else "symmetric=True"

    def init(self, key: Array, num_heads: int, model_dim: int) -> dict[str, Array]:
        """``{"w": [model_dim, heads], "b": [heads]}``, float32, ``w`` normal with 0.02; only ``b`` for constants."""
        check_count("num_heads", num_heads)
        b = jnp.zeros(num_heads)
        if self.decay_times is not None:
            times = np.geomspace(*self.decay_times, num_heads)
            b = jnp.asarray(-np.log(np.expm1(1 / times)), jnp.float32)
        w = {"w": 0.02 * jax.random.normal(key, (model_dim, num_heads), jnp.float32)} if self.data_dependent else {}
        return {**w, "b": b.astype(jnp.float32)}

    def prepare(
        self, params: dict[str, Array], x: Float[Array, "batch length model_dim"]
    ) -> Float[Array, "batch length heads"]:
        """``log sigmoid(x w + b)``, at least float32: the logarithms of the forget gates of every token.

        Raises:
            ValueError: if ``params`` does not hold ``w`` and ``b``, or for tokens of another size.
        """
        check_rank("x", x, 3, "[batch, length, model_dim]")
        heads = params["b"].shape[0] if params and "b" in params else 0
        if not self.data_dependent:
            (b,) = params_of(params, self, b=(heads,))
            return jnp.broadcast_to(jax.nn.log_sigmoid(widened(b)), (*x.shape[:2], heads))
        w, b = params_of(params, self, w=(x.shape[2], heads), b=(heads,))
        dtype = at_least_float32(x.dtype, w.dtype)
        x, w, b = (part.astype(dtype) for part in (x, w, b))
        return jax.nn.log_sigmoid(jnp.einsum("btd,dh->bth", x, w, precision="highest") + b[None, None])

    def kept(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_heads,)``: the sum of the gates."""
        return (num_heads,)

    def bind(
        self,
        params: dict[str, Array] | None = None,
        *,
        num_heads: int,
        q_gates: Float[Array, "batch heads q"],
        kv_gates: Float[Array, "batch heads k"],
    ) -> ForgetBias:
        """The bias of cumulative sums from ``accumulate``; ``params`` is used only in ``prepare``.

        Raises:
            ValueError: if the sums are not ``[batch, heads, length]``.
        """
        for name, gates in (("q_gates", q_gates), ("kv_gates", kv_gates)):
            check_rank(name, gates, 3, _LAYOUT)
            fits = gates.shape[1] == num_heads
            check(fits, f"{name} must be {_LAYOUT} with {num_heads} heads, found shape {gates.shape}")
        return ForgetBias(widened(q_gates), widened(kv_gates), self.symmetric)
