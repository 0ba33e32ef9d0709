"""``python -m train bench CONFIG --loop``: compares a step of the training loop with the bare jitted step, in one run.

The loop is that of `fit`, with its data, logs, watchdog and clock, but without checkpoints and evaluation. It runs in
blocks of ``train.log_every`` steps, so each block writes one line of metrics. Before each block the devices become
idle, and a block of the same number of bare steps runs: the same program, over one batch that is already on the
devices. So other load on the machine affects both equally.
"""

import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from train.checkpoint.manager import Checkpoints
from train.config import Config
from train.config.typed import changed
from train.loop.fit import Training, prepare
from train.monitor.monitor import Monitor
from train.runtime.machine import processor
from train.runtime.reuse import keep_memory_on_cpu

BLOCKS = 24
WARM_BLOCKS = 2
"""Blocks at the beginning that are not counted: they compile, and fill caches."""


@dataclass
class TimedBlocks:
    """Seconds per step in blocks of `size` steps, alternating between the loop and the bare step."""

    size: int
    loop: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter

    def around(self, program: Any) -> Any:
        """`program` with an update that also runs and times the bare blocks."""
        steps, began, bare = 0, None, None

        def update(given: Any, state: Any, batch: Any) -> Any:
            nonlocal steps, began, bare
            if steps % self.size == 0:
                jax.block_until_ready((state, batch))
                if began is not None:
                    self.loop.append((self.clock() - began) / self.size)
                bare = self._block(program, program.initialize(given.seed) if bare is None else bare, batch)
                began = self.clock()
            steps += 1
            return program.update(given, state, batch)

        return dataclasses.replace(program, update=update)

    def _block(self, program: Any, state: Any, batch: Any) -> Any:
        """Runs and times a bare block; returns its last state."""
        began = self.clock()
        for _ in range(self.size):
            state, metrics = program.update(program.given, state, batch)
        jax.block_until_ready((state, metrics))
        self.bare.append((self.clock() - began) / self.size)
        return state

    def medians(self) -> tuple[float, float]:
        """The seconds of a step of the loop and of a bare step, without the first blocks."""
        return statistics.median(self.loop[WARM_BLOCKS:]), statistics.median(self.bare[WARM_BLOCKS : len(self.loop)])


def bench_loop(config: Config) -> tuple[float, float]:
    """Measures the first stage of a config; prints and returns the medians in seconds. No files are kept."""
    keep_memory_on_cpu()
    size = config.train.log_every
    steps = BLOCKS * size + 1
    changes = {"train": {"steps": steps, "checkpoint_every": steps}, "monitor": {"evaluate_every": 0, "profile": ()}}
    config = changed(config.stage(0), changes, "")
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
    print(f"the loop {1e3 * loop:.3f} ms a step · bare {1e3 * bare:.3f} ms · {loop / bare - 1:+.2%}")
    return loop, bare
