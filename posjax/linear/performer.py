"""FAVOR+: random features whose inner product is softmax's exponential on average (Choromanski et al., 2009.14794)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_count, check_number, params_of
from posjax.linear.feature_maps import ScaledKernel, stabilised


@dataclass(frozen=True)
class Performer(ScaledKernel):
    """``exp(q . k) = E[exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)]`` for ``w ~ N(0, I)``, here with m draws of w.

        psi(k) = m^(-1/2) exp(w_l . k - |k|^2 / 2),  l = 1 .. m,    and phi the same of q

    where ``q`` and ``k`` are first multiplied by ``sqrt(scale)``, that is ``d^(-1/4)``. Stabilisation adds no bias and
    reads no later keys: the features of each query are divided by the largest one, which cancels; those of each key by
    its largest one, whose logarithm is the log scale (``LinearKernel.key``). ``eps`` is then added to every feature,
    relative to the largest one of its token, so that no denominator vanishes.

    The released code subtracts one maximum over all keys instead, so that later keys slightly change earlier outputs of
    a causal model, through ``eps``. Its factory sets ``eps`` to 1e-6; the paper and the PyTorch port have 1e-4.
    The port's ``num_features`` is ``int(d ln d)``. Queries and keys with larger norms need more features: the relative
    variance of one feature is ``exp(|q + k|^2) - 1``.

    num_features: m.
    orthogonal: rows of each block of d are orthogonal, which lowers the variance a little; otherwise independent.
    norms: of orthogonal rows. ``"chi"``, those of Gaussian vectors, is unbiased; ``"constant"``, ``sqrt(d)``, is
        biased and has a lower variance.
    eps: added to every feature, relative to the largest one of its token.
    scale: see ``ScaledKernel``.
    """

    num_features: int = 256
    orthogonal: bool = True
    norms: Literal["chi", "constant"] = "chi"
    eps: float = 1e-6

    random: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_count("num_features", self.num_features)
        check_choice("norms", self.norms, ("chi", "constant"))
        check(
            self.orthogonal or self.norms == "chi", "norms='constant' needs orthogonal=True; otherwise use norms='chi'"
        )
        check_number("eps", self.eps, at_least=0)

    def init(self, key, *, num_heads, num_kv_heads, head_dim):
        """``{"projection": [m, d]}``, random, shared by all heads, without gradient."""
        return {"projection": self.draw(key, head_dim)}

    def draw(self, key: Array, head_dim: int) -> Float[Array, "m d"]:
        """A new projection, float32; to redraw, replace ``params["projection"]`` by it.

        Orthogonal blocks are uniform over all rotations and reflections. (The released code keeps the signs of a QR
        factorisation. The first component of a block's first row then always has the same sign, the others have one
        sign more often, and the estimate is biased.)
        """
        check_count("head_dim", head_dim)
        rows_key, blocks_key = jax.random.split(key)
        rows = jax.random.normal(rows_key, (self.num_features, head_dim), jnp.float32)
        if not self.orthogonal:
            return rows
        blocks = jax.random.orthogonal(blocks_key, head_dim, (-(-self.num_features // head_dim),), jnp.float32)
        norms = jnp.linalg.norm(rows, axis=-1, keepdims=True) if self.norms == "chi" else head_dim**0.5
        return blocks.reshape(-1, head_dim)[: self.num_features] * norms

    def size(self, head_dim: int) -> int:
        """m."""
        return self.num_features

    def query(self, params, q):
        """``m^(-1/2) (exp(w . q - max_l w_l . q) + eps)``; the factor with ``|q|^2`` is left out: it cancels."""
        x = self.scaled(q)
        return self._positive(stabilised(self._project(params, x))[0])

    def key(self, params, k):
        """``(psi, c)``, ``psi = m^(-1/2) (exp(w . k - |k|^2 / 2 - c) + eps)`` with ``c`` the maximum over l."""
        x = self.scaled(k)
        psi, highest = stabilised(self._project(params, x) - jnp.square(x).sum(-1, keepdims=True) / 2)
        return self._positive(psi), highest

    def _positive(self, exponential):
        return (exponential + self.eps) * self.num_features**-0.5

    def _project(self, params, x):
        """``w . x`` in full precision, because it is an exponent."""
        (projection,) = params_of(params, self, projection=(self.num_features, x.shape[-1]))
        projection = jax.lax.stop_gradient(projection).astype(x.dtype)
        return jnp.einsum("...d,md->...m", x, projection, precision=jax.lax.Precision.HIGHEST)
