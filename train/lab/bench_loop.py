"""``python -m train bench CONFIG --loop``: compares a step of the training loop with the bare jitted step, in one run.

The loop is that of `fit`, with its data, logs, watchdog and clock, but without checkpoints and evaluation. It runs in
blocks of ``train.log_every`` steps, so each block writes one line of metrics. Before each block the devices become
idle, and a block of the same number of bare steps runs: the same program, over one batch that is already on the
devices. So other load on the machine affects both equally. Processor time, which is shown with wall-clock time, hardly
depends on such load.
"""

import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from train.checkpoint.manager import Checkpoints
from train.config import Config
from train.loop.fit import Training, prepare
from train.monitor.monitor import Monitor
from train.runtime.machine import processor
from train.runtime.reuse import keep_memory_on_cpu

BLOCKS = 24
WARM_BLOCKS = 2
"""Blocks at the beginning that are not counted: they compile, and fill caches."""


class Seconds(NamedTuple):
    """Seconds of wall-clock time, and of processor time over all threads."""

    wall: float
    processor: float


def now() -> Seconds:
    """The current time of both clocks."""
    return Seconds(time.perf_counter(), time.process_time())


@dataclass
class TimedBlocks:
    """Seconds per step in blocks of `size` steps, alternating between the loop and the bare step.

    ``around(program)`` gives a program whose update runs the bare blocks and measures the time.
    """

    size: int
    loop: list[Seconds] = field(default_factory=list)
    bare: list[Seconds] = field(default_factory=list)
    clock: Callable[[], Seconds] = now
    _steps: int = 0
    _began: Seconds | None = None

    def around(self, program: Any) -> Any:
        """`program` with an update that also runs and times the bare blocks."""
        bare_state = [None]

        def update(given: Any, state: Any, batch: Any) -> Any:
            if self._steps % self.size == 0:
                self._turn(program, bare_state, state, batch)
            self._steps += 1
            return program.update(given, state, batch)

        return dataclasses.replace(program, update=update)

    def _turn(self, program: Any, own: list, state: Any, batch: Any) -> None:
        """Call it after a block of the loop: records its time, and runs a bare block.

        `own` holds the state of the bare steps; None before the first block.
        """
        jax.block_until_ready((state, batch))
        if self._began:
            self.loop.append(self._since(self._began))
        own[0] = program.initialize(program.given.seed) if own[0] is None else own[0]
        began = self.clock()
        for _ in range(self.size):
            own[0], metrics = program.update(program.given, own[0], batch)
        jax.block_until_ready((own[0], metrics))
        self.bare.append(self._since(began))
        self._began = self.clock()

    def _since(self, began: Seconds) -> Seconds:
        return Seconds(*((end - start) / self.size for end, start in zip(self.clock(), began, strict=True)))

    def medians(self) -> tuple[Seconds, Seconds]:
        """The times of a step of the loop and of a bare step, without the first blocks."""
        both = self.loop[WARM_BLOCKS:], self.bare[WARM_BLOCKS : len(self.loop)]
        return tuple(Seconds(*map(statistics.median, zip(*blocks, strict=True))) for blocks in both)


def bench_loop(config: Config) -> tuple[Seconds, Seconds]:
    """Measures the first stage of a config; prints and returns the medians. No files are kept."""
    keep_memory_on_cpu()
    size = config.train.log_every
    steps = BLOCKS * size + 1
    train = dataclasses.replace(config.stage(0).train, steps=steps, checkpoint_every=steps)
    monitor = dataclasses.replace(config.monitor, evaluate_every=0, profile=())
    config = dataclasses.replace(config.stage(0), train=train, monitor=monitor)
    blocks = TimedBlocks(size)
    (stage,) = prepare(config)
    stage = dataclasses.replace(stage, program=blocks.around(stage.program))
    with (
        tempfile.TemporaryDirectory() as directory,
        Checkpoints(config, Path(directory), [stage.rows.digest()]) as checkpoints,
        Monitor(config, Path(directory)) as monitor,
    ):
        Training(config, [stage], checkpoints, None, monitor, threading.Event()).resume()
    loop, bare = blocks.medians()
    print(f"{processor()} · medians of {BLOCKS - WARM_BLOCKS} blocks of {size} steps in turn")
    for name, ours, least in zip(("wall-clock", "processor"), loop, bare, strict=True):
        print(f"{name}: the loop {1e3 * ours:.3f} ms a step · bare {1e3 * least:.3f} ms · {ours / least - 1:+.2%}")
    return loop, bare
