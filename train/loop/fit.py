"""Training from a config to a finished run directory: stage by stage, in the same way on every process of a run."""

import itertools
import json
import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posjax.nn.huggingface.load import open_source, read_parameters
from train.checkpoint.directory import check_run, create_run, is_started
from train.checkpoint.local import LocalCheckpoint, LocalCheckpoints
from train.checkpoint.manager import Checkpoint, Checkpoints
from train.config import Config, MonitorConfig
from train.config.settings.checks import check, check_distinct
from train.data.packing import Batch, pack_sample
from train.data.pipeline import batches, held_out_sample, training_rows, warnings_of_shared_text
from train.loop.optimizer import kept_moments
from train.loop.step import Program, StepMetrics, build_program
from train.model.build import RELEASED, Setup, as_released, check_model, trained_changes
from train.model.convert import check_continues, convert
from train.model.mesh import make_mesh
from train.model.sharding import global_batch, rows_of_process
from train.model.state import TrainState
from train.monitor.cache import enable_compilation_cache
from train.monitor.meter import peak_memory_bytes
from train.monitor.monitor import Monitor, check_monitor
from train.runtime import flags
from train.runtime.allocator import keep_memory_on_cpu
from train.runtime.distributed import decide, listen, reached_preemption, stop_requested
from train.runtime.paths import path, write_file

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
        `train.monitor.goodput`.
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
    began, directory = time.time(), path(directory or config.directory)
    check_run(config, directory)
    finished = read_result(directory)
    if finished:
        return finished
    check_monitor(config)
    enable_compilation_cache(config.monitor.compilation_cache)
    keep_memory_on_cpu()
    log = print if progress and jax.process_index() == 0 else lambda _: None
    # Not shown for a resumed run: with other flags than at its start, its result would not be the same bit for bit.
    if not is_started(directory) and (advice := flags.advice(jax.devices()[0].device_kind)):
        log(advice)
    stages = prepare(config, log)
    create_run(config, directory)
    corpora = [stage.rows.digest() for stage in stages]
    with ExitStack() as stack:
        run = Run(
            config,
            stages,
            stack.enter_context(Checkpoints(config, directory, corpora)),
            stack.enter_context(LocalCheckpoints(config, directory, corpora)) if config.local_folder else None,
            stack.enter_context(Monitor(config, directory, label=progress, began=began)),
            stack.enter_context(stop_requested()),
        )
        step, done = run.train()
        last, speed = run.monitor.last, run.monitor.tokens_per_second
        run.monitor.goodput.spend("checkpoint")  # waits for the last save
    seconds = run.monitor.goodput.seconds
    result = FitResult(directory, step, done, last.get("loss"), speed, peak_memory_bytes(), seconds)
    if result.finished:
        decide(lambda: write_result(result))
        if run.local:
            run.local.forget()
    return result


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
    def mesh(self) -> Mesh:
        """The mesh of the stage."""
        return self.setup.mesh

    @property
    def last_step(self) -> int:
        """The number of updates of the run once this stage is done."""
        return self.first_step + self.config.train.steps

    @property
    def part(self) -> slice:
        """Which rows of every batch this process reads."""
        return rows_of_process(self.mesh, self.config.train.rows)

    def on_devices(self, batch: Any, rows: int, part: slice) -> Any:
        """This process's rows of a batch, in the order of the layout, as arrays over the mesh."""
        return global_batch(self.mesh, jax.tree.map(self.setup.placement.layout.apply, batch), rows, part)


def prepare(config: Config, log: Any = lambda _: None) -> list[Stage]:
    """All stages of a config, traced and checked against each other before any text is read, without compiling."""
    check_distinct("stages", config.stage_names, "give one of them its own name")
    built: list[tuple[Setup, Program]] = []
    for number, stage in enumerate(config.every_stage):
        try:
            built.append(_build(stage, built[-1][0] if built else None))
            if stage.scheme.name == RELEASED and stage.scheme.options:
                which = f"stage {config.stage_names[number]}: " if config.stages else ""
                log(f"{which}the released scheme, {_in_words(trained_changes(stage, stage.scheme))}")
            if message := built[-1][0].undivided:
                log(f"warning: {message}")
        except ValueError as error:
            raise ValueError(f"stages[{number}]: {error}" if config.stages else str(error)) from error
    for line in decide(lambda: warnings_of_shared_text(config)):
        log(f"warning: {line}")
    firsts = itertools.accumulate((setup.config.train.steps for setup, _ in built), initial=0)
    return [
        Stage(number, first, setup, program, training_rows(setup.config, setup.tokenizer, log), _held_out(setup))
        for number, (first, (setup, program)) in enumerate(zip(firsts, built, strict=False))
    ]


def _in_words(changes: Mapping[str, Any]) -> str:
    return f"with {json.dumps(changes)}" if changes else "unchanged up to the model's own length"


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
class Run:
    """One process's part in a run: from the newest checkpoint, or the beginning, to the end or a request to stop."""

    config: Config
    stages: list[Stage]
    checkpoints: Checkpoints
    local: LocalCheckpoints | None
    monitor: Monitor
    stop: threading.Event

    def train(self) -> tuple[int, bool]:
        """Trains; returns the number of updates of the saved state, and whether that is the end of the run."""
        return self.checkpoints.resume(self._train)

    def _train(self, lasting: Checkpoint | None) -> tuple[int, bool]:
        saved = self._newest(lasting)
        listen(0 if saved is None else saved.step, self.stop)
        first = 0 if saved is None else saved.stage
        if saved is not None and saved.step == self.stages[first].last_step and first + 1 < len(self.stages):
            first += 1
        for stage in self.stages[first:]:
            with jax.set_mesh(stage.mesh):
                step, reached_loss = self._train_stage(stage, saved)
            if self.stop.is_set():
                return step, reached_loss or step == self.config.steps
            saved = Checkpoint(step, stage.number, None)
        return step, True

    def _newest(self, lasting: Checkpoint | None) -> Checkpoint | None:
        states = [stage.program.abstract for stage in self.stages]
        return (self.local.newest(states, lasting) if self.local else None) or lasting

    def _train_stage(self, stage: Stage, saved: Checkpoint | None) -> tuple[int, bool]:
        """Trains one stage from the saved state.

        Returns the number of updates of the run after it, or at a stop, and whether ``train.stop_loss`` was reached.
        """
        train, goodput = stage.config.train, self.monitor.goodput
        goodput.spend("start")
        stream = batches(stage.rows, train.rows, _stream_seed(self.config.seed, stage.number), stage.part)
        state, step = self._first_state(stage, saved, stream)
        evaluate = _Evaluation(stage, self.config.monitor, step) if stage.held_out else None
        warm, reached_loss = step + min(WARM_STEPS, stage.last_step - step - 1), False
        self.monitor.pause()
        if warm == step:
            self.monitor.begin()
        while step < stage.last_step:
            # Dispatch is asynchronous: the loop waits for the devices only when it reads a number.
            batch = self.monitor.next(stream)
            self.monitor.before(step + 1, state)
            on_devices = stage.on_devices(batch, train.rows, stage.part)
            state, metrics = stage.program.update(stage.program.given, state, on_devices)
            step += 1
            self.monitor.after(step, metrics.loss)
            is_preempted = reached_preemption(step, self.stop)
            last = is_preempted or step == stage.last_step
            if step == warm:
                jax.block_until_ready(metrics)
                self.monitor.begin()
            if step == stage.last_step or (step - stage.first_step) % train.log_every == 0:
                with goodput.spending("evaluate"):
                    measured = evaluate.measure(step, state.parameters) if evaluate else {}
                self._log(stage, step, metrics, batch.segment_ids, measured)
                reached_loss = float(metrics.loss) < train.stop_loss
            last = last or reached_loss
            if last or (step - stage.first_step) % train.checkpoint_every == 0:
                _refuse_divergence(stage, step, metrics)
                with goodput.spending("checkpoint"):
                    self.checkpoints.save(step, stage.number, state, stream.get_state())
            elif train.local_every and (step - stage.first_step) % train.local_every == 0:
                _refuse_divergence(stage, step, metrics)
                with goodput.spending("checkpoint"):
                    self.local.save(step, stage.number, state, stream.get_state())
            if last:
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
            source = self.local if isinstance(saved, LocalCheckpoint) else self.checkpoints
            return source.restore(saved, stage.program.abstract), saved.step
        return self._continued(stage, saved), saved.step

    def _continued(self, stage: Stage, saved: Checkpoint) -> TrainState:
        """The first state of a stage from the last one of the stage before it."""
        before = replace(self.stages[saved.stage].setup, mesh=stage.mesh)
        abstract = build_program(before).abstract
        converted = jax.jit(partial(convert, before, stage.setup))
        if not stage.config.train.keep_moments:
            return stage.program.begin(converted(self.checkpoints.restore_parameters(saved, abstract.parameters)))
        last = self.checkpoints.restore(saved, abstract)
        begun = stage.program.begin(converted(last.parameters))
        return replace(begun, optimizer=kept_moments(last.optimizer, begun.optimizer))

    def _log(self, stage: Stage, step: int, metrics: StepMetrics, segment_ids: np.ndarray, measured: dict) -> None:
        _refuse_divergence(stage, step, metrics)
        values = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "learning_rate": metrics.learning_rate}
        found = {name: finite(value) for name, value in values.items()}
        done = step - stage.first_step
        tokens = sum(s.config.train.steps * s.config.train.batch_tokens for s in self.stages[: stage.number])
        tokens += done * stage.config.train.batch_tokens
        self.monitor.write(step, segment_ids, **found, tokens=tokens, skipped=int(metrics.skipped), **measured)


def initial_parameters(setup: Setup) -> Any:
    """The parameters of the released model under ``init`` as those of a stage, read straight to the devices' shards.

    Raises FileNotFoundError without the model, and ValueError for tensors that do not match its config.
    """
    config = setup.config
    released = Setup(as_released(config), setup.mesh)
    abstract = build_program(released).abstract.parameters
    found = read_parameters(open_source(config.init.path), config.init.values, released.decoder, abstract)
    return jax.jit(partial(convert, released, setup))(found) if config.scheme.name != RELEASED else found


def _stream_seed(seed: int, stage: int) -> int:
    """A seed for every stage. Each pass over the text takes the next seed, so the seeds of stages are far apart."""
    return (seed + 104_729 * stage) % 2**32


def finite(value: Any) -> float | None:
    """A number, or None if it is not finite, since JSON has finite numbers only."""
    return float(value) if math.isfinite(float(value)) else None


class _Evaluation:
    """The loss of held-out rows at the training length, every ``monitor.evaluate_every`` steps."""

    def __init__(self, stage: Stage, monitor: MonitorConfig, step: int):
        train, rows = stage.config.train, stage.held_out
        self._stage, self._every = stage, monitor.evaluate_every
        size = train.rows // train.accumulate
        count = max(1, min(len(rows), monitor.evaluate_tokens // train.length) // size)
        part = rows_of_process(stage.mesh, size)
        spread = np.linspace(0, len(rows) - 1, count * size).astype(int)
        numbers = (spread[n * size : (n + 1) * size] for n in range(count))
        self._batches = [stage.on_devices(rows.batch(number[part]), size, part) for number in numbers]
        self._last = step // self._every

    def measure(self, step: int, parameters: Any) -> dict[str, float]:
        """``held_out_loss``, in nats per token, at the first log step after it is due; empty at other steps."""
        if step // self._every == self._last and step != self._stage.last_step:
            return {}
        self._last = step // self._every
        losses = [self._stage.program.loss(parameters, batch) for batch in self._batches]
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
