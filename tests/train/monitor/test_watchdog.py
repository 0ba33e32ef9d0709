"""The watchdog reports a hang once, with the step, the process and the stacks of all threads."""

import threading
import time

import jax.numpy as jnp
import pytest

from train.config import parse
from train.loop.fit import fit
from train.monitor import watchdog as module
from train.monitor.monitor import Monitor
from train.monitor.watchdog import Watchdog, thread_stacks

PATIENCE = 60  # seconds for something that takes milliseconds


class Value:
    """A result on a device; the test sets `ready` when it is there."""

    ready = False

    def is_ready(self):
        return self.ready


class Messages(list):
    """The messages of a watchdog; a test can wait for them."""

    def __init__(self):
        self.condition = threading.Condition()

    def __call__(self, text):
        with self.condition:
            self.append(text)
            self.condition.notify()

    def wait(self, count):
        with self.condition:
            assert self.condition.wait_for(lambda: len(self) >= count, PATIENCE)


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


def test_a_hang_is_named_and_its_end_too(capsys, loader):
    messages, done, hanging = Messages(), Value(), Value()
    done.ready = True
    with Watchdog(0.05, messages, process=3) as watchdog:
        watchdog.beat(40, done)
        watchdog.beat(41, hanging)
        watchdog.beat(42, Value())
        messages.wait(1)
        hanging.ready = True
        messages.wait(2)
    hang, end = messages[:2]
    assert "process 3: no step has finished for 0.05 s" in hang
    assert "last finished: step 40; step 41 was dispatched and is not done" in hang
    assert "Thread loader (most recent call first):" in hang
    assert "in stuck_in_the_loader" in hang
    assert "Thread MainThread" in hang
    assert "in test_a_hang_is_named_and_its_end_too" in hang
    assert "process 3: continued: step 41 has finished" in end
    assert capsys.readouterr().err.startswith(hang + end)


@pytest.fixture
def now(monkeypatch):
    """The time of the watchdog, which a test can set."""
    times = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: times[0])
    return times


def test_each_hang_is_reported_once(now, capsys):
    messages = Messages()
    watchdog = Watchdog(10.0, messages)
    values = [Value() for _ in range(3)]
    for step, value in enumerate(values, start=1):
        watchdog.beat(step, value)
    for second in (5, 9, 11, 30):
        now[0] = float(second)
        watchdog._look()
    assert len(messages) == 1
    assert "last finished: none so far; step 1 was dispatched" in messages[0]
    values[0].ready = values[1].ready = True
    watchdog._look()
    assert messages[1].endswith("continued: step 2 has finished\n")
    now[0] = 39.0
    watchdog._look()
    assert len(messages) == 2
    now[0] = 41.0
    watchdog._look()
    assert "last finished: step 2; step 3 was dispatched" in messages[2]


def test_nothing_is_reported_while_steps_finish(now, capsys):
    messages = Messages()
    watchdog = Watchdog(10.0, messages)
    for step in range(1, 9):
        watchdog.beat(step, jnp.float32(step).block_until_ready())
        now[0] += 9.0
        watchdog._look()
    assert not messages
    now[0] += 11.0
    watchdog._look()
    assert "last finished: step 8; none is running" in messages[0]


def test_zero_seconds_watch_nothing():
    before = threading.active_count()
    with Watchdog(0, print) as watchdog:
        watchdog.beat(1, Value())
        assert threading.active_count() == before
        assert not watchdog._pending


def test_the_thread_ends_with_the_run():
    with Watchdog(1000.0, print):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_stacks_are_of_named_threads(loader):
    deadline = time.monotonic() + PATIENCE
    while "in stuck_in_the_loader" not in (text := thread_stacks()):
        assert time.monotonic() < deadline
    assert "Current thread MainThread (most recent call first):" in text


def test_a_thread_that_is_being_started_has_no_stack_yet(loader, monkeypatch):
    starting = threading.Thread(name="starting")
    monkeypatch.setattr(module.threading, "enumerate", lambda: [starting, threading.current_thread()])
    assert "thread MainThread (most recent call first):" in thread_stacks()


def wait_for_text(file, text):
    deadline = time.monotonic() + PATIENCE
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"{file} does not say {text!r}"
        time.sleep(0.01)


def test_a_run_that_waits_for_a_batch_names_the_step_in_its_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the {number}th of the texts, not the longest of them. " * 8)
    config = parse(
        {
            "data": {"source": "files", "paths": [f"{tmp_path}/text/*.txt"], "cache": ""},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "train": {"length": 16, "batch_tokens": 128, "steps": 5, "warmup_steps": 1},
            "monitor": {"tensorboard": False, "watchdog_seconds": 0.5, "compilation_cache": ""},
        }
    )
    file = tmp_path / "run" / "watchdog" / "process-0.txt"
    expected = {4: "last finished: step 3; none is running", 5: "process 0: continued: step 4 has finished"}
    steps = iter(range(1, 6))

    def read_a_slow_disk(self, stream):
        step = next(steps)
        if step in expected:
            wait_for_text(file, expected[step])
        return original(self, stream)

    original = Monitor.next
    monkeypatch.setattr(Monitor, "next", read_a_slow_disk)
    assert fit(config, tmp_path / "run").finished
    assert "in read_a_slow_disk" in file.read_text().split(expected[4])[1]
