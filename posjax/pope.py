"""PoPE, polar coordinate position embedding (Gopalakrishnan et al., arXiv:2509.10534)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, params_of
from posjax._numbers import align_ranks, widened
from posjax._slots import Features
from posjax.rotary import FrequencyRule, Plain
from posjax.rotary.rules import check_angles

INITS = ("zeros", "uniform")


@dataclass(frozen=True)
class PoPE(Features):
    """Content in magnitudes, positions in phases; with theta_c = base^(-(c-1)/d), c = 1 .. d,

        score(i, j) = sum_c softplus(q_c) softplus(k_c) cos((j - i) theta_c + delta_c)

    delta in [-2 pi, 0] is learned for each layer, key head and channel. Both features are 2d wide, so scores cost about
    twice those of RoPE; a cache may hold k, d wide, and rotate it on read. PoPE resembles CoCA (:mod:`posjax.coca`),
    but its key is not halved.

    The paper does not state its softmax scale; a scheme uses 1 / sqrt(d), with the head size d, not the width 2d.

    frequencies: the rule for a head of size 2d, whose d frequencies are base^(-t/d); it must rotate the whole head. If
        it sets a ``head_dim``, that is 2d.
    init_delta: ``"zeros"`` (the paper's choice for language and extrapolation) or ``"uniform"`` on [-2 pi, 0].
    precision: see :func:`posjax.rotary_table`.
    """

    frequencies: FrequencyRule = field(default=Plain())
    init_delta: str = "zeros"
    precision: str = "exact"

    cached: ClassVar[str] = "raw"

    def __post_init__(self):
        check_angles(self.frequencies, self.precision)
        check_choice("init_delta", self.init_delta, INITS)

    @property
    def own_head_dim(self) -> int | None:
        """Half of the rule's ``head_dim``."""
        size = self.frequencies.head_dim
        return None if size is None else size // 2

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """``{"delta": [kv_heads, head_dim]}``, float32 radians, and the parameters of the rule."""
        shape = (num_kv_heads, self.query_size(head_dim))
        low = -2 * np.pi if self.init_delta == "uniform" else 0.0
        delta_key, rule_key = jax.random.split(key)
        delta = jax.random.uniform(delta_key, shape, jnp.float32, low, 0.0) if low else jnp.zeros(shape, jnp.float32)
        return {"delta": delta} | self.frequencies.init(rule_key, 2 * head_dim)

    def heads(self, params, which):
        """The phases of some key heads, and the parameters of the rule."""
        return dict(params) | {"delta": params["delta"][which]}

    def query_size(self, head_dim: int) -> int:
        """``head_dim``; raises ValueError if the rule leaves channels without a phase."""
        width = self.frequencies.rotary_dim(2 * head_dim)
        check(width == 2 * head_dim, f"PoPE needs a rule that rotates every channel: {width // 2} of {head_dim} rotate")
        return head_dim

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``softplus(q) (cos(p theta), sin(p theta))``, ``2 head_dim`` wide, with the dtype of ``q``."""
        return _polar(q, *self._phases(q, params, positions, head_dim, length))

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``softplus(k) (cos(p theta + delta), sin(p theta + delta))``, with the dtype of ``k``."""
        (delta,) = params_of(params, self, delta=k.shape[-2:])
        cos, sin, delta = align_ranks(*self._phases(k, params, positions, head_dim, length), clip_delta(delta))
        return _polar(k, cos * jnp.cos(delta) - sin * jnp.sin(delta), sin * jnp.cos(delta) + cos * jnp.sin(delta))

    def _phases(self, x, params, positions, head_dim: int, length) -> tuple[Array, Array]:
        """Cosines and sines with the axes of ``x``."""
        self.query_size(head_dim)
        table = self.frequencies.table(
            positions, head_dim=2 * head_dim, length=length, params=params, precision=self.precision
        )
        return align_ranks(x, *(part[..., None, :] for part in table))[1:]


def clip_delta(delta: Float[Array, "kv_heads head_dim"]) -> Float[Array, "kv_heads head_dim"]:
    """``delta`` clipped to [-2 pi, 0], with a derivative of 1 everywhere.

    Training starts at zero, an end of the interval: with the derivative of a clip, a channel whose first step leaves
    the interval would never move again. So the parameter itself may leave the interval and always gets the gradient,
    but the applied value stays inside. An optimizer may also clip the parameter after each update: values and gradients
    are the same, and the parameter does not drift away.
    """
    return delta + jax.lax.stop_gradient(jnp.clip(delta, -2 * np.pi, 0.0) - delta)


def _polar(x: Array, cos: Array, sin: Array) -> Array:
    """Non-negative magnitudes at given phases: first all cosines, then all sines; built in at least float32."""
    magnitude = jax.nn.softplus(widened(x))
    parts = [magnitude * part.astype(magnitude.dtype) for part in (cos, sin)]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
