"""The watchdog reports a hang once, with the step, the process and the stacks of all threads."""

import threading
import time

import pytest

from train.config import parse
from train.model.build import Setup
from train.monitor.monitor import Monitor
from train.monitor.watchdog import Watchdog

PATIENCE = 60  # seconds for something that takes milliseconds


class Value:
    """A result on a device; the test sets `ready` when it is there."""

    def __init__(self, ready=False):
        self.ready = ready

    def is_ready(self):
        return self.ready


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stuck_in_the_loader(release):
    release.wait(PATIENCE)


@pytest.fixture
def loader():
    """A thread that waits until the test is over."""
    release = threading.Event()
    thread = threading.Thread(target=stuck_in_the_loader, args=(release,), name="loader")
    thread.start()
    yield
    release.set()
    thread.join()


def test_each_hang_is_named_once_and_so_is_its_end(capsys, loader):
    messages, hanging, last = [], Value(), Value()
    with Watchdog(0.05, messages.append, process=3) as watchdog:
        watchdog.beat(40, Value(ready=True))
        watchdog.beat(41, hanging)
        watchdog.beat(42, last)
        wait_for(lambda: messages)
        time.sleep(0.2)
        assert len(messages) == 1
        hanging.ready = True
        wait_for(lambda: len(messages) == 3)
        last.ready = True
        wait_for(lambda: len(messages) == 5)
    hang, end, again, _, idle = messages
    assert "process 3: no step has finished for 0.05 s" in hang
    assert "last finished: step 40; step 41 was dispatched and is not done" in hang
    for stack in (
        "hread loader (most recent",
        "in stuck_in_the_loader",
        "hread MainThread (most recent",
        "in wait_for",
    ):
        assert stack in hang
    assert "process 3: continued: step 41 has finished" in end
    assert "last finished: step 41; step 42 was dispatched" in again
    assert "last finished: step 42; none is running" in idle
    assert capsys.readouterr().err.startswith(hang + end)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_reported_while_steps_finish_and_zero_seconds_watch_nothing():
    messages = []
    with Watchdog(2.0, messages.append) as watchdog, Watchdog(0, messages.append) as none:
        none.beat(1, Value())
        assert [thread.name for thread in threading.enumerate()].count("watchdog") == 1
        for step in range(1, 26):
            watchdog.beat(step, Value(ready=True))
            time.sleep(0.1)
    assert not messages


def test_a_run_that_waits_for_a_batch_names_the_step_in_its_directory(tmp_path, capsys):
    file = tmp_path / "watchdog" / "process-0.txt"
    config = parse({"train": {"steps": 5, "warmup_steps": 1}, "monitor": {"watchdog_seconds": 0.3}})

    def read_a_slow_disk():
        yield from range(3)
        wait_for(lambda: file.exists() and "last finished: step 3; none is running" in file.read_text())
        yield 3
        wait_for(lambda: "process 0: continued: step 4 has finished" in file.read_text())
        yield 4

    stream = read_a_slow_disk()
    with Monitor(config, tmp_path) as monitor:
        monitor.begin_stage(Setup(config))
        for step in range(1, 6):
            monitor.next(stream)
            monitor.before(step, None)
            monitor.after(step, Value(ready=True))
    assert "in read_a_slow_disk" in file.read_text()
