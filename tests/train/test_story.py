"""Runs at gs:// URLs from end to end: every command in one process, and a pod that shares only the object store.

fake-gcs-server replaces Google's store.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import yaml
from flags import environment
from object_store import of_the_store, serving_by_another
from processes import Processes

pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUNS = "gs://bucket/runs"
RUN = f"{RUNS}/mine"
NTK = {"name": "rope", "label": "ntk", "extend": {"frequencies": {"name": "ntk", "factor": 8.0}}}
STEPS, HOSTS = 40, 2


class Bucket:
    """What is in the store, as gcsfs reads it."""

    def __init__(self):
        self._files = fsspec.filesystem("gs", skip_instance_cache=True)

    def put(self, name: str, text: str) -> None:
        self._files.pipe_file(f"bucket/{name}", text.encode())

    def has(self, name: str) -> bool:
        self._files.invalidate_cache()
        return self._files.exists(f"bucket/{name}")

    def read(self, name: str) -> bytes:
        return self._files.cat_file(f"bucket/{name}")

    def names(self, under: str) -> set[str]:
        self._files.invalidate_cache()
        return {name.removeprefix(f"bucket/{under}/") for name in self._files.find(f"bucket/{under}")}

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in self.read(name).splitlines()]

    def losses(self, name: str, label: str) -> dict[int, float]:
        return {row["length"]: row["window_nll"] for row in self.rows(name) if row["label"] == label}


@pytest.fixture
def bucket(monkeypatch):
    """The store that all processes use instead of Google's, with some texts."""
    draw = random.Random(0)
    with serving_by_another() as address:
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        found = Bucket()
        for number in range(6):
            found.put(f"text/{number}.txt", " ".join(draw.choices(("the", "of", "a", "text", "not"), k=200)))
        yield found


def write_config(folder, name, train, cache="", **evaluate):
    """A config whose text and results are in the store."""
    config = {
        "output": RUNS,
        "data": {"source": "files", "paths": ["gs://bucket/text/*.txt"], "held_out": 0.3, "cache": cache},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 4, "mlp_dim": 16},
        "train": {"warmup_steps": 1, "log_every": 1, **train},
        "evaluate": evaluate,
        "compare": {"schemes": ["rope", NTK]},
        "monitor": {"tensorboard": False, "evaluate_every": 2, "compilation_cache": str(folder / "compiled")},
    }
    (folder / name).write_text(yaml.safe_dump(config))


LANGUAGES = """
{output: gs://bucket/runs, languages: [even pairs], schemes: [rope], train_length: 4, test_lengths: [4],
  num_layers: 1, model_dim: 8, num_heads: 1, steps: 2, batch: 2, test_batches: 1}
"""
SCRIPT = """
import json, sys
from train.cli import main
print("statuses", json.dumps([main(command) for command in json.loads(sys.argv[1])]))
"""


def run(folder: Path, *commands: list[str]) -> str:
    """Runs the commands one after the other in one process and returns their output; all must succeed."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=folder, env=env, timeout=300, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert f"statuses {json.dumps([0] * len(commands))}" in done.stdout, output
    return output


def test_every_command_reads_and_writes_in_an_object_store(tmp_path, bucket):
    train = {"length": 16, "batch_tokens": 32, "steps": 4, "checkpoint_every": 2}
    write_config(tmp_path, "mine.yaml", train, lengths=[16, 32], tokens=128, batch_tokens=64)
    (tmp_path / "languages.yaml").write_text(LANGUAGES)
    text = ["data.source=files", "data.paths=['gs://bucket/text/*.txt']", "data.held_out=0.3", "data.cache=''"]
    sizes = ["data.tokenizer=bytes", "evaluate.lengths=[16, 32]", "evaluate.tokens=128", f"output={RUNS}"]
    study = ["init=gs://bucket/exported", "train.steps=0", "evaluate.lengths=[16]", "data.tokenizer=bytes"]
    output = run(
        tmp_path,
        ["fit", "mine.yaml"],
        ["evaluate", RUN],
        ["generate", RUN, "--prompt", "the", "--tokens", "5"],
        ["search", RUN, "--length", "64", "--population", "4", "--iterations", "1"],
        ["export", RUN, "gs://bucket/exported"],
        ["evaluate", "gs://bucket/exported", "name=released", *text, *sizes],
        ["verify", RUN],
        ["compare", f"{RUN}/config.yaml", "name=both"],
        ["compare", "mine.yaml", "name=both"],
        ["compare", "mine.yaml", "name=study", "compare.schemes=[released]", *study],
        ["languages", "languages.yaml"],
    )
    page = {"index.html", "figure.png"}
    results = {"evaluation.jsonl", "longrope.json", "metrics.jsonl", "training.png"}
    assert bucket.names("runs/mine") >= page | results
    assert bucket.names("runs/released") == page | {"evaluation.jsonl", "model.txt"}
    assert bucket.names("runs/both") >= page | {"results.jsonl", "config.yaml", "rope-seed0/results.jsonl"}
    assert bucket.names("runs/study") == page | {"results.jsonl", "cells.jsonl", "config.yaml"}
    assert bucket.names("runs/languages") == {"figure.png", "results.jsonl"}
    assert bucket.names("exported") == {"config.json", "model.safetensors"}
    assert {row["error"] for row in bucket.rows("runs/study/results.jsonl")} == {None}
    assert bucket.rows("runs/mine/evaluation.jsonl")[0]["training"]["tokens"] == [64, 128]
    evaluated = bucket.losses("runs/mine/evaluation.jsonl", "rope")
    assert bucket.losses("runs/both/results.jsonl", "rope") == evaluated
    assert bucket.losses("runs/both/results.jsonl", "ntk").keys() == {16, 32}
    exported = bucket.losses("runs/released/evaluation.jsonl", "released")
    assert exported == pytest.approx(evaluated, rel=1e-5)
    assert bucket.rows("runs/mine/longrope.json")[0]["extend"]["frequencies"]["name"] == "longrope"
    assert "step 4: whole\nstep 2: whole\n" in output
    assert "rope-seed0 (finished before)" in output
    assert not [place for place in tmp_path.rglob("*") if place.name in ("runs", "gs:", "gs:bucket")]
    assert not os.path.exists(ROOT / "gs:")


def test_a_pod_trains_loses_a_host_resumes_and_is_measured(tmp_path, bucket):
    """The hosts split the rows; a comparison makes the same training in one process that is not killed."""
    train = {"length": 32, "batch_tokens": 128, "steps": STEPS, "checkpoint_every": 3}
    train["mesh"] = {"data": 1, "context": HOSTS}
    lengths = {"lengths": [32, 256], "tokens": 512, "batch_tokens": 512}
    write_config(tmp_path, "config.yaml", train, "gs://bucket/tokens", **lengths)
    hosts = Processes(tmp_path, "pod", HOSTS, 1)
    hosts.wait_until(lambda: bucket.has("runs/pod/checkpoints/3/commit_success.txt"))
    hosts.send(signal.SIGKILL, 1)
    hosts.end(None, -9)
    Processes(tmp_path, "pod", HOSTS, 1).end(*[0] * HOSTS)
    other = "evaluate.mesh={data: 1, fsdp: 2, context: 2}"
    Processes(tmp_path, "pod", 2, 2, other, command="evaluate").end(0, 0)
    Processes(tmp_path, "both", 1, HOSTS, command="compare").end(0)
    measured = bucket.losses("runs/pod/evaluation.jsonl", "rope")
    assert measured == pytest.approx(bucket.losses("runs/both/results.jsonl", "rope"), rel=1e-3)
    assert measured.keys() == bucket.losses("runs/both/results.jsonl", "ntk").keys() == {32, 256}
    page = bucket.read("runs/pod/index.html").decode()
    for part in ("256 (8x)", "Time of training", "restart", "data:image/png"):
        assert part in page
    assert bucket.read("runs/pod/training.png")
