"""The initial parameters of a training from a released model."""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from posjax.nn.huggingface.load import open_source, read_parameters
from train.config import Config
from train.loop.step import build_program
from train.model.build import RELEASED, as_released, decoder_config
from train.model.convert import convert


def initial_parameters(config: Config, mesh: Mesh) -> Any:
    """The parameters of the released model under ``init`` as those of a config, read straight to the devices' shards.

    Raises FileNotFoundError without the model, and ValueError for tensors that do not match its config.
    """
    released = as_released(config)
    abstract = build_program(released, mesh).abstract.parameters
    source, values = open_source(config.init.path), config.init.values
    found = read_parameters(source, values, decoder_config(released), abstract)
    return jax.jit(partial(convert, released, config))(found) if config.scheme.name != RELEASED else found
