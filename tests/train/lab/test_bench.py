"""The bench: libraries compute the same results, measurements are real, and problems are reported."""

import json
import sys

import numpy as np
import pytest
from refusals import refused

import posjax as pj
from train import cli
from train.config import load, parse
from train.lab.bench import BenchConfig, bench, measure
from train.lab.libraries import BACKWARD, FORWARD, LIBRARIES, Shape

SMALL = Shape(64, 2, 8, "float32", FORWARD)


@pytest.mark.lab
def test_posjax_and_jax_compute_the_same():
    shape = Shape(64, 2, 8, "float32", BACKWARD)
    (out, gradients), (expected, expected_gradients) = (LIBRARIES[name](shape)() for name in ("posjax", "jax.nn"))
    for a, b in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.lab
@pytest.mark.parity
def test_torch_sdpa_computes_the_same():
    torch = pytest.importorskip("torch")
    theirs = LIBRARIES["torch sdpa"](SMALL)()
    torch.manual_seed(0)  # the implementation's own inputs, drawn once more
    q, k, v = (torch.randn(1, 2, 64, 8).numpy().swapaxes(1, 2) for _ in range(3))
    ours = pj.attention(q, k, v, bias=pj.bias.ALiBi(), mask=pj.masks.Causal())
    np.testing.assert_allclose(ours, theirs.numpy().swapaxes(1, 2), atol=2e-6)


def test_a_measurement_is_a_process_with_its_own_time_and_peak(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    config = BenchConfig(
        "small", str(tmp_path), (64,), 2, 8, "float32", (FORWARD,), ("posjax", "torch sdpa"), repeats=1
    )
    found, absent = bench(config)
    assert 0 < found.seconds < 10
    assert found.peak_bytes > 50 * 2**20
    assert (absent.seconds, absent.problem) == (None, "torch is not installed")
    about, line, _ = [json.loads(line) for line in (tmp_path / "small" / "bench.jsonl").read_text().splitlines()]
    assert set(about) == {"machine", "versions"}
    assert line["shape"] == {"length": 64, "heads": 2, "head_dim": 8, "dtype": "float32", "direction": FORWARD}
    assert (line["library"], line["seconds"]) == ("posjax", found.seconds)
    assert measure("posjax", SMALL, repeats=1, timeout=0.01).problem == "longer than 0.01 s"


REFUSALS = [
    ("lengths", {"lengths": []}),
    ("num_heads", {"num_heads": 0}),
    ("libraries", {"libraries": ["posjx"]}),
    ("schedule.num_heads", {"schedule": {"num_heads": 0}}),
    ("schedule.implementations", {"schedule": {"implementations": ["splash"]}}),
    ("chips", {"schedule": {"chips": ["v5e"]}}),
    ("gpu.forms", {"gpu": {"forms": ["alibis"]}}),
    ("gpu.decode_kv_heads", {"gpu": {"decode_kv_heads": [3]}}),
    ("gpu.seconds", {"gpu": {"seconds": -1}}),
]


@pytest.mark.parametrize(("name", "values"), REFUSALS)
def test_mistakes_in_a_config_are_refused(name, values):
    refused(name, lambda: parse(values, BenchConfig))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--schedule", "v5e,v5"], "--schedule"), (["--costs", "v9"], "--costs"), (["--schedule", "v5e"], "libtpu")],
)
def test_an_unknown_chip_and_a_missing_compiler_are_one_line_errors(arguments, name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert cli.main(["bench", "configs/bench.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1
    assert load("configs/bench.yaml", ["schedule.num_heads=8"], BenchConfig).schedule.shape.heads == 8
