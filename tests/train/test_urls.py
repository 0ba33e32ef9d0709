"""Every command reads and writes at gs:// URLs; fake-gcs-server replaces Google's store."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import yaml
from flags import environment
from object_store import of_the_store, serving_by_another

pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUNS = "gs://bucket/runs"
RUN = f"{RUNS}/mine"
SCRIPT = """
import json, sys
from train.cli import main
print("statuses", json.dumps([main(command) for command in json.loads(sys.argv[1])]))
"""
PI = {"frequencies": {"name": "linear", "factor": 2.0}}


@pytest.fixture
def folder(tmp_path):
    """A folder with text, a config of a run and one of languages; both write into the store."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the {number}th of the texts, not the longest of them. " * 30)
    train = {"length": 16, "batch_tokens": 32, "steps": 4, "warmup_steps": 1, "log_every": 1, "checkpoint_every": 2}
    config = {
        "output": RUNS,
        "data": {"source": "files", "paths": [f"{tmp_path}/text/*.txt"], "held_out": 0.3, "cache": ""},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
        "train": train,
        "evaluate": {"lengths": [16, 32], "tokens": 128, "batch_tokens": 64},
        "compare": {"schemes": ["rope", {"name": "rope", "label": "pi", "extend": PI}]},
        "monitor": {"evaluate_every": 2, "compilation_cache": str(tmp_path / "compiled")},
    }
    languages = {
        "output": RUNS,
        "languages": ["even pairs"],
        "schemes": ["rope"],
        "train_length": 4,
        "test_lengths": [4],
    }
    sizes = {"num_layers": 1, "model_dim": 8, "num_heads": 1, "steps": 2, "batch": 2, "test_batches": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "languages.yaml").write_text(yaml.safe_dump(languages | sizes))
    return tmp_path


def run(folder: Path, address: str, *commands: list[str]) -> str:
    """Runs the commands one after the other in one process and returns their output; all must succeed."""
    env = environment(**of_the_store(address)) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, env=env, timeout=300, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert f"statuses {json.dumps([0] * len(commands))}" in done.stdout, output
    return output


class Bucket:
    """What is in the store, as gcsfs reads it."""

    def __init__(self, monkeypatch, address: str):
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        self._files = fsspec.filesystem("gs", skip_instance_cache=True)

    def names(self, under: str) -> set[str]:
        self._files.invalidate_cache()
        return {name.removeprefix(f"bucket/{under}/") for name in self._files.find(f"bucket/{under}")}

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in self._files.cat_file(f"bucket/{name}").splitlines()]


def losses(rows: list[dict], label: str) -> dict[int, float]:
    return {row["length"]: row["window_nll"] for row in rows if row["label"] == label}


def test_every_command_reads_and_writes_in_an_object_store(folder, monkeypatch):
    from_text = ["data.source=files", f"data.paths=['{folder}/text/*.txt']", "data.held_out=0.3", "data.cache=''"]
    sizes = ["evaluate.lengths=[16, 32]", "evaluate.tokens=128", f"output={RUNS}"]
    released = ["data.tokenizer=bytes", *from_text, *sizes]
    study = ["init=gs://bucket/exported", "train.steps=0", "evaluate.lengths=[16]", "data.tokenizer=bytes"]
    with serving_by_another() as address:
        output = run(
            folder,
            address,
            ["fit", "mine.yaml"],
            ["evaluate", RUN],
            ["generate", RUN, "--prompt", "the", "--tokens", "5"],
            ["search", RUN, "--length", "64", "--population", "4", "--iterations", "1"],
            ["export", RUN, "gs://bucket/exported"],
            ["evaluate", "gs://bucket/exported", "name=released", *released],
            ["verify", RUN],
            ["compare", f"{RUN}/config.yaml", "name=both"],
            ["compare", "mine.yaml", "name=both"],
            ["compare", "mine.yaml", "name=study", "compare.schemes=[released]", *study],
            ["languages", "languages.yaml"],
        )
        bucket = Bucket(monkeypatch, address)
        page = {"index.html", "figure.png"}
        results = {"evaluation.jsonl", "longrope.json", "metrics.jsonl", "training.png"}
        assert bucket.names("runs/mine") >= page | results
        assert bucket.names("runs/released") == page | {"evaluation.jsonl", "model.txt"}
        assert bucket.names("runs/both") >= page | {"results.jsonl", "config.yaml", "rope-seed0/results.jsonl"}
        assert bucket.names("runs/study") == {"index.html", "figure.png", "results.jsonl", "config.yaml"}
        assert bucket.names("runs/languages") == {"figure.png", "results.jsonl"}
        assert [row["error"] for row in bucket.rows("runs/study/results.jsonl")] == [None] * 3
        assert bucket.names("exported") == {"config.json", "model.safetensors"}
        evaluated = bucket.rows("runs/mine/evaluation.jsonl")
        assert evaluated[0]["training"]["tokens"] == [64, 128]
        both = bucket.rows("runs/both/results.jsonl")
        assert losses(both, "rope") == losses(evaluated, "rope")
        assert losses(both, "pi").keys() == {16, 32}
        exported = losses(bucket.rows("runs/released/evaluation.jsonl"), "released")
        assert exported == pytest.approx(losses(evaluated, "rope"), rel=1e-5)
        assert bucket.rows("runs/mine/longrope.json")[0]["extend"]["frequencies"]["name"] == "longrope"
        assert "step 4: whole\nstep 2: whole\n" in output
        assert "rope-seed0 (finished before)" in output
    assert not [place for place in folder.rglob("*") if place.name in ("runs", "gs:", "gs:bucket")]
    assert not os.path.exists(ROOT / "gs:")
