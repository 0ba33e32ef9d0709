"""KERPLE: kernelised relative position biases (Chi et al., arXiv 2205.09921)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check_choice, params_of
from posjax._numbers import align_ranks, widened
from posjax.bias.base import Bias, BiasSpec, distance, heads_first

_SMALLEST = 1e-2
_LARGEST_POWER = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogBias(Bias):
    """``b_h = -p_h log(1 + a_h |i - j|)`` with ``a`` and ``p`` of shape ``[heads]``, both kept at 0.01 or above."""

    a: Float[Array, "heads"]
    p: Float[Array, "heads"]

    axes: ClassVar = {"a": ("heads",), "p": ("heads",)}
    by_distance: ClassVar[bool] = True

    def values(self, q_positions, kv_positions):
        """``-p_h log(1 + a_h |i - j|)``, ``[heads, q, k]`` for positions that the batch shares."""
        a, p = (_clipped(x, _SMALLEST) for x in (self.a, self.p))
        r = jnp.abs(distance(q_positions, kv_positions, a.dtype))
        a, p = heads_first(a, r), heads_first(p, r)
        return -p * jnp.log1p(a * r)


def _clipped(x, least: float, most: float | None = None):
    """``x`` clipped, with a derivative of 1 everywhere: a scalar that has left its bounds can return.

    (The released code clips the stored parameter before each use, with the same effect.)
    """
    x = widened(x)
    return x + jax.lax.stop_gradient(jnp.clip(x, least, most) - x)


def _power(a, p, q_positions, kv_positions):
    """``a_h |i - j|^p_h`` with ``a >= 0.01`` and ``0.01 <= p <= 2``; 0 at distance 0."""
    a = _clipped(a, _SMALLEST)
    p = _clipped(p, _SMALLEST, _LARGEST_POWER)
    r = jnp.abs(distance(q_positions, kv_positions, a.dtype))
    a, p = heads_first(a, r), heads_first(p, r)
    # Autodiff gives no finite derivative of 0^p in p. So at distance 0 this computes the power of 1 and multiplies it
    # by 0. It does not use ``where``: jax 0.10.2 compiles its gradient to NaN on CPUs at optimisation level 1.
    return a * jnp.maximum(r, 1) ** p * (r > 0).astype(a.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PowerBias(Bias):
    """``b_h = -a_h |i - j|^p_h`` with ``a >= 0.01`` and ``0.01 <= p <= 2`` of shape ``[heads]``; 0 at distance 0."""

    a: Float[Array, "heads"]
    p: Float[Array, "heads"]

    axes: ClassVar = {"a": ("heads",), "p": ("heads",)}
    by_distance: ClassVar[bool] = True

    def values(self, q_positions, kv_positions):
        """``-a_h |i - j|^p_h``, ``[heads, q, k]`` for positions that the batch shares."""
        return -_power(self.a, self.p, q_positions, kv_positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedPowerBias(PowerBias):
    """A ``PowerBias`` that also damps scores: ``z exp(-a'_h |i - j|^p'_h) + b_h``.

    ``a'`` and ``p'`` have the bounds of ``a`` and ``p``. ``values`` is only the additive part.
    """

    weight_a: Float[Array, "heads"]
    weight_p: Float[Array, "heads"]

    axes: ClassVar = PowerBias.axes | {"weight_a": ("heads",), "weight_p": ("heads",)}
    by_distance: ClassVar[bool] = False

    def apply(self, scores, q_positions, kv_positions):
        """``z exp(-a'_h |i - j|^p'_h) + b_h``."""
        weight = jnp.exp(-_power(self.weight_a, self.weight_p, q_positions, kv_positions))
        scores, weight = align_ranks(scores, weight)
        return super().apply(scores * weight.astype(scores.dtype), q_positions, kv_positions)


_KINDS = {"log": LogBias, "power": PowerBias, "weighted-power": WeightedPowerBias}


@dataclasses.dataclass(frozen=True)
class Kerple(BiasSpec):
    """Spec of KERPLE (Chi et al., arXiv 2205.09921): learned scalars per head, shared by all layers.

    ``kind="log"``, the variant its authors recommend: ``b_h = -p_h log(1 + a_h |i - j|)``.
    ``kind="power"``: ``b_h = -a_h |i - j|^p_h``, which is ALiBi for ``p = 1``.
    ``kind="weighted-power"``: the power bias and a factor, ``z exp(-a'_h |i - j|^p'_h) - a_h |i - j|^p_h``, an option
    of the authors' code (``kerple_power_ap_ap`` in their fork of GPT-NeoX).

    At the start every ``p`` is uniform in [0, 2] and every ``a`` in [0, 1].
    """

    kind: str = "log"
    shared_across_layers = True
    shift_invariant = True

    def __post_init__(self):
        check_choice("Kerple kind", self.kind, tuple(_KINDS))

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``{"a": [heads], "p": [heads]}``, float32; for ``"weighted-power"`` also ``weight_a`` and ``weight_p``."""
        keys = jax.random.split(key, len(self._names))
        return {
            name: jax.random.uniform(k, (num_heads,), jnp.float32, maxval=2.0 if name.endswith("p") else 1.0)
            for name, k in zip(self._names, keys, strict=True)
        }

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> LogBias | PowerBias:
        """The bias with its parameters.

        Raises:
            ValueError: if ``params`` does not hold them, or holds them for another number of heads.
        """
        return _KINDS[self.kind](*params_of(params, self, **dict.fromkeys(self._names, (num_heads,))))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(_KINDS[self.kind]))
