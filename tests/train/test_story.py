"""A run from end to end, as a pod has it: hosts that share an object store and nothing else, of which one dies."""

import json
import random
import signal

import fsspec
import pytest
import yaml
from object_store import of_the_store, serving_by_another
from processes import Processes

pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

STEPS, HOSTS = 12, 4
RUNS = "gs://bucket/runs"
EXTENDED = {"name": "rope", "label": "ntk", "extend": {"frequencies": {"name": "ntk", "factor": 8.0}}}


@pytest.fixture
def store(monkeypatch):
    """The files of the store, which also this process takes for Google's, with some texts."""
    draw = random.Random(0)
    with serving_by_another() as address:
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("gs", token="anon", skip_instance_cache=True, use_listings_cache=False)
        for number in range(6):
            text = " ".join(draw.choices(("the", "of", "a", "text", "not"), k=200))
            files.pipe_file(f"bucket/text/{number}.txt", text.encode())
        yield files


@pytest.fixture
def folder(tmp_path):
    """A config of rows that four devices share, a piece each."""
    data = {"source": "files", "paths": ["gs://bucket/text/*.txt"], "held_out": 0.3, "cache": "gs://bucket/tokens"}
    train = {"length": 32, "batch_tokens": 128, "steps": STEPS, "warmup_steps": 2, "checkpoint_every": 3}
    config = {
        "output": RUNS,
        "data": data,
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 4, "mlp_dim": 16},
        "train": train | {"log_every": 1, "mesh": {"data": 1, "context": HOSTS}},
        "evaluate": {"lengths": [32, 256], "tokens": 512, "batch_tokens": 512},
        "compare": {"schemes": ["rope", EXTENDED]},
        "monitor": {"tensorboard": False, "evaluate_every": 4, "compilation_cache": str(tmp_path / "compiled")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def rows(store, name: str) -> list[dict]:
    place = f"bucket/runs/{name}"
    return [json.loads(line) for line in store.cat_file(place).splitlines()] if store.exists(place) else []


def test_a_pod_trains_loses_a_host_resumes_and_is_measured(folder, store):
    hosts = Processes(folder, "pod", HOSTS, 1)
    hosts.wait_until(lambda: store.exists("bucket/runs/pod/checkpoints/3/checksums"))
    hosts.send(signal.SIGKILL, 2)
    hosts.end(None, None, -9, None)
    Processes(folder, "pod", HOSTS, 1).end(*[0] * HOSTS)
    measured = Processes(folder, "pod", 2, 2, "evaluate.mesh={data: 1, fsdp: 2, context: 2}", command="evaluate")
    measured.end(0, 0)
    alone = {0: ["--prompt", "the text", "--tokens", "5"]}
    for command, own in (("generate", alone), ("compare", None), ("export", {0: ["gs://bucket/model"]})):
        Processes(folder, "pod" if command != "compare" else "both", 1, 4, own=own, command=command).end(0)

    assert [row["length"] for row in rows(store, "pod/evaluation.jsonl")] == [32, 256]
    both = {(row["label"], row["length"]): row["window_nll"] for row in rows(store, "both/results.jsonl")}
    assert both.keys() == {(label, length) for label in ("rope", "ntk") for length in (32, 256)}
    for row in rows(store, "pod/evaluation.jsonl"):  # trained alike, by one process
        assert row["window_nll"] == pytest.approx(both["rope", row["length"]], rel=1e-3)
    assert store.exists("bucket/model/model.safetensors")
    page = store.cat_file("bucket/runs/pod/index.html").decode()
    for part in ("256 (8x)", "Time of training", "restart", "training.png"):
        assert part in page
