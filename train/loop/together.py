"""Several small trainings as one program: their states are stacked, and one update advances all of them.

On a CPU the update runs them one after the other: nine small products are faster there than one of nine times the size.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from train.checkpoint.directory import check_run, create_run
from train.checkpoint.manager import Checkpoints
from train.config import Config, differences
from train.config.settings.checks import check
from train.data.packing import Batch, PackedRows
from train.data.pipeline import batches, training_rows
from train.loop.fit import FitResult, finite, write_result
from train.loop.step import StepMetrics, given_of, initialize, update, without
from train.model.build import Setup
from train.model.mesh import AXES, mesh_from_sizes
from train.model.state import TrainState
from train.monitor.logs import MetricsLog
from train.monitor.meter import peak_memory_bytes
from train.monitor.progress import show_progress
from train.runtime.reuse import prepare_process

_AXIS = "data"  # the mesh axis over which the trainings are split
_MAY_DIFFER = ("seed", "train.learning_rate", "train.learning_rate_factors")


def fit_together(configs: Sequence[Config], *, progress: str | None = None) -> list[FitResult]:
    """Trains configs that differ only in seed, learning rate and its factors, and saves each in its own directory.

    Every training is updated by `train.loop.step.update` on its own state, batch, seed and rates: all of them under
    ``vmap``, or on a CPU one after the other. Over several devices the trainings are split, not their rows. On an
    accelerator the products are larger and faster.

    A training that diverges is returned with ``finished`` false, and is not saved. Each is saved when it ends.
    `progress` is the label under which the mean loss is shown.

    Raises ValueError, before anything is compiled, for configs that differ in more, that have stages or start from a
    released model, and for directories that hold another run.
    """
    check_together(configs)
    for config in configs:
        check_run(config, config.directory)
    prepare_process(configs[0].monitor.compilation_cache)
    return _train(configs, training_rows(configs[0], Setup(configs[0]).tokenizer), progress)


def check_together(configs: Sequence[Config]) -> None:
    """Raises ValueError for configs that cannot be trained as one program."""
    first = configs[0]
    check(not first.stages, "compare.together: trainings of several stages run one by one; set it to 1")
    check(not first.init.path, "compare.together: trainings of a released model run one by one; set it to 1")
    check(
        not first.monitor.evaluate_every,
        "compare.together: such trainings measure nothing while they train; set monitor.evaluate_every=0, or this to 1",
    )
    check(jax.process_count() == 1, "compare.together: several trainings as one program run on one process")
    for other in configs[1:]:
        changed = [each for each in differences(first, other) if not each.startswith(_MAY_DIFFER)]
        check(not changed, f"trainings of one program differ in rates and seeds alone; found {'; '.join(changed)}")


def _train(configs: Sequence[Config], rows: PackedRows, progress: str | None) -> list[FitResult]:
    train, seeds = configs[0].train, [config.seed for config in configs]
    program = stacked_program(configs)
    streams = {seed: batches(rows, train.rows, seed) for seed in seeds}
    state, logged, found = program.initialize(), [], {}
    with show_progress(progress, train.steps) as report:
        for step in range(1, train.steps + 1):
            read = {seed: next(stream) for seed, stream in streams.items()}
            state, metrics = program.update(state, [read[seed] for seed in seeds])
            if step % train.log_every and step < train.steps:
                continue
            logged.append(_lines(step, metrics, len(seeds), train.batch_tokens))
            report(step, {"loss": finite(np.mean(metrics.loss))}, 0)
            for n, line in enumerate(logged[-1]):
                if n not in found and (step == train.steps or (line["loss"] or math.inf) < train.stop_loss):
                    own = jax.tree.map(jnp.asarray, jax.device_get(jax.tree.map(itemgetter(n), state)))
                    position, lines = streams[seeds[n]].get_state(), [lines[n] for lines in logged]
                    found[n] = _save(configs[n], rows.digest(), own, position, lines)
            if len(found) == len(seeds):
                break
    return [found[n] for n in range(len(seeds))]


def _save(config: Config, digest: str, state: TrainState, position: Any, lines: list[dict[str, Any]]) -> FitResult:
    """Writes a training that is done as `fit` leaves it: its config, metrics, a last checkpoint and the result."""
    directory, steps, last = config.directory, lines[-1]["step"], lines[-1]["loss"]
    diverged = int(state.guard.in_row) >= config.train.stop_after_skips
    result = FitResult(directory, steps, not diverged, last, None, peak_memory_bytes())
    if not result.finished:
        return result
    create_run(config, directory)
    with closing(MetricsLog(directory)) as log, Checkpoints(config, directory, [digest]) as checkpoints:
        for line in lines:
            log.write(**line)
        checkpoints.save(steps, 0, state, position)
    write_result(result)
    return result


def _lines(step: int, metrics: StepMetrics, count: int, batch_tokens: int) -> list[dict[str, Any]]:
    """What each training logs of a step."""
    losses, norms = (np.asarray(values).tolist() for values in (metrics.loss, metrics.gradient_norm))
    return [
        {"step": step, "loss": finite(losses[n]), "gradient_norm": finite(norms[n]), "tokens": step * batch_tokens}
        for n in range(count)
    ]


@dataclass(frozen=True)
class StackedProgram:
    """The functions of several trainings, whose states are stacked.

    ``initialize()`` gives the first states. ``update(state, batches)``, with one batch for each training, gives the
    next states and the metrics.
    """

    initialize: Callable[[], TrainState]
    update: Callable[[TrainState, Sequence[Batch]], tuple[TrainState, StepMetrics]]


def stacked_program(configs: Sequence[Config], devices: list | None = None) -> StackedProgram:
    """The program of several trainings that share all but seeds, rates and factors.

    Every array of a state has a leading axis for the trainings, split over at most as many devices as trainings. If
    the devices do not divide the trainings, the last training is computed several times.
    """
    devices = (jax.devices() if devices is None else devices)[: len(configs)]
    mesh = mesh_from_sizes(dict.fromkeys(AXES, 1) | {_AXIS: len(devices)}, devices)
    filled = [*configs, *[configs[-1]] * (-len(configs) % len(devices))]
    setup = Setup(configs[0], without(mesh, _AXIS))
    given = jax.tree.map(lambda *each: np.stack(each), *(given_of(setup, config) for config in filled))

    map_trainings = _in_turn if devices[0].platform == "cpu" else jax.vmap

    def split(function: Callable, inputs: int) -> Callable:
        specs = (PartitionSpec(_AXIS),) * inputs
        return jax.shard_map(
            map_trainings(function), mesh=mesh, axis_names={_AXIS}, in_specs=specs, out_specs=PartitionSpec(_AXIS),
            check_vma=False,
        )  # fmt: skip

    first = jax.jit(split(partial(initialize, setup), 1))
    following = jax.jit(split(partial(update, setup), 3), donate_argnums=1)
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))

    def step(state: TrainState, read: Sequence[Batch]) -> tuple[TrainState, StepMetrics]:
        read = [*read, *[read[-1]] * (len(filled) - len(read))]
        stacked = jax.device_put(jax.tree.map(lambda *rows: np.stack(rows), *read), sharding)
        with jax.set_mesh(mesh):
            state, metrics = following(given, state, stacked)
        return state, metrics

    def begin() -> TrainState:
        with jax.set_mesh(mesh):
            return first(given.seed)

    return StackedProgram(begin, step)


def _in_turn(function: Callable) -> Callable:
    """`function` on each training, one after the other: a replacement for ``vmap``."""
    return lambda *stacked: jax.lax.map(lambda each: function(*each), stacked)
