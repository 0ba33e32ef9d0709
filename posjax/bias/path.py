"""PaTH: products of Householder-like matrices between the key and the query (Yang et al., arXiv 2505.16381)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._checks import check, check_count, check_rank, params_of
from posjax._numbers import align_ranks, at_least_float32, widened
from posjax._shapes import in_blocks
from posjax._triangular import inverse_of_unit_triangle
from posjax.bias.base import BiasSpec, Contextual


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PathBias(Contextual):
    """``q_i^T (H_i H_{i-1} ... H_{j+1} - I) k_j`` with ``H_t = I - beta_t w_t w_t^T``.

    The logit is then ``q_i^T H_i ... H_{j+1} k_j``. The product is over the keys after ``j`` that the query may see,
    its own included.

    A tile is computed as in the article (the UT transform). With ``L`` the part of ``diag(beta) W W^T`` below the
    diagonal, the product over all keys of a tile is ``I - W^T M W``, ``M = (I + L)^-1 diag(beta)``, and that over some
    consecutive keys has the same rows and columns of ``M``. So with ``a = q W^T`` for the keys that the query may see,
    and ``U`` the part of ``W K^T`` with ``w`` after ``k``, the tile is ``q K^T - a M U``, and ``q - a M W`` goes on to
    the tile before it.
    """

    w: Float[Array, "batch heads keys size"]
    beta: Float[Array, "batch heads keys"]

    axes: ClassVar = {"w": ("batch", "heads", "keys", None), "beta": ("batch", "heads", "keys")}
    most_keys: ClassVar[int] = 64  # a tile has two matrices of this width for each of its keys and heads

    def check_size(self, size: int) -> None:
        """Raises ValueError unless the vectors have the size of the queries."""
        found = self.w.shape
        check(found[-1] == size, f"w must have the head size of q, {size}, found shape {found}")

    def tiles(self, k, size: int):
        """Keys, vectors, ``M U`` and ``M W`` of each tile."""
        batch, kv_heads, keys = k.shape[:3]
        heads = (batch, kv_heads, self.w.shape[1] // kv_heads, keys)
        w, beta = widened(self.w), widened(self.beta)
        w = in_blocks(w.reshape(*heads, -1), 3, size)
        beta = in_blocks(beta.reshape(heads).astype(w.dtype), 3, size)
        k = in_blocks(k.astype(w.dtype), 2, size)
        after = jnp.tri(size, k=-1, dtype=w.dtype)
        solved = inverse_of_unit_triangle(beta[..., None] * _products(w, w)) * beta[..., None, :]
        of_keys = _products(w, jnp.broadcast_to(k[:, :, :, None], w.shape)) * _like(after, w)
        return k, w, _times(solved, of_keys), _times(solved, w)

    def start(self, raw, scaled):
        """Nothing that stays, and the queries times the scale."""
        return (), widened(scaled)

    def step(self, fixed, carry, tile, allowed: Bool[Array, "*#b q k"], product):
        """The tile of logits, and the queries for the tile before it."""
        k, w, on_keys, on_queries = tile
        read, allowed = align_ranks(_products(carry, w), allowed)
        read = jnp.where(allowed, read, 0)
        return product(carry, k) - _times(read, on_keys), carry - _times(read, on_queries)


def _products(a: Array, b: Array) -> Array:
    return jnp.einsum("...sd,...td->...st", a, b, precision="highest")


def _times(a: Array, b: Array) -> Array:
    return jnp.einsum("...st,...td->...sd", a, b, precision="highest")


def _like(matrix: Array, tile: Array) -> Array:
    """A matrix with axes of 1 in front, as many as a tile has."""
    return matrix.reshape((1,) * (tile.ndim - 2) + matrix.shape)


@dataclasses.dataclass(frozen=True)
class PaTH(BiasSpec):
    """Spec of PaTH (Yang et al., arXiv 2505.16381): ``q_i^T H_i H_{i-1} ... H_{j+1} k_j``, in place of rotations.

    ``H_t = I - beta_t w_t w_t^T`` is a function of token ``t`` for each key head: ``w_t`` is a projection of the
    token, of length 1, and ``beta_t = 2 sigmoid(.)`` another. ``beta_t = 0`` is no position, ``beta_t = 2`` a
    reflection. As in ``fla``, with its low rank of ``w``, and without its short convolution over ``w``, its forget
    gates and half precision.

    Attention visits the tiles of keys in order, from the last to the first; the queries that go on from tile to tile
    are the state. A cache holds the keys as projected, and ``w`` and ``beta`` of every token, as wide as a key: each
    step of decoding computes the products anew. (``fla`` multiplies all cached keys by ``H_t`` at each step instead.)
    For causal attention only.

    Args:
        rank: of the projection to ``w``; None is a full one, which ``fla`` has if query heads share keys.
    """

    rank: int | None = 32
    contextual: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = True
    shift_invariant = True

    def __post_init__(self):
        if self.rank is not None:
            check_count("rank", self.rank)

    @property
    def one_sided(self) -> str | None:
        """``""``: there is no option for bidirectional attention."""
        return ""

    def init(self, key: Array, num_kv_heads: int, head_dim: int, model_dim: int) -> dict[str, Array]:
        """``{"w", "beta": [model_dim, kv_heads], "start": [kv_heads]}``, float32, and with a rank ``"up"``.

        ``w`` is ``[model_dim, kv_heads, head_dim]``, or ``[model_dim, rank]`` with ``up`` ``[rank, kv_heads,
        head_dim]``. ``beta`` starts at about 1.
        """
        of_w, of_up, of_beta = jax.random.split(key, 3)
        heads = (num_kv_heads, head_dim)
        made = {"w": _normal(of_w, (model_dim, *heads) if self.rank is None else (model_dim, self.rank))}
        if self.rank is not None:
            made["up"] = _normal(of_up, (self.rank, *heads))
        beta = 0.02 * jax.random.normal(of_beta, (model_dim, num_kv_heads), jnp.float32)
        return made | {"beta": beta, "start": jnp.zeros(num_kv_heads, jnp.float32)}

    def prepare(
        self, params: dict[str, Array], x: Float[Array, "batch length model_dim"]
    ) -> Float[Array, "batch kv_heads length size+1"]:
        """``w`` and, as the last number, ``beta`` of all tokens, at least float32.

        Raises:
            ValueError: if ``params`` are not those of ``init``, or for tokens of another size.
        """
        check_rank("x", x, 3, "[batch, length, model_dim]")
        shape = (x.shape[2], "kv_heads", "head_dim") if self.rank is None else (x.shape[2], self.rank)
        w, of_beta, start = params_of(params, self, w=shape, beta=(x.shape[2], "kv_heads"), start=("kv_heads",))
        dtype = at_least_float32(x.dtype, w.dtype)
        x, of_beta, start = (array.astype(dtype) for array in (x, of_beta, start))
        if self.rank is None:
            vectors = jnp.einsum("bnm,mhd->bhnd", x, w.astype(dtype), precision="highest")
        else:
            (up,) = params_of(params, self, up=(self.rank, "kv_heads", "head_dim"))
            inner = jnp.einsum("bnm,mr->bnr", x, w.astype(dtype), precision="highest")
            vectors = jnp.einsum("bnr,rhd->bhnd", inner, up.astype(dtype), precision="highest")
        vectors = vectors * jax.lax.rsqrt(jnp.square(vectors).sum(-1, keepdims=True) + 1e-6)
        beta = jnp.einsum("bnm,mh->bhn", x, of_beta, precision="highest") + start[None, :, None]
        return jnp.concatenate([vectors, 2 * jax.nn.sigmoid(beta)[..., None]], axis=-1)

    def kept(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(kv_heads, head_dim + 1)``."""
        return num_kv_heads, head_dim + 1

    def bind(
        self,
        params: dict[str, Array] | None = None,
        *,
        num_heads: int,
        kv_states: Float[Array, "batch kv_heads k size"],
    ) -> PathBias:
        """The bias of the results of ``prepare`` for all keys.

        Raises:
            ValueError: if ``num_heads`` is not a multiple of their heads.
        """
        check_rank("kv_states", kv_states, 4, "[batch, kv_heads, keys, size + 1]")
        group, rest = divmod(num_heads, kv_states.shape[1])
        check(rest == 0, f"kv_states must have a divisor of {num_heads} heads, found shape {kv_states.shape}")
        states = jnp.repeat(kv_states, group, axis=1)
        return PathBias(states[..., :-1], states[..., -1])


def _normal(key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    return shape[0] ** -0.5 * jax.random.normal(key, shape, jnp.float32)
