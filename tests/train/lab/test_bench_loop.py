"""The bench of the loop: blocks of the loop and of the bare step take turns."""

import pytest

from train.config import parse
from train.lab.bench_loop import WARM_BLOCKS, TimedBlocks, bench_loop
from train.loop.step import Given, Program

pytestmark = pytest.mark.lab


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def test_blocks_of_the_loop_and_of_the_bare_step_take_turns_and_each_has_its_time():
    clock, order = Clock(), []

    def update(given, state, batch):
        clock.now += 2.0
        order.append(state)
        return state, 0.0

    blocks = TimedBlocks(3, clock=clock)
    given = Given(seed=0, rates=None)
    bare = Program(given, lambda seed: "bare", begin=None, update=update, loss=None, abstract=None)
    measured, steps = blocks.around(bare), 3 * (WARM_BLOCKS + 2)
    for step in range(steps + 1):
        measured.update(given, "loop", 0.0)
        clock.now += 30.0 if step < 3 else 1.0  # the rest of the loop; its first block compiles
    assert order == (["bare"] * 3 + ["loop"] * 3) * (WARM_BLOCKS + 2) + ["bare"] * 3 + ["loop"]
    assert blocks.loop == [32.0] + [3.0] * (WARM_BLOCKS + 1)
    assert blocks.medians() == (3.0, 2.0)


def test_a_loop_is_measured_as_fit_runs_it(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    settings = {
        "output": str(tmp_path / "runs"),
        "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.2},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
        "train": {"length": 16, "batch_tokens": 128, "warmup_steps": 1, "log_every": 2, "mesh": {"data": 1}},
        "monitor": {"profile": [1, 2], "evaluate_every": 3},
    }
    loop, bare = bench_loop(parse(settings))
    assert min(loop, bare) > 0
    assert not (tmp_path / "runs").exists()
