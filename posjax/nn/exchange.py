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
            beyond the sum of the sizes have no expert. Rows are a tree of arrays: the states, and their weights, so
            that the gradients of both come back together.
        axis: the mesh axis over which experts are split.
        everywhere: all mesh axes over which rows are split.
    """

    of_experts: Callable
    axis: str
    everywhere: tuple[str, ...]

    def __call__(
        self,
        parameters: Any,
        rows: tuple[Float[Array, "rows size"], Float[Array, "rows 1"]],
        sizes: Int[Array, "experts"],
    ) -> Float[Array, "rows size"]:
        """The output of the expert of every row, float32.

        Args:
            parameters: of this device's experts.
            rows: the states of this device's tokens and their weights, sorted by expert.
            sizes: the rows of each expert of the model.
        """
        return _exchanged(self, *match_varying((parameters, rows, sizes)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange: Exchange, parameters, rows, sizes):
    plan, states = _Plan(exchange, rows[0], sizes), rows[0]

    def one(number, out):
        there = plan.there(number)
        outputs = plan.outputs(there, parameters, plan.sent(number, there, rows))
        return plan.placed(number, plan.returned(there, outputs.astype(states.dtype)), out)

    return jax.lax.fori_loop(0, plan.rounds, one, full_varying_like(states.shape, jnp.float32, states))


def _forward(exchange, parameters, rows, sizes):
    return _exchanged(exchange, parameters, rows, sizes), (parameters, rows, sizes)


def _backward(exchange, saved, d_out):
    """Every round computes its outputs once more, and takes their cotangents the same way."""
    parameters, rows, sizes = saved
    plan = _Plan(exchange, rows[0], sizes)
    d_out = d_out.astype(rows[0].dtype)

    def one(number, so_far):
        d_parameters, d_rows = so_far
        there = plan.there(number)
        out, pull = jax.vjp(partial(plan.outputs, there), parameters, plan.sent(number, there, rows))
        of_parameters, of_rows = pull(plan.sent(number, there, d_out).astype(out.dtype))
        d_rows = plan.placed(number, plan.returned(there, of_rows), d_rows)
        return jax.tree.map(jnp.add, d_parameters, of_parameters), d_rows

    zeros = jax.tree.map(lambda leaf: full_varying_like(leaf.shape, leaf.dtype, leaf), (parameters, rows))
    d_parameters, d_rows = jax.lax.fori_loop(0, plan.rounds, one, zeros)
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
        self.count = len(rows)
        share = -(-int(_ROOM * self.count) // self.devices)
        self.room = min(max(8 * -(-share // 8), 8), self.count)
        self.counts = sizes.reshape(self.devices, self.own).sum(1)
        self.starts = jnp.cumsum(self.counts) - self.counts
        numbers = jnp.arange(self.count, dtype=jnp.int32)
        self.experts = jnp.searchsorted(jnp.cumsum(sizes), numbers, side="right").astype(jnp.int32)
        self.target = self.experts // self.own
        self.place = numbers - self.starts[self.target]
        fullest = jnp.max(-(-self.counts // self.room))
        self.rounds = jax.lax.pmax(fullest, exchange.everywhere)

    def there(self, number) -> _There:
        """What this device knows of the rows that it receives in a round."""
        index, filled = self._slots(number)
        first = jnp.arange(self.devices, dtype=jnp.int32)[:, None] * self.own
        experts = self._swapped(jnp.where(filled, self.experts[index] - first, self.own)).reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.sum(experts[:, None] == jnp.arange(self.own), axis=0, dtype=jnp.int32)
        return _There(order, jnp.argsort(order), sizes, jnp.minimum(experts[order], self.own - 1))

    def sent(self, number, there: _There, rows: Any) -> Any:
        """The rows that this device receives in a round, sorted by expert; 0 where there are fewer than room."""
        index, filled = self._slots(number)

        def of_array(rows):
            received = self._swapped(jnp.where(filled[..., None], rows[index], 0))
            return received.reshape(-1, rows.shape[1])[there.order]

        return jax.tree.map(of_array, rows)

    def _slots(self, number) -> tuple[Array, Array]:
        """The rows of a round for each device, ``[devices, room]``, and which of these there are."""
        place = number * self.room + jnp.arange(self.room, dtype=jnp.int32)
        return jnp.minimum(self.starts[:, None] + place, self.count - 1), place < self.counts[:, None]

    def outputs(self, there: _There, parameters: Any, received: Any) -> Array:
        """The outputs of this device's experts, float32."""
        return self.exchange.of_experts(parameters, received, there.sizes, there.experts)

    def returned(self, there: _There, outputs: Any) -> Any:
        """The outputs for this device's rows of a round, ``[devices, room, width]``."""

        def of_array(outputs):
            return self._swapped(outputs[there.inverse].reshape(self.devices, self.room, -1))

        return jax.tree.map(of_array, outputs)

    def placed(self, number, returned: Any, out: Any) -> Any:
        """``out`` with the rows of a round in their places."""
        place = self.place - number * self.room
        here = ((place >= 0) & (place < self.room))[:, None]
        place = jnp.clip(place, 0, self.room - 1)
        return jax.tree.map(
            lambda new, old: jnp.where(here, new[self.target, place].astype(old.dtype), old), returned, out
        )

    def _swapped(self, x: Array) -> Array:
        """Part j of this device for the j-th device along the axis, and its part for this device in return."""
        return jax.lax.all_to_all(x, self.exchange.axis, split_axis=0, concat_axis=0)
