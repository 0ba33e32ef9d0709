"""One object for all that a run reports: the loop calls it, and knows nothing of bars, logs, clocks and threads."""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.config import Config
from train.model.build import Setup
from train.model.flops import decoder_flops
from train.monitor.logs import MetricsLog, TensorBoardLog, WandbLog
from train.monitor.meter import Goodput, Meter, count_chips, peak_memory_bytes
from train.monitor.progress import show_progress
from train.monitor.trace import Trace
from train.monitor.watchdog import Watchdog
from train.runtime.chips import PEAK_FLOPS


def check_monitor(config: Config) -> None:
    """Raises ValueError for settings that cannot work: steps to trace beyond the last one, or a missing package."""
    steps, profile, project = config.steps, config.monitor.profile, config.monitor.wandb
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"monitor.wandb={project}: the package is not installed: pip install wandb, or leave the key empty"
        )
    if profile and not 1 <= profile[0] <= profile[1] <= steps:
        raise ValueError(f"monitor.profile must lie between steps 1 and {steps}, the last one; found {list(profile)}")
    if config.monitor.evaluate_every and not config.model.causal:
        raise ValueError(
            "monitor.evaluate_every measures how well the next token is predicted, which model.causal=false does not "
            "learn; leave it 0"
        )


class Monitor:
    """Everything that a run reports, as a context manager; steps count from 1, through all stages.

    Only process 0 writes and shows metrics; every process watches and traces itself. A loop does:

        monitor.begin_stage(setup)
        batch = monitor.next(stream)
        monitor.before(step, state)
        state, metrics = update(state, batch)
        monitor.after(step, metrics.loss)
        monitor.write(step, tokens, batch.segment_ids, loss=float(metrics.loss), ...)   # at log steps

    It tells `goodput` what its other time is spent on. Only `write` needs idle devices, and there they are: the loop
    has waited for the numbers that it writes.
    """

    def __init__(self, config: Config, directory: Path, *, label: str | None = None, began: float | None = None):
        self._config, self._directory, self._label = config, directory, label
        self._began, self._process = time.time() if began is None else began, jax.process_index()
        self._all_tokens = sum(stage.train.steps * stage.train.batch_tokens for stage in config.every_stage)
        devices = jax.devices()
        self._meter = Meter(count_chips(devices), PEAK_FLOPS.get(devices[0].device_kind))

    def __enter__(self):
        settings, writes = self._config.monitor, self._process == 0
        with ExitStack() as stack:
            self._logs = list(self._open_logs(stack)) if writes else []
            self.last: dict[str, Any] = self._logs[0].last if writes else {"step": 0}
            self._known = self.last["step"]
            self.goodput = Goodput(self._began, self.last)
            self._report = stack.enter_context(show_progress(self._label if writes else None, self._config.steps))
            self._trace = stack.enter_context(Trace(settings.profile, self._directory / "profile"))
            watchdog = Watchdog(settings.watchdog_seconds, self._append, process=self._process)
            self._watchdog = stack.enter_context(watchdog)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def begin_stage(self, setup: Setup, name: str = "", step: int = 0, warm: int = 0) -> None:
        """Call it before the first step of a stage, which compiles, after `step` steps of the run.

        Its lines have the stage's `name`, unless that is empty. The first `warm` steps do not count for the rates.
        """
        self._setup, self._named = setup, {"stage": name} if name else {}
        self._compiles, self._warm_step = True, step + warm
        self._meter.pause()
        if not warm:
            self._meter.begin()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of wall time, over all steps that were measured so far."""
        return self._meter.tokens_per_second

    def next(self, stream: Iterator[Any]) -> Any:
        """The next batch of a stream; its time counts as waiting for data."""
        with self.goodput.spending("input"):
            return next(stream)

    def before(self, step: int, state: Any) -> None:
        """Call it before a step is dispatched, with the state that it starts from."""
        self.goodput.spend("compile" if self._compiles else "restart" if step <= self._known else "steps")
        self._trace.before(step, state)

    def after(self, step: int, value: Any) -> None:
        """Call it after a step was dispatched; `value` is a scalar of its result, on the devices."""
        if self._compiles:
            self._compiles = False
            self.goodput.spend("steps")
        self._meter.step(self._setup.config.train.batch_tokens)
        self._watchdog.beat(step, value)
        self._trace.after(step, value)
        if step == self._warm_step:
            jax.block_until_ready(value)
            self._meter.begin()

    def write(self, step: int, tokens: int, segment_ids: np.ndarray, **values: Any) -> None:
        """Writes and shows the values of a step, among them ``loss``, unless that step is already written.

        Adds the rates since the last call. `tokens` are those of all steps so far; `segment_ids` are those of this
        process's rows of the batch, from which the model FLOPs are counted.
        """
        rates = self._meter.read(_model_flops(self._setup, segment_ids))
        memory = {"peak_memory_bytes": peak_memory_bytes()}
        line = {**self._named, **values, "tokens": tokens, **rates, **memory, **self.goodput.read()}
        if step > self.last["step"]:
            self.last = {"step": step, **line}
            for log in self._logs:
                log.write(step, **line)
        self._report(step, line, self._all_tokens - tokens)

    def _open_logs(self, stack: ExitStack) -> Iterator[MetricsLog | TensorBoardLog | WandbLog]:
        """The logs of this run, JSON lines first."""
        yield stack.enter_context(closing(MetricsLog(self._directory)))
        if self._config.monitor.tensorboard:
            yield stack.enter_context(closing(TensorBoardLog(self._directory / "tensorboard")))
        if self._config.monitor.wandb:
            yield stack.enter_context(closing(WandbLog(self._config, self._directory)))

    def _append(self, text: str) -> None:
        """Appends the watchdog's report to a file, one for each process."""
        location = self._directory / "watchdog" / f"process-{self._process}.txt"
        location.parent.mkdir(exist_ok=True)
        before = location.read_text(encoding="utf-8") if location.exists() else ""
        location.write_text(before + text, encoding="utf-8")


def _model_flops(setup: Setup, segment_ids: np.ndarray) -> float | None:
    """Model FLOPs of an update over all processes, if all have rows like these; None if they cannot be counted."""
    try:
        return decoder_flops(setup.decoder, segment_ids).total * setup.config.train.rows / len(segment_ids)
    except ValueError:  # a mask that depends on more than positions
        return None
