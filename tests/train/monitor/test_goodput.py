"""Goodput: every second of a run counts as one kind, across the restarts of its processes."""

import json
import time

import pytest

from train.config import parse
from train.monitor.goodput import KINDS, Goodput, share
from train.monitor.monitor import Monitor


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self):
        return self.now


def test_every_second_is_of_one_kind_also_over_a_restart():
    clock = Clock()
    first = Goodput(990.0, {}, clock)
    clock.now += 5
    first.spend("steps")
    clock.now += 7
    with first.spending("checkpoint"):
        clock.now += 2
        with first.spending("input"):
            clock.now += 1
    clock.now += 3
    assert first.seconds == dict.fromkeys(KINDS, 0.0) | {"start": 15, "steps": 10, "checkpoint": 2, "input": 1}
    assert share(first.seconds) == 10 / 28
    line = json.loads(json.dumps(first.read()))
    clock.now += 12  # until the process dies, and until the next one starts
    second = Goodput(clock.now, line, clock)
    clock.now += 4
    found = {kind: seconds for kind, seconds in second.seconds.items() if seconds}
    assert found == {"start": 19, "steps": 10, "checkpoint": 2, "input": 1, "restart": 12}


def test_a_monitor_tells_compiling_repeated_and_new_steps_apart(tmp_path):
    config = parse({"train": {"steps": 9, "warmup_steps": 1}, "monitor": {"tensorboard": False}})
    began = time.time()
    old = {"step": 4, "loss": 1.0, "time": began - 50, "seconds_steps": 40.0, "seconds_start": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    with Monitor(config, tmp_path, began=began) as monitor:
        monitor.pause()
        time.sleep(0.1)
        for step in range(3, 7):  # steps 3 and 4 were made before the restart
            monitor.before(step, None)
            time.sleep(0.3 if step == 3 else 0.2)
            monitor.after(step, 0.0)
        monitor.write(6, loss=1.0)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    found = {kind: last[f"seconds_{kind}"] for kind in KINDS}
    least = {"start": 10.1, "compile": 0.3, "restart": 50.2, "steps": 40.4}
    assert all(found[kind] >= seconds - 0.001 for kind, seconds in least.items())
    assert sum(found.values()) == pytest.approx(100 + last["time"] - began)
    assert [found[kind] for kind in KINDS if kind not in least] == [0, 0, 0]
