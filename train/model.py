"""From a config to a model: the scheme, and the decoder around it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from posjax import nn
from posjax._checks import check
from posjax.attention.sharded import Placement
from posjax.layers import Layers
from posjax.layout import Layout
from posjax.presets import scheme, scheme_options
from posjax.scheme import Scheme
from train.config import Config, SchemeConfig
from train.data import load_tokenizer
from train.mesh import BATCH_AXES


def build_scheme(entry: SchemeConfig, num_layers: int) -> Scheme | Layers:
    """The scheme that is trained: ``posjax.scheme(name, **options)``, without the entry's extension.

    Recipes whose layers differ get the model's ``num_layers``. Raises ValueError for an unknown name or option, and for
    slots that do not compose.
    """
    options = dict(entry.options)
    if "num_layers" in scheme_options(entry.name):
        options.setdefault("num_layers", num_layers)
    return scheme(entry.name, **options)


def evaluated_scheme(entry: SchemeConfig, num_layers: int) -> Scheme | Layers:
    """The scheme of an entry with its extension. Raises ValueError for one that does not exist or cannot extend."""
    return build_scheme(entry, num_layers).extend(**entry.extend)


def check_model(config: Config) -> None:
    """Raises ValueError for a scheme that does not fit the model or the length it is trained at; computes nothing.

    So too for a vocabulary in which the tokenizer's tokens have no place.
    """
    _check_vocabulary(config)
    _check_reach(config)

    def forward(key):
        rule = build_scheme(config.scheme, config.model.num_layers).positions
        drawn = {} if rule is None else rule.draw(key, 1, config.train.length)._asdict()
        tokens = jnp.zeros((1, config.train.length), jnp.int32)
        return build_model(config)(tokens, **{name: value for name, value in drawn.items() if value is not None})

    jax.eval_shape(forward, jax.random.key(0))


def _check_vocabulary(config: Config) -> None:
    found, needed = config.model.vocabulary, load_tokenizer(config.data).vocabulary_size
    check(
        not found or found >= needed,
        f"model.vocabulary: the tokenizer has {needed} tokens, found {found}; leave it out, or take {needed} or more",
    )


def _check_reach(config: Config) -> None:
    """Absolute embeddings may have an end, behind which they are NaN."""
    length = config.train.length
    reach = getattr(build_scheme(config.scheme, config.model.num_layers).embedding, "reach", length)
    check(
        reach >= length,
        f"scheme: {config.scheme.name} tells {reach} positions apart, but train.length is {length}; "
        f"scheme.max_length={length} would work",
    )


def decoder_config(config: Config, mesh: Mesh | None = None) -> nn.DecoderConfig:
    """The shape of the decoder that a config trains, over a mesh if there is one.

    Raises ValueError for one that cannot be built.
    """
    fields = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
    fields |= {
        "vocab_size": fields.pop("vocabulary") or load_tokenizer(config.data).vocabulary_size,
        "norm": nn.Norm(**vars(config.model.norm)),
        "residual": nn.Residual(**vars(config.model.residual)),
        "placement": placement(config, mesh),
    }
    return nn.DecoderConfig(**fields, scheme=build_scheme(config.scheme, config.model.num_layers))


def placement(config: Config, mesh: Mesh | None) -> Placement:
    """How activations lie over the mesh of a stage. Raises ValueError for a mesh that the model cannot use."""
    if mesh is None:
        return Placement()
    shards, context = mesh.shape["context"], config.train.context
    kind = context.layout
    if kind == "auto":
        rings = not {"auto", "ring", "ring-ulysses"}.isdisjoint(context.strategies)
        balanced = rings and config.model.causal and shards > 1
        kind = "zigzag" if balanced and config.train.length % (2 * shards) == 0 else "contiguous"
    return Placement(
        batch=BATCH_AXES,
        context="context" if shards > 1 else None,
        heads="tensor" if mesh.shape["tensor"] > 1 else None,
        strategy=context.strategy,
        layout=Layout(kind, shards),
        ulysses=context.ulysses,
    )


def build_model(config: Config, mesh: Mesh | None = None) -> nn.Decoder:
    """The decoder that a config trains, with parameters drawn from its seed.

    Raises ValueError for what cannot be built.
    """
    return nn.Decoder(decoder_config(config, mesh), rngs=nnx.Rngs(config.seed))
