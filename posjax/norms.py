"""Norms of queries and keys over each head, before their rotation or after it.

The functions keep shapes and dtypes. The specs are ``HeadNorm``.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check_flags, check_number, params_of
from posjax._numbers import align_ranks, widened


def rms_norm(
    x: Float[Array, "*b size"], gain: Float[Array, "*size"] | None = None, *, eps: float = 1e-6
) -> Float[Array, "*b size"]:
    """``x / sqrt(mean(x^2) + eps)``, times ``gain`` if given; in float32, cast back to ``x.dtype`` last.

    The mean is over the last axis, or over as many of the last axes as the gain has.
    """
    check_number("eps", eps, at_least=0)
    wide = widened(x)
    axes = tuple(range(-1 if gain is None else -gain.ndim, 0))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    if gain is not None:
        normed, gain = align_ranks(normed, gain.astype(wide.dtype))
        normed = normed * gain
    return normed.astype(x.dtype)


def key_norm(k: Float[Array, "*b heads size"], *, eps: float = 1e-6) -> Float[Array, "*b heads size"]:
    """KeyNorm: keys of norm ``sqrt(d)``, so that the usual ``q . k / sqrt(d)`` is ``q . k / |k|``.

    (Su, kexue.fm/archives/9859.)

    There is no gain, because a gain would give keys different norms again. A rotation keeps norms, so this may come
    before or after it; but after a rotation whose table includes an attention factor (YaRN) it would undo the factor.
    """
    return rms_norm(k, eps=eps)


def qk_norm(
    q: Float[Array, "*b heads size"],
    k: Float[Array, "*b kv_heads size"],
    q_gain: Float[Array, "size"] | None = None,
    k_gain: Float[Array, "size"] | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Float[Array, "*b heads size"], Float[Array, "*b kv_heads size"]]:
    """Root-mean-square norm of queries and keys over each head, with a gain per channel or none.

    With gains it is the norm of Qwen 3 and Gemma 3 before the rotation, and that of Hunyuan after it. Without gains it
    is that of Llama 4, and its place makes no difference; with the usual ``1 / sqrt(d)`` logits are then
    ``sqrt(d) cos(q, k)``.
    """
    return rms_norm(q, q_gain, eps=eps), rms_norm(k, k_gain, eps=eps)


class HeadNorm(abc.ABC):
    """The base class of the specs. A spec is a frozen, hashable dataclass."""

    commutes_with_rotation: bool = True
    """Whether it makes no difference on which side of a rotation the norm stands."""

    after_features: bool = False
    """Whether it norms queries and keys after the features of the scheme, not before them."""

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` if there are none."""
        return {}

    @abc.abstractmethod
    def apply(self, params, q, k) -> tuple[Array, Array]:
        """Normed queries and keys, of the same shapes and dtypes."""


class _WithEps(HeadNorm):
    """A norm with an ``eps``, which is checked."""

    eps: float

    def __post_init__(self):
        check_flags(self)
        check_number("eps", self.eps, at_least=0)


@dataclasses.dataclass(frozen=True)
class KeyNorm(_WithEps):
    """Spec of ``key_norm``; queries pass through. It commutes with a rotation.

    Args:
        eps: added to the mean square.
    """

    eps: float = 1e-6

    def apply(self, params, q, k):
        """``(q, key_norm(k))``, shapes and dtypes kept."""
        return q, key_norm(k, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class QKNorm(_WithEps):
    """Spec of ``qk_norm``.

    Args:
        gain: learn a gain per channel for the queries and one for the keys, shared by the heads, initially 1.
        eps: added to the mean square.
        unit_offset: multiplies by ``1 + gain``, the gain starting from 0 (Gemma 3).
        after_features: norms the rotated queries and keys (Hunyuan, nanochat).
    """

    gain: bool = True
    eps: float = 1e-6
    unit_offset: bool = False
    after_features: bool = False

    @property
    def commutes_with_rotation(self) -> bool:
        """False with a gain per channel: its place, before or after the rotation, then matters."""
        return not self.gain

    def init(self, key: Array, head_dim: int) -> dict[str, Float[Array, "size"]]:
        """``{"q": [size], "k": [size]}`` of ones (zeros with ``unit_offset``), float32; ``{}`` without gain."""
        initial = 0.0 if self.unit_offset else 1.0
        return {name: jnp.full(head_dim, initial, jnp.float32) for name in ("q", "k")} if self.gain else {}

    def apply(self, params, q, k):
        """``qk_norm(q, k, gains)``, shapes and dtypes kept.

        Raises:
            ValueError: if a gain is missing, or has another width than the heads that it multiplies.
        """
        if not self.gain:
            return qk_norm(q, k, eps=self.eps)
        gains = params_of(params, self, q=q.shape[-1:], k=k.shape[-1:])
        offset = 1.0 if self.unit_offset else 0.0
        return qk_norm(q, k, *(gain.astype(jnp.float32) + offset for gain in gains), eps=self.eps)


@dataclasses.dataclass(frozen=True)
class CosineNorm(_WithEps):
    """Queries of norm ``sqrt(d)`` and keys of norm 1, so that the usual ``q . k / sqrt(d)`` is ``cos(q, k)``.

    Use it with a scale: cosines without one give nearly uniform attention. ``scales.CosineScale`` makes it CosA (Su,
    kexue.fm/archives/9859), ``scales.LearnedCosineScale`` the QK-norm of Henry et al. It commutes with a rotation.

    Args:
        eps: added to the mean square.
    """

    eps: float = 1e-6

    def apply(self, params, q, k):
        """``(sqrt(d) q / |q|, k / |k|)``, shapes and dtypes kept."""
        size = k.shape[-1]
        return qk_norm(q, k, k_gain=jnp.full(size, size**-0.5, jnp.float32), eps=self.eps)
