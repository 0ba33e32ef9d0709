"""Norms, residuals, experts and activations of the blocks of a decoder, as frozen, hashable specs."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import (
    check,
    check_choice,
    check_count,
    check_counts,
    check_flags,
    check_number,
    check_positive,
    describe,
)
from posjax._numbers import widened

NORMS = ("rms", "layer")
PLACES = ("before", "after", "both")
BIASES = ("qkv", "output", "gate", "mlp", "head")
"""The projections that may have a learned bias."""
GATES = ("elementwise", "head")
"""The gates of the outputs of attention."""
SCORES = ("softmax", "sigmoid")
"""How a router scores experts."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last axis, in float32:

        "rms":    x / sqrt(mean(x^2) + eps) * gain             (Zhang and Sennrich, arXiv 1910.07467)
        "layer":  (x - mean) / sqrt(var + eps) * gain + bias   (Ba et al., arXiv 1607.06450)

    Args:
        kind: ``"rms"`` or ``"layer"``.
        eps: added to the mean square or to the variance. Llama and its relatives are released with 1e-5 or 1e-6.
        bias: whether a LayerNorm learns a bias.
        unit_offset: whether the factor is ``1 + gain``, with a gain that starts from 0 (Gemma).
        gain: False leaves out the gain (OLMo 1, nanochat).
    """

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False
    gain: bool = True

    def __post_init__(self):
        check_flags(self, "norm.")
        learns = self.bias or self.unit_offset
        check(self.gain or not learns, "norm.gain: False needs a norm without bias and unit_offset; leave them out")
        check_choice("norm.kind", self.kind, NORMS)
        check_number("norm.eps", self.eps, at_least=0)
        check(
            self.kind == "layer" or not self.bias, "norm.bias: an RMS norm has no bias; leave it out or use kind layer"
        )


@dataclasses.dataclass(frozen=True)
class Router:
    """Which experts a token takes, and the weight of each, from the router's logits ``z = W x``, float32.

        s = softmax(z), over all experts, or sigmoid(z), each for itself
        chosen are the ``per_token`` experts with the largest s_e + c_e; of equal ones those with lower numbers
        w_e = scale s_e, with ``normalized`` divided by the sum of s over the chosen experts

    With "softmax" and ``normalized`` the weights are the softmax over the chosen logits (Mixtral, gpt-oss).

    Args:
        score: ``"softmax"`` or ``"sigmoid"``.
        normalized: whether the weights of a token sum to ``scale``.
        bias: whether the logits have a learned bias (gpt-oss).
        correction: whether every expert has a number c_e that counts for the choice alone. It has no gradient; training
            moves it by the experts' loads (DeepSeek V3, Wang et al., arXiv 2408.15664).
        groups: the experts form so many groups of equal size, in order.
        groups_kept: only experts of the best so many groups are chosen (DeepSeek V2 and V3).
        group_best: a group is as good as the sum of the ``s_e + c_e`` of its so many best experts: 1 in DeepSeek V2, 2
            in V3.
        scale: factor of the weights.
        least_sum: the least divisor of normalized weights (ERNIE 4.5).
        on_input: whether the weights multiply the inputs of the experts instead of their outputs (Llama 4).
        learned_scale: whether the weights of every expert have a learned factor, which starts at 1 (Gemma 4).
    """

    score: str = "softmax"
    normalized: bool = True
    bias: bool = False
    correction: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    scale: float = 1.0
    least_sum: float = 1e-20
    on_input: bool = False
    learned_scale: bool = False

    def __post_init__(self):
        check_flags(self, "experts.router.")
        check_choice("experts.router.score", self.score, SCORES)
        counts = {name: getattr(self, name) for name in ("groups", "groups_kept", "group_best")}
        check_counts(**{f"experts.router.{name}": count for name, count in counts.items()})
        kept = f"experts.router.groups_kept must be at most groups, found {self.groups_kept} of {self.groups}"
        check(self.groups_kept <= self.groups, kept)
        check_number("experts.router.scale", self.scale)
        check_number("experts.router.least_sum", self.least_sum, at_least=0)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLPs.

    Args:
        count: number of experts.
        per_token: number of experts for every token.
        router: how a token's experts are chosen and weighted.
        shared_dim: hidden width of an MLP beside the experts that every token takes; None for none.
        shared_gate: whether the output of that MLP is multiplied by ``sigmoid(g x)`` with a learned vector g (Qwen2).
        shared_scale: factor of that output (Cohere 2).
        norms: whether router, experts and that MLP have each a norm before them, in place of one before the block's
            hidden layer, and experts and MLP each one after them, before the two are added. The router's is divided by
            the root of the width (Gemma 4).
        balance: coefficient of the balance loss that the model is trained with. It changes no computation here.
        dense: the numbers of the layers that have one MLP instead, from 0 (DeepSeek V3: 0, 1, 2).
        dense_dim: the hidden width of these; ``mlp_dim``, the width of an expert, when left out.
    """

    count: int
    per_token: int
    router: Router = dataclasses.field(default=Router())
    shared_dim: int | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    norms: bool = False
    balance: float = 0.0
    dense: tuple[int, ...] = ()
    dense_dim: int | None = None

    def __post_init__(self):
        check_flags(self, "experts.")
        check_counts(**{"experts.count": self.count, "experts.per_token": self.per_token})
        check(isinstance(self.router, Router), f"experts.router must be Router(...), found {describe(self.router)}")
        check(isinstance(self.dense, tuple), f"experts.dense must be a tuple of layers, found {describe(self.dense)}")
        names_layers = all(type(layer) is int and layer >= 0 for layer in self.dense)
        check(names_layers, f"experts.dense must name layers, from 0, found {describe(self.dense)}")
        if self.dense_dim is not None:
            check_count("experts.dense_dim", self.dense_dim)
        fits = self.per_token <= self.count
        check(fits, f"experts.per_token must be at most experts.count, found {self.per_token} of {self.count}")
        self._check_groups()
        check_number("experts.shared_scale", self.shared_scale)
        check_number("experts.balance", self.balance, at_least=0)
        if self.shared_dim is not None:
            check_counts(**{"experts.shared_dim": self.shared_dim})
        gated = "experts.shared_gate needs a shared MLP; set experts.shared_dim, or leave shared_gate out"
        check(self.shared_dim is not None or not self.shared_gate, gated)

    def _check_groups(self) -> None:
        """Raises ValueError unless the groups divide the experts, and those kept have enough for a token."""
        router, groups = self.router, self.router.groups
        check(self.count % groups == 0, f"experts.router.groups must divide the {self.count} experts, found {groups}")
        size = self.count // groups
        check(
            router.group_best <= size,
            f"experts.router.group_best must be at most the {size} experts of a group, found {router.group_best}",
        )
        check(
            self.per_token <= router.groups_kept * size,
            f"experts.per_token must be at most the {router.groups_kept * size} experts of the groups that are kept, "
            f"found {self.per_token}; a larger experts.router.groups_kept would work",
        )


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention, in place of separate projections of queries, keys and values; ``LatentAttention``.

    Args:
        rank: numbers of a token's latent, from which the keys and values of all heads are computed.
        rotated: channels of a head that the features of the scheme read. Their keys are the same in all heads.
        unrotated: channels of a head that no features read.
        value: channels of a value.
        query_rank: numbers of the latent of the queries; None for queries that are computed from the token itself.
        norm: of both latents.

    Raises:
        ValueError: for a size that is not whole and above 0.
    """

    rank: int
    rotated: int
    unrotated: int
    value: int
    query_rank: int | None = None
    norm: Norm = Norm()

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("rank", "rotated", "unrotated", "value")}
        sizes |= {} if self.query_rank is None else {"query_rank": self.query_rank}
        check_counts(**{f"latent.{name}": size for name, size in sizes.items()})
        fits = isinstance(self.norm, Norm) and self.norm.kind == "rms"
        check(fits, f"latent.norm must be a Norm of kind rms, found {describe(self.norm)}")

    @property
    def size(self) -> int:
        """Channels of a query and of a key."""
        return self.rotated + self.unrotated

    @property
    def stored(self) -> int:
        """Numbers of a token in a cache."""
        return self.rotated + self.rank


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of projections: ``y = W x + s B (A x)`` with A of ``rank`` rows (Hu et al., arXiv 2106.09685).

    Args:
        rank: numbers of ``A x``.
        alpha: the scale s is ``alpha / rank``.
        paths: patterns of the names of projections in a block that have an adapter, as in ``"attention/[qv]"``, where
            ``*`` stands for any part. The projections are ``attention/q``, ``k``, ``v`` and ``o``, ``mlp/gate``, ``up``
            and ``down``, those of latent attention, of its output gate (``attention/gate/weight``), of Gated DeltaNet
            (``delta/q``, ...) and of the MLP beside experts (``mlp/shared/up``, ...).
        rank_stabilized: whether s is ``alpha / sqrt(rank)`` (Kalajdzievski, arXiv 2312.03732).

    Raises:
        ValueError: for a rank that is not whole and above 0, an ``alpha`` that is not above 0, and no paths.
    """

    rank: int = 16
    alpha: float = 16.0
    paths: tuple[str, ...] = ("*",)
    rank_stabilized: bool = False

    def __post_init__(self):
        check_flags(self, "lora.")
        check_counts(**{"lora.rank": self.rank})
        check_positive("lora.alpha", self.alpha)
        named = bool(self.paths) and all(isinstance(path, str) for path in self.paths)
        check(named, f"lora.paths must name projections, as in ('attention/*', 'mlp/*'), found {describe(self.paths)}")

    @property
    def scale(self) -> float:
        """The factor s of ``B (A x)``."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclasses.dataclass(frozen=True)
class Residual:
    """How a block adds the outputs of attention and MLP to ``x``; N are its norms and s is ``scale``.

        "before":              x <- x + s attention(N(x)),     then x <- x + s mlp(N(x))
        "after" (OLMo 2):      x <- x + s N(attention(x)),     then x <- x + s N(mlp(x))
        "both" (Gemma 2):      x <- x + s N(attention(N(x))),  then x <- x + s N(mlp(N(x)))
        parallel (GPT-NeoX):   x <- x + s attention(N(x)) + s mlp(N(x)), of the same x

    Args:
        norm: where the norms are: ``"before"``, ``"after"`` or ``"both"``.
        parallel: whether attention and MLP read the same x.
        shared_norm: one norm for both parallel branches (GPT-J, Cohere).
        first_norm: False leaves out the norm before the attention of the first layer (ModernBERT, which has a norm
            after the embedding).
        scale: factor of what is added (Granite).
        learned_scale: whether each layer ends with a factor of x, a learned number that starts at 1 (Gemma 4).

    Raises:
        ValueError: for a shared norm without parallel branches that have a norm before them, and for ``first_norm``
            False without a norm before attention, or with a shared one.
    """

    norm: str = "before"
    parallel: bool = False
    shared_norm: bool = False
    first_norm: bool = True
    scale: float = 1.0
    learned_scale: bool = False

    def __post_init__(self):
        check_flags(self, "residual.")
        check_choice("residual.norm", self.norm, PLACES)
        check_number("residual.scale", self.scale)
        before = self.norm != "after"
        shares = self.parallel and before
        check(shares or not self.shared_norm, "residual.shared_norm needs parallel branches with a norm before them")
        check(
            self.first_norm or (before and not self.shared_norm),
            "residual.first_norm: False needs a norm before attention that the MLP does not share; leave it True",
        )


def _exact_gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jax.nn.gelu(x, approximate=False)


def _squared_relu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """``max(x, 0)^2`` (Primer, So et al., arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def _clamped_swiglu(gate: Float[Array, "*b"], up: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """``(u + 1) g sigmoid(1.702 g)`` with ``g = min(gate, 7)`` and u = up between -7 and 7 (gpt-oss)."""
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def _xielu(x: Float[Array, "*b"], *, alpha_p: Float[Array, ""], alpha_n: Float[Array, ""]) -> Float[Array, "*b"]:
    """``p x^2 + x / 2`` above 0, else ``n (e^x - 1 - x) + x / 2`` (Huang and Schlag, arXiv 2411.13010).

    The learned numbers set ``p = softplus(alpha_p)`` and ``n = softplus(alpha_n) + 1 / 2``. The exponent is at most
    -1e-6, as in Apertus.
    """
    wide = widened(x)
    p, n = (jax.nn.softplus(alpha.astype(wide.dtype)) for alpha in (alpha_p, alpha_n))
    below = (n + XIELU_BETA) * (jnp.expm1(jnp.minimum(wide, XIELU_EPS)) - wide)
    return (jnp.where(wide > 0, p * wide * wide, below) + XIELU_BETA * wide).astype(x.dtype)


XIELU_BETA, XIELU_EPS = 0.5, -1e-6
"""The fixed numbers of xIELU."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """The hidden units of an MLP: a function of ``gate x`` and ``up x`` if ``gated``, otherwise of ``up x``.

    ``learned`` are the initial values of numbers that every MLP learns, arguments of the function by name.
    """

    hidden: Callable[..., Array]
    gated: bool
    learned: Mapping[str, float] = dataclasses.field(default_factory=dict)


def _gated(act: Callable[[Array], Array]) -> Activation:
    """``act(gate x) * up x`` (Shazeer, arXiv 2002.05202)."""
    return Activation(lambda gate, up: act(gate) * up, True)


ACTIVATIONS = {
    "swiglu": _gated(jax.nn.silu),
    "swiglu-clamped": Activation(_clamped_swiglu, True),
    "geglu": _gated(jax.nn.gelu),
    "geglu-exact": _gated(_exact_gelu),
    "reglu": _gated(jax.nn.relu),
    "silu": Activation(jax.nn.silu, False),
    "gelu": Activation(jax.nn.gelu, False),
    "gelu-exact": Activation(_exact_gelu, False),
    "relu": Activation(jax.nn.relu, False),
    "relu-squared": Activation(_squared_relu, False),
    "xielu": Activation(_xielu, False, {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}),
}
"""Activations by name. ``gelu`` and ``geglu`` use the tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
