"""Rows that are computed by the devices that hold their experts: an all-to-all there and one back, without dropping.

The buffers of an all-to-all have a fixed size, with room for ``_ROOM`` times an even share of the rows. If some device
gets more, there are further rounds: their number is that of the fullest device, and one if the loads are nearly even.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._lowered import full_varying_like, match_varying

_ROOM = 1.5


@dataclass(frozen=True)
class Exchange:
    """How rows go to their experts.

    Attributes:
        of_experts: ``of_experts(parameters, rows, sizes, experts)``, the outputs of rows that are sorted by expert,
            where ``sizes`` are the rows of each expert of this device and ``experts`` the expert of each row. Rows
            beyond the sum of the sizes have no expert.
        axis: the mesh axis over which experts are split.
        everywhere: all mesh axes over which rows are split.
    """

    of_experts: Callable
    axis: str
    everywhere: tuple[str, ...]

    def __call__(
        self, parameters: Any, rows: Float[Array, "rows size"], sizes: Int[Array, "experts"]
    ) -> Float[Array, "rows size"]:
        """The output of the expert of every row, float32.

        Args:
            parameters: of this device's experts.
            rows: of this device, sorted by expert.
            sizes: the rows of each expert of the model.
        """
        return _exchanged(self, *match_varying((parameters, rows, sizes)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange: Exchange, parameters, rows, sizes):
    plan = _Plan(exchange, rows, sizes)

    def one(number, out):
        there = plan.there(number)
        outputs = plan.outputs(there, parameters, plan.sent(number, there, rows))
        return plan.placed(number, plan.returned(there, outputs), out)

    return jax.lax.fori_loop(0, plan.rounds, one, plan.blank(jnp.float32))


def _forward(exchange, parameters, rows, sizes):
    return _exchanged(exchange, parameters, rows, sizes), (parameters, rows, sizes)


def _backward(exchange, saved, d_out):
    """Every round computes its outputs once more, and takes their cotangents the same way."""
    parameters, rows, sizes = saved
    plan = _Plan(exchange, rows, sizes)
    d_out = d_out.astype(rows.dtype)

    def one(number, so_far):
        d_parameters, d_rows = so_far
        there = plan.there(number)
        out, pull = jax.vjp(partial(plan.outputs, there), parameters, plan.sent(number, there, rows))
        of_parameters, of_rows = pull(plan.sent(number, there, d_out).astype(out.dtype))
        d_rows = plan.placed(number, plan.returned(there, of_rows), d_rows)
        return jax.tree.map(jnp.add, d_parameters, of_parameters), d_rows

    zeros = jax.tree.map(lambda leaf: full_varying_like(leaf.shape, leaf.dtype, leaf), parameters)
    d_parameters, d_rows = jax.lax.fori_loop(0, plan.rounds, one, (zeros, plan.blank(rows.dtype)))
    return d_parameters, d_rows, None


_exchanged.defvjp(_forward, _backward)


class _There(NamedTuple):
    """What a device knows of the rows that it receives: their order by expert, and its inverse."""

    order: Array
    inverse: Array
    sizes: Array
    experts: Array


class _Plan:
    """Where the rows of one device go, and in which round.

    Row m is for the device ``target[m]``, as the number ``place[m]`` of its rows for it.
    """

    def __init__(self, exchange: Exchange, rows: Array, sizes: Array):
        self.exchange = exchange
        self.devices = jax.lax.axis_size(exchange.axis)
        self.own = len(sizes) // self.devices
        self.count, self.width = rows.shape
        share = -(-int(_ROOM * self.count) // self.devices)
        self.room = min(max(8 * -(-share // 8), 8), self.count)
        self.like = rows
        self.counts = sizes.reshape(self.devices, self.own).sum(1)
        self.starts = jnp.cumsum(self.counts) - self.counts
        numbers = jnp.arange(self.count, dtype=jnp.int32)
        self.experts = jnp.searchsorted(jnp.cumsum(sizes), numbers, side="right").astype(jnp.int32)
        self.target = self.experts // self.own
        self.place = numbers - self.starts[self.target]
        fullest = jnp.max(-(-self.counts // self.room))
        self.rounds = jax.lax.pmax(fullest, exchange.everywhere)

    def blank(self, dtype) -> Array:
        """Zeros for the rows of this device."""
        return full_varying_like((self.count, self.width), dtype, self.like)

    def there(self, number) -> _There:
        """What this device knows of the rows that it receives in a round."""
        index, filled = self._slots(number)
        first = jnp.arange(self.devices, dtype=jnp.int32)[:, None] * self.own
        experts = self._swapped(jnp.where(filled, self.experts[index] - first, self.own)).reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.sum(experts[:, None] == jnp.arange(self.own), axis=0, dtype=jnp.int32)
        return _There(order, jnp.argsort(order), sizes, jnp.minimum(experts[order], self.own - 1))

    def sent(self, number, there: _There, rows: Array) -> Array:
        """The rows that this device receives in a round, sorted by expert; 0 where there are fewer than room."""
        index, filled = self._slots(number)
        received = self._swapped(jnp.where(filled[..., None], rows[index], 0))
        return received.reshape(-1, self.width)[there.order]

    def _slots(self, number) -> tuple[Array, Array]:
        """The rows of a round for each device, ``[devices, room]``, and which of these there are."""
        place = number * self.room + jnp.arange(self.room, dtype=jnp.int32)
        return jnp.minimum(self.starts[:, None] + place, self.count - 1), place < self.counts[:, None]

    def outputs(self, there: _There, parameters, received: Array) -> Array:
        """The outputs of this device's experts, float32."""
        return self.exchange.of_experts(parameters, received, there.sizes, there.experts)

    def returned(self, there: _There, outputs: Array) -> Array:
        """The outputs for this device's rows of a round, ``[devices, room, width]``."""
        outputs = outputs.astype(self.like.dtype)[there.inverse]
        return self._swapped(outputs.reshape(self.devices, self.room, self.width))

    def placed(self, number, returned: Array, out: Array) -> Array:
        """``out`` with the rows of a round in their places."""
        place = self.place - number * self.room
        here = (place >= 0) & (place < self.room)
        found = returned[self.target, jnp.clip(place, 0, self.room - 1)]
        return jnp.where(here[:, None], found.astype(out.dtype), out)

    def _swapped(self, x: Array) -> Array:
        """Part j of this device for the j-th device along the axis, and its part for this device in return."""
        return jax.lax.all_to_all(x, self.exchange.axis, split_axis=0, concat_axis=0)
