"""Goodput, rates, chips and their peaks, memory, and the progress that is shown."""

import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu

from train.config import parse
from train.model.build import Setup
from train.monitor.meter import KINDS, Goodput, Meter, count_chips, peak_memory_bytes, share
from train.monitor.monitor import Monitor
from train.monitor.progress import show_progress
from train.runtime.chips import CHIPS, PEAK_FLOPS


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def test_rates_are_those_since_the_last_reading_without_pauses():
    clock = Clock()
    meter = Meter(chips=2, peak=197e12, clock=clock)
    meter.step(50)
    assert set(meter.read(1e12).values()) == {None}
    assert meter.tokens_per_second is None
    meter.begin()
    for _ in range(2):
        meter.step(100)
        clock.now += 2
    assert meter.read(1e12) == {
        "tokens_per_second": 200 / 4,
        "tokens_per_second_per_chip": 200 / 4 / 2,
        "model_flops_per_second_per_chip": 2e12 / 4 / 2,
        "mfu": 2e12 / 4 / 2 / 197e12,
    }
    meter.step(1000)
    meter.pause()
    clock.now += 50
    meter.begin()
    meter.step(100)
    clock.now += 1
    found = meter.read()
    assert found["tokens_per_second"] == 100.0
    assert found["model_flops_per_second_per_chip"] is found["mfu"] is None
    assert meter.tokens_per_second == 300 / 5


def test_peaks_are_those_that_jax_knows():
    versions = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "7x": 2}
    for chip in CHIPS.values():
        known = tpu.get_tpu_info_for_chip(tpu.ChipVersion(chip.name), 1).bf16_ops_per_second * versions[chip.name]
        np.testing.assert_allclose(PEAK_FLOPS[chip.kind], known, rtol=0.003)


def test_two_devices_of_a_chip_are_one_chip():
    chips = [SimpleNamespace(id=n, coords=(n // 2, 0, 0), slice_index=0) for n in range(8)]
    assert count_chips(chips) == 4
    assert count_chips([*chips, SimpleNamespace(id=8, coords=(0, 0, 0), slice_index=1)]) == 5
    assert count_chips(jax.devices()) == 8


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    assert 2**26 < peak_memory_bytes() < 2**36
    reports = {"peak_bytes_in_use": 5}, None, {"peak_bytes_in_use": 9}, {"bytes_limit": 8}, {"peak_bytes_in_use": 7}
    devices = [SimpleNamespace(memory_stats=lambda report=report: report) for report in reports]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == 9


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    def shown(label):
        with show_progress(label, 200) as report:
            report(20, {"loss": None, "skipped": 3}, 100)
            values = {"stage": "[long]", "loss": 2.345678, "tokens_per_second": 1500.0, "mfu": 0.4123}
            report(50, values, 15000)
        return capsys.readouterr().out

    assert shown(None) == ""
    lines = shown("alibi").splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["alibi: step 20/200", "alibi: step 50/200"]
    assert "3 skipped" in lines[0]
    assert "[long] · loss 2.3457 · 1,500 tokens/s · MFU 41.2% · 0:00:10 left" in lines[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    bar = shown("alibi")
    assert "\x1b[" in bar
    assert "MFU 41.2%" in bar


def test_every_second_is_of_one_kind_also_over_a_restart():
    clock = Clock()
    first = Goodput(90.0, {}, clock)
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
        monitor.begin_stage(Setup(config))
        time.sleep(0.1)
        for step in range(3, 7):  # steps 3 and 4 were made before the restart
            monitor.before(step, None)
            time.sleep(0.3 if step == 3 else 0.2)
            monitor.after(step, 0.0)
        monitor.write(6, 0, np.zeros((1, 8), np.int32), loss=1.0)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    found = {kind: last[f"seconds_{kind}"] for kind in KINDS}
    least = {"start": 10.1, "compile": 0.3, "restart": 50.2, "steps": 40.4}
    assert all(found[kind] >= seconds - 0.001 for kind, seconds in least.items())
    assert sum(found.values()) == pytest.approx(100 + last["time"] - began)
    assert [found[kind] for kind in KINDS if kind not in least] == [0, 0, 0]
