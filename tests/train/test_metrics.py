"""Throughput, memory, JSON lines and the progress bar."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from train import metrics
from train.config import TrainConfig
from train.metrics import MetricsLog, Throughput, peak_memory_bytes, show_progress


def test_throughput_counts_from_begin_on():
    times = iter([10.0, 14.0, 20.0])
    throughput = Throughput(100, clock=lambda: next(times))
    throughput.step()
    assert throughput.rate() is None
    throughput.begin()
    assert throughput.rate() is None
    throughput.step()
    throughput.step()
    assert throughput.rate() == 2 * 100 / 4
    throughput.step()
    assert throughput.rate() == 3 * 100 / 10


def test_peak_memory_sees_a_large_array():
    before = peak_memory_bytes()
    kept = np.ones(before // 4, np.float64)  # twice what there was
    assert before + kept.nbytes * 0.9 < peak_memory_bytes() < before + kept.nbytes * 1.5


def test_log_appends_and_never_repeats_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(5, loss=1.5)
        log.write(10, loss=1.0)
    with MetricsLog(path) as log:
        assert log.last == {"step": 10, "loss": 1.0}
        log.write(10, loss=9.0)
        log.write(15, loss=0.5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 5, "loss": 1.5},
        {"step": 10, "loss": 1.0},
        {"step": 15, "loss": 0.5},
    ]


@pytest.fixture
def config():
    return TrainConfig(length=10, batch_tokens=100, steps=200)


def test_bar_on_a_terminal(config, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(metrics, "Console", lambda: Console(file=screen, force_terminal=True, width=120))
    with show_progress("alibi", config) as report:
        report(10, 3.21, None)
        report(50, 2.345678, 1500.0)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
    assert "alibi" in shown
    assert "50/200 loss 2.3457 · 1,500 tokens/s · 0:00:10 left" in shown


def test_nothing_is_shown_without_a_label(config, capsys):
    with show_progress(None, config) as report:
        report(10, 3.21, 5.0)
    assert capsys.readouterr() == ("", "")
