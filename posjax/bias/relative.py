"""Relative biases that read the query: what a query holds times an embedding of the distance (Inkling; Shaw et al.)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_flags, check_number, check_positive, check_rank, params_of
from posjax._numbers import align_ranks, at_least_float32, widened
from posjax.bias.base import Bias, BiasSpec
from posjax.positions import difference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias(Bias):
    """``b_h(i, j) = state_hi . profiles[i - j]``, with a state for each query and head.

    ``profiles`` are those of the distances ``0, 1, ..., extent - 1``; if two-sided, of ``1 - extent, ..., extent - 1``.
    All other distances have a bias of 0, or if ``clipped``, that of the nearest distance with a profile.
    """

    states: Float[Array, "batch heads queries size"]
    profiles: Float[Array, "size distances"]
    two_sided: bool = dataclasses.field(metadata={"static": True})
    clipped: bool = dataclasses.field(metadata={"static": True})

    axes: ClassVar = {"states": ("batch", "heads", "queries", None)}

    def __post_init__(self):
        check_flags(self)

    def values(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Array:
        """``[batch, heads, q, k]``: the products with all profiles, read at the distance of each pair."""
        states, profiles = widened(self.states), widened(self.profiles)
        levels = jnp.einsum("bhqs,sd->bhqd", states, profiles.astype(states.dtype), precision="highest")
        i, j = align_ranks(q_positions[..., :, None], kv_positions[..., None, :])
        ahead = (self.profiles.shape[1] - 1) // 2 if self.two_sided else 0
        last = self.profiles.shape[1] - 1 - ahead
        distance, _ = align_ranks(difference(i, j), levels)
        near = jnp.clip(distance, -ahead, last)
        index = jnp.broadcast_to(near + ahead, (*levels.shape[:2], *distance.shape[2:]))
        found = jnp.take_along_axis(levels, index, axis=-1, mode="clip")
        return found if self.clipped else jnp.where(distance == near, found, 0)


@dataclasses.dataclass(frozen=True)
class _Profiled(BiasSpec):
    """Profiles of distances, and whether keys ahead have their own."""

    extent: int = 1024
    bidirectional: bool = False
    stddev: float = 0.02
    shift_invariant = True

    def __post_init__(self):
        check_count("extent", self.extent)
        check_flags(self)
        check_number("stddev", self.stddev, at_least=0)

    @property
    def one_sided(self) -> str | None:
        """``"bidirectional=True"``, or None if it is set."""
        return None if self.bidirectional else "bidirectional=True"

    @property
    def distances(self) -> int:
        """How many distances have a profile."""
        return 2 * self.extent - 1 if self.bidirectional else self.extent

    def _profiles(self, key: Array, size: int) -> Float[Array, "size distances"]:
        return self.stddev * jax.random.normal(key, (size, self.distances), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Relative(_Profiled):
    """Spec of Inkling's relative bias: ``b_h(i, j) = r_hi . profiles[i - j]`` with ``r_hi = W_h x_i``.

    Every head of every token mixes a few learned profiles of the distance, which all heads of a layer share, by a small
    projection of the token. It replaces rotary positions. (Inkling and Inkling 2, from their code in transformers;
    related: Shaw et al., arXiv 1803.02155, Transformer-XL, DeBERTa.) Used in two steps, as ``Scheme`` does:

        states = spec.prepare(params, x)             x: the tokens that the queries are projected from
        bias = spec.bind(params, num_heads=..., states=states)

    Args:
        extent: how many distances behind the query have a profile, from 0 on; the bias of longer ones is 0. Inkling has
            1,024, and the size of the window in its layers with windows.
        bidirectional: profiles for the keys ahead too, where the bias is otherwise 0.
        stddev: standard deviation of the initial profiles, which are normal.
        size: of a state; the profiles of a layer.
        clip: if given, states are multiplied by learned factors, at first 1, and those longer than this get this
            length; 8 in Inkling 2.
        scaled: whether the scale of the scheme multiplies the bias too, as in the full layers of Inkling.
    """

    size: int = 16
    clip: float | None = None
    scaled: bool = False
    reads_tokens: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_count("size", self.size)
        if self.clip is not None:
            check_positive("clip", self.clip)

    def init(self, key: Array, num_heads: int, model_dim: int) -> dict[str, Array]:
        """``{"w": [model_dim, heads, size], "profiles": [size, distances]}``, float32.

        ``w`` is normal with a variance of ``1 / model_dim``. With ``clip`` also ``{"factors": [heads, size]}`` of ones.
        """
        of_states, of_profiles = jax.random.split(key)
        w = model_dim**-0.5 * jax.random.normal(of_states, (model_dim, num_heads, self.size), jnp.float32)
        factors = {} if self.clip is None else {"factors": jnp.ones((num_heads, self.size), jnp.float32)}
        return {"w": w, "profiles": self._profiles(of_profiles, self.size)} | factors

    def prepare(
        self, params: dict[str, Array], x: Float[Array, "batch length model_dim"]
    ) -> Float[Array, "batch heads length size"]:
        """The states of all tokens, at least float32.

        Raises:
            ValueError: if ``params`` are not those of ``init``, or for tokens of another size.
        """
        check_rank("x", x, 3, "[batch, length, model_dim]")
        (w,) = params_of(params, self, w=(x.shape[2], "heads", self.size))
        dtype = at_least_float32(x.dtype, w.dtype)
        states = jnp.einsum("bnd,dhs->bhns", x.astype(dtype), w.astype(dtype), precision="highest")
        if self.clip is None:
            return states
        (factors,) = params_of(params, self, factors=w.shape[1:])
        states = states * factors.astype(dtype)[None, :, None]
        # The length is a root: its derivative at a state of zeros, such as that of padding, would not be finite.
        squares = jnp.square(states).sum(-1, keepdims=True)
        length = jnp.sqrt(jnp.where(squares == 0, 1, squares)) + 1e-6
        return states * jnp.minimum(1, self.clip / length)

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int, states: Array) -> RelativeBias:
        """The bias of states from ``prepare``, of ``num_heads`` heads.

        Raises:
            ValueError: if ``params`` hold no profiles of this many distances, or the states do not fit them.
        """
        (profiles,) = params_of(params, self, profiles=(self.size, self.distances))
        return _bound(self, states, profiles, num_heads, clipped=False)


@dataclasses.dataclass(frozen=True)
class Shaw(_Profiled):
    """Spec of relative keys (Shaw et al., arXiv 1803.02155): ``(q_i . k_j + q_i . a_{i-j}) / sqrt(d)``.

    The heads of a layer share the embeddings ``a`` of the distances. The scale multiplies both products, that of a
    scheme too. The query is that of the product with the key, after a norm, before any rotation. The article's
    embeddings for the values are left out, as in most later code.

    Args:
        extent: how many distances have an embedding, from 0 on; longer ones have that of the last (the article's
            ``k + 1``).
        bidirectional: embeddings for the keys ahead too; otherwise they have that of distance 0.
        stddev: standard deviation of the initial embeddings, which are normal.
    """

    reads_queries: ClassVar[bool] = True

    def init(self, key: Array, num_heads: int, head_dim: int) -> dict[str, Array]:
        """``{"profiles": [head_dim, distances]}``, float32."""
        return {"profiles": self._profiles(key, head_dim)}

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int, states: Array) -> RelativeBias:
        """The bias for queries ``[batch, heads, queries, head_dim]`` that are multiplied by the scale.

        Raises:
            ValueError: if ``params`` hold no embeddings of this many distances, or the queries do not fit them.
        """
        (profiles,) = params_of(params, self, profiles=("head_dim", self.distances))
        return _bound(self, states, profiles, num_heads, clipped=True)


def _bound(spec: _Profiled, states, profiles, num_heads: int, clipped: bool) -> RelativeBias:
    layout = f"[batch, {num_heads} heads, queries, {profiles.shape[0]}]"
    check_rank("states", states, 4, layout)
    fits = (states.shape[1], states.shape[3]) == (num_heads, profiles.shape[0])
    check(fits, f"states must be {layout}, found shape {states.shape}")
    return RelativeBias(states, profiles, spec.bidirectional, clipped)
