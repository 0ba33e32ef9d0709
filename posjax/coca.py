"""Collinear constrained attention, CoCA (Zhu et al., arXiv 2309.08646), as a feature map.

Per head of size ``d``, plane ``j`` of the query is ``(x, y)``, the key is one number ``t_j >= 0`` for each of the
``d / 2`` planes, and ``theta_j`` is the frequency of the plane. The collinear constraint multiplies the key by the
query, ``k_{m,n} = q_m * t_n``, so that no angle stands between them at distance zero:

    strict(m, n) = sum_j t_{n,j} (x_{m,j}^2 + y_{m,j}^2) cos((m - n) theta_j)

The paper takes this for a three-way product that costs ``O(n^2 d)`` memory, and its code uses another score for that
reason. But it is a plain inner product ``phi(q, m) . psi(t, n)`` of ``d`` features, and so are all its relatives: any
attention kernel runs them at the usual cost. With ``c_p = cos(p theta_j)``, ``s_p = sin(p theta_j)``, in each plane

    psi           t (c_n, s_n)                                     for every variant
    phi strict    (x^2 + y^2) (c_m, s_m)                           equations 4 to 9, 17: free queries
    phi tied      2 x^2 (c_m, s_m)                                 the same with y = x: the paper's own constraint
    phi slack     ((x^2 + y^2) c_m, 2 x y s_m + (y^2 - x^2) c_m)   what the released code computes
    phi relative  (u^2 c_m - u w s_m, u^2 s_m + u w c_m)           slack without its absolute part

where ``u = (x + y) / sqrt(2)`` and ``w = (y - x) / sqrt(2)``. Strict, tied and relative depend on ``m - n`` alone.
Slack also carries ``t (w^2 cos((m + n) theta) + u w sin((m + n) theta))``, so shifting all positions changes it.

Features are quadratic in the query: they are built in float32 and cast last; keep them out of float16. A cache should
hold ``half_width(t)``, half as wide as an ordinary key and free of positions, and rotate on read.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax import coca_tpu as tpu
from posjax._checks import check, check_choice, check_even, check_rank, shown
from posjax._numbers import at_least_float32
from posjax._slots import Features
from posjax.lowered import Lowered, run, split_by_compiler, zero_tangent
from posjax.rotary import FrequencyRule, Plain, Proportional, RotaryTable
from posjax.rotary.rotation import PAIRINGS, check_table
from posjax.rotary.rules import check_angles

VARIANTS = ("strict", "tied", "slack", "relative")

Variant = Literal["strict", "tied", "slack", "relative"]
Pairing = Literal["half", "interleaved"]


def features(
    q: Float[Array, "batch length heads size"],
    t: Float[Array, "batch kv_length kv_heads half"],
    table: RotaryTable,
    *,
    kv_table: RotaryTable | None = None,
    variant: Variant,
    pairing: Pairing = "half",
) -> tuple[Float[Array, "batch length heads d"], Float[Array, "batch kv_length kv_heads d"]]:
    """Features whose inner product is the CoCA score: ``score(m, n) = phi_m . psi_n``, before ``1 / sqrt(d)``.

    Args:
        q: queries before rotation, ``d`` wide; ``d / 2`` wide for ``"tied"``, one number per plane.
        t: the key projection, ``d / 2`` wide, raw or already through ``half_width``. May have fewer heads (GQA).
        table: rotation at the positions of the queries, all ``d / 2`` planes of it.
        kv_table: rotation at the positions of the keys; ``table`` if absent.
        variant: ``"strict"``, ``"tied"``, ``"slack"`` or ``"relative"``.
        pairing: which channels of ``q`` form a plane, ``(j, j + d/2)`` for ``"half"`` or ``(2j, 2j + 1)`` for
            ``"interleaved"``. It matters for ``q`` alone: ``t`` and the features are indexed by plane.

    Returns:
        ``(phi, psi)``, each ``d`` wide (first components of all planes, then second), in the dtypes of ``q`` and ``t``.

    Raises:
        ValueError: for an unknown variant or pairing, for widths that do not fit each other, and for a partial rotary
            table: without its rotation a plane has no score to fall back on.
    """
    phi = query_feature(q, table, variant=variant, pairing=pairing)
    psi = key_feature(t, table if kv_table is None else kv_table)
    check(
        phi.shape[-1] == psi.shape[-1],
        f"t must be {phi.shape[-1] // 2} wide, half of a head, found shape {tuple(t.shape)} beside q {tuple(q.shape)}",
    )
    return phi, psi


def query_feature(
    q: Float[Array, "batch length heads size"], table: RotaryTable, *, variant: Variant, pairing: Pairing = "half"
) -> Float[Array, "batch length heads d"]:
    """``phi`` of ``features``, in the dtype of ``q``."""
    check_choice("variant", variant, VARIANTS)
    check_choice("pairing", pairing, PAIRINGS)
    check_rank("q", q, 4, "[batch, length, heads, size]")
    if variant != "tied":
        check_even("the last axis of q", q.shape[-1])
    return _feature(_QUERY[variant], None if variant == "tied" else pairing, "q", q, table)


def key_feature(t: Float[Array, "batch length heads half"], table: RotaryTable) -> Float[Array, "batch length heads d"]:
    """``psi = relu(t) (cos, sin)`` of ``features``, the same for every variant, in the dtype of ``t``."""
    check_rank("t", t, 4, "[batch, length, heads, size / 2]")
    return _feature(_key, None, "t", t, table)


def half_width(t: Float[Array, "*b half"]) -> Float[Array, "*b half"]:
    """``relu(t)``: the non-negative key of each plane, what a cache holds. Applying it twice changes nothing."""
    return jax.nn.relu(t)


def merge_projection(weights: Float[Array, "*b size"], pairing: Pairing = "half") -> Float[Array, "*b half"]:
    """Half-width projection of ``t`` from one of full width: the mean over the two channels of each plane.

    The released code projects ``d`` channels and computes ``relu((first half + second half) / 2)``. Averaging the
    weights and biases first is the same function with half the parameters.

    Args:
        weights: kernel ``[model, heads, d]`` or bias ``[heads, d]``; the last axis is one head.
        pairing: ``"half"`` for the released checkpoints.
    """
    check_choice("pairing", pairing, PAIRINGS)
    first, second = _planes("weights", weights, pairing)
    return (first + second) / 2


def _planes(name: str, a: Array, pairing: str) -> tuple[Array, Array]:
    """The two components of every plane."""
    check_even(f"the last axis of {name}", a.shape[-1])
    if pairing == "interleaved":
        return a[..., 0::2], a[..., 1::2]
    return tuple(jnp.split(a, 2, axis=-1))


def _feature(formula: tpu.Formula, pairing: Pairing | None, name: str, x: Array, table: RotaryTable) -> Array:
    """Features of components ``[batch, length, heads, width]``; ``pairing`` is None where a plane has one of them."""
    function = _Feature(formula, pairing)
    cos, sin = _rotation(name, x, x.shape[-1] // (2 if pairing else 1), table)
    if tpu.takes(x, cos) and not split_by_compiler(x):
        return run(function, cos.astype(jnp.float32), sin.astype(jnp.float32), x)[0]
    return function.plain(cos, sin, x)


def _rotation(name: str, x: Array, planes: int, table: RotaryTable) -> tuple[Array, Array]:
    """Cosines and sines ``[batch or 1, length, planes]``."""
    check_table(table)
    *batch, length, width = table.cos.shape
    check(
        width == planes,
        f"the table rotates {width} planes and {name} has {planes}: CoCA scores rotated planes only, so the table "
        "must cover the whole head (no partial rotation); t, and the q of 'tied', are half as wide as a head",
    )
    rows, tokens = x.shape[:2]
    fits = length == tokens and batch in ([], [1], [rows])
    check(fits, f"table of shape {table.cos.shape} does not fit {name}, with {tokens} tokens in {rows} rows")
    return tuple(part.reshape(-1, length, width) for part in table)


@dataclasses.dataclass(frozen=True)
class _Feature(Lowered):
    """Features of cosines, sines and components: by a kernel on TPUs."""

    formula: tpu.Formula
    pairing: Pairing | None

    def plain(self, cos, sin, x):
        """As XLA computes them."""
        wide = x.astype(at_least_float32(x.dtype))
        components = _planes("q", wide, self.pairing) if self.pairing else (wide,)
        table = (part[:, :, None].astype(wide.dtype) for part in (cos, sin))
        return jnp.concatenate(self.formula(*components, *table), axis=-1).astype(x.dtype)

    def types(self, cos, sin, x):
        return [self.plain(cos, sin, x)]

    def on(self, platform, cos, sin, x):
        if platform == "tpu":
            return [tpu.features(x, cos, sin, formula=self.formula, pairing=self.pairing)]
        return [self.plain(cos, sin, x)]

    def differentiated(self, primals, tangents):
        """Linear in the table: XLA computes what its tangent adds."""
        *table, x = primals
        *d_table, d_x = tangents
        moved = [] if d_x is None else run(_Tangent(self), *primals, d_x)
        if any(part is not None for part in d_table):
            filled = [zero_tangent(a) if d is None else d for a, d in zip(table, d_table, strict=True)]
            moved = [*moved, self.plain(*filled, x)]
        return run(self, *primals), [functools.reduce(jnp.add, moved)]


@dataclasses.dataclass(frozen=True)
class _Derivative(Lowered):
    """A function of cosines, sines and components that is linear in a fourth argument. XLA finds its derivatives."""

    of: _Feature

    @property
    def linear(self):
        return 1

    def plain(self, *arrays):
        """As XLA computes it."""
        raise NotImplementedError

    def types(self, *arrays):
        return [self.plain(*arrays)]

    def on(self, platform, *arrays):
        return [self.plain(*arrays)]

    def differentiated(self, primals, tangents):
        filled = (zero_tangent(x) if d is None else d for x, d in zip(primals, tangents, strict=True))
        found, moved = jax.jvp(self.plain, primals, tuple(filled))
        return [found], [moved]


class _Tangent(_Derivative):
    """The tangent of features, of that of components."""

    def plain(self, cos, sin, x, d_x):
        return jax.jvp(functools.partial(self.of.plain, cos, sin), (x,), (d_x,))[1]

    def transposed(self, constants, cotangents):
        return run(_Cotangent(self.of), *constants, *cotangents)


class _Cotangent(_Derivative):
    """The cotangent of components, of that of features: by a kernel on TPUs."""

    def plain(self, cos, sin, x, d_features):
        return jax.vjp(functools.partial(self.of.plain, cos, sin), x)[1](d_features)[0]

    def on(self, platform, cos, sin, x, d_features):
        if platform == "tpu":
            return [tpu.gradient(x, cos, sin, d_features, formula=self.of.formula, pairing=self.of.pairing)]
        return [self.plain(cos, sin, x, d_features)]

    def transposed(self, constants, cotangents):
        return run(_Tangent(self.of), *constants, *cotangents)


def _strict(x, y, cos, sin):
    squared = x * x + y * y
    return squared * cos, squared * sin


def _slack(x, y, cos, sin):
    return (x * x + y * y) * cos, 2 * x * y * sin + (y - x) * (y + x) * cos


def _relative(x, y, cos, sin):
    uu, uw = (x + y) * (x + y) / 2, (y - x) * (y + x) / 2
    return uu * cos - uw * sin, uu * sin + uw * cos


def _tied(x, cos, sin):
    return _strict(x, x, cos, sin)


def _key(t, cos, sin):
    t = half_width(t)
    return t * cos, t * sin


_QUERY = {"strict": _strict, "tied": _tied, "slack": _slack, "relative": _relative}


@dataclasses.dataclass(frozen=True)
class Coca(Features):
    """CoCA as the feature slot of a scheme, with the angles of any frequency rule.

    Args:
        variant: ``"strict"``, ``"tied"``, ``"slack"`` or ``"relative"``; see the table of this module.
        frequencies: the rule. It must rotate the whole head. Its attention factor (YaRN) multiplies both tables, as in
            RoPE; its ``softmax_scale`` is left to whoever scales the logits.
        pairing: which channels of the query form a plane.
        precision: see ``posjax.rotary_table``.
    """

    variant: Variant
    frequencies: FrequencyRule = dataclasses.field(default=Plain())
    pairing: Pairing = "half"
    precision: str = "exact"

    cached: ClassVar[str] = "half-width"

    def __post_init__(self):
        check_choice("variant", self.variant, VARIANTS)
        check_angles(self.frequencies, self.precision)
        check_choice("pairing", self.pairing, PAIRINGS)
        if not isinstance(self.frequencies, Proportional):
            share = self.frequencies.partial_rotary_factor
            check(share == 1, f"CoCA needs a rule that rotates the whole head, partial_rotary_factor is {share}")

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions changes nothing: not for slack, which has a term in ``m + n``."""
        return self.variant != "slack" and self.frequencies.shift_invariant

    def query_size(self, head_dim: int) -> int:
        """Width of the raw query projection of a head: ``head_dim``, or half of it for ``"tied"``."""
        return self.key_size(head_dim) if self.variant == "tied" else head_dim

    def key_size(self, head_dim: int) -> int:
        """Width of ``t``: half of ``head_dim``.

        Raises:
            ValueError: if ``head_dim`` is odd, or the rule rotates only a part of it.
        """
        rotated = self.frequencies.rotary_dim(head_dim)
        check(
            rotated == head_dim,
            f"CoCA needs a rule that rotates the whole head of {head_dim}, {shown(self.frequencies)} rotates {rotated}",
        )
        return head_dim // 2

    @property
    def widths(self) -> tuple[float, float]:
        """The key projection is half as wide as a head, and so is the query's for ``"tied"``."""
        return (0.5 if self.variant == "tied" else 1.0), 0.5

    def compact(self, k):
        """``half_width(t)``."""
        return half_width(k)

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``phi`` of the raw query projection; see ``query_feature``."""
        return query_feature(
            q, self._table(params, positions, head_dim, length), variant=self.variant, pairing=self.pairing
        )

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``psi`` of ``t``, before or after ``half_width``; see ``key_feature``."""
        return key_feature(k, self._table(params, positions, head_dim, length))

    def _table(self, params, positions, head_dim: int, length) -> RotaryTable:
        self.key_size(head_dim)
        return self.frequencies.table(
            positions, head_dim=head_dim, length=length, params=params, precision=self.precision
        )
