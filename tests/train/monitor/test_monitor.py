"""What a run writes and shows: rates, JSON lines, TensorBoard's files, the progress bar, the compilation cache."""

import io
import json
import re
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import tpu
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from train.config import parse
from train.model.build import decoder_config
from train.monitor import monitor as module
from train.monitor import progress as bars
from train.monitor.cache import enable_compilation_cache, user_cache
from train.monitor.logs import MetricsLog, read_metrics
from train.monitor.meter import Meter, count_chips, peak_memory_bytes
from train.monitor.monitor import Monitor, check_monitor, tokens_left
from train.monitor.trace import Trace
from train.runtime.chips import PEAK_FLOPS
from train.runtime.paths import path

ROOT = Path(__file__).parents[3]


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_rates_are_those_since_the_last_reading(clock):
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
    meter.step(100)
    clock.now += 1
    found = meter.read()
    assert (found["tokens_per_second"], found["data_wait"]) == (100.0, 0.0)
    assert found["model_flops_per_second_per_chip"] is found["mfu"] is None
    assert meter.tokens_per_second == 300 / 5


def test_a_pause_is_not_measured(clock):
    meter = Meter(1, None, clock)
    meter.begin()
    meter.step(10)
    clock.now += 2
    meter.read()
    meter.step(1000)
    meter.pause()
    clock.now += 50
    meter.begin()
    meter.step(10)
    clock.now += 2
    assert meter.read()["tokens_per_second"] == 5
    assert meter.tokens_per_second == 20 / 4


@pytest.mark.parametrize(
    ("kind", "version", "cores"),
    [
        ("TPU v4", "v4", 2),
        ("TPU v5 lite", "v5e", 1),
        ("TPU v5", "v5p", 2),
        ("TPU v6 lite", "v6e", 1),
        ("TPU7x", "7x", 2),
    ],
)
def test_peaks_are_those_that_jax_knows(kind, version, cores):
    known = tpu.get_tpu_info_for_chip(tpu.ChipVersion(version), 1).bf16_ops_per_second * cores
    np.testing.assert_allclose(PEAK_FLOPS[kind], known, rtol=0.003)
    assert sum(kind.startswith("TPU") for kind in PEAK_FLOPS) == 5


def test_no_peak_is_made_up():
    assert jax.devices()[0].device_kind not in PEAK_FLOPS


def test_two_devices_of_a_chip_are_one_chip():
    chips = [SimpleNamespace(id=n, coords=(n // 2, 0, 0), slice_index=0) for n in range(8)]
    assert count_chips(chips) == 4
    assert count_chips([*chips, SimpleNamespace(id=8, coords=(0, 0, 0), slice_index=1)]) == 5
    assert count_chips(jax.devices()) == 8


SEES_AN_ARRAY = """
import numpy as np
from train.monitor.meter import peak_memory_bytes

before = peak_memory_bytes()
kept = np.ones(before // 4, np.float64)  # twice what there was
assert before + kept.nbytes * 0.9 < peak_memory_bytes() < before + kept.nbytes * 1.5
"""


def test_peak_memory_sees_a_large_array():
    """In a separate process, because the peak of this one may already be gigabytes."""
    subprocess.run([sys.executable, "-c", SEES_AN_ARRAY], check=True, cwd=ROOT)


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    statistics = {"peak_bytes_in_use": 5}, None, {"peak_bytes_in_use": 9}, {}
    devices = [SimpleNamespace(memory_stats=lambda found=found: found) for found in statistics]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == 9


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
    with closing(MetricsLog(place)) as log:
        assert log.last == {"step": 10, "loss": 1.0}
        log.write(10, loss=9.0)
        log.write(15, loss=0.5)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 5, "loss": 1.5},
        {"step": 10, "loss": 1.0},
        {"step": 15, "loss": 0.5},
    ]


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


def test_a_local_log_is_one_file_and_a_line_that_was_cut_off_is_not_read(tmp_path):
    with closing(MetricsLog(tmp_path)) as log:
        for step in range(1, 20):
            log.write(step, note="x" * 9000)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "no')
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 20))
    assert [place.name for place in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", ["no JSON", "[1]", '{"loss": 1}', '{"step": null}'])
def test_a_log_without_metrics_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl: its last line holds no metrics; take the line out"):
        MetricsLog(tmp_path)


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


def run(monitor, steps, clock, wait=0.25):
    """A training loop without a model, which logs every second step."""
    monitor.begin()
    for step in steps:
        monitor.next(iter([0]))
        monitor.before(step, 0.0)
        clock.now += 2.0
        monitor.after(step, 0.0)
        if step % 2 == 0:
            monitor.write(step, loss=1 / step, skipped=0)


@pytest.fixture
def timed(monkeypatch, clock):
    monkeypatch.setattr(module, "Meter", lambda *chips: Meter(*chips, clock=clock))
    return clock


def test_all_logs_have_the_same_values(place, timed, monkeypatch):
    device = SimpleNamespace(id=0, device_kind="TPU v5 lite", coords=(0, 0, 0), slice_index=0)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with Monitor(parse(CONFIG), place) as monitor:
        run(monitor, range(1, 11), timed)
        assert monitor.last["step"] == 10
        assert monitor.tokens_per_second == 64 / 2
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines] == [
        (2, "short"),
        (4, "short"),
        (6, "long"),
        (8, "long"),
        (10, "long"),
    ]
    products = 4 * 16 * 16 + 3 * 16 * 32 + 16 * 260
    for line, length, rows in zip(lines, (16, 16, 32, 32, 32), (4, 4, 2, 2, 2), strict=True):
        flops = 6 * products * 64 + 12 * 16 * rows * length * (length + 1) / 2
        np.testing.assert_allclose(line["model_flops_per_second_per_chip"], flops / 2, rtol=1e-12)
        np.testing.assert_allclose(line["mfu"], flops / 2 / 197e12, rtol=1e-12)
        assert line["tokens_per_second"] == line["tokens_per_second_per_chip"] == 32
    expected = [
        (line["step"], name, value) for line in lines for name, value in line.items() if name not in ("step", "stage")
    ]
    found = scalars(place / "tensorboard")
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    np.testing.assert_allclose([entry[2] for entry in found], [entry[2] for entry in expected], rtol=1e-6)


def test_a_resumed_run_writes_no_step_twice_anywhere(tmp_path, timed):
    config = parse(CONFIG)
    for steps in (range(1, 7), range(4, 11)):
        with Monitor(config, tmp_path) as monitor:
            run(monitor, steps, timed)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert [step for step, name, _ in scalars(tmp_path / "tensorboard") if name == "loss"] == [2, 4, 6, 8, 10]


def test_other_processes_write_and_show_nothing(tmp_path, timed, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Monitor(parse(CONFIG), tmp_path, label="mine") as monitor:
        run(monitor, range(1, 11), timed)
        assert monitor.last["loss"] == 0.1
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_tensorboard_may_be_turned_off(tmp_path, timed):
    with Monitor(parse({**CONFIG, "monitor": {"tensorboard": False}}), tmp_path) as monitor:
        run(monitor, range(1, 3), timed)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_flops_of_some_of_the_rows_are_scaled_to_all_rows():
    config = parse({**CONFIG, "stages": []})
    ids = np.zeros((2, 16), np.int32)
    ids[:, 8:] = 1
    decoder = decoder_config(config)
    whole = module.model_flops(config.train, decoder, np.concatenate([ids, ids]))
    assert module.model_flops(config.train, decoder, ids) == whole < module.model_flops(config.train, decoder, None)


class Wandb:
    """A stub of wandb, which need not be installed; it records its calls."""

    def __init__(self):
        self.calls = []

    def init(self, **settings):
        self.calls.append(settings)
        return self

    def log(self, values, step):
        self.calls.append((step, values))

    def finish(self):
        self.calls.append("finished")


def test_wandb_gets_the_known_values_and_its_run_resumes(tmp_path, timed, monkeypatch):
    wandb, config = Wandb(), parse({**CONFIG, "monitor": {"wandb": "lengths", "tensorboard": False}})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for steps in (range(1, 3), range(1, 5)):
        with Monitor(config, tmp_path) as monitor:
            run(monitor, steps, timed)
    (first, one, end, second, two, _) = wandb.calls
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("lengths", "run", "allow")
    assert first["config"]["train"]["length"] == 16
    assert end == "finished"
    assert (one[0], one[1]["loss"], two[0]) == (2, 0.5, 4)
    assert not {"mfu", "stage"} & set(one[1])


@pytest.mark.parametrize("steps", [[1, 11], [0, 2], [11, 12]])
def test_a_trace_of_steps_that_never_come_is_refused(steps):
    config = parse({**CONFIG, "monitor": {"profile": steps}})
    with pytest.raises(ValueError, match=r"monitor.profile must lie between steps 1 and 10"):
        check_monitor(config)
    check_monitor(parse({**CONFIG, "monitor": {"profile": [10, 10]}}))


def test_tokens_left():
    stages = [parse(CONFIG).stage(number) for number in range(2)]
    assert [tokens_left(stages, step) for step in (0, 3, 4, 5, 10)] == [640, 448, 384, 320, 0]


def test_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(bars, "Console", lambda: Console(file=screen, force_terminal=True, width=120))
    with bars.show_progress("alibi", 200) as report:
        report(10, {"loss": 3.21}, 100)
        report(20, {"loss": None, "skipped": 3}, 100)
        values = {"stage": "[long]", "loss": 2.345678, "tokens_per_second": 1500.0, "mfu": 0.4123}
        report(50, values, 15000)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
    assert "alibi" in shown
    assert "50/200 [long] · loss 2.3457 · 1,500 tokens/s · MFU 41.2% · 0:00:10 left" in shown


def test_plain_lines_elsewhere(capsys):
    with bars.show_progress("alibi", 200) as report:
        report(10, {"loss": 3.21}, 100)
        report(20, {"loss": None, "skipped": 3}, 100)
    assert (
        capsys.readouterr().out
        == "alibi: step 10/200 · loss 3.2100\nalibi: step 20/200 · loss not finite · 3 skipped\n"
    )


def test_nothing_is_shown_without_a_label(capsys):
    with bars.show_progress(None, 200) as report:
        report(10, {"loss": 3.21}, 5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("steps", [range(1, 6), range(3, 6), range(1, 4)])
def test_trace_of_some_steps(place, monkeypatch, steps):
    calls, inside = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append(directory))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(None))
    with Trace([2, 4], place / "profile") as trace:
        for step in steps:
            trace.before(step, 0.0)
            inside += [step] * (len(calls) == 1)
            trace.after(step, 0.0)
    assert inside == [step for step in steps if 2 <= step <= 4]
    assert calls[1:] == [None]


def test_a_trace_is_left_behind(place):
    double = jax.jit(lambda x: 2 * x)
    with Trace([1, 1], place / "profile") as trace:
        trace.before(1, 0.0)
        trace.after(1, double(1.0))
    assert any(str(file).endswith(".xplane.pb") and file.stat().st_size for file in (place / "profile").rglob("*.pb"))


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


def test_programs_are_kept_in_the_users_cache(cache, tmp_path, monkeypatch):
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


def test_where_the_users_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(sys, "platform", "linux")
    assert str(user_cache()) == "/home/ada/.cache/posjax/xla"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(user_cache()) == "/home/ada/Library/Caches/posjax/xla"


def test_a_folder_of_the_environment_wins(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/xla")
    assert enable_compilation_cache(str(tmp_path)) == enable_compilation_cache("") == "gs://bucket/xla"


def test_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"monitor.compilation_cache: cannot write into '.*file'; name another folder"):
        enable_compilation_cache(str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert enable_compilation_cache("auto") is None


def test_the_environment_turns_every_cache_off(cache, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache(str(tmp_path / "xla")) is None
    assert not (tmp_path / "xla").exists()
