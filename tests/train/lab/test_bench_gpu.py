"""The bench of a GPU, in small on a CPU: it goes on where it was cut off, refuses other machines, prints its tables."""

import json

import numpy as np
import pytest
from refusals import refused

from train.config import load
from train.lab.bench import BenchConfig
from train.lab.gpu.bench import bench_gpu
from train.lab.gpu.config import GpuConfig
from train.lab.gpu.jobs import BACKWARD, DECODE, ERRORS, FORWARD, OURS, Job
from train.lab.gpu.results import Results
from train.lab.gpu.worker import Worker

pytestmark = pytest.mark.lab

SMALL = {
    "implementation": "blockwise",
    "libraries": (),
    "sizes": (8,),
    "error_length": 64,
    "lengths": (64,),
    "loop_length": 64,
    "decode_length": 64,
    "threads": 2,
    "row_seconds": 0.001,
    "step": "",
    "generation": "",
}
STEP_OF = """
model: {num_layers: 1, model_dim: 16, num_heads: 2, num_kv_heads: 1, mlp_dim: 16, vocab_size: 300}
train: {length: 192, batch_tokens: 384}
"""


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_training_steps_with_their_kernels_and_generated_tokens(tmp_path, capsys):
    model = tmp_path / "model.yaml"
    model.write_text(STEP_OF)
    config = GpuConfig(**SMALL | {"step": str(model), "generation": str(model)}, forms=())
    found = bench_gpu(config, tmp_path).found
    for job in config.generations:
        rows = int(job.shape.form.split()[0])
        np.testing.assert_allclose(found[job]["tokens_per_second"] * found[job]["ms"], rows * 1e3)
    assert set(config.steps) <= set(found)
    for job in config.steps:
        np.testing.assert_allclose(found[job]["tokens_per_second"] * found[job]["ms"], 384 * 1e3)
        assert len(found[job]["kernels"]) == 20
    assert "tokens/s" in capsys.readouterr().out


def test_a_bench_that_was_cut_off_goes_on(tmp_path):
    bench_gpu(GpuConfig(**SMALL, forms=("causal",)), tmp_path)
    file = tmp_path / "gpu.jsonl"
    before = file.read_text()
    whole = GpuConfig(**SMALL, forms=("causal", "alibi"))
    bench_gpu(whole, tmp_path)
    assert file.read_text().startswith(before)
    machine, *lines = map(json.loads, file.read_text().splitlines())
    assert machine["machine"]["device"] == "cpu"
    results = Results(file)
    assert len(lines) == len(results.found)
    assert set(results.found) == set(whole.jobs)
    for job, found in results.found.items():
        assert found["out"] < 0.01 if job.what == ERRORS else found["ms"] > 0


def test_other_machines_are_refused(tmp_path):
    config = GpuConfig(**SMALL, forms=("causal",))
    Results(tmp_path / "gpu.jsonl").claim({"device": "NVIDIA H200"})
    refused("name", lambda: bench_gpu(config, tmp_path))
    needs_one = load("configs/gpu.yaml", ["gpu.libraries=[]"], BenchConfig).gpu
    refused("gpu.implementation", lambda: bench_gpu(needs_one, tmp_path / "new"))


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    config = GpuConfig(**SMALL)
    worker = Worker("jax", list(config.jobs), config.options, tmp_path / "gpu.log")
    assert worker.answer(0.01) == {"problem": "longer than 0.01 s"}
    assert not worker.runs


def test_tables_need_no_gpu(tmp_path, capsys):
    config = GpuConfig(sizes=(64,), seconds=0)
    results = Results(tmp_path / "gpu.jsonl")
    results.claim({"device": "NVIDIA H100 80GB HBM3"})
    shapes = {form: config.shape(form, 4096, 64) for form in ("causal", "alibi")}
    results.add(Job(FORWARD, "cudnn", shapes["causal"]), {"ms": 2.0})
    results.add(Job(BACKWARD, "cudnn", shapes["causal"]), {"ms": 8.0})
    results.add(Job(FORWARD, OURS, shapes["alibi"]), {"ms": 3.0})
    results.add(Job(BACKWARD, OURS, shapes["alibi"]), {"ms": 10.0})
    results.add(Job(FORWARD, "torch flex", shapes["alibi"]), {"problem": "ValueError: no [/compiler]"})
    decoding = next(job for job in config.jobs if job.what == DECODE)
    results.add(decoding, {"ms": 1.0, "gigabytes_per_second": 1676.0})
    bench_gpu(config, tmp_path)
    printed = capsys.readouterr().out
    for words in ("3 / 10", "1.5 / 1.25", "1,676 GB/s, 50%", "no [/compiler]"):
        assert words in printed
