"""Decoders with low-rank adapters from decoders without, and back."""

import dataclasses

import jax
from flax import nnx

from posjax._checks import check
from posjax.nn.decoder import Decoder
from posjax.nn.lora import Adapter, projections
from posjax.nn.specs import LoRA


def add_adapters(decoder: Decoder, spec: LoRA, *, rngs: nnx.Rngs) -> Decoder:
    """A decoder over the same parameters with new adapters, which change nothing until they are trained.

    Args:
        decoder: without adapters.
        spec: which projections have one, and their rank and scale.
        rngs: random streams, of which A is drawn.

    Raises:
        ValueError: for a decoder with adapters, and a path that matches no projection.
    """
    check(decoder.config.lora is None, "decoder has adapters already; merge_adapters makes one without")
    config = dataclasses.replace(decoder.config, lora=spec)

    @jax.jit  # so that of the drawn decoder only the adapters are computed
    def drawn(key):
        return adapters_of(nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(key)))))

    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    own = nnx.to_pure_dict(nnx.state(decoder))
    nnx.replace_by_pure_dict(state, _joined(own, drawn(rngs.params())))
    return nnx.merge(graph, state)


def merge_adapters(decoder: Decoder) -> Decoder:
    """A decoder that computes the same without adapters: every ``W + s B A``, computed in float32, in the dtype of W.

    One without adapters is returned as it is. The arrays that do not change are shared.
    """
    if decoder.config.lora is None:
        return decoder
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))  # variables of its own
    for stack in merged.stacks:
        for block in stack:
            for name, module in list(projections(block)):
                _merge(module, name.rpartition("/")[2])
    config = dataclasses.replace(decoder.config, lora=None)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(merged)))
    return nnx.merge(graph, state)


def _merge(module: nnx.Module, name: str) -> None:
    """Adds a projection's adapter, if it has one, to its matrix, which keeps its sharding."""
    adapter = module.adapters.pop(name, None)
    if adapter is None:
        return
    weight = getattr(module, name)
    before = weight.get_value()

    def added(weight, adapter: Adapter):
        return (weight + adapter.change()).astype(weight.dtype)

    weight.set_value(jax.jit(added, out_shardings=before.sharding)(before, adapter))


def adapters_of(parameters: dict) -> dict:
    """The part of a tree of parameters that is of adapters."""
    found = {}
    for name, value in parameters.items():
        if name == "adapters":
            found[name] = value
        elif isinstance(value, dict) and (inside := adapters_of(value)):
            found[name] = inside
    return found


def _joined(one: dict, other: dict) -> dict:
    """Two trees of parameters as one."""
    both = one.keys() & other.keys()
    return one | other | {name: _joined(one[name], other[name]) for name in both}
