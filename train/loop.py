"""Training from a config to a finished run directory."""

import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from train.checkpoint import Checkpoints, check_run, create_run
from train.config import Config
from train.data import PackedRows, batches, training_rows
from train.machine import write_file
from train.mesh import make_mesh
from train.metrics import MetricsLog, Report, Throughput, peak_memory_bytes, show_progress
from train.sharding import global_batch
from train.step import Program, StepMetrics, build_program

# Compilation and the first steps after it (caches, lazy allocation) are left out of tokens per second.
WARM_STEPS = 5


@dataclass(frozen=True)
class FitResult:
    """What came out of `fit`.

    Attributes:
      directory: the run directory.
      steps: updates done; fewer than asked for when the run was interrupted.
      finished: whether all of them are done.
      final_loss: the training loss of the last update that was logged, in nats per token.
      tokens_per_second: training tokens of all devices per second of wall time, from the end of the first
        `WARM_STEPS` steps of the last process that trained (fewer in a run of fewer) to the end of its last step,
        checkpoints included.
      peak_memory_bytes: the most that process held, as `train.metrics.peak_memory_bytes` says.
    """

    directory: Path
    steps: int
    finished: bool
    final_loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int


def fit(config: Config, directory: str | Path | None = None, *, progress: str | None = None) -> FitResult:
    """Trains the config in `directory` (its own by default), resuming whatever is there, and saves the result.

    A finished run is returned as it is. SIGINT (Ctrl-C) and SIGTERM save a checkpoint and return; the same call then
    goes on as if nothing had happened: bit for bit on the same devices. `progress` is the label under which progress
    is shown; None shows nothing.

    Raises ValueError or FileNotFoundError, before anything is compiled, for text that is missing or too short, a batch
    that the devices cannot share, or a directory that belongs to another config.
    """
    directory = Path(directory or config.directory)
    if jax.process_count() > 1:
        raise ValueError(f"this version trains in one process, found {jax.process_count()}; run it on one host")
    check_run(config, directory)
    finished = read_result(directory)
    if finished:
        return finished
    rows = training_rows(config)
    mesh = make_mesh(config.train.mesh, config.train.rows)
    program = build_program(config, mesh)
    create_run(config, directory)
    with ExitStack() as stack:
        run = _Run(
            config,
            mesh,
            program,
            stack.enter_context(Checkpoints(config, directory, rows.digest())),
            stack.enter_context(MetricsLog(directory / "metrics.jsonl")),
            stack.enter_context(show_progress(progress, config.train)),
            stack.enter_context(stop_requested()),
        )
        stack.enter_context(jax.set_mesh(mesh))
        step = run.train(rows)
        last = run.log.last
    result = FitResult(
        directory,
        step,
        step == config.train.steps,
        last.get("loss"),
        last.get("tokens_per_second"),
        peak_memory_bytes(),
    )
    if result.finished:
        values = {key: value for key, value in vars(result).items() if key != "directory"}
        write_file(directory / "fit.json", json.dumps(values) + "\n")
    return result


def read_result(directory: str | Path) -> FitResult | None:
    """The result of a finished run; None when it is not finished."""
    path = Path(directory) / "fit.json"
    return FitResult(Path(directory), **json.loads(path.read_text())) if path.exists() else None


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one acts as usual. In the main thread only."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    usual = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, usual[number])

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, usual[number])


@dataclass(frozen=True)
class _Run:
    """One process's part in a run: from the newest checkpoint, or the beginning, to the end or a request to stop."""

    config: Config
    mesh: Mesh
    program: Program
    checkpoints: Checkpoints
    log: MetricsLog
    report: Report
    stop: threading.Event

    def train(self, rows: PackedRows) -> int:
        """Trains and returns the number of updates that the saved state has seen."""
        train = self.config.train
        stream = batches(rows, train.rows, self.config.seed, jax.process_index(), jax.process_count())
        state, step = self._first_state(stream)
        throughput = Throughput(train.batch_tokens)
        warm = step + min(WARM_STEPS, train.steps - step - 1)
        if warm == step:
            throughput.begin()
        while step < train.steps:
            # Dispatch is asynchronous: the loop waits for the devices only where it reads a number.
            state, metrics = self.program.update(state, global_batch(self.mesh, next(stream)))
            step += 1
            throughput.step()
            last = step == train.steps or self.stop.is_set()
            if step == warm:
                jax.block_until_ready(metrics)
                throughput.begin()
            if step == train.steps or step % train.log_every == 0:
                self._log(step, metrics, throughput)
            if last or step % train.checkpoint_every == 0:
                _refuse_divergence(step, metrics)
                self.checkpoints.save(step, state, stream.get_state())
            if last:
                break
        return step

    def _first_state(self, stream: Any) -> tuple[Any, int]:
        saved = self.checkpoints.restore(self.program.abstract)
        if saved is None:
            return self.program.initialize(), 0
        state, place = saved
        stream.set_state(place)
        return state, int(state.step)

    def _log(self, step: int, metrics: StepMetrics, throughput: Throughput) -> None:
        _refuse_divergence(step, metrics)
        loss, gradient_norm, rate = (float(value) for value in metrics)
        tokens, speed = step * self.config.train.batch_tokens, throughput.rate()
        self.log.write(
            step, loss=loss, gradient_norm=gradient_norm, learning_rate=rate, tokens=tokens, tokens_per_second=speed
        )
        self.report(step, loss, speed)


def _refuse_divergence(step: int, metrics: StepMetrics) -> None:
    """Raises ValueError when training diverged, before anything of it is written or saved."""
    loss, norm = float(metrics.loss), float(metrics.gradient_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ValueError(
            f"training diverged: at step {step} the loss is {loss} and the norm of its gradient {norm}. What was saved "
            "before is kept; lower train.learning_rate, or look at what the scheme does with these positions"
        )
