"""Norms of the residual stream, and of projections over all heads."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax._numbers import align_ranks
from posjax.nn.config import DecoderConfig
from posjax.nn.parameters import bias_parameter, on_any_mesh, plus
from posjax.nn.specs import Norm
from posjax.norms import rms_norm


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * gain`` over the last axes, in float32; see ``Norm``.

    Args:
        shape: of the gain, the sizes of the last axes of ``x``.
        axes: their logical names.
        spec: ``eps``, ``unit_offset`` and ``gain`` are read.
    """

    def __init__(self, shape: int | tuple[int, ...], axes: str | tuple[str, ...] = "embed", spec: Norm | None = None):
        shape, axes = (shape,) if isinstance(shape, int) else shape, (axes,) if isinstance(axes, str) else axes
        self.spec, self.shape = Norm() if spec is None else spec, shape
        self.gain = _gain(shape, axes, self.spec)

    def __call__(self, x: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
        return on_any_mesh(RMSNorm._normed, self, x)

    def _normed(self, x):
        return rms_norm(x, _factor(self), eps=self.spec.eps)


class LayerNorm(nnx.Module):
    """``(x - mean) / sqrt(var + eps) * gain + bias`` over the last axis, in float32; see ``Norm``.

    Args:
        shape: of the gain and the bias, the sizes of the last axes of ``x``.
        axes: their logical names.
        spec: ``eps``, ``bias``, ``unit_offset`` and ``gain`` are read.
    """

    def __init__(self, shape: int | tuple[int, ...], axes: str | tuple[str, ...] = "embed", spec: Norm | None = None):
        shape, axes = (shape,) if isinstance(shape, int) else shape, (axes,) if isinstance(axes, str) else axes
        self.spec, self.shape = Norm("layer") if spec is None else spec, shape
        self.gain = _gain(shape, axes, self.spec)
        self.bias = bias_parameter(shape, axes) if self.spec.bias else None

    def __call__(self, x: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
        return on_any_mesh(LayerNorm._normed, self, x)

    def _normed(self, x):
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.spec.eps)
        normed, factor = align_ranks(normed, _factor(self))
        return plus(normed * factor, self.bias).astype(x.dtype)


def make_norm(size: int, spec: Norm) -> RMSNorm | LayerNorm:
    """The norm of the residual stream for a spec."""
    return (RMSNorm if spec.kind == "rms" else LayerNorm)(size, "embed", spec)


def projection_norm(config: DecoderConfig, shape: tuple[int, ...], axes: tuple[str, ...]) -> RMSNorm | LayerNorm | None:
    """The norm of queries or keys ``[..., heads, size]``, if the config has one."""
    if config.head_norms:
        return LayerNorm(shape, axes, dataclasses.replace(config.norm, bias=False))
    return RMSNorm(shape, axes, config.norm) if config.projection_norm else None


def _gain(shape: tuple[int, ...], axes: tuple[str, ...], spec: Norm) -> nnx.Param | None:
    if not spec.gain:
        return None
    return nnx.Param((jnp.zeros if spec.unit_offset else jnp.ones)(shape, jnp.float32), logical_axes=axes)


def _factor(norm: RMSNorm | LayerNorm) -> Float[Array, "*size"]:
    """The factor of the normed values, float32: ``gain``, ``1 + gain`` with ``unit_offset``, or ones without a gain."""
    if norm.gain is None:
        return jnp.ones(norm.shape, jnp.float32)
    gain = norm.gain[...].astype(jnp.float32)
    return 1 + gain if norm.spec.unit_offset else gain
