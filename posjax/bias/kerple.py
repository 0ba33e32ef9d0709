"""KERPLE: kernelised relative position biases (Chi et al., arXiv 2205.09921)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check, check_choice
from posjax.bias.base import Bias, distance, heads_first

_SMALLEST = 1e-2
_LARGEST_POWER = 2.0


@partial(jax.tree_util.register_dataclass, data_fields=["a", "p"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LogBias(Bias):
    """``b_h = -p_h log(1 + a_h |i - j|)`` with ``a`` and ``p`` of shape ``[heads]``, both kept at 0.01 or above."""

    a: Float[Array, "heads"]
    p: Float[Array, "heads"]

    def values(self, q_positions, kv_positions):
        a, p = (heads_first(jnp.maximum(_widened(x), _SMALLEST)) for x in (self.a, self.p))
        r = jnp.abs(distance(q_positions, kv_positions)).astype(a.dtype)
        return -p * jnp.log1p(a * r)


@partial(jax.tree_util.register_dataclass, data_fields=["a", "p"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PowerBias(Bias):
    """``b_h = -a_h |i - j|^p_h`` with ``a >= 0.01`` and ``0.01 <= p <= 2`` of shape ``[heads]``; 0 at distance 0."""

    a: Float[Array, "heads"]
    p: Float[Array, "heads"]

    def values(self, q_positions, kv_positions):
        a = heads_first(jnp.maximum(_widened(self.a), _SMALLEST))
        p = heads_first(jnp.clip(_widened(self.p), _SMALLEST, _LARGEST_POWER))
        r = jnp.abs(distance(q_positions, kv_positions)).astype(a.dtype)
        # 0^p has no finite derivative in p as autodiff sees it: the power is taken of 1 there and then dropped.
        return jnp.where(r > 0, -a * jnp.maximum(r, 1) ** p, 0.0)


def _widened(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


_KINDS = {"log": LogBias, "power": PowerBias}


@dataclasses.dataclass(frozen=True)
class Kerple:
    """Spec of KERPLE (Chi et al., arXiv 2205.09921), two learned scalars per head, one module for all layers.

    ``kind="log"``, the variant its authors recommend: ``b_h = -p_h log(1 + a_h |i - j|)``.
    ``kind="power"``: ``b_h = -a_h |i - j|^p_h``, which is ALiBi for ``p = 1``.

    At the start ``p`` is uniform in [0, 2] and ``a`` in [0, 1].
    """

    kind: str = "log"
    shared_across_layers = True
    shift_invariant = True

    def __post_init__(self):
        check_choice("Kerple kind", self.kind, tuple(_KINDS))

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``{"a": [heads], "p": [heads]}``, float32."""
        key_a, key_p = jax.random.split(key)
        return {
            "a": jax.random.uniform(key_a, (num_heads,), jnp.float32, maxval=1.0),
            "p": jax.random.uniform(key_p, (num_heads,), jnp.float32, maxval=2.0),
        }

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> LogBias | PowerBias:
        """The bias with its parameters.

        Raises:
            ValueError: if ``params`` does not hold ``a`` and ``p``.
        """
        check(bool(params) and {"a", "p"} <= set(params), "params must hold 'a' and 'p': Kerple(...).init makes them")
        for name in ("a", "p"):
            found = params[name].shape
            check(found == (num_heads,), f"{name} must have shape {(num_heads,)}, found {found}")
        return _KINDS[self.kind](params["a"], params["p"])
