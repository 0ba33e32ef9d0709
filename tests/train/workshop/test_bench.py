"""The bench: libraries compute the same results, measurements are real, and problems are reported."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

import posjax as pj
from train.config import load, parse
from train.workshop import bench as module
from train.workshop.bench import BenchConfig, Timing, bench, measure, table
from train.workshop.libraries import BACKWARD, FORWARD, LIBRARIES, Shape, refuses

SMALL = Shape(64, 2, 8, "float32", FORWARD)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_posjax_and_jax_compute_the_same(direction):
    shape = Shape(64, 2, 8, "float32", direction)
    ours, theirs = (LIBRARIES[name](shape)() for name in ("posjax", "jax.nn"))
    ours, theirs = ([ours], [theirs]) if direction == FORWARD else ([ours[0], *ours[1]], [theirs[0], *theirs[1]])
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parity
def test_torch_sdpa_computes_the_same():
    torch = pytest.importorskip("torch")
    theirs = LIBRARIES["torch sdpa"](SMALL)()
    torch.manual_seed(0)  # the implementation's own inputs, drawn once more
    q, k, v = (torch.randn(1, 2, 64, 8).numpy().swapaxes(1, 2) for _ in range(3))
    ours = pj.attention(q, k, v, bias=pj.bias.ALiBi(), mask=pj.masks.Causal())
    np.testing.assert_allclose(ours, theirs.numpy().swapaxes(1, 2), atol=2e-6)


def test_a_measurement_is_a_process_with_its_own_time_and_peak():
    found = measure("posjax", SMALL, repeats=1, timeout=120)
    assert found.problem is None
    assert 0 < found.seconds < 10
    assert found.peak_bytes > 50 * 2**20


def test_an_implementation_that_cannot_run_says_why(monkeypatch):
    backward = Shape(64, 2, 8, "float32", BACKWARD)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refuses("torch flex", SMALL) == "torch is not installed"
    assert measure("torch sdpa", SMALL, 1, 1).problem == "torch is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert refuses("torch flex", backward) == "has no backward on CPU"
    assert refuses("posjax", backward) is None


def test_a_measurement_that_takes_too_long_is_reported():
    assert measure("posjax", SMALL, repeats=1, timeout=0.01).problem == "longer than 0.01 s"


def test_the_table_and_the_file_hold_every_measurement(tmp_path, monkeypatch):
    def fake(name, shape, repeats, timeout):
        if name == "jax.nn":
            return Timing(name, shape, problem="out of memory")
        return Timing(name, shape, shape.length / 1000, shape.length * 2**20)

    monkeypatch.setattr(module, "measure", fake)
    config = BenchConfig(output=str(tmp_path), lengths=(16, 2048), libraries=("posjax", "jax.nn"))
    results = bench(config)
    assert len(results) == 8
    lines = [json.loads(line) for line in (tmp_path / "bench" / "bench.jsonl").read_text().splitlines()]
    assert set(lines[0]) == {"machine", "versions"}
    assert lines[1]["shape"] == {"length": 16, "heads": 8, "head_dim": 64, "dtype": "float32", "direction": FORWARD}
    text = io.StringIO()
    Console(file=text, width=120).print(table(config, results))
    assert "2.048 s, 2,048 MiB" in text.getvalue()
    assert "out of memory" in text.getvalue()


def test_the_config_loads_and_mistakes_are_named():
    assert load("configs/bench.yaml", (), BenchConfig).lengths == (4096, 8192, 16384)
    for values, message in (
        ({"lengths": [0]}, "lengths must be positive, found 0"),
        ({"lengths": []}, "lengths is empty"),
        ({"num_heads": 0}, "num_heads must be positive, found 0"),
        ({"libraries": ["posjx"]}, "did you mean 'posjax'"),
        ({"legnths": [1]}, "did you mean 'lengths'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(values, BenchConfig)
