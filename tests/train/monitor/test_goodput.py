"""Goodput: every second of a run counts as one kind, across the restarts of its processes."""

import json

import pytest

from train.config import parse
from train.monitor.goodput import KINDS, Goodput, share
from train.monitor.monitor import Monitor


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self):
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_every_second_is_of_one_kind(clock):
    goodput = Goodput(990.0, {}, clock)
    clock.passes(5)
    goodput.spend("steps")
    clock.passes(7)
    with goodput.spending("checkpoint"):
        clock.passes(2)
        with goodput.spending("input"):
            clock.passes(1)
    clock.passes(3)
    assert goodput.seconds == dict.fromkeys(KINDS, 0.0) | {"start": 15, "steps": 10, "checkpoint": 2, "input": 1}
    assert share(goodput.seconds) == 10 / 28


def test_a_restarted_process_continues_the_counts_and_adds_the_time_between(clock):
    first = Goodput(1000.0, {}, clock)
    first.spend("steps")
    clock.passes(30)
    line = first.read()
    clock.passes(12)  # until the process dies, and until the next one starts
    second = Goodput(clock.now, json.loads(json.dumps(line)), clock)
    clock.passes(4)
    assert second.seconds == dict.fromkeys(KINDS, 0.0) | {"steps": 30, "restart": 12, "start": 4}


def test_a_monitor_tells_compiling_repeated_and_new_steps_apart(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("train.monitor.monitor.Goodput", lambda *args: Goodput(*args, clock))
    config = parse({"train": {"steps": 9, "warmup_steps": 1}, "monitor": {"tensorboard": False}})
    old = {"step": 4, "loss": 1.0, "time": 950.0, "seconds_steps": 40.0, "seconds_start": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    with Monitor(config, tmp_path, began=1000.0) as monitor:
        clock.passes(1)
        monitor.pause()
        for step in range(3, 7):  # steps 3 and 4 were made before the restart
            clock.passes(0.5)
            monitor.before(step, None)
            clock.passes(20 if step == 3 else 2)
            monitor.after(step, 0.0)
        monitor.write(6, loss=1.0)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    found = {kind: last[f"seconds_{kind}"] for kind in KINDS}
    # Time before a step counts as the kind of the previous step.
    wanted = {"start": 10 + 1.5, "compile": 20, "restart": 50 + 2.5, "steps": 40 + 0.5 + 4.5}
    assert found == dict.fromkeys(KINDS, 0.0) | wanted
    assert last["time"] == clock.now
