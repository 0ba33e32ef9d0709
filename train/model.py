"""From a config to a model: the scheme, and the decoder around it."""

import dataclasses

from flax import nnx

from posjax import nn
from posjax.presets import scheme
from posjax.scheme import Scheme
from train.config import Config, SchemeConfig
from train.data import VOCABULARY_SIZE
from train.sharding import RULES


def build_scheme(entry: SchemeConfig) -> Scheme:
    """The scheme that is trained: ``posjax.scheme(name, **options)``, without the entry's extension.

    Raises ValueError for an unknown name or option, and for slots that do not compose.
    """
    return scheme(entry.name, **entry.options)


def build_model(config: Config) -> nn.Decoder:
    """The decoder that a config trains, with parameters drawn from its seed.

    Raises ValueError for what cannot be built.
    """
    fields = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
    fields |= {"vocab_size": VOCABULARY_SIZE, "scheme": build_scheme(config.scheme), "batch_axes": (RULES["batch"],)}
    options = nn.DecoderConfig(**fields)
    return nn.Decoder(options, rngs=nnx.Rngs(config.seed))
