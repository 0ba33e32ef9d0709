"""What the blocks of a decoder are made of: norms, residuals and hidden layers, as frozen, hashable specs."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_number

NORMS = ("rms", "layer")
PLACES = ("before", "after", "both")
BIASES = ("qkv", "output", "mlp", "head")
"""Where a decoder may add learned biases."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last axis, in float32:

        "rms":    x / sqrt(mean(x^2) + eps) * gain             (Zhang and Sennrich, arXiv 1910.07467)
        "layer":  (x - mean) / sqrt(var + eps) * gain + bias   (Ba et al., arXiv 1607.06450)

    Args:
        kind: ``"rms"`` or ``"layer"``.
        eps: added to the mean square or to the variance. Llama and its relatives are released with 1e-5 or 1e-6.
        bias: whether a LayerNorm learns a bias.
        unit_offset: multiplies by ``1 + gain``, the gain starting from 0 (Gemma).
    """

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False

    def __post_init__(self):
        check_choice("norm.kind", self.kind, NORMS)
        check_number("norm.eps", self.eps, at_least=0)
        check(
            self.kind == "layer" or not self.bias, "norm.bias: an RMS norm has none; leave it out, or take kind layer"
        )


@dataclasses.dataclass(frozen=True)
class Residual:
    """How a block adds what attention and the MLP make of ``x``; N are its norms and s is ``scale``.

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
        scale: of what is added (Granite).

    Raises:
        ValueError: for a shared norm where there are not two parallel branches with norms before them.
    """

    norm: str = "before"
    parallel: bool = False
    shared_norm: bool = False
    first_norm: bool = True
    scale: float = 1.0

    def __post_init__(self):
        check_choice("residual.norm", self.norm, PLACES)
        check_number("residual.scale", self.scale)
        before = self.norm != "after"
        shares = self.parallel and before
        check(shares or not self.shared_norm, "residual.shared_norm needs parallel branches with a norm before them")
        check(
            self.first_norm or (before and not self.shared_norm),
            "residual.first_norm: there is no norm before attention alone to leave out; leave first_norm True",
        )


def _exact_gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jax.nn.gelu(x, approximate=False)


@dataclasses.dataclass(frozen=True)
class Activation:
    """``down(act(gate x) * up x)`` where ``gated`` (Shazeer, arXiv 2002.05202), else ``down(act(up x))``."""

    act: Callable[[Array], Array]
    gated: bool


ACTIVATIONS = {
    "swiglu": Activation(jax.nn.silu, True),
    "geglu": Activation(jax.nn.gelu, True),
    "geglu-exact": Activation(_exact_gelu, True),
    "reglu": Activation(jax.nn.relu, True),
    "silu": Activation(jax.nn.silu, False),
    "gelu": Activation(jax.nn.gelu, False),
    "gelu-exact": Activation(_exact_gelu, False),
    "relu": Activation(jax.nn.relu, False),
}
"""The MLPs by name. ``gelu`` and ``geglu`` use the tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
