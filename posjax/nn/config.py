"""What a decoder is made of: one frozen, hashable dataclass."""

import dataclasses

import jax.numpy as jnp

from posjax._checks import check, check_choice, check_positive
from posjax.attention.sharded import Placement
from posjax.layers import Layers, uniform
from posjax.scheme import Scheme

REMAT = ("none", "dots", "offload", "attention", "full")
ACTIVATIONS = ("swiglu", "gelu")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a ``Decoder``.

    Args:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        model_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads (GQA); ``num_heads`` when left out.
        head_dim: size of a head; ``model_dim // num_heads`` when left out.
        mlp_dim: hidden width; when left out 4 ``model_dim``, or for SwiGLU 8/3 of it rounded up to a multiple of 8.
        activation: ``"swiglu"`` or ``"gelu"``.
        tied_head: the output projection is the embedding.
        causal: False makes a bidirectional encoder, for a masked-token loss.
        scheme: how position is told: one ``Scheme`` for all layers, or ``Layers``.
        compute_dtype: of activations and matrix products, ``"float32"`` or ``"bfloat16"``; parameters, norms, logits
            and softmax statistics are float32.
        remat: what the backward pass recomputes in each block: ``"none"``, ``"dots"`` (everything but matrix products
            with parameters and what attention computes), ``"offload"`` (the same, the products kept in the host's
            memory), ``"attention"`` (everything but what attention computes: for long sequences, where that takes most
            of the time and little memory), ``"full"`` (everything). Short rows, linear attention, CoPE and cuDNN are
            attended to again even so: what is kept comes from attention in linear memory.
        scan_layers: whether the blocks run as ``lax.scan``, which compiles one block instead of all.
        implementation: attention backend; see ``posjax.attention``.
        placement: how activations lie over the Auto axes of the mesh in use (``jax.set_mesh``), if there is one;
            attention then runs under ``shard_map``. Explicit axes, which ``jax.make_mesh`` makes, need none: the types
            of the tokens and of the parameters tell.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: str = "swiglu"
    tied_head: bool = True
    causal: bool = True
    scheme: Scheme | Layers = dataclasses.field(default=Scheme())
    compute_dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    implementation: str | None = None
    placement: Placement = dataclasses.field(default=Placement())

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads"):
            check_positive(name, getattr(self, name))
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("remat", self.remat, REMAT)
        check_choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        self._fill_defaults()
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}",
        )
        for scheme in uniform(self.scheme, self.num_layers).schemes:
            scheme.check_direction(self.causal)
            # Refuses an odd head, or one that the frequency rule cannot rotate.
            scheme.query_size(self.head_dim), scheme.key_size(self.head_dim)

    def _fill_defaults(self) -> None:
        if self.head_dim is None:
            check(
                self.model_dim % self.num_heads == 0,
                f"model_dim must be a multiple of num_heads, or head_dim given; found {self.model_dim} and "
                f"{self.num_heads}",
            )
        widths = {"swiglu": -(-8 * self.model_dim // 24) * 8, "gelu": 4 * self.model_dim}
        defaults = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.model_dim // self.num_heads,
            "mlp_dim": widths[self.activation],
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            check_positive(name, getattr(self, name))

    @property
    def dtype(self) -> jnp.dtype:
        """``compute_dtype`` as a dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def layers(self) -> Layers:
        """The scheme of every layer."""
        return uniform(self.scheme, self.num_layers)
