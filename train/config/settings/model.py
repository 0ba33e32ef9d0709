"""The model: the released one that it starts from, its shape, its position scheme, and what a stage changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from train.config.settings.checks import check_positive


@dataclass(frozen=True)
class InitConfig:
    """A released model: a folder in the layout of Hugging Face, at a path or URL; a GGUF file; or the name of a model
    at the Hugging Face hub, ``org/name`` or ``org/name@revision``, each with ``/file.gguf`` for a GGUF file there,
    unless a local path has that name.

    In a config ``init: PATH`` is enough. When the config is read, `values` become those of its ``config.json``, and the
    revision becomes the commit that it then is. `adapter` is a folder of peft with LoRA for the model, which the
    training goes on with; it determines ``model.lora``.
    """

    path: str = ""
    values: Mapping = field(default_factory=dict)
    adapter: str = ""


def own_tokenizer(path: str) -> str:
    """The path of the tokenizer of a released model."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}/tokenizer.json"


@dataclass(frozen=True)
class NormConfig:
    """The fields of `posjax.nn.Norm`."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False  # of a layer norm
    unit_offset: bool = False  # multiplies by 1 + gain
    gain: bool = True


@dataclass(frozen=True)
class RouterConfig:
    """The fields of `posjax.nn.Router`."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True  # the weights of a token are divided by their sum
    bias: bool = False
    correction: bool = False  # every expert has a number for the choice, which training moves by its load
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    scale: float = 1.0
    least_sum: float = 1e-20
    on_input: bool = False
    learned_scale: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """The fields of `posjax.nn.Experts`."""

    count: int = 8
    per_token: int = 2
    router: RouterConfig = field(default_factory=RouterConfig)
    shared_dim: int | None = None  # hidden width of an MLP beside the experts that every token takes
    shared_gate: bool = False
    shared_scale: float = 1.0
    norms: bool = False  # of router, experts and that MLP apart
    balance: float = 0.0  # coefficient of the balance loss
    dense: tuple[int, ...] = ()  # numbers of the layers with one MLP instead, from 0
    dense_dim: int | None = None  # the hidden width of these; None is mlp_dim


@dataclass(frozen=True)
class LatentConfig:
    """The fields of `posjax.nn.Latent`."""

    rank: int = 64
    rotated: int = 16
    unrotated: int = 32
    value: int = 32
    query_rank: int | None = None
    norm: NormConfig = field(default_factory=NormConfig)


@dataclass(frozen=True)
class LoRAConfig:
    """The fields of `posjax.nn.LoRA`."""

    rank: int = 16
    alpha: float = 16.0  # the scale of an adapter is alpha / rank
    paths: tuple[str, ...] = ("*",)  # patterns of the names of projections in a block, as in attention/[qv]
    rank_stabilized: bool = False  # the scale is alpha / sqrt(rank)


@dataclass(frozen=True)
class ResidualConfig:
    """The fields of `posjax.nn.Residual`."""

    norm: Literal["before", "after", "both"] = "before"
    parallel: bool = False
    shared_norm: bool = False
    first_norm: bool = True
    scale: float = 1.0
    learned_scale: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model: the fields of `posjax.nn.DecoderConfig` except the scheme, which has its own section."""

    num_layers: int = 2
    model_dim: int = 96
    vocab_size: int | None = None  # rows of the embedding; None: the number of the tokenizer's tokens
    num_heads: int = 4
    num_kv_heads: int | tuple[int, ...] | None = None  # this and the next two: one number, or one for each layer
    head_dim: int | tuple[int, ...] | None = None
    mlp_dim: int | tuple[int, ...] | None = None
    activation: Literal[
        "swiglu",
        "swiglu-clamped",
        "geglu",
        "geglu-exact",
        "reglu",
        "gelu",
        "gelu-exact",
        "silu",
        "relu",
        "relu-squared",
        "xielu",
    ] = "swiglu"
    experts: ExpertsConfig | None = None  # a mixture of experts in place of every MLP
    latent: LatentConfig | None = None  # multi-head latent attention; head_dim and num_kv_heads follow from it
    norm: NormConfig = field(default_factory=NormConfig)
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    lora: LoRAConfig | None = None  # low-rank adapters; unless train.trainable says more, they alone are trained
    biases: tuple[str, ...] = ()  # those of qkv, output, gate, mlp, head that have a bias
    embedding_norm: bool = False
    projection_norm: bool = False  # of queries and keys over all heads together
    head_norms: bool = False  # a LayerNorm of every head of queries and keys
    keys_as_values: bool | tuple[bool, ...] = False  # values are the projected keys; one for all layers or each
    value_norm: bool = False  # of values over each head
    attention_gate: Literal["elementwise", "head"] | None = None  # what multiplies the outputs of attention's heads
    clip_qkv: float | None = None  # queries, keys and values are cut off at this magnitude
    embedding_scale: float | None = None  # None is sqrt(model_dim)
    query_scale: float | None = None  # None is head_dim ** -0.5
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied_head: bool = True
    trained_length: int | None = None  # the length in tokens that a released model was made for; from its config.json
    causal: bool = True  # False trains a bidirectional encoder with the masked-token loss
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters are float32 always
    remat: Literal["none", "dots", "offload", "attention", "full"] = "none"
    scan_layers: bool = True
    implementation: str | None = None  # the attention backend; None picks the best one that supports the scheme

    def __post_init__(self):
        check_positive("model", self, "num_layers", "model_dim", "num_heads", "vocab_size")


@dataclass(frozen=True)
class SchemeConfig:
    """A position scheme: ``rope``, or ``{name: rope, label: ..., extend: {...}, stage: ..., option: value, ...}``.

    `options` go to ``posjax.scheme(name, **options)``. `extend` goes to ``Scheme.extend`` after training, without
    retraining: the run is trained as ``trained()`` and evaluated extended. In an entry of a comparison, `train` has
    keys that replace the config's ``train`` keys, such as a learning rate that suits this scheme.
    """

    name: str = "rope"
    label: str = ""  # in tables and figures; default: the name
    options: Mapping[str, Any] = field(default_factory=dict)
    extend: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""  # the stage of a curriculum whose weights are measured; default: the last one
    train: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "label", self.label or self.name)

    @property
    def only_measured(self) -> bool:
        """Whether the entry only measures a trained model in another way, and needs no training of its own."""
        return bool(self.extend or self.stage)

    def trained(self) -> SchemeConfig:
        """The entry as it is trained, without label, extension or stage. Entries that agree here share one training."""
        return SchemeConfig(self.name, options=self.options, train=self.train)


@dataclass(frozen=True)
class StageConfig:
    """What a stage changes: keys of ``train`` and ``data``, the scheme, or options of the current scheme."""

    name: str = ""
    train: Mapping = field(default_factory=dict)
    data: Mapping = field(default_factory=dict)
    scheme: SchemeConfig | None = None
    extend: Mapping = field(default_factory=dict)
