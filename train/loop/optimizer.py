"""The optimizers, their schedule, and which parameters they train."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from posjax.nn.huggingface.load import named_parameters
from train.config import TrainConfig
from train.model.state import is_axis_names, is_matrix

TRAINED, FROZEN = "moves", "stays"  # keys of the optimizer's state, so also in saved checkpoints


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The rate of update number n, counted from 0: linear up to the peak at ``n = warmup_steps - 1``, then by
    ``schedule``. The rate of the first update is above 0.

    ``cosine`` is half a cosine and ``linear`` a line, both down to the final share of the peak at the last update;
    ``constant`` stays at the peak.
    """
    rise = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    schedule = optax.join_schedules([rise, _after_warmup(config)], [config.warmup_steps])
    return lambda count: schedule(count + 1)


def _after_warmup(config: TrainConfig) -> optax.Schedule:
    peak, steps = config.learning_rate, config.steps - config.warmup_steps
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, config.final_learning_rate)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, peak * config.final_learning_rate, steps)
    return optax.constant_schedule(peak)


def make_optimizer(config: TrainConfig, axes: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer of the config, on the parameters that ``train.trainable`` names.

    `axes` is the tree of the parameters' logical axis names. Only the model's matrices decay (see `is_matrix`): norms,
    biases, scalars and what a position scheme learns do not. ``train.learning_rate_factors`` multiply whole updates,
    decay included.
    """
    decays = _map_axes(is_matrix, axes)
    chosen = optax.chain(
        optax.clip_by_global_norm(config.clip_norm), _OPTIMIZERS[config.optimizer](config, axes, decays)
    )
    if config.trainable:
        chosen = optax.partition({TRAINED: chosen, FROZEN: optax.set_to_zero()}, param_labels(config, axes))
    return scaled(chosen, factors(config, axes)) if config.learning_rate_factors else chosen


def scaled(optimizer: optax.GradientTransformation, factors: Any) -> optax.GradientTransformation:
    """Multiplies every update of an optimizer by the factor of its parameter; the state is unchanged."""

    def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, parameters)
        return jax.tree.map(lambda factor, change: factor * change, factors, updates), state

    return optax.GradientTransformation(optimizer.init, update)


def factors(config: TrainConfig, axes: Any) -> Any:
    """For every parameter the product of the factors whose patterns match it, as in `param_labels`; 1 if none does."""
    names = _names(axes)
    _check_patterns("train.learning_rate_factors", config.learning_rate_factors, names)
    found = [
        math.prod(factor for pattern, factor in config.learning_rate_factors.items() if fnmatchcase(name, pattern))
        for name in names
    ]
    return jax.tree.unflatten(_structure(axes), found)


def kept_moments(before: Any, begun: Any) -> Any:
    """The optimizer's state `before` a stage, with the schedule's count taken from the state `begun` by the stage."""
    return jax.tree.map(lambda new, old: new if _is_schedule(new) else old, begun, before, is_leaf=_is_schedule)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def param_labels(config: TrainConfig, axes: Any) -> Any:
    """For every parameter `TRAINED` or `FROZEN`.

    A pattern of ``train.trainable`` matches a parameter's path, as in ``stacks/0/0/attention/k`` or ``*/attention/k``.

    Raises ValueError for a pattern that matches no parameter.
    """
    names = _names(axes)
    _check_patterns("train.trainable", config.trainable, names)
    trained = [
        not config.trainable or any(fnmatchcase(name, pattern) for pattern in config.trainable) for name in names
    ]
    return jax.tree.unflatten(_structure(axes), [TRAINED if each else FROZEN for each in trained])


def _names(axes: Any) -> list[str]:
    return [name for name, _ in named_parameters(axes)]


def _check_patterns(key: str, patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{key}: {pattern!r} names no parameter; the names are {', '.join(sorted(names))}, and * stands for "
                "any part of one"
            )


def _adamw(config: TrainConfig, axes: Any, decays: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return optax.adamw(
        learning_rate(config),
        config.beta1,
        config.beta2,
        mu_dtype=config.moment_dtype,
        weight_decay=config.weight_decay,
        mask=decays,
    )


def _muon(config: TrainConfig, axes: Any, decays: Any) -> optax.GradientTransformation:
    """Muon on the matrices inside the blocks, AdamW with Nesterov momentum on the rest (Jordan 2024).

    Updates are scaled to the size of AdamW's, 0.2 per element (Liu et al., arXiv 2502.16982), so that AdamW's learning
    rates fit.
    """
    return muon(
        learning_rate(config),
        beta=config.beta2,
        mu_dtype=config.moment_dtype,
        weight_decay=config.weight_decay,
        weight_decay_mask=decays,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=_map_axes(_as_matrix, axes),
        consistent_rms=0.2,
    )


def _adafactor(config: TrainConfig, axes: Any, decays: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235): second moments are products of sums over rows and columns.

    The learning rate is relative to the root mean square of each parameter; 1e-2 is usual.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


_OPTIMIZERS = {"adamw": _adamw, "muon": _muon, "adafactor": _adafactor}

# The input axes of a block's matrices; the others are output axes.
_INTO = {
    ("embed", "heads", "head_dim"): (0,),
    ("embed", "kv_heads", "head_dim"): (0,),
    ("heads", "head_dim", "embed"): (0, 1),
    ("embed", "mlp"): (0,),
    ("mlp", "embed"): (0,),
}


def _as_matrix(names: tuple[str | None, ...]) -> MuonDimensionNumbers | None:
    """How Muon reshapes a parameter to a matrix, for every layer; None if it is not a matrix of a block."""
    in_layer = tuple(name for name in names if name != "layers")
    if names[0] != "layers" or in_layer not in _INTO:
        return None
    into = _INTO[in_layer]
    out = tuple(axis for axis in range(len(in_layer)) if axis not in into)
    return MuonDimensionNumbers(tuple(axis + 1 for axis in into), tuple(axis + 1 for axis in out))


def _map_axes(function: Any, axes: Any) -> Any:
    return jax.tree.map(function, axes, is_leaf=is_axis_names)


def _structure(axes: Any) -> Any:
    return jax.tree.structure(axes, is_leaf=is_axis_names)
