"""From a config to a model: the scheme, and the decoder around it."""

import dataclasses
import json
import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int32

from posjax import nn
from posjax.attention.placement import Placement
from posjax.layout import Layout
from posjax.nn.huggingface import read_config
from posjax.nn.huggingface.load import named_parameters
from posjax.scheme import Layers, Scheme, uniform
from posjax.scheme.presets import scheme, scheme_options
from train.config import Config, SchemeConfig, TrainConfig
from train.config.settings.checks import check, check_chunks
from train.config.settings.model import ExpertsConfig, LatentConfig
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.model.extension import completed, continued
from train.model.mesh import BATCH_AXES, EXPERT
from train.model.sharding import replicated

RELEASED = "released"
"""The name of the scheme of the model under ``init``."""


def scheme_of(config: Config, entry: SchemeConfig | None = None) -> Scheme | Layers:
    """The scheme that is trained: that of the config or of another entry, without the entry's extension.

    The scheme of a released model may be trained with changes; these are options of the entry: slots of
    `Scheme.extend`. Raises ValueError as `build_scheme` does, and for the scheme of a released model if the config
    names no such model.
    """
    entry = config.scheme if entry is None else entry
    if entry.name != RELEASED:
        return build_scheme(_with_base(config, entry), config.model.num_layers)
    check(bool(config.init.values), "scheme: 'released' is the scheme of the model under init; name one there")
    return read_config(config.init.values).scheme.extend(**trained_changes(config, entry))


def trained_changes(config: Config, entry: SchemeConfig) -> dict[str, Any]:
    """The changes with which the scheme of the model under ``init`` is trained, with all options; see `continued`."""
    own, length = config.model.trained_length or config.train.length, config.train.length
    return continued(read_config(config.init.values).scheme, entry.options, own, length)


def _with_base(config: Config, entry: SchemeConfig) -> SchemeConfig:
    """The entry with the rotary base of the model under ``init``, if it names none and the model has only one."""
    if not config.init.values or "base" in entry.options or "base" not in scheme_options(entry.name):
        return entry
    released = uniform(read_config(config.init.values).scheme, config.model.num_layers)
    bases = {each.features.frequencies.base for each in released.kinds if each.rotates}
    return dataclasses.replace(entry, options={**entry.options, "base": bases.pop()}) if len(bases) == 1 else entry


def build_scheme(entry: SchemeConfig, num_layers: int) -> Scheme | Layers:
    """``posjax.scheme(name, **options)`` of an entry.

    Recipes whose layers differ get the model's ``num_layers``. Raises ValueError for an unknown name or option, and for
    slots that do not compose.
    """
    options = dict(entry.options)
    if "num_layers" in scheme_options(entry.name):
        options.setdefault("num_layers", num_layers)
    return scheme(entry.name, **options)


def evaluated_scheme(config: Config, entry: SchemeConfig | None = None, length: int | None = None) -> Scheme | Layers:
    """The scheme of an entry with its extension, for texts of a length; by default the longest of the evaluation.

    Options that the extension omits follow from that length and from the length the model was made for. Raises
    ValueError for a scheme that does not exist or cannot extend.
    """
    entry = config.scheme if entry is None else entry
    longest = max(config.evaluate.lengths) if length is None else length
    return scheme_of(config, entry).extend(**extension_of(config, entry, longest))


def extension_of(config: Config, entry: SchemeConfig, length: int) -> dict[str, Any]:
    """The extension of an entry with all options, for texts of a length.

    Raises ValueError for an extension that would replace a rule of the released model itself.
    """
    own = model_length(config)
    if entry.name != RELEASED:
        return completed(entry.extend, own, length)
    return continued(scheme_of(config, entry), entry.extend, own, length)


def model_length(config: Config) -> int:
    """The length that the model was made for: its training length, or that of the released model if that is longer.

    A released model with another scheme was trained with that scheme at ``train.length`` only.
    """
    released = config.model.trained_length or 0 if config.scheme.name == RELEASED else 0
    return max(released, config.train.length)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the config of one stage means: its tokenizer, scheme and decoder, each made once, when it is needed first.

    Args:
        config: the config of the stage.
        mesh: over which the decoder is split, or None.
    """

    config: Config
    mesh: Mesh | AbstractMesh | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text. Raises FileNotFoundError and ValueError for one that cannot be read."""
        return load_tokenizer(self.config.data)

    @cached_property
    def scheme(self) -> Scheme | Layers:
        """The scheme that is trained; see `scheme_of`."""
        return scheme_of(self.config)

    @cached_property
    def placement(self) -> Placement:
        """How activations are sharded over the mesh. Raises ValueError for a mesh that the model cannot use."""
        mesh, context = self.mesh, self.config.train.context
        if mesh is None:
            return Placement()
        shards, kind = mesh.shape["context"], context.layout
        if kind == "auto":
            rings = not {"auto", "ring", "ring-ulysses"}.isdisjoint(context.strategies)
            balanced = rings and self.config.model.causal and shards > 1
            kind = "zigzag" if balanced and self.config.train.length % (2 * shards) == 0 else "contiguous"
        return Placement(
            batch=tuple(axis for axis in BATCH_AXES if axis in mesh.shape),
            context="context" if shards > 1 else None,
            heads="tensor" if mesh.shape["tensor"] > 1 else None,
            strategy=context.strategy,
            layout=Layout(kind, shards),
            ulysses=context.ulysses,
            experts=EXPERT if EXPERT in mesh.shape else None,
        )

    @cached_property
    def decoder(self) -> nn.DecoderConfig:
        """The shape of the decoder over the mesh. Raises ValueError for one that cannot be built."""
        model = self.config.model
        fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        fields |= {
            "vocab_size": fields["vocab_size"] or self.tokenizer.vocabulary_size,
            "experts": model.experts and _experts(model.experts),
            "latent": model.latent and _latent(model.latent),
            "lora": model.lora and nn.LoRA(**vars(model.lora)),
            "norm": nn.Norm(**vars(model.norm)),
            "residual": nn.Residual(**vars(model.residual)),
            "placement": self.placement,
            "trained_length": model_length(self.config),
        }
        return nn.DecoderConfig(**fields, scheme=self.scheme)

    @property
    def balance_weight(self) -> float:
        """The weight of the balance loss of experts: that of the config, or the one the model was released with."""
        given, spec = self.config.train.balance_loss, self.decoder.experts
        if spec is None:
            return 0.0
        return spec.balance if given is None else given

    def model(self, seed: int | Int32[Array, ""] | None = None) -> nn.Decoder:
        """The decoder with parameters drawn from a seed, by default the config's own."""
        return nn.Decoder(self.decoder, rngs=nnx.Rngs(jax.random.key(self.config.seed if seed is None else seed)))

    @cached_property
    def abstract(self) -> nn.Decoder:
        """The decoder with shapes and dtypes in place of parameters."""
        return nnx.eval_shape(self.model)

    @cached_property
    def axes(self) -> Any:
        """The logical names of the axes of the parameters, by the parameters' names."""
        return nn.logical_axes(self.abstract)

    @property
    def shapes(self) -> Any:
        """The shapes and dtypes of the parameters, by their names."""
        return nnx.to_pure_dict(nnx.state(self.abstract))

    @property
    def undivided(self) -> str:
        """A line on the parameters that the mesh does not divide; see `train.model.sharding.replicated`."""
        return replicated(self.mesh, self.axes, self.shapes)

    @property
    def notes(self) -> list[str]:
        """Lines on how a released scheme is changed, and warnings: `undivided`, and of a slow average."""
        lines, entry = [], self.config.scheme
        if entry.name == RELEASED and entry.options:
            changes = trained_changes(self.config, entry)
            how = f"with {json.dumps(changes)}" if changes else "unchanged up to the model's own length"
            lines.append(f"the released scheme, {how}")
        return [*lines, *(f"warning: {each}" for each in (self.undivided, _heavy_start(self.config.train)) if each)]


def _heavy_start(train: TrainConfig) -> str:
    """A line on an average in which the first parameters of a stage still weigh 1% at its end; empty for others."""
    weight = train.ema ** max(train.steps, 1)
    if weight < 0.01 or train.keep_moments:  # with the moments, the average may go on too
        return ""
    below = math.floor(1000 * 0.01 ** (1 / max(train.steps, 1))) / 1000
    return (
        f"train.ema: the parameters before the first of {train.steps} updates weigh {weight:.0%} in the average; "
        f"{below} would make it less than 1%"
    )


def _experts(settings: ExpertsConfig) -> nn.Experts:
    """The mixture of experts of a config. Raises ValueError, with the key, for one that cannot be built."""
    return nn.Experts(**{**vars(settings), "router": nn.Router(**vars(settings.router))})


def _latent(settings: LatentConfig) -> nn.Latent:
    """The latent attention of a config. Raises ValueError, with the key, for one that cannot be built."""
    return nn.Latent(**vars(settings) | {"norm": nn.Norm(**vars(settings.norm))})


def check_model(setup: Setup) -> None:
    """Raises ValueError for a scheme that does not fit the model or its training length; computes nothing.

    Also raises it for a vocabulary that is too small for the tokenizer.
    """
    config, length = setup.config, setup.config.train.length
    check_vocabulary(setup)
    check_chunks(setup.decoder.vocab_size, config.train.loss_chunks)
    _check_reach(setup)

    def forward(key):
        rule = setup.scheme.training_positions
        drawn = {} if rule is None else rule.draw(key, 1, length)._asdict()
        tokens = jnp.zeros((1, length), jnp.int32)
        return setup.model()(tokens, **{name: value for name, value in drawn.items() if value is not None})

    jax.eval_shape(forward, jax.random.key(0))


def check_vocabulary(setup: Setup) -> None:
    """Raises ValueError for a tokenizer with more tokens than the model's vocabulary."""
    config, tokenizer = setup.config, setup.tokenizer
    found, needed = config.model.vocab_size, tokenizer.encoded_size
    check(
        config.model.causal or tokenizer.mask != tokenizer.eos,
        "model.causal: the tokenizer has no mask token of its own; data.special_tokens=added would work",
    )
    works = f"leave it out, or use at least {needed}"
    works = "they do not belong together" if config.init.path else works
    check(not found or found >= needed, f"model.vocab_size: the tokenizer has {needed} tokens, found {found}; {works}")


def _check_reach(setup: Setup) -> None:
    """Raises ValueError for a table of absolute embeddings that is shorter than the text; beyond its end it is NaN."""
    length, name, reach = setup.config.train.length, setup.config.scheme.name, setup.scheme.reach
    works = f"train.length={reach}" if name == RELEASED else f"scheme.max_length={length}"
    check(
        reach is None or reach >= length,
        f"scheme: {name} has {reach} positions, but train.length is {length}; {works} would work",
    )


def learned_positions(setup: Setup) -> tuple[str, ...]:
    """Patterns of the names of the parameters that a scheme learns, as in ``train.learning_rate_factors``.

    Empty for schemes without parameters. The projections of linear attention do not encode position and are not among
    them.
    """
    names = [name.split("/") for name, _ in named_parameters(setup.axes)]
    inside = [parts[parts.index("learned") + 1] for parts in names if "learned" in parts]
    around = [parts[0] for parts in names if parts[0] in ("shared", "embedding")]
    found = [f"{part}/*" for part in around] + [f"*/learned/{slot}/*" for slot in inside if slot != "linear"]
    return tuple(dict.fromkeys(found))


def as_released(config: Config) -> Config:
    """The config of the model that it starts from: with the released scheme, and with adapters if ``init`` has them."""
    model = config.model if config.init.adapter else dataclasses.replace(config.model, lora=None)
    return dataclasses.replace(config, model=model, scheme=SchemeConfig(RELEASED), stages=())
