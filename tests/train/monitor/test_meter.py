"""Rates, chips and their peaks, memory, the progress that is shown, and the bench of the loop."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu

from train.config import parse
from train.loop.step import Program
from train.monitor.meter import Meter, count_chips, peak_memory_bytes
from train.monitor.progress import show_progress
from train.runtime.chips import CHIPS, PEAK_FLOPS
from train.workshop.bench_loop import WARM_BLOCKS, Seconds, TimedBlocks, bench_loop

ROOT = Path(__file__).parents[3]


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
        with meter.waiting():
            clock.now += 0.5
        meter.step(100)
        clock.now += 1.5
    assert meter.read(1e12) == {
        "tokens_per_second": 200 / 4,
        "tokens_per_second_per_chip": 200 / 4 / 2,
        "model_flops_per_second_per_chip": 2e12 / 4 / 2,
        "mfu": 2e12 / 4 / 2 / 197e12,
        "data_wait": 1 / 4,
    }
    meter.step(1000)
    meter.pause()
    clock.now += 50
    meter.begin()
    meter.step(100)
    clock.now += 1
    found = meter.read()
    assert (found["tokens_per_second"], found["data_wait"]) == (100.0, 0.0)
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


SEES_AN_ARRAY = """
import numpy as np
from train.runtime.machine import resident_peak_bytes

before = resident_peak_bytes()
kept = np.ones(before // 4, np.float64)  # twice what there was
assert before + kept.nbytes * 0.9 < resident_peak_bytes() < before + kept.nbytes * 1.5
"""


def test_peak_memory_sees_a_large_array():
    """In a separate process, because the peak of this one may already be gigabytes."""
    subprocess.run([sys.executable, "-c", SEES_AN_ARRAY], check=True, cwd=ROOT)


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    assert peak_memory_bytes() > 2**20
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


def test_blocks_of_the_loop_and_of_the_bare_step_take_turns_and_each_has_its_time():
    clock, order = Clock(), []

    def update(state, batch):
        clock.now += 2.0
        order.append(state)
        return state, 0.0

    blocks = TimedBlocks(3, clock=lambda: Seconds(clock.now, 10 * clock.now))
    bare = Program(initialize=lambda: "bare", begin=None, update=update, loss=None, abstract=None)
    measured, steps = blocks.around(bare), 3 * (WARM_BLOCKS + 2)
    for step in range(steps + 1):
        measured.update("loop", 0.0)
        clock.now += 30.0 if step < 3 else 1.0  # the rest of the loop; its first block compiles
    assert order == (["bare"] * 3 + ["loop"] * 3) * (WARM_BLOCKS + 2) + ["bare"] * 3 + ["loop"]
    assert blocks.loop == [(32.0, 320.0)] + [(3.0, 30.0)] * (WARM_BLOCKS + 1)
    assert blocks.medians() == ((3.0, 30.0), (2.0, 20.0))


@pytest.mark.lab
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
    assert min(*loop, *bare) > 0
    assert not (tmp_path / "runs").exists()
