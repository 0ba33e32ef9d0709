"""One object for all that a run reports: the loop calls it, and knows nothing of bars, logs, clocks and threads."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posjax.nn import DecoderConfig
from train.config import Config, TrainConfig
from train.model.build import Setup
from train.model.flops import decoder_flops
from train.monitor.goodput import Goodput
from train.monitor.logs import MetricsLog, TensorBoardLog, WandbLog, check_wandb
from train.monitor.meter import Meter, count_chips, peak_memory_bytes
from train.monitor.progress import show_progress
from train.monitor.trace import Trace
from train.monitor.watchdog import Watchdog
from train.runtime.chips import PEAK_FLOPS


def check_monitor(config: Config) -> None:
    """Raises ValueError for settings that cannot work: steps to trace beyond the last one, or a missing package."""
    check_wandb(config.monitor.wandb)
    steps, profile = config.steps, config.monitor.profile
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

        batch = monitor.next(stream)
        monitor.before(step, state)
        state, metrics = update(state, batch)
        monitor.after(step, metrics.loss)
        monitor.write(step, batch.segment_ids, loss=float(metrics.loss), ...)   # at log steps

    It calls `pause` before the first steps of a stage, which compile, and `begin` after them. It tells `goodput`
    what its other time is spent on. Only `begin` and `write` need idle devices; before `write` they are idle, since the
    loop has waited for the numbers that it writes.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        label: str | None = None,
        began: float | None = None,
    ):
        devices = jax.devices()
        self._config, self._directory, self._label = config, directory, label
        self._stages = config.every_stage
        # Computed once: the vocabulary may be in a file.
        self._decoders = [Setup(stage).decoder for stage in self._stages]
        self._meter = Meter(count_chips(devices), PEAK_FLOPS.get(devices[0].device_kind))
        self._compiles = True
        self._process = jax.process_index()
        self._began = time.time() if began is None else began
        self.begin = self._meter.begin

    def __enter__(self):
        first = self._process == 0
        steps = self._config.steps
        with ExitStack() as stack:
            self._logs = tuple(self._open_logs(stack)) if first else ()
            self.last: dict[str, Any] = self._logs[0].last if first else {"step": 0}
            self._known = self.last["step"]
            self.goodput = Goodput(self._began, self.last)
            self._report = stack.enter_context(show_progress(self._label if first else None, steps))
            self._trace = stack.enter_context(Trace(self._config.monitor.profile, self._directory / "profile"))
            self._watchdog = stack.enter_context(
                Watchdog(self._config.monitor.watchdog_seconds, self._append, process=self._process)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def pause(self) -> None:
        """Call it before a stage, whose first step compiles."""
        self._meter.pause()
        self._compiles = True

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of wall time, over all steps that were measured so far."""
        return self._meter.tokens_per_second

    def next(self, stream: Iterator[Any]) -> Any:
        """The next batch of a stream; its time counts as waiting for data."""
        with self._meter.waiting(), self.goodput.spending("input"):
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
        self._meter.step(self._stages[self._stage(step)].train.batch_tokens)
        self._watchdog.beat(step, value)
        self._trace.after(step, value)

    def write(self, step: int, segment_ids: np.ndarray | None = None, **values: Any) -> None:
        """Writes and shows the values of a step, among them ``loss``, unless that step is already written.

        Adds the stage's name, if there are stages, and the rates since the last call. `segment_ids` are those of this
        process's rows of the batch, from which the model FLOPs are counted.
        """
        number = self._stage(step)
        named = {"stage": self._config.stage_names[number]} if self._config.stages else {}
        flops = model_flops(self._stages[number].train, self._decoders[number], segment_ids)
        rates = self._meter.read(flops)
        line = {**named, **values, **rates, "peak_memory_bytes": peak_memory_bytes(), **self.goodput.read()}
        if step > self.last["step"]:
            self.last = {"step": step, **line}
            for log in self._logs:
                log.write(step, **line)
        self._report(step, line, tokens_left(self._stages, step))

    def _stage(self, step: int) -> int:
        """The number of the stage that a step belongs to."""
        ends = itertools.accumulate(stage.train.steps for stage in self._stages)
        return next(number for number, end in enumerate(ends) if step <= end)

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


def model_flops(train: TrainConfig, decoder: DecoderConfig, segment_ids: np.ndarray | None) -> float | None:
    """Model FLOPs of an update over all processes, if all have rows like these; None if they cannot be counted.

    Without segment ids every row is one document.
    """
    ids = np.zeros((1, train.length), np.int32) if segment_ids is None else segment_ids
    try:
        return decoder_flops(decoder, ids).total * train.rows / len(ids)
    except ValueError:  # a mask that depends on more than positions
        return None


def tokens_left(stages: Sequence[Config], step: int) -> int:
    """Tokens of the steps after `step`, over all stages."""
    left = 0
    for stage in stages:
        left += max(0, stage.train.steps - max(0, step)) * stage.train.batch_tokens
        step -= stage.train.steps
    return left
