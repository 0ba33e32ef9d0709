"""CLEX: frequencies that follow the scale along a learned differential equation (arXiv:2310.16450)."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._angles import Frequencies, as_real_positions, exact
from posjax._checks import check, check_choice, check_count, check_length, params_of
from posjax.positions import Positions
from posjax.rotary.ntk import ntk_exponents
from posjax.rotary.rules import FrequencyRule, Length, is_host
from posjax.rotary.tables import RotaryTable, learned_angles, rotary_table

_ACTIVATIONS = {"tanh": jnp.tanh, "silu": jax.nn.silu}


@dataclass(frozen=True)
class CLEX(FrequencyRule):
    """Log frequencies z(t) integrated over the scale t, from z(1) = ln theta of plain RoPE (arXiv:2310.16450).

        dz/dt = act((z + ln ntk(t)) up) down + d/dt ln ntk(t),    ntk_i(t) = theta_i (2t - 1)^(-2i/(w-2))

    ``down`` starts at zero, so the frequencies of an untrained CLEX are exactly ntk(t).

    original_length: L. The scale is t = ceil(length / L), between 1 and ``max_factor``: pass ``length = t * L`` in
        training, with t drawn from 1 .. max_factor, and the current length at inference. Both may be traced.
    max_factor: the largest t.
    param_factor: the width of the hidden layer divided by the rotary width. activation: ``"tanh"`` or ``"silu"``.
    steps: Runge-Kutta steps (of fourth order) per unit of t; the released code takes 100. One pass of
        steps * (max_factor - 1) small steps gives all integer scales, so a traced length does not compile again.

    Other modules have the rest of the method: ``training_positions.ClexPositions`` draws training positions from t L;
    ``scales.ClippedLogN`` is the log scale ln(keys) / ln L of the query (unclipped in the paper), not used in training.
    The released code shares one module among all layers, and always uses base 10,000 in ntk.
    All keys must share the frequencies of the current length: cache keys before rotation, or keep the length fixed.
    """

    original_length: int
    max_factor: int = 16
    param_factor: int = 1
    activation: str = "tanh"
    steps: int = 100

    reads_length: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("original_length", "max_factor", "param_factor", "steps"):
            check_count(name, getattr(self, name))
        check_choice("activation", self.activation, tuple(_ACTIVATIONS))

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """``{"up": [w/2, param_factor w], "down": [param_factor w, w/2]}``, float32.

        ``up`` is uniform within 1/sqrt(param_factor w) (torch's Kaiming initialisation), ``down`` zero.
        """
        half, hidden = self._sizes(head_dim)
        up = jax.random.uniform(key, (half, hidden), jnp.float32, -(hidden**-0.5), hidden**-0.5)
        return {"up": up, "down": jnp.zeros((hidden, half), jnp.float32)}

    def _sizes(self, head_dim: int | None) -> tuple[int, int]:
        """w/2, and the width of the hidden layer."""
        width = self.rotary_dim(head_dim)
        return width // 2, self.param_factor * width

    def _scale(self, length: Length):
        """The scale t as an integer."""
        xp = np if is_host(length) else jnp
        return xp.minimum(1 + (xp.maximum(length, 1) - 1) // self.original_length, self.max_factor)

    def _untrained(self, head_dim: int | None) -> Float[np.ndarray, "max_factor w/2"]:
        """ntk(t) for t = 1 .. max_factor, float64."""
        alpha = 2 * np.arange(1, self.max_factor + 1) - 1.0
        return self.inverse_frequencies(head_dim) * alpha[:, None] ** ntk_exponents(self.rotary_dim(head_dim))

    def at_length(
        self, length: Length | None = None, *, head_dim: int | None = None, params: dict[str, Array] | None = None
    ) -> tuple[Frequencies, float]:
        """As :meth:`FrequencyRule.at_length`, in float32 for the given ``params``.

        Without ``params`` the frequencies are exact, those of an untrained CLEX.
        """
        check_length(length)
        row = self._scale(self.original_length if length is None else length) - 1
        untrained = self._untrained(head_dim)
        if params is None:
            rows = exact(untrained[row] if is_host(row) else untrained)
            return rows if is_host(row) else jax.tree.map(lambda x: jnp.take(x, row, axis=0), rows), 1.0
        last = int(row.max()) if is_host(row) else self.max_factor - 1
        half, hidden = self._sizes(head_dim)
        network = (part.astype(jnp.float32) for part in params_of(params, self, up=(half, hidden), down=(hidden, half)))
        learned = jnp.exp(self._integrate(*network, last, head_dim))
        return Frequencies(jnp.take(untrained[: last + 1].astype(np.float32) * learned, row, axis=0)), 1.0

    def _integrate(self, up, down, units: int, head_dim: int | None) -> Float[Array, "units+1 w/2"]:
        """z(t) - ln ntk(t) for t = 1 .. 1 + units; its slope is only the learned term."""
        plain = np.log(self.inverse_frequencies(head_dim)).astype(np.float32)
        exponents = ntk_exponents(2 * plain.size).astype(np.float32)
        act = _ACTIVATIONS[self.activation]
        step = 1 / self.steps

        def slope(t, y):
            z_plus_ntk = y + 2 * (plain + exponents * jnp.log(2 * t - 1))
            hidden = act(jnp.dot(z_plus_ntk, up, precision="highest"))
            return jnp.dot(hidden, down, precision="highest")

        def runge_kutta(y, t):
            a = slope(t, y)
            b = slope(t + step / 2, y + step / 2 * a)
            c = slope(t + step / 2, y + step / 2 * b)
            return y + step / 6 * (a + 2 * b + 2 * c + slope(t + step, y + step * c)), None

        @jax.checkpoint
        def unit(y, times):
            y, _ = jax.lax.scan(runge_kutta, y, times)
            return y, y

        times = 1 + np.arange(units * self.steps, dtype=np.float32).reshape(units, self.steps) * np.float32(step)
        start = jnp.zeros_like(down[0])
        return jnp.concatenate([start[None], jax.lax.scan(unit, start, times)[1]])

    def table(
        self,
        positions: Positions,
        *,
        head_dim: int | None = None,
        length: Length | None = None,
        params: dict[str, Array] | None = None,
        precision: str = "exact",
    ) -> RotaryTable:
        """As :meth:`FrequencyRule.table`, with the parameters of ``init``, which get gradients.

        The frequencies are float32 and the angles exact multiples of them, so shifting all positions does not change
        scores.
        """
        check(length is not None, "CLEX reads the current length: pass length=")
        values = self.at_length(length, head_dim=head_dim, params=params or {})[0].value
        check_choice("precision", precision, ("exact", "hf"))
        if precision == "hf":
            return rotary_table(positions, values, precision=precision)
        angle = learned_angles(as_real_positions(positions), values[:, None] if values.ndim == 2 else values)
        return RotaryTable(jnp.cos(angle), jnp.sin(angle))
