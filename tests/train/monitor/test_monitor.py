"""What a run writes and shows: JSON lines, TensorBoard's files, wandb, traces, the compilation cache."""

import json
import struct
import sys
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from refusals import refused
from tensorboardX.proto.event_pb2 import Event

from train.config import parse
from train.model.build import Setup
from train.monitor.logs import MetricsLog, read_metrics
from train.monitor.monitor import Monitor, check_monitor
from train.monitor.trace import Trace
from train.runtime.paths import path
from train.runtime.reuse import enable_compilation_cache


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """A local folder, and one in an object store."""
    if request.param == "local":
        yield tmp_path
        return
    folder = path(f"memory://{tmp_path.name}")
    yield folder
    folder.fs.rm("/", recursive=True)


def test_log_appends_and_never_repeats_a_step(place):
    file = place / "metrics.jsonl"
    with closing(MetricsLog(place)) as log:
        log.write(5, loss=1.5)
        log.write(10, loss=1.0)
        assert len(file.read_text().splitlines()) == 2
    file.write_bytes(file.read_bytes() + b'{"step": 15, "lo')
    assert [line["step"] for line in read_metrics(place)] == [5, 10]
    with closing(MetricsLog(place)) as log:
        assert log.last == {"step": 10, "loss": 1.0}
        log.write(10, loss=9.0)
        log.write(15, loss=0.5)
    expected = [{"step": 5, "loss": 1.5}, {"step": 10, "loss": 1.0}, {"step": 15, "loss": 0.5}]
    assert [json.loads(line) for line in file.read_text().splitlines()] == read_metrics(place) == expected


def test_an_object_store_gets_a_log_in_parts_and_readers_join_them():
    """However long the log is, a new line rewrites one part at most, and full parts never change."""
    directory = path("memory://parts")
    for first in (1, 61):
        with closing(MetricsLog(directory)) as log:
            assert log.last["step"] == first - 1
            for step in range(first, first + 60):
                log.write(step, note="x" * 9000)
                parts = {name: entry["size"] for name, entry in directory.fs.find("/parts", detail=True).items()}
                assert max(parts.values()) < 2**16 + 9100
    assert parts.keys() == {"/parts/metrics.jsonl", *(f"/parts/metrics/{number}.jsonl" for number in range(1, 15))}
    assert [line["step"] for line in read_metrics(directory)] == list(range(1, 121))
    directory.fs.rm("/parts", recursive=True)


@pytest.mark.parametrize("line", ["no JSON", "[1]", '{"loss": 1}', '{"step": null}'])
def test_a_log_without_metrics_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    refused("metrics.jsonl", lambda: MetricsLog(tmp_path))


def scalars(directory):
    """Step, name and value of all scalars in TensorBoard's files.

    A record is a length, its checksum, an event and its checksum.
    """
    found = []
    for file in sorted(directory.iterdir(), key=str):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    return found


CONFIG = {
    "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 32},
    "train": {"length": 16, "batch_tokens": 64, "steps": 4, "warmup_steps": 1},
    "stages": [{"name": "short"}, {"name": "long", "train": {"length": 32, "steps": 6}}],
}


def with_monitor(**settings):
    return parse({**CONFIG, "monitor": settings})


def report(monitor, config, steps):
    """A training loop without a model, which logs every second step."""
    for step in steps:
        if step in (steps[0], 5):
            number = 0 if step <= 4 else 1
            monitor.begin_stage(Setup(config.stage(number)), config.stage_names[number])
        monitor.next(iter([0]))
        monitor.before(step, 0.0)
        monitor.after(step, 0.0)
        if step % 2 == 0:
            rows = np.zeros((2, 16 if step <= 4 else 32), np.int32)  # one document each
            monitor.write(step, 64 * step, rows, loss=1 / step, skipped=0)


def test_all_logs_of_a_resumed_run_have_the_same_values_and_no_step_twice(place, monkeypatch):
    device = SimpleNamespace(id=0, device_kind="TPU v5 lite", coords=(0, 0, 0), slice_index=0)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    for steps in (range(1, 7), range(4, 11)):
        with Monitor(parse(CONFIG), place) as monitor:
            report(monitor, parse(CONFIG), steps)
            assert monitor.last["step"] == steps[-1]
            assert monitor.tokens_per_second > 0
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    stages = [(2, "short"), (4, "short"), (6, "long"), (8, "long"), (10, "long")]
    assert [(line["step"], line["stage"]) for line in lines] == stages
    products = 4 * 16 * 16 + 3 * 16 * 32 + 16 * 260
    for line, length, rows in zip(lines, (16, 16, 32, 32, 32), (4, 4, 2, 2, 2), strict=True):
        flops_of_a_token = (6 * products * 64 + 12 * 16 * rows * length * (length + 1) / 2) / 64
        rate = line["tokens_per_second"]
        assert line["tokens_per_second_per_chip"] == rate
        np.testing.assert_allclose(line["model_flops_per_second_per_chip"], flops_of_a_token * rate, rtol=1e-12)
        np.testing.assert_allclose(line["mfu"], flops_of_a_token * rate / 197e12, rtol=1e-12)
    expected = [
        (line["step"], name, value) for line in lines for name, value in line.items() if name not in ("step", "stage")
    ]
    found = scalars(place / "tensorboard")
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    np.testing.assert_allclose([entry[2] for entry in found], [entry[2] for entry in expected], rtol=1e-6)


def test_other_processes_write_and_show_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Monitor(parse(CONFIG), tmp_path, label="mine") as monitor:
        report(monitor, parse(CONFIG), range(1, 11))
        assert monitor.last["loss"] == 0.1
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_wandb_gets_the_known_values_and_its_run_resumes(tmp_path, monkeypatch):
    """Wandb need not be installed; a stub records its calls."""
    wandb, config = MagicMock(), with_monitor(wandb="lengths", tensorboard=False)
    wandb.__spec__ = object()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (range(1, 3), range(1, 5)):
        with Monitor(config, tmp_path) as monitor:
            report(monitor, config, steps)
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("lengths", "run", "allow")
    assert first["config"]["train"]["length"] == 16
    one, two = wandb.init.return_value.log.call_args_list
    assert (one.kwargs["step"], one.args[0]["loss"], two.kwargs["step"]) == (2, 0.5, 4)
    assert not {"mfu", "stage"} & set(one.args[0])
    assert wandb.init.return_value.finish.call_count == 2
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


EVALUATES = {"evaluate_every": 5}
REFUSALS = [
    ("monitor.profile", lambda: check_monitor(with_monitor(profile=[1, 11]))),
    ("monitor.profile", lambda: check_monitor(with_monitor(profile=[3, 2]))),
    ("monitor.wandb", lambda: check_monitor(with_monitor(wandb="lengths"))),
    ("monitor.evaluate_every", lambda: check_monitor(parse({"model": {"causal": False}, "monitor": EVALUATES}))),
]


@pytest.mark.parametrize(("name", "call"), REFUSALS)
def test_settings_that_cannot_work_are_refused(name, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(name, call)
    check_monitor(with_monitor(profile=[10, 10]))


@pytest.mark.parametrize(("steps", "traced"), [(range(1, 6), [2, 3]), (range(3, 4), [3])], ids=["all", "cut off"])
def test_a_trace_holds_the_asked_steps(place, steps, traced):
    with Trace([2, 3], place / "profile") as trace:
        for step in steps:
            trace.before(step, 0.0)
            with jax.profiler.TraceAnnotation(f"<step {step}>"):
                result = jax.jit(lambda x: 2 * x)(1.0)
            trace.after(step, result)
    (content,) = [file.read_bytes() for file in (place / "profile").rglob("*.pb") if str(file).endswith(".xplane.pb")]
    assert [step for step in range(1, 7) if f"<step {step}>".encode() in content] == traced


@pytest.fixture
def cache(monkeypatch):
    """Enables JAX's cache, and restores its settings after the test."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_in_the_folder_that_is_asked_for(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert enable_compilation_cache("auto") == str(tmp_path / "posjax" / "xla")
    jax.jit(lambda x: 3 * x)(1.0)
    kept = list((tmp_path / "posjax" / "xla").iterdir())
    assert kept
    assert enable_compilation_cache(str(tmp_path / "other")) == str(tmp_path / "other")
    jax.jit(lambda x: 4 * x)(1.0)
    assert list((tmp_path / "other").iterdir())
    assert enable_compilation_cache("") is None
    jax.jit(lambda x: 5 * x)(1.0)
    assert set((tmp_path / "posjax" / "xla").iterdir()) == set(kept)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert enable_compilation_cache("auto") is None  # it cannot be written
    refused("monitor.compilation_cache", lambda: enable_compilation_cache(str(tmp_path / "file")))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/xla")
    assert enable_compilation_cache(str(tmp_path)) == enable_compilation_cache("") == "gs://bucket/xla"
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache(str(tmp_path / "never")) is None
    assert not (tmp_path / "never").exists()
