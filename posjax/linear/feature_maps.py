"""Kernels of linear attention: feature maps whose inner product replaces ``exp(q . k / sqrt(d))``.

Features are at least float32. Two kinds differ in how they are rotated (:func:`features` handles both):

* elementwise maps (:class:`Elu`, :class:`Exponential`). A rotation has to come after the map, and then an inner
  product may be negative. So it is applied in the numerator only, and not in the denominator, which must not vanish:
  ``sum_j (R_i phi_i) . (R_j psi_j) v_j / sum_j phi_i . psi_j`` (RoFormer, arXiv 2104.09864, equation 19; Su, kexue.fm
  8265). The weights then do not sum to one, but they depend on position only through ``i - j``.
* functions of ``q . k`` (:class:`Taylor`, :class:`Limit`, :class:`Cosine` and, in expectation, ``Performer``). They are
  non-negative for any inner product, so ``q`` and ``k`` are rotated first and numerator and denominator have the same
  weights, which sum to one.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_flags, check_positive
from posjax._numbers import widened


class LinearLayer:
    """What replaces the softmax: attention that keeps one state for all keys. The base class of the specs.

    A spec is a frozen, hashable dataclass without arrays.
    """

    random: ClassVar[bool] = False
    """Whether ``init`` draws random features. They are not trained, are saved with the model, and may be redrawn."""

    @property
    def one_sided(self) -> str | None:
        """What to use in its place where every token sees both sides, if it is for causal attention alone."""
        return None

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """Parameters or random features of one layer, ``{}`` if there are none. They are passed back to the maps."""
        return {}


@dataclass(frozen=True)
class LinearKernel(LinearLayer, abc.ABC):
    """A kernel ``phi(q) . psi(k) >= 0``. A subclass is a frozen, hashable dataclass and holds no array.

    Inner products are non-negative; features may be negative. Elementwise maps have no factor 1 / sqrt(d); each kernel
    says whether it has one.

    Args:
        decay: whether each head h = 0, 1, ... forgets: a weight at distance r is multiplied by ``(1 - 2^(-5-h))^r``
            (retention, Sun et al., arXiv 2307.08621, equation 8). Causal attention only.
    """

    decay: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        check_flags(self)

    of_inner_product: ClassVar[bool] = False
    """Whether ``phi . psi`` is a function of ``q . k``, so that ``q`` and ``k`` are rotated before the map."""

    @property
    def one_sided(self) -> str | None:
        """The option that makes it two-sided, if it decays."""
        return "decay=False" if self.decay else None

    def log_decay(self, heads: Int[Array, "heads"]) -> Float[Array, "heads"] | None:
        """The log decay of the key heads with these numbers; None without decay."""
        return jnp.log1p(-jnp.exp2(-5.0 - heads)) if self.decay else None

    def size(self, head_dim: int) -> int:
        """The width m of the features of a head of size ``head_dim``."""
        return head_dim

    @abc.abstractmethod
    def query(
        self, params: dict[str, Array] | None, q: Float[Array, "batch length heads size"]
    ) -> Float[Array, "batch length heads m"]:
        """``phi``, up to a positive factor of each query, which cancels."""

    def key(
        self, params: dict[str, Array] | None, k: Float[Array, "batch length kv_heads size"]
    ) -> tuple[Float[Array, "batch length kv_heads m"], Float[Array, "batch length kv_heads"] | None]:
        """``(psi, c)``: the features are ``exp(c) psi``, one ``c`` per token and head; None means 0.

        By default ``psi`` is ``phi``, so ``query`` must then not leave out a factor.

        Factors of keys do not cancel, and one maximum over the whole sequence would let later keys change earlier
        outputs. So ``c`` is separate, and the forms of attention take the maximum over the keys that each query sees.
        """
        return self.query(params, k), None


@dataclass(frozen=True)
class Elu(LinearKernel):
    """``phi(x) = psi(x) = elu(x) + 1``: ``x + 1`` above zero, ``exp(x)`` below; m = d, no 1 / sqrt(d).

    (Katharopoulos et al., arXiv 2006.16236, equation 7.)
    """

    def query(self, params, q):
        """``elu(q) + 1``, without the rounding of ``1 + expm1``: positive for inputs down to -87."""
        x = widened(q)
        return jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@dataclass(frozen=True)
class Exponential(LinearKernel):
    """``phi(q) = softmax(q)`` over the features of a query, ``psi(k) = exp(k)``; m = d, no 1 / sqrt(d).

    A factor of a query cancels, so ``phi(q) = exp(q)`` is the same. A projection wider than a head (m = 4d) gives the
    weights a higher rank; Performer's random matrix is then a part of the projection (Su, kexue.fm 8338).

    Efficient attention (Shen et al., arXiv 1812.01243) divides each channel of ``exp(k)`` by its sum over the sequence,
    that is ``sum_c softmax(q)_c (sum_j exp(k_jc) v_j / sum_j exp(k_jc))``; here all channels share one denominator, as
    in kexue.fm 7546 and in every other kernel.
    """

    def query(self, params, q):
        """``softmax(q)``."""
        return jax.nn.softmax(widened(q), axis=-1)

    def key(self, params, k):
        """``(exp(k - c), c)`` with c the largest channel of each key."""
        return stabilised(widened(k))


def stabilised(
    logarithm: Float[Array, "batch length heads m"],
) -> tuple[Float[Array, "batch length heads m"], Float[Array, "batch length heads"]]:
    """``(exp(x - c), c)`` with ``c`` the maximum over the last axis, which needs no gradient."""
    highest = jax.lax.stop_gradient(logarithm.max(-1))
    return jnp.exp(logarithm - highest[..., None]), highest


def taylor_features(x: Float[Array, "*b d"], order: int) -> Float[Array, "*b m"]:
    """``[1, x, x (x) x / sqrt(2!), ..., (x)^n x / sqrt(n!)]``, of width ``sum_{k=0}^n d^k``.

    Inner products are ``sum_k (x . y)^k / k!``. With an odd order they may be negative. (Su, kexue.fm 8601.)
    """
    check_count("order", order)
    terms = [jnp.ones((*x.shape[:-1], 1), x.dtype)]
    for k in range(1, order + 1):
        terms.append(_outer(terms[-1], x) * k**-0.5)
    return jnp.concatenate(terms, axis=-1)


def limit_features(x: Float[Array, "*b d"], order: int) -> Float[Array, "*b m"]:
    """``(x)^n [1, x / sqrt(n)]``, of width ``(1 + d)^n``.

    Inner products are ``(1 + x . y / n)^n``, whose limit is the exponential. With an odd order they may be negative.
    (Su, kexue.fm 8601.)
    """
    check_count("order", order)
    base = jnp.concatenate([jnp.ones((*x.shape[:-1], 1), x.dtype), x * order**-0.5], axis=-1)
    power = base
    for _ in range(order - 1):
        power = _outer(power, base)
    return power


def _outer(a, b):
    return (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1)


@dataclass(frozen=True)
class ScaledKernel(LinearKernel):
    """The base of approximations of ``exp(scale q . k)``: each side gets ``sqrt(scale)``.

    scale: None for ``1 / sqrt(d)``.
    """

    scale: float | None = field(default=None, kw_only=True)

    of_inner_product: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.scale is not None:
            check_positive("scale", self.scale)

    def scaled(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """``x sqrt(scale)``, that is ``x d^(-1/4)`` unless another scale is set."""
        scale = x.shape[-1] ** -0.5 if self.scale is None else self.scale
        return widened(x) * math.sqrt(scale)


@dataclass(frozen=True)
class Expansion(ScaledKernel):
    """The base of the two expansions of the exponential. Only even orders: odd ones may be negative.

    They are exact in the limit, which shows that the rank of softmax attention is not bounded by ``d``. Because of
    their width they are practical only at order 2 with small heads.

    order: n, the order of the expansion, even.
    """

    order: int = 2

    def __post_init__(self):
        super().__post_init__()
        check_count("order", self.order)
        check(self.order % 2 == 0, f"order must be even, because an odd one has negative weights; found {self.order}")


@dataclass(frozen=True)
class Taylor(Expansion):
    """``sum_{k=0}^n (scale q . k)^k / k!``, m = ``sum_k d^k`` (:func:`taylor_features`); above zero as n is even."""

    def size(self, head_dim: int) -> int:
        """``1 + d + ... + d^n``."""
        return sum(head_dim**k for k in range(self.order + 1))

    def query(self, params, q):
        """``taylor_features`` of the scaled queries."""
        return taylor_features(self.scaled(q), self.order)


@dataclass(frozen=True)
class Limit(Expansion):
    """``(1 + scale q . k / n)^n``, m = ``(1 + d)^n`` (:func:`limit_features`).

    It is zero at ``scale q . k = -n`` and grows again below it. If all keys of a query are near that point, the
    denominator is a sum of rounding errors, unlike that of :class:`Taylor`: use a norm of q and k that keeps
    ``scale |q| |k|`` below n.
    """

    def size(self, head_dim: int) -> int:
        """``(1 + d)^n``."""
        return (1 + head_dim) ** self.order

    def query(self, params, q):
        """``limit_features`` of the scaled queries."""
        return limit_features(self.scaled(q), self.order)


@dataclass(frozen=True)
class Cosine(LinearKernel):
    """``1 + q_hat . k_hat``, the non-negative first-order form of the exponential; m = d + 1, no 1 / sqrt(d).

    (Su, kexue.fm 7546.) A vector of zeros has cosine 0 with every vector.
    """

    of_inner_product: ClassVar[bool] = True

    def size(self, head_dim: int) -> int:
        """``d + 1``."""
        return head_dim + 1

    def query(self, params, q):
        """``[1, q / |q|]``."""
        x = widened(q)
        squared = jnp.square(x).sum(-1, keepdims=True)
        unit = x * jax.lax.rsqrt(jnp.where(squared > 0, squared, 1))
        return jnp.concatenate([jnp.ones_like(squared), unit], axis=-1)


def features(
    kernel: LinearKernel,
    q: Float[Array, "batch length heads size"],
    k: Float[Array, "batch kv_length kv_heads size"],
    *,
    params: dict[str, Array] | None = None,
    rotate_q: Callable[[Array], Array] | None = None,
    rotate_k: Callable[[Array], Array] | None = None,
) -> dict[str, Array | None]:
    """The arguments ``phi, psi, log_scale, q_numerator, k_numerator`` of the forms of attention.

    ``rotate_q`` and ``rotate_k`` apply RoPE, or another map of position that keeps norms, to ``[batch, length, heads,
    width]``. They act on ``q`` and ``k`` for a kernel that is a function of ``q . k``, else on the ``m`` features of
    the numerator: see this module for the reasons.

    Raises ValueError if only one of the two is given.
    """
    check((rotate_q is None) == (rotate_k is None), "rotate_q and rotate_k must be given together")
    if kernel.of_inner_product and rotate_q is not None:
        q = rotate_q(q)
        k = rotate_k(k)
        rotate_q = None
        rotate_k = None
    phi, (psi, log_scale) = kernel.query(params, q), kernel.key(params, k)
    return {
        "phi": phi,
        "psi": psi,
        "log_scale": log_scale,
        "q_numerator": None if rotate_q is None else rotate_q(phi),
        "k_numerator": None if rotate_k is None else rotate_k(psi),
    }
