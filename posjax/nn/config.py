"""The configuration of a decoder: one frozen, hashable dataclass."""

import dataclasses
import operator
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import (
    check,
    check_choice,
    check_count,
    check_flag,
    check_flags,
    check_number,
    check_positive,
    describe,
)
from posjax._numbers import LARGEST, align_ranks
from posjax.attention.placement import Placement
from posjax.attention.platform import IMPLEMENTATIONS
from posjax.nn.specs import ACTIVATIONS, BIASES, GATES, Experts, Latent, LoRA, Norm, Residual
from posjax.rotary import Rotary
from posjax.scheme import Layers, Scheme, uniform
from posjax.scheme.layers import MOST_LAYERS

_MOST_PARAMETERS = 10**16
"""A thousand times the largest models."""

_LONGEST_PERIOD = 64
"""Of layers that differ in more than their schemes."""

_SIZES = ("num_kv_heads", "head_dim", "mlp_dim")
BY_LAYER = (*_SIZES, "keys_as_values")
"""The fields that may differ from layer to layer."""

REMAT = ("none", "dots", "offload", "attention", "full")


def check_size(name: str, field: str, value: Any) -> None:
    """Raises ValueError for a size that is not whole and positive, or larger than any machine could use.

    Args:
        name: in the message.
        field: the size as a field of ``DecoderConfig``.
        value: the size.
    """
    check_count(name, value)
    most = MOST_LAYERS if field == "num_layers" else LARGEST
    check(value <= most, f"{name} must be at most {most}, found {describe(value)}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a ``Decoder``.

    Args:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        model_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads (GQA); ``num_heads`` when left out. This, ``head_dim`` and ``mlp_dim`` are one
            number for all layers, or a tuple with a number for each; see ``of_layer``.
        head_dim: size of a head; ``model_dim // num_heads`` when left out, with ``latent`` the rotated part of a head.
        mlp_dim: hidden width; when left out 4 ``model_dim``, or for a gated MLP 8/3 ``model_dim`` rounded up to a
            multiple of 8.
        activation: of the MLP, one of ``nn.specs.ACTIVATIONS``. Gated: ``"swiglu"``, ``"geglu"``, ``"geglu-exact"``,
            ``"reglu"``, ``"swiglu-clamped"``. Plain: ``"gelu"``, ``"gelu-exact"``, ``"silu"``, ``"relu"``,
            ``"relu-squared"``, ``"xielu"`` (with two learned numbers in every layer, Apertus).
        experts: a mixture of MLPs instead of one MLP; ``mlp_dim`` is then the hidden width of each expert.
        norm: of the residual stream, and with ``projection_norm`` or ``head_norms`` of queries and keys.
        latent: multi-head latent attention (DeepSeek V2). Every query head has its own keys and values; ``"qkv"`` in
            ``biases`` are biases of the latents and of the rotated key.
        residual: where the norms are, and how attention and MLP are added.
        lora: low-rank adapters beside projections of the blocks.
        biases: which projections have a learned bias, of ``"qkv"``, ``"output"``, ``"gate"`` (of ``attention_gate``),
            ``"mlp"`` and ``"head"``.
        embedding_norm: whether a norm follows the embedding (BLOOM).
        projection_norm: whether queries and keys are normed over all heads together, before the position method, with a
            gain for every channel of every head (OLMo 2).
        head_norms: the same with a LayerNorm of every head, without a bias (Command R+). For a gain that the heads
            share use ``Scheme(norm=QKNorm())``.
        keys_as_values: whether the projected keys, before any norm and rotation, are also the values, in place of a
            projection of their own (Gemma 4); one for all layers, or a tuple with one for each.
        value_norm: whether values are normed over each head, without a gain (Gemma 4); the eps is that of ``norm``.
        attention_gate: what multiplies the outputs of attention's heads before the output projection (Qiu et al., arXiv
            2505.06708), of the layer's input x: ``"elementwise"``, ``sigmoid(x W)`` for every channel; ``"head"``, one
            such number for every head; nothing when left out.
        clip_qkv: queries, keys and values are cut off at this magnitude before the position method (OLMo 1).
        embedding_scale: factor of token embeddings; ``sqrt(model_dim)`` when left out. Llama and most others use 1.
        query_scale: factor of ``<phi, psi>``; ``head_dim ** -0.5`` when left out (Gemma, Granite), with ``latent``
            ``(rotated + unrotated) ** -0.5``.
        logit_scale: factor of the logits (Cohere, Granite).
        attention_softcap: cap c of the scores of attention, ``c tanh(z / c)`` (Gemma 2).
        logit_softcap: the same cap for the logits of the vocabulary.
        tied_head: whether the output projection is the embedding.
        causal: False makes a bidirectional encoder, for a masked-token loss.
        trained_length: tokens of the longest rows that the model was trained for. It changes no computation; it is
            only written to released layouts.
        scheme: the position scheme: one ``Scheme`` for all layers, or ``Layers``.
        compute_dtype: of activations and matrix products, ``"float32"`` or ``"bfloat16"``; parameters, norms, logits
            and softmax statistics are float32.
        remat: what the backward pass recomputes in each block: ``"none"``; ``"dots"``, everything except matrix
            products with parameters and results of attention; ``"offload"``, the same as ``"dots"``, with the products
            stored in host memory; ``"attention"``, everything except results of attention, for long sequences, where
            attention takes most of the time and its results take little memory; ``"full"``, everything. Results of
            attention are stored only if they were computed in linear memory: short rows, linear attention, CoPE and
            cuDNN are always recomputed.
        scan_layers: whether the blocks run as ``lax.scan``, which compiles one block instead of all.
        implementation: attention backend; see ``posjax.attention``.
        placement: how activations are split over the Auto axes of the mesh in use (``jax.set_mesh``), if there is one;
            attention then runs under ``shard_map``. Explicit axes, which ``jax.make_mesh`` makes, need no placement:
            the types of the tokens and of the parameters contain the split.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int | tuple[int, ...] | None = None
    head_dim: int | tuple[int, ...] | None = None
    mlp_dim: int | tuple[int, ...] | None = None
    activation: str = "swiglu"
    experts: Experts | None = None
    latent: Latent | None = None
    norm: Norm = dataclasses.field(default=Norm())
    residual: Residual = dataclasses.field(default=Residual())
    lora: LoRA | None = None
    biases: tuple[str, ...] = ()
    embedding_norm: bool = False
    projection_norm: bool = False
    head_norms: bool = False
    keys_as_values: bool | tuple[bool, ...] = False
    value_norm: bool = False
    attention_gate: str | None = None
    clip_qkv: float | None = None
    embedding_scale: float | None = None
    query_scale: float | None = None
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied_head: bool = True
    causal: bool = True
    trained_length: int | None = None
    scheme: Scheme | Layers = dataclasses.field(default=Scheme())
    compute_dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    implementation: str | None = None
    placement: Placement = dataclasses.field(default=Placement())

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads"):
            check_size(name, name, getattr(self, name))
        check_flags(self)
        self._check_kinds()
        check_choice("activation", self.activation, ACTIVATIONS)
        self._check_numbers()
        self._check_latent()
        if self.attention_gate is not None:
            check_choice("attention_gate", self.attention_gate, GATES)
        ungated = "gate" in self.biases and self.attention_gate is None
        check(not ungated, "biases: 'gate' is the bias of attention_gate, which is not set; set it, or leave it out")
        check_choice("remat", self.remat, REMAT)
        check_choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        check_choice("implementation", self.implementation or IMPLEMENTATIONS[0], IMPLEMENTATIONS)
        self._fill_defaults()
        for kv_heads in _numbers(self.num_kv_heads):
            fits = self.num_heads % kv_heads == 0
            check(fits, f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {kv_heads}")
        self._check_experts()
        self._check_total()
        self._check_schemes()

    def _check_kinds(self) -> None:
        kinds = {"experts": Experts, "latent": Latent, "norm": Norm, "residual": Residual, "placement": Placement}
        for name, kind in kinds.items():
            spec = getattr(self, name)
            fits = isinstance(spec, kind) or (spec is None and name in ("experts", "latent"))
            check(fits, f"{name} must be {kind.__name__}(...), found {describe(spec)}")
        check(isinstance(self.biases, tuple), f"biases must be a tuple of names, found {describe(self.biases)}")

    def _check_numbers(self) -> None:
        for name in self.biases:
            check_choice("biases", name, BIASES)
        fits = not self.head_norms or self.norm.kind == "layer"
        check(fits, "head_norms: it is a LayerNorm of every head, as norm must be; use norm.kind layer")
        check(not (self.head_norms and self.projection_norm), "head_norms does not go with projection_norm; use one")
        check_number("logit_scale", self.logit_scale)
        for name in ("embedding_scale", "query_scale"):
            check_number(name, 1 if getattr(self, name) is None else getattr(self, name))
        for name in ("attention_softcap", "logit_softcap", "clip_qkv"):
            check_positive(name, 1 if getattr(self, name) is None else getattr(self, name))
        if self.trained_length is not None:
            check_count("trained_length", self.trained_length)

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        for name, size in (("head_dim", self.latent.rotated), ("num_kv_heads", self.num_heads)):
            found = getattr(self, name)
            check(
                found in (None, size), f"{name} must be {size} with this latent attention, found {found}; leave it out"
            )
        for name in ("projection_norm", "head_norms"):
            check(not getattr(self, name), f"{name}: the latents have norms of their own; leave it out")
        for name in ("keys_as_values", "value_norm"):
            check(getattr(self, name) is False, f"{name}: latent attention has values of its own; leave it out")
        check(self.clip_qkv is None, "clip_qkv: latent attention clips nothing; leave it out")
        object.__setattr__(self, "head_dim", self.latent.rotated)

    def _check_schemes(self) -> None:
        parts = zip(self.layers.schemes, self._every("head_dim"), self._every("keys_as_values"), strict=True)
        for scheme, size, shared in set(parts):
            if self.latent is not None:
                check_over_latents(scheme)
            scheme.check_direction(self.causal)
            for name in self.logit_options:
                check(scheme.linear is None, f"{name}: linear attention has no logits for it; leave it out")
            # Raises ValueError for an odd head size, or one that the frequency rule cannot rotate.
            scheme.query_size(size), scheme.key_size(size)
            fits = not shared or scheme.key_size(size) == size
            check(fits, f"keys_as_values: keys of {scheme.key_size(size)} channels cannot be values of {size}")

    def _fill_defaults(self) -> None:
        if self.head_dim is None:
            check(
                self.model_dim % self.num_heads == 0,
                f"model_dim must be a multiple of num_heads unless head_dim is given; found {self.model_dim} and "
                f"{self.num_heads}",
            )
        defaults = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.model_dim // self.num_heads,
            "mlp_dim": -(-8 * self.model_dim // 24) * 8 if self.gated else 4 * self.model_dim,
            "embedding_scale": self.model_dim**0.5,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_positive("embedding_scale", self.embedding_scale)
        for name in BY_LAYER:
            numbers = _numbers(getattr(self, name))
            for number in numbers:
                check_size(name, name, number) if name in _SIZES else check_flag(name, number)
            fits = len(numbers) in (1, self.num_layers)
            check(fits, f"{name} must be one for all layers or one for each of {self.num_layers}, found {len(numbers)}")
            object.__setattr__(self, name, numbers[0] if len(set(numbers)) == 1 else numbers)

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        dense = self.experts.dense
        fits = max(dense, default=0) < self.num_layers
        check(fits, f"experts.dense names layers from 0 to {self.num_layers - 1}, found {describe(dense)}")
        check(len(set(dense)) < self.num_layers, "experts.dense names every layer; leave a layer out, or experts")
        fits = self.residual.norm != "after" and not self.residual.shared_norm
        check(fits or not self.experts.norms, "experts.norms needs residual.norm before or both, without shared_norm")

    def _check_total(self) -> None:
        experts = 1 if self.experts is None else self.experts.count
        kv_heads, size, hidden = (max(_numbers(getattr(self, name))) for name in _SIZES)
        layer = 2 * (self.num_heads + kv_heads) * size + (2 + self.gated) * experts * hidden
        total = self.model_dim * (self.vocab_size + self.num_layers * layer)
        sizes = f"vocab_size {self.vocab_size}, num_layers {self.num_layers} and model_dim {self.model_dim}"
        fits = total <= _MOST_PARAMETERS
        check(fits, f"{sizes}: {total:.0e} parameters are more than any machine holds; choose smaller sizes")

    @property
    def dtype(self) -> jnp.dtype:
        """``compute_dtype`` as a dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two."""
        return ACTIVATIONS[self.activation].gated

    @property
    def logit_options(self) -> dict[str, float]:
        """What changes the logits of attention, as arguments of ``Scheme.attend``."""
        options = {"query_scale": self.query_scale, "softcap": self.attention_softcap}
        if self.latent is not None:
            scale = self.latent.size**-0.5 if self.query_scale is None else self.query_scale
            options |= {"query_scale": scale, "head_dim": self.head_dim}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def cached(self) -> dict[str, int | bool]:
        """The sizes of a layer's cache, as arguments of ``Scheme.init_cache``."""
        if self.latent is None:
            return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return {"num_heads": self.num_heads, "num_kv_heads": 1, "head_dim": self.latent.stored, "only_keys": True}

    def finish_logits(
        self, products: Float[Array, "*b vocab"], bias: Float[Array, "vocab"] | None
    ) -> Float[Array, "*b vocab"]:
        """``c tanh(z / c)`` with ``z = logit_scale (products + bias)`` and the soft cap ``c``, if there is one."""
        z = products if bias is None else operator.add(*align_ranks(products, bias.astype(products.dtype)))
        z = z if self.logit_scale == 1 else z * self.logit_scale
        cap = self.logit_softcap
        return z if cap is None else cap * jnp.tanh(z / cap)

    @property
    def layers(self) -> Layers:
        """The scheme of every layer."""
        return uniform(self.scheme, self.num_layers)

    def of_layer(self, layer: int) -> "DecoderConfig":
        """The config of a decoder whose layers are all like the one of this number, from 0: ``scheme`` is a ``Scheme``,
        sizes are single numbers, and ``experts`` is None if the layer has none.

        Raises:
            ValueError: for a layer that there is not.
        """
        there = type(layer) is int and 0 <= layer < self.num_layers
        check(there, f"layer must be from 0 to {self.num_layers - 1}, found {describe(layer)}")
        sizes = {name: self._every(name)[layer] for name in BY_LAYER}
        experts, residual = self.experts, self.residual
        if experts is not None and layer in experts.dense:
            sizes["mlp_dim"] = experts.dense_dim or sizes["mlp_dim"]
            experts = None
        elif experts is not None:
            experts = dataclasses.replace(experts, dense=(), dense_dim=None)
        if layer > 0:
            residual = dataclasses.replace(residual, first_norm=True)
        scheme = self.layers.schemes[layer]
        return dataclasses.replace(self, **sizes, experts=experts, residual=residual, scheme=scheme)

    @cached_property
    def every_layer(self) -> tuple["DecoderConfig", ...]:
        """The config of every layer, in order; equal layers have the same object."""
        dense = () if self.experts is None else self.experts.dense
        numbers = range(self.num_layers)
        parts = zip(self.layers.schemes, *map(self._every, BY_LAYER), strict=True)
        keys = [(*part, n in dense, n == 0 and not self.residual.first_norm) for n, part in enumerate(parts)]
        firsts = {key: n for n, key in zip(reversed(numbers), reversed(keys), strict=True)}
        made = {key: self.of_layer(n) for key, n in firsts.items()}
        return tuple(made[key] for key in keys)

    @cached_property
    def patterns(self) -> tuple[tuple[tuple["DecoderConfig", ...], int], ...]:
        """The layers as a sequence of patterns, each repeated, as ``Layers.patterns``, with the config of every layer.

        The patterns are those of the scheme, unless layers differ in something else.
        """
        every, start, patterns = self.every_layer, 0, []
        for schemes, repeats in self.layers.patterns:
            period = every[start : start + len(schemes)]
            end = start + len(schemes) * repeats
            if every[start:end] != period * repeats:
                return find_patterns(every)
            patterns.append((period, repeats))
            start = end
        return tuple(patterns)

    def _every(self, name: str) -> tuple[int, ...]:
        """A field of ``BY_LAYER`` for every layer."""
        numbers = _numbers(getattr(self, name))
        return numbers * self.num_layers if len(numbers) == 1 else numbers


def check_over_latents(scheme: Scheme) -> None:
    """Raises ValueError, with the reason, for a scheme that latent attention cannot have.

    Its features rotate a part of each head, which all key heads share, and its cache holds neither whole keys nor
    values.
    """
    check(
        scheme.linear is None,
        "linear: latent attention stores latents in place of a state; use softmax attention",
    )
    features = scheme.features
    check(
        features is None or type(features) is Rotary,
        "features: latent attention rotates a part of each head, whose keys all heads share, so it needs Rotary; "
        f"{type(features).__name__} reads whole heads, or maps values",
    )
    check(
        scheme.norm is None,
        f"norm: latent attention norms its latents; {type(scheme.norm).__name__} reads whole keys, which its cache "
        "does not hold; leave it out",
    )
    check(
        scheme.bias is None or not (scheme.bias.contextual or scheme.bias.reads_queries),
        f"bias: {type(scheme.bias).__name__} reads the queries of a head, which latent attention has in two forms; use "
        "another bias",
    )


def _numbers(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, tuple | list) else (size,)


def find_patterns(layers: Sequence[Hashable]) -> tuple[tuple[tuple[Any, ...], int], ...]:
    """A sequence as patterns that repeat: from the start, always the shortest period that covers the most layers."""
    patterns, start = [], 0
    while start < len(layers):
        most = min(_LONGEST_PERIOD, len(layers) - start)
        repeats = {period: _repeats(layers[start:], period) for period in range(1, most + 1)}
        repeating = [period for period in repeats if period == 1 or repeats[period] > 1]
        best = max(repeating, key=lambda period: (period * repeats[period], -period))
        patterns.append((tuple(layers[start : start + best]), repeats[best]))
        start += best * repeats[best]
    return tuple(patterns)


def _repeats(layers: Sequence[Hashable], period: int) -> int:
    """How often the first layers repeat."""
    differing = (n for n in range(period, len(layers)) if layers[n] != layers[n - period])
    return next(differing, len(layers)) // period
