"""``bench --loop``: blocks of the whole loop and blocks of the bare step alternate, and each has its own time."""

import pytest

from train.config import parse
from train.loop.step import Program
from train.workshop import bench_loop as module
from train.workshop.bench_loop import Seconds, TimedBlocks, bench_loop


class Clock:
    now = 0.0

    def __call__(self):
        return Seconds(self.now, 10 * self.now)


@pytest.fixture
def clock():
    return Clock()


def program(clock, order):
    """A program whose step takes two seconds and records whose step it is."""

    def update(state, batch):
        clock.now += 2.0
        order.append(state)
        return state, 0.0

    return Program(initialize=lambda: "bare", begin=None, update=update, loss=None, abstract=None)


def test_blocks_take_turns_and_each_has_its_time(clock, monkeypatch):
    monkeypatch.setattr(module, "WARM_BLOCKS", 1)
    order, blocks = [], TimedBlocks(3, clock=clock)
    measured = blocks.around(program(clock, order))
    for step in range(10):
        measured.update("loop", 0.0)
        clock.now += 30.0 if step < 3 else 1.0  # the rest of the loop; its first block compiles
    assert order == (["bare"] * 3 + ["loop"] * 3) * 3 + ["bare"] * 3 + ["loop"]
    assert blocks.bare == [(2.0, 20.0)] * 4
    assert blocks.loop == [(32.0, 320.0), (3.0, 30.0), (3.0, 30.0)]
    assert blocks.medians() == ((3.0, 30.0), (2.0, 20.0))


def test_a_loop_is_measured_as_fit_runs_it(tmp_path, monkeypatch, capsys):
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    config = parse(
        {
            "output": str(tmp_path / "runs"),
            "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.2},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "train": {
                "length": 16,
                "batch_tokens": 128,
                "steps": 400,
                "warmup_steps": 1,
                "log_every": 2,
                "mesh": {"data": 1},
            },
            "monitor": {"profile": [1, 2], "evaluate_every": 3},
        }
    )
    monkeypatch.setattr(module, "BLOCKS", 4)
    made = []
    monkeypatch.setattr(module, "TimedBlocks", lambda size: made.append(TimedBlocks(size)) or made[0])
    loop, bare = bench_loop(config)
    assert len(made[0].loop) == 4
    assert len(made[0].bare) == 5
    assert min(*loop, *bare) > 0
    assert "2 blocks of 2 steps in turn" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
