"""Applying a rotary table, in both pairings, and converting projection weights from one pairing to the other."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_even, check_float, describe
from posjax._lowered import Lowered, run, split_by_compiler, zero_tangent
from posjax._numbers import align_ranks, at_least_float32
from posjax.rotary import tpu
from posjax.rotary.tables import RotaryTable

PAIRINGS = ("half", "interleaved")


def apply_rotary(
    x: Float[Array, "*batch length heads size"], table: RotaryTable, *, pairing: str = "half"
) -> Float[Array, "*batch length heads size"]:
    """Rotates pair t of every head by its angle: (a, b) -> (a cos - b sin, a sin + b cos).

    x: ``[batch, length, heads, size]`` (the batch axis is optional); any float dtype.
    table: ``[length, w/2]`` or ``[batch, length, w/2]``. The first w features rotate, the rest pass through. If each of
        K key heads has its own angles, ``[batch or 1, length, K, w/2]``: head n of N uses those of n // (N / K).
    pairing: which features form pair t. ``"half"``: t and t + w/2 (GPT-NeoX, Hugging Face's Llama, Qwen, Gemma).
    ``"interleaved"``: 2t and 2t + 1 (RoFormer, GPT-J, Meta's Llama, DeepSeek).

    Computes in at least float32 and casts only the result, to the dtype of x. Raises ValueError if the table is wider
    than the head or its length or batch differs. (RoFormer, arXiv:2104.09864, section 3.4.2)
    """
    check_choice("pairing", pairing, PAIRINGS)
    _check_table(x, table)
    if tpu.supports(x, table.cos) and not split_by_compiler(x):
        return run(_Rotation(pairing), *(part.astype(jnp.float32) for part in table), x)[0]
    return _rotated(x, table, pairing)


@dataclass(frozen=True)
class _Rotation(Lowered):
    """``apply_rotary`` of cosines, sines and features, linear in the features; on TPUs it is a kernel."""

    pairing: str

    @property
    def linear(self):
        return 1

    def types(self, cos, sin, x):
        return [x]

    def on(self, platform, cos, sin, x):
        if platform == "tpu":
            return [tpu.rotated(x, cos, sin, pairing=self.pairing)]
        return [_rotated(x, RotaryTable(cos, sin), self.pairing)]

    def differentiated(self, primals, tangents):
        """Bilinear: the features' tangent rotated, plus the features rotated by the tangent of the table."""
        *table, x = primals
        *d_table, d_x = (zero_tangent(a) if t is None else t for a, t in zip(primals, tangents, strict=True))
        width = 2 * table[0].shape[-1]
        by_table = _turned(x[..., :width], RotaryTable(*d_table), self.pairing)
        of_x = run(self, *table, d_x)[0]
        return run(self, *primals), [of_x.at[..., :width].add(by_table)]

    def transposed(self, constants, cotangents):
        """The inverse rotation."""
        cos, sin = constants
        return run(self, cos, -sin, *cotangents)


def _rotated(x: Array, table: RotaryTable, pairing: str) -> Array:
    """Rotates the features that the table covers; the others pass through."""
    width = 2 * table.cos.shape[-1]
    return jnp.concatenate([_turned(x[..., :width], table, pairing), x[..., width:]], axis=-1)


def _turned(x: Array, table: RotaryTable, pairing: str) -> Array:
    """Rotates all features."""
    dtype = at_least_float32(x.dtype)
    _, cos, sin = align_ranks(x, *(_with_heads(part.astype(dtype), x.shape[-2]) for part in table))
    wide = x.astype(dtype)
    half = cos.shape[-1]
    a, b = (wide[..., :half], wide[..., half:]) if pairing == "half" else (wide[..., 0::2], wide[..., 1::2])
    rotated = a * cos - b * sin, a * sin + b * cos
    joined = jnp.concatenate(rotated, -1) if pairing == "half" else jnp.stack(rotated, -1).reshape(x.shape)
    return joined.astype(x.dtype)


def _with_heads(part: Array, heads: int) -> Array:
    """A table with a head axis, which each group of query heads shares."""
    return part[..., None, :] if part.ndim < 4 else jnp.repeat(part, heads // part.shape[2], axis=2)


def _check_table(x: Array, table: RotaryTable) -> None:
    """Raises ValueError for a table that does not fit the axes of x, or would broadcast over them."""
    check(not isinstance(x, RotaryTable), "x must be an array, found the table: write apply_rotary(x, table)")
    check_table(table)
    check_float("x", x)
    shape = table.cos.shape
    check(x.ndim >= 3, f"x must be [batch, length, heads, size], found shape {x.shape}")
    check(2 * shape[-1] <= x.shape[-1], f"table rotates {2 * shape[-1]} features but x has head size {x.shape[-1]}")
    fits = len(shape) == 2 or (len(shape) in (3, 4) and x.ndim == 4 and shape[0] in (1, x.shape[0]))
    fits = fits and (len(shape) < 4 or x.shape[2] % shape[2] == 0)
    check(
        fits and shape[min(len(shape) - 2, 1)] == x.shape[-3],
        f"table of shape {shape} does not fit x of shape {x.shape}",
    )


def check_table(table: RotaryTable) -> None:
    """Raises ValueError unless ``table`` is a RotaryTable; a plain pair of arrays is not."""
    made = isinstance(table, RotaryTable)
    check(
        made, f"table must be a RotaryTable, as rotary_table makes it or RotaryTable(cos, sin), found {describe(table)}"
    )


def permute_projection(
    weight: Float[Array, "..."], source: str, target: str, *, rotary_dim: int | None = None, axis: int = -1
) -> Float[Array, "..."]:
    """Converts a weight from ``source`` to ``target`` pairing by reordering its head axis.

    Apply it to every parameter with the head axis of queries and keys: projection weights ``[model, heads, size]`` (any
    number of heads, grouped queries too), biases ``[heads, size]``, and the weights ``[size]`` of query and key norms.
    Scores are then the same; values are not permuted. ``axis`` is the head axis: reshape a PyTorch weight
    ``[heads * size, model]`` to ``[heads, size, model]`` and permute it with ``axis=1``.

    rotary_dim: how many leading features rotate (partial rotary); the others stay in place. None means all, which is
    also right for p-RoPE. half -> interleaved takes feature 2t from t and 2t + 1 from t + w/2; the other way is its
    inverse, (0, 2, 4, ..., 1, 3, 5, ...). Raises ValueError for an odd or too large ``rotary_dim``.
    """
    check_choice("source", source, PAIRINGS)
    check_choice("target", target, PAIRINGS)
    size = weight.shape[axis]
    width = size if rotary_dim is None else rotary_dim
    check_even("rotary_dim", width)
    check(width <= size, f"rotary_dim {width} is larger than the head size {size} on axis {axis}")
    order = np.arange(size)
    if source != target:
        pairs = (2, -1) if source == "half" else (-1, 2)
        order[:width] = order[:width].reshape(pairs).T.ravel()
    return jnp.take(weight, order, axis=axis)
