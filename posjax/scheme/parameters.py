"""The learned parameters of a scheme: those of one layer, and those that all layers share."""

import inspect
from collections.abc import Mapping

import jax
from jaxtyping import Array

from posjax._checks import check
from posjax.scheme.choices import Choices
from posjax.scheme.slots import Learns

LEARNING = ("norm", "scale", "bias", "features", "sinks", "linear")
"""The slots with parameters in the layers; the parameters of the embedding belong to the model."""


def init_slots(choices: Choices, key: Array, sizes: Mapping[str, int | None], *, shared: bool) -> dict[str, dict]:
    """The parameters that all layers share, or those of one layer, ``{slot: {name: array}}``.

    Raises:
        ValueError: for a bias that reads the tokens if ``model_dim`` is None.
    """
    names = [name for name in LEARNING if _is_shared(choices, name) == shared]
    check(
        sizes["model_dim"] is not None or not choices.reads_tokens or "bias" not in names,
        f"model_dim: {type(choices.bias).__name__} reads the tokens, so their width is needed",
    )
    keys = dict(zip(LEARNING, jax.random.split(key, len(LEARNING)), strict=True))
    made = {name: init_spec(getattr(choices, name), keys[name], sizes) for name in names}
    return {name: params for name, params in made.items() if params}


def init_spec(spec: Learns | None, key: Array, sizes: Mapping[str, int | None]) -> dict[str, Array]:
    """A spec's parameters; its ``init`` gets the sizes that are in its signature."""
    if spec is None:
        return {}
    return spec.init(key, **{name: sizes[name] for name in inspect.signature(spec.init).parameters if name in sizes})


def _is_shared(choices: Choices, slot_name: str) -> bool:
    return slot_name == "bias" and choices.bias is not None and choices.bias.shared_across_layers
