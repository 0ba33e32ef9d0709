"""Converts the weights of one stage to those that the next stage starts from."""

from typing import Any

import jax
from flax import nnx

from posjax.coca import Coca, merge_projection
from posjax.nn.adapters import adapters_of
from posjax.nn.huggingface.load import named_parameters
from posjax.rotary import Rotary
from posjax.scheme import Scheme
from train.model.build import Setup


def check_continues(before: Setup, after: Setup) -> None:
    """Raises ValueError unless `after` can start from the weights of `before`; computes nothing."""
    jax.eval_shape(lambda: convert(before, after, nnx.to_pure_dict(nnx.state(before.model()))))


def convert(before: Setup, after: Setup, parameters: Any) -> Any:
    """The parameters of one stage as those of the next.

    Parameters that have the same names and shapes in the next scheme are copied. RoPE turns into CoCA (Zhu et al.,
    arXiv 2309.08646, section 4.1): the projection ``t`` of half the width is the mean of the keys' projection over the
    two channels of each plane, and the projection of the query of tied CoCA is such a mean too. Adapters that the stage
    before did not have are new.

    Raises ValueError for schemes that do not follow from each other.
    """
    wanted = after.shapes
    found = dict(named_parameters(parameters))
    old, new = before.config.scheme.label, after.config.scheme.label
    schemes = dict(_schemes(before, after))
    new_adapters = _adapters(after) if before.decoder.lora is None and after.decoder.lora is not None else {}

    def taken(name: str, shape: tuple[int, ...]) -> Any:
        if name in new_adapters:
            return new_adapters[name]
        if name in found and found[name].shape == shape:
            return found[name]
        block, _, projection = name.rpartition("/attention/")
        if projection in ("q", "k", "q_bias", "k_bias") and _becomes_coca(*schemes.get(block, (None, None))):
            merged = merge_projection(found[name], schemes[block][1].features.pairing)
            if merged.shape == shape:
                return merged
        raise ValueError(
            f"scheme: {new!r} cannot start from the weights of {old!r}: {name} was "
            f"{found[name].shape if name in found else 'not trained'} and must be {shape}. The same parameters, or "
            "RoPE turning into CoCA, would work"
        )

    names = [(name, leaf.shape) for name, leaf in named_parameters(wanted)]
    lost = sorted(found.keys() - {name for name, _ in names})
    if lost:
        raise ValueError(f"scheme: {new!r} would lose parameters that {old!r} has learned: {lost[0]}")
    return jax.tree.unflatten(jax.tree.structure(wanted), [taken(name, shape) for name, shape in names])


def _adapters(setup: Setup) -> dict[str, Any]:
    """The adapters of a new model by their names."""
    drawn = jax.jit(lambda: adapters_of(nnx.to_pure_dict(nnx.state(setup.model()))))  # compiled, only they are drawn
    return dict(named_parameters(drawn()))


def _schemes(before: Setup, after: Setup):
    """For every block's name its scheme in both stages, if the layers of both stages follow the same pattern."""
    patterns = [setup.decoder.patterns for setup in (before, after)]
    for p, ((old, old_repeats), (new, new_repeats)) in enumerate(zip(*patterns, strict=False)):
        if old_repeats == new_repeats:
            pairs = zip(old, new, strict=False)
            yield from ((f"stacks/{p}/{n}", (one.scheme, other.scheme)) for n, (one, other) in enumerate(pairs))


def _becomes_coca(before: Scheme | None, after: Scheme | None) -> bool:
    if before is None or after is None:
        return False
    old, new = before.features, after.features
    if not (isinstance(old, Rotary) and isinstance(new, Coca) and old.pairing == new.pairing):
        return False
    # CoCA rotates every plane: if some channels of the other scheme do not rotate, the planes are not the same.
    return old.frequencies.partial_rotary_factor == 1
