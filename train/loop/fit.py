"""Training from a config to a finished run directory: stage by stage, in the same way on every process of a run."""

import itertools
import json
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posjax import nn
from posjax._checks import describe
from posjax.nn.decoder import Loads
from posjax.nn.huggingface.load import open_source, read_parameters
from posjax.nn.huggingface.peft import read_adapter
from posjax.nn.huggingface.registry import family_of
from train.checkpoint.directory import check_run, create_run
from train.checkpoint.local import LocalCheckpoint, LocalCheckpoints
from train.checkpoint.manager import Checkpoint, Checkpoints
from train.config import Config
from train.config.settings.checks import check, check_distinct
from train.data.packing import Batch, pack_sample
from train.data.pipeline import batches, held_out_sample, training_rows, warnings_of_shared_text
from train.loop.optimizer import kept_moments
from train.loop.step import Program, StepMetrics, build_program
from train.model.build import RELEASED, Setup, as_released, check_model
from train.model.convert import check_continues, convert
from train.model.mesh import make_mesh
from train.model.sharding import global_batch, rows_of_process, tree_shardings
from train.model.state import TrainState
from train.monitor.meter import peak_memory_bytes
from train.monitor.monitor import Monitor, check_monitor
from train.runtime import flags
from train.runtime.distributed import decide, decided, listen, print_once, reached_preemption, stop_requested
from train.runtime.paths import path, write_file
from train.runtime.reuse import prepare_process

# Compilation and the first steps after it (caches, lazy allocation) are left out of tokens per second.
WARM_STEPS = 5


class Diverged(ValueError):
    """A training whose loss or gradients are not finite, or far above those before, for several updates in a row."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
      directory: the run directory.
      steps: updates done, of all stages; fewer than the config says if the run was interrupted or reached its
        ``train.stop_loss``.
      finished: whether all updates are done, or the ``train.stop_loss`` was reached.
      final_loss: the training loss of the last update that was logged, in nats per token.
      tokens_per_second: training tokens of all devices per second of wall time, in the last process that trained the
        run. The first `WARM_STEPS` steps of every stage are left out; checkpoints are included.
      seconds: what the run's wall-clock time was spent on, over all processes that trained the run; see
        `train.monitor.meter`.
      peak_memory_bytes: the peak memory of the last process that trained the run, as
        `train.monitor.meter.peak_memory_bytes` measures it.
    """

    directory: Path
    steps: int
    finished: bool
    final_loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int
    seconds: dict[str, float] | None = None


def fit(config: Config, directory: str | Path | None = None, *, progress: str | None = None) -> FitResult:
    """Trains the config in `directory` (by default the config's), resuming what is saved there, and saves the result.

    Of a finished run the saved result is returned. SIGINT (Ctrl-C), SIGTERM and a pod's notice of preemption save a
    checkpoint and return. The same call then resumes as if there had been no interruption: bit for bit on the same
    devices. `progress` is the label under which progress is shown; None shows nothing.

    Raises ValueError or FileNotFoundError, before anything is compiled, for text that is missing or too short, for an
    invalid mesh, batch or stage, or for a directory of another config.
    """
    began, directory = time.time(), path(directory) if directory else config.directory
    check_run(config, directory)
    finished = read_result(directory)
    if finished:
        return finished
    check_monitor(config)
    prepare_process(config.monitor.compilation_cache)
    log = print_once() if progress else lambda _: None
    stages = prepare(config, log)
    is_new = create_run(config, directory)
    # Not shown for a resumed run: with other flags than at its start, its result would not be the same bit for bit.
    if is_new and (advice := flags.advice(jax.devices()[0].device_kind, jax.device_count())):
        log(advice)
    corpora = [stage.rows.digest() for stage in stages]
    with ExitStack() as stack:
        training = Training(
            config,
            stages,
            stack.enter_context(Checkpoints(config, directory, corpora)),
            stack.enter_context(LocalCheckpoints(config, directory, corpora)) if config.local_folder else None,
            stack.enter_context(Monitor(config, directory, label=progress, began=began)),
            stack.enter_context(stop_requested()),
        )
        step, done = training.resume()
        monitor = training.monitor
        monitor.goodput.spend("checkpoint")  # waits for the last save
    loss, seconds = monitor.last.get("loss"), monitor.goodput.seconds
    result = FitResult(directory, step, done, loss, monitor.tokens_per_second, peak_memory_bytes(), seconds)
    if result.finished:
        write_result(result)
        if training.local:
            training.local.forget()
    return result


@decided
def write_result(result: FitResult) -> None:
    """Marks a run as finished."""
    values = {key: value for key, value in vars(result).items() if key != "directory"}
    write_file(result.directory / "fit.json", json.dumps(values) + "\n")


def read_result(directory: str | Path) -> FitResult | None:
    """The result of a finished run; None when it is not finished."""
    location = path(directory) / "fit.json"
    values = decide(lambda: json.loads(location.read_text()) if location.exists() else None)
    return FitResult(path(directory), **values) if values else None


@dataclass(frozen=True)
class Stage:
    """One stage, ready to be compiled: what it is made from, and the number of updates before it."""

    number: int
    name: str  # empty if the config has no stages
    first_step: int
    setup: Setup
    program: Program
    rows: Any
    held_out: Any  # rows of held-out text, or None if none are measured during training

    @property
    def config(self) -> Config:
        """The config of the stage."""
        return self.setup.config

    @property
    def last_step(self) -> int:
        """The number of updates of the run once this stage is done."""
        return self.first_step + self.config.train.steps

    def is_due(self, step: int, every: int) -> bool:
        """Whether something is done after `step` updates of the run that is done `every` updates of a stage, if any."""
        return every > 0 and (step - self.first_step) % every == 0

    @property
    def part(self) -> slice:
        """Which rows of every batch this process reads."""
        return rows_of_process(self.setup.mesh, self.config.train.rows)

    def on_devices(self, batch: Any, rows: int, part: slice) -> Any:
        """This process's rows of a batch, in the order of the layout, as arrays over the mesh."""
        return global_batch(self.setup.mesh, jax.tree.map(self.setup.placement.layout.apply, batch), rows, part)


def prepare(config: Config, log: Any = lambda _: None) -> list[Stage]:
    """All stages of a config, traced and checked against each other before any text is read, without compiling."""
    check_distinct("stages", config.stage_names, "give one of them its own name")
    built: list[tuple[Setup, Program]] = []
    names = config.stage_names if config.stages else ("",)
    for number, stage in enumerate(config.every_stage):
        try:
            built.append(_build(stage, built[-1][0] if built else None))
            for line in built[-1][0].notes:
                log(f"stage {names[number]}: {line}" if config.stages else line)
        except ValueError as error:
            raise ValueError(f"stages[{number}]: {error}" if config.stages else str(error)) from error
    for line in decide(lambda: warnings_of_shared_text(config)):
        log(f"warning: {line}")
    firsts = itertools.accumulate((setup.config.train.steps for setup, _ in built), initial=0)
    return [
        Stage(number, name, first, setup, program, training_rows(setup.config, setup.tokenizer, log), _held_out(setup))
        for number, (name, first, (setup, program)) in enumerate(zip(names, firsts, built, strict=False))
    ]


def _held_out(setup: Setup) -> Any:
    """The rows that are measured while a stage trains, or None; raises ValueError for too little held-out text."""
    if not setup.config.monitor.evaluate_every:
        return None
    sample, length = held_out_sample(setup.config, setup.tokenizer), setup.config.train.length
    if sample.tokens <= length:
        raise ValueError(
            f"monitor.evaluate_every: the held-out text has {sample.tokens} tokens, too few for a row of {length} "
            "(train.length); raise data.held_out, or set monitor.evaluate_every=0"
        )
    return pack_sample(sample, length)


def _build(config: Config, before: Setup | None) -> tuple[Setup, Program]:
    """A stage and its program. The program is traced, so errors of attention or the loss are raised here."""
    train = config.train
    check(train.steps > 0, "train.steps is 0: there is nothing to train; use evaluate or compare to measure the model")
    check_model(Setup(config))
    setup = Setup(config, make_mesh(train.mesh, train.rows // train.accumulate))
    program = build_program(setup)
    if train.keep_moments:
        _check_moments(None if before is None else build_program(replace(before, mesh=setup.mesh)), program)
    before = Setup(as_released(config)) if before is None and config.init.path else before
    if before is not None:
        check_continues(before, setup)
    field = jax.ShapeDtypeStruct((train.rows, train.length), np.int32)
    with jax.set_mesh(setup.mesh):
        program.update.eval_shape(program.given, program.abstract, Batch(*(field for _ in Batch._fields)))
    return setup, program


def _check_moments(before: Program | None, program: Program) -> None:
    """Raises ValueError for a stage that cannot continue with the moments of the stage before it."""
    check(before is not None, "train.keep_moments: the first stage has no moments to keep; set it in a later one")
    shapes = [jax.tree.map(jax.typeof, each.abstract.optimizer) for each in (before, program)]
    check(
        shapes[0] == shapes[1],
        "train.keep_moments: the moments of the stage before are those of another optimizer, of other parameters or of "
        "another dtype; leave optimizer, trainable, moment_dtype and the scheme's parameters as they were, or set it "
        "false",
    )


@dataclass(frozen=True)
class Training:
    """One process's part in a run: from the newest checkpoint, or the beginning, to the end or a request to stop."""

    config: Config
    stages: list[Stage]
    checkpoints: Checkpoints
    local: LocalCheckpoints | None
    monitor: Monitor
    stop: threading.Event

    def resume(self) -> tuple[int, bool]:
        """Trains; returns the number of updates of the saved state, and whether that is the end of the run."""
        return self.checkpoints.resume(self._resume)

    def _resume(self, lasting: Checkpoint | None) -> tuple[int, bool]:
        states = [stage.program.abstract for stage in self.stages]
        saved = (self.local.newest(states, lasting) if self.local else None) or lasting
        listen(0 if saved is None else saved.step, self.stop)
        first = 0 if saved is None else saved.stage
        if saved is not None and saved.step == self.stages[first].last_step and first + 1 < len(self.stages):
            first += 1
        for stage in self.stages[first:]:
            with jax.set_mesh(stage.setup.mesh):
                step, reached_loss = self._train_stage(stage, saved)
            if self.stop.is_set():
                return step, reached_loss or step == self.config.steps
            saved = Checkpoint(step, stage.number, None)
        return step, True

    def _train_stage(self, stage: Stage, saved: Checkpoint | None) -> tuple[int, bool]:
        """Trains one stage from the saved state.

        Returns the number of updates of the run after it, or at a stop, and whether ``train.stop_loss`` was reached.
        """
        train, goodput = stage.config.train, self.monitor.goodput
        goodput.spend("start")
        stream = batches(stage.rows, train.rows, _stream_seed(self.config.seed, stage.number), stage.part)
        state, step = self._first_state(stage, saved, stream)
        held_out, reached_loss = _held_out_batches(stage), False
        self.monitor.begin_stage(stage.setup, stage.name, step, min(WARM_STEPS, stage.last_step - step - 1))
        while step < stage.last_step:
            # Dispatch is asynchronous: the loop waits for the devices only when it reads a number.
            batch = self.monitor.next(stream)
            self.monitor.before(step + 1, state)
            on_devices = stage.on_devices(batch, train.rows, stage.part)
            state, metrics = stage.program.update(stage.program.given, state, on_devices)
            step += 1
            self.monitor.after(step, metrics.loss)
            is_last = reached_preemption(step, self.stop) or step == stage.last_step
            if stage.is_due(step, train.log_every) or step == stage.last_step:
                _refuse_divergence(stage, step, metrics)
                with goodput.spending("evaluate"):
                    measured = _held_out_loss(stage, held_out, step, state)
                self._log(stage, step, metrics, batch.segment_ids, measured)
                reached_loss = float(metrics.loss) < train.stop_loss
            is_last = is_last or reached_loss
            lasting = is_last or stage.is_due(step, train.checkpoint_every)
            if lasting or stage.is_due(step, train.local_every):
                _refuse_divergence(stage, step, metrics)
                with goodput.spending("checkpoint"):
                    place = self.checkpoints if lasting else self.local
                    place.save(step, stage.number, state, stream.get_state())
            if is_last:
                break
        return step, reached_loss

    def _first_state(self, stage: Stage, saved: Checkpoint | None, stream: Any) -> tuple[TrainState, int]:
        """The state to start from: the saved one, that of the saved parameters of the stage before, or a new one."""
        if saved is None and stage.config.init.path:
            return stage.program.begin(initial_parameters(stage.setup)), 0
        if saved is None:
            return stage.program.initialize(stage.program.given.seed), 0
        if saved.stage == stage.number:
            stream.set_state(saved.stream)
            is_read = isinstance(saved, LocalCheckpoint)
            return saved.state if is_read else self.checkpoints.restore(saved, stage.program.abstract), saved.step
        return self._continued(stage, saved), saved.step

    def _continued(self, stage: Stage, saved: Checkpoint) -> TrainState:
        """The first state of a stage from the last one of the stage before it."""
        before = replace(self.stages[saved.stage].setup, mesh=stage.setup.mesh)
        abstract = build_program(before).abstract
        converted = jax.jit(partial(convert, before, stage.setup))
        if not stage.config.train.keep_moments:
            return stage.program.begin(converted(self.checkpoints.restore_parameters(saved, abstract.parameters)))
        last = self.checkpoints.restore(saved, abstract)
        begun = stage.program.begin(converted(last.parameters))
        average = begun.average and (last.average or begun.average)  # the stage before may have had none
        return replace(begun, optimizer=kept_moments(last.optimizer, begun.optimizer), average=average)

    def _log(self, stage: Stage, step: int, metrics: StepMetrics, segment_ids: np.ndarray, measured: dict) -> None:
        values = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "learning_rate": metrics.learning_rate}
        found = {name: finite(value) for name, value in values.items()}
        tokens = sum(s.config.train.steps * s.config.train.batch_tokens for s in self.stages[: stage.number])
        tokens += (step - stage.first_step) * stage.config.train.batch_tokens
        found |= {"skipped": int(metrics.skipped)} | expert_rows(metrics.loads)
        self.monitor.write(step, tokens, segment_ids, **found, **measured)


def initial_parameters(setup: Setup) -> Any:
    """The parameters of the released model under ``init`` as those of a stage, read straight to the devices' shards.

    Raises FileNotFoundError without the model, and ValueError for tensors that do not match its config.
    """
    config = setup.config
    released = Setup(as_released(config), setup.mesh)
    plain = replace(released, config=replace(released.config, model=replace(config.model, lora=None)))
    shardings = tree_shardings(setup.mesh, plain.axes, plain.shapes)
    wanted = jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), plain.shapes, shardings)
    found = read_parameters(open_source(config.init.path), config.init.values, plain.decoder, wanted)
    if config.init.adapter:
        found = _with_adapter(released, plain.decoder, found)
    start = partial(convert, released, setup)
    # Without a change of the scheme the arrays stay as they are; a compiled program would copy them.
    return (start if config.scheme.name == RELEASED else jax.jit(start))(found)


def _with_adapter(setup: Setup, plain: nn.DecoderConfig, parameters: Any) -> Any:
    """The parameters of a released model, with the adapter that ``init`` names."""
    init = setup.config.init
    spec, found = read_adapter(init.adapter, family_of(init.values), plain, parameters)
    wanted = setup.decoder.lora
    check(spec == wanted, f"model.lora: {describe(wanted)} contradicts {init.adapter}, which has {spec}; leave it out")
    return found


def _stream_seed(seed: int, stage: int) -> int:
    """A seed for every stage. Each pass over the text takes the next seed, so the seeds of stages are far apart."""
    return (seed + 104_729 * stage) % 2**32


def expert_rows(loads: Loads) -> dict[str, Any]:
    """The loads of a batch as values of a line of metrics; empty for a model without experts.

    ``expert_tokens`` has a list for each layer with experts, in the order of patterns of layers; ``expert_load_max`` is
    the largest load as a multiple of the mean of its layer.
    """
    layers = [load.tokens for period in loads for load in period if load is not None]
    if not layers:
        return {}
    tokens = np.concatenate([np.asarray(each) for each in layers])
    most = tokens.max(-1) / np.maximum(tokens.mean(-1), 1)
    return {"expert_tokens": tokens.astype(int).tolist(), "expert_load_max": float(most.max())}


def finite(value: Any) -> float | None:
    """A number, or None if it is not finite, since JSON has finite numbers only."""
    return float(value) if math.isfinite(float(value)) else None


def _held_out_batches(stage: Stage) -> list[Batch]:
    """The held-out rows that are measured while a stage trains, at its length, as batches on the devices."""
    if stage.held_out is None:
        return []
    train, rows = stage.config.train, stage.held_out
    size = train.rows // train.accumulate
    count = max(1, min(len(rows), stage.config.monitor.evaluate_tokens // train.length) // size)
    part = rows_of_process(stage.setup.mesh, size)
    spread = np.linspace(0, len(rows) - 1, count * size).astype(int)
    return [stage.on_devices(rows.batch(numbers[part]), size, part) for numbers in spread.reshape(count, size)]


def _held_out_loss(stage: Stage, held_out: list[Batch], step: int, state: TrainState) -> dict[str, float]:
    """``held_out_loss``, in nats per token, at the first log step after it is due; else empty."""
    every, log_every = stage.config.monitor.evaluate_every, stage.config.train.log_every
    if not held_out or (step < stage.last_step and step // every == (step - log_every) // every):
        return {}
    parameters = state.averaged if stage.config.evaluate.averaged else state.parameters
    losses = [stage.program.loss(parameters, batch) for batch in held_out]
    total, count = (sum(float(getattr(loss, name)) for loss in losses) for name in ("nll", "count"))
    return {"held_out_loss": total / max(count, 1)}


def _refuse_divergence(stage: Stage, step: int, metrics: StepMetrics) -> None:
    """Raises Diverged for a diverged training, before its values are written or saved."""
    in_row = int(metrics.skipped_in_row)
    no_update = in_row == step - stage.first_step and step == stage.last_step
    if in_row >= stage.config.train.stop_after_skips or no_update:
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        raise Diverged(
            f"training diverged: at step {step} the loss is {loss} and the norm of its gradient {norm}, and {in_row} "
            "updates in a row were skipped. Earlier checkpoints are kept; lower train.learning_rate, raise "
            "train.spike_factor if it is set, or check the scheme at these positions"
        )
