"""The optimizers, their schedule, and which parameters they train."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from posjax.nn.huggingface.load import named_parameters
from train.config import TrainConfig
from train.model.state import is_axis_names, is_matrix

ADAPTERS = "*/adapters/*"
"""The pattern of the names of the parameters of adapters."""

TRAINED, FROZEN = "moves", "stays"  # keys of the optimizer's state, so also in saved checkpoints


class Rates(NamedTuple):
    """The learning rates of a training, as arguments of its compiled update: trainings of other rates share it.

    Args:
        peak: the learning rate at the end of the warm-up, float32.
        factors: the factor on the updates of each parameter, float32 ``[parameters]``.
    """

    peak: Float[Array, ""]
    factors: Float[Array, "parameters"]

    @staticmethod
    def of(config: TrainConfig, axes: Any) -> "Rates":
        """Those of a config; `axes` is the tree of the parameters' logical axis names.

        The factor of a parameter is the product of those of ``train.learning_rate_factors`` whose patterns match it, as
        in `param_labels`; 1 if none does.
        """
        names = _names(axes, "train.learning_rate_factors", config.learning_rate_factors)
        factors = [
            math.prod(factor for pattern, factor in config.learning_rate_factors.items() if fnmatchcase(name, pattern))
            for name in names
        ]
        return Rates(np.float32(config.learning_rate), np.asarray(factors, np.float32))


def learning_rate(config: TrainConfig, peak: Float[Array, ""] | None = None) -> optax.Schedule:
    """The rate of update number n, counted from 0: linear up to the peak at ``n = warmup_steps - 1``, then by
    ``schedule``. The rate of the first update is above 0. The peak is that of the config unless it is given.

    ``cosine`` is half a cosine and ``linear`` a line, both down to the final share of the peak at the last update;
    ``constant`` stays at the peak.
    """
    peak = config.learning_rate if peak is None else peak
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    schedule = optax.join_schedules([rise, _after_warmup(config, peak)], [config.warmup_steps])
    return lambda count: schedule(count + 1)


def _after_warmup(config: TrainConfig, peak: float | Float[Array, ""]) -> optax.Schedule:
    steps = config.steps - config.warmup_steps
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, config.final_learning_rate)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, peak * config.final_learning_rate, steps)
    return optax.constant_schedule(peak)


def make_optimizer(config: TrainConfig, axes: Any, rates: Rates | None = None) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer of the config, on the parameters that `param_labels` names.

    An update is ``-rate * (direction + weight_decay * parameter)``; the config's optimizer sets only the direction.
    `axes` is the tree of the parameters' logical axis names. Only the model's matrices decay (see `is_matrix`): norms,
    biases, scalars and what a position scheme learns do not. ``train.learning_rate_factors`` multiply whole updates,
    decay included. The rates are those of the config unless they are given.
    """
    rates = Rates.of(config, axes) if rates is None else rates
    unclipped = optax.chain(
        _DIRECTIONS[config.optimizer](config, axes),
        optax.add_decayed_weights(config.weight_decay, _map_axes(is_matrix, axes)),
        optax.scale_by_learning_rate(learning_rate(config, rates.peak)),
    )
    # A chain in a chain: with AdamW, the shape of the state in checkpoints that were saved before.
    chosen = optax.chain(optax.clip_by_global_norm(config.clip_norm), unclipped)
    if _trainable(config, axes):
        chosen = optax.partition({TRAINED: chosen, FROZEN: optax.set_to_zero()}, param_labels(config, axes))
    return _scaled(chosen, jax.tree.unflatten(_structure(axes), list(rates.factors)))


def _scaled(optimizer: optax.GradientTransformation, factors: Any) -> optax.GradientTransformation:
    """Multiplies every update of an optimizer by the factor of its parameter; the state is unchanged."""

    def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, parameters)
        return jax.tree.map(lambda factor, change: factor.astype(change.dtype) * change, factors, updates), state

    return optax.GradientTransformation(optimizer.init, update)


def kept_moments(before: Any, begun: Any) -> Any:
    """The optimizer's state `before` a stage, with the schedule's count taken from the state `begun` by the stage."""
    return jax.tree.map(lambda new, old: new if _is_schedule(new) else old, begun, before, is_leaf=_is_schedule)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def param_labels(config: TrainConfig, axes: Any) -> Any:
    """For every parameter `TRAINED` or `FROZEN`.

    A pattern of ``train.trainable`` matches a parameter's path, as in ``stacks/0/0/attention/k`` or ``*/attention/k``.
    Without any pattern all parameters are trained, or, of a model with adapters, these alone.

    Raises ValueError for a pattern that matches no parameter.
    """
    patterns = _trainable(config, axes)
    names = _names(axes, "train.trainable", patterns)
    trained = [not patterns or any(fnmatchcase(name, pattern) for pattern in patterns) for name in names]
    return jax.tree.unflatten(_structure(axes), [TRAINED if each else FROZEN for each in trained])


def _trainable(config: TrainConfig, axes: Any) -> tuple[str, ...]:
    """The patterns of the trained parameters; none if all are trained."""
    if config.trainable:
        return config.trainable
    return (ADAPTERS,) if any(fnmatchcase(name, ADAPTERS) for name, _ in named_parameters(axes)) else ()


def _names(axes: Any, key: str, patterns: Iterable[str]) -> list[str]:
    """The names of all parameters. Raises ValueError for a pattern of the config's `key` that matches none of them."""
    names = [name for name, _ in named_parameters(axes)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{key}: {pattern!r} names no parameter; the names are {', '.join(sorted(names))}, and * stands for "
                "any part of one"
            )
    return names


def _adam(config: TrainConfig, _: Any) -> optax.GradientTransformation:
    """Adam; with the decay, AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return optax.scale_by_adam(config.beta1, config.beta2, mu_dtype=config.moment_dtype)


def _muon(config: TrainConfig, axes: Any) -> optax.GradientTransformation:
    """Muon on the matrices inside the blocks, Adam on the rest (Jordan 2024).

    With momentum ``m <- beta2 * m + g``, the direction of a matrix is ``g + beta2 * m`` with all singular values near
    1, times ``0.2 * sqrt(max(inputs, outputs))``. So an element has about the size that it has with Adam (Liu et al.,
    arXiv 2502.16982), and AdamW's learning rates fit.
    """

    def orthogonal(names: tuple[str | None, ...], update: Any) -> Any:
        return jax.tree.map(partial(_orthogonal, names), update)  # Adam's parameters are empty trees here

    muon = optax.chain(
        optax.trace(config.beta2, nesterov=True, accumulator_dtype=config.moment_dtype),
        optax.stateless(lambda updates, _: jax.tree.map(orthogonal, axes, updates, is_leaf=is_axis_names)),
    )
    labels = _map_axes(lambda names: "muon" if _is_of_block(names) else "adam", axes)
    return optax.partition({"muon": muon, "adam": _adam(config, axes)}, labels)


def _is_of_block(names: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix in every layer, or a matrix of each expert; the router is not."""
    return names[:1] == ("layers",) and is_matrix(names)


def _orthogonal(names: tuple[str | None, ...], update: Array) -> Array:
    """The direction of a matrix, for each layer and expert alone; heads and their channels are one axis of it.

    With ``X`` the update over its Frobenius norm, five times ``X <- a X + b A X + c A^2 X``, where ``A = X X^T``.
    """
    lead = len({"layers", "experts"} & set(names))
    sides = (update.shape[lead], -1) if names[lead] in ("embed", "rank") else (-1, update.shape[-1])
    x = update.reshape(*update.shape[:lead], *sides)
    inputs, outputs = x.shape[-2:]
    x = x.mT if inputs > outputs else x  # A is then the smaller of the two products
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    x = x.mT if inputs > outputs else x
    return 0.2 * math.sqrt(max(inputs, outputs)) * x.reshape(update.shape)


def _adafactor(_: TrainConfig, __: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235): second moments are products of sums over rows and columns.

    The learning rate is relative to the root mean square of each parameter; 1e-2 is usual.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())


_DIRECTIONS = {"adamw": _adam, "muon": _muon, "adafactor": _adafactor}


def _map_axes(function: Any, axes: Any) -> Any:
    return jax.tree.map(function, axes, is_leaf=is_axis_names)


def _structure(axes: Any) -> Any:
    return jax.tree.structure(axes, is_leaf=is_axis_names)
