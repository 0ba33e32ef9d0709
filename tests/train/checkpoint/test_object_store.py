"""A run whose folder is at gs://: everything it writes goes through gcsfs and TensorStore to a store in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flags import environment
from object_store import of_the_store, serving

pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

RUN = "runs/mine"


def fit(config: Path, address: str) -> str:
    """Trains in its own process, which uses the store as if it were Google's; returns its standard error."""
    command = [sys.executable, "-m", "train", "fit", str(config), "name=mine"]
    root = Path(__file__).parents[3]
    env = environment(**of_the_store(address))
    done = subprocess.run(command, cwd=root, env=env, timeout=150, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def metrics(content: bytes) -> list[tuple]:
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in map(json.loads, content.splitlines())]


def test_a_run_in_an_object_store_resumes_from_the_newest_whole_checkpoint(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the {number}th of the texts, not the longest of them. " * 8)
    saving = {"checkpoint_every": 2, "keep": 3, "log_every": 1}
    config = {
        "output": "gs://bucket/runs",
        "data": {"source": "files", "paths": [f"{tmp_path}/text/*.txt"], "cache": str(tmp_path / "tokens")},
        "model": {"num_layers": 1, "model_dim": 64, "num_heads": 2, "mlp_dim": 16},
        "train": {"length": 16, "batch_tokens": 32, "steps": 6, "warmup_steps": 1, **saving},
        "monitor": {"tensorboard": False, "compilation_cache": str(tmp_path / "compiled")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with serving() as (store, address):

        def names(under: str = "") -> list[str]:
            return [name for name in store.names("bucket") if name.startswith(f"{RUN}/{under}")]

        def checkpoints() -> set[str]:
            return {name.split("/")[3] for name in names("checkpoints/")}

        def values() -> set[str]:
            """Files that hold the embedding (65,536 bytes) or a moment of it; those of Orbax's index are smaller."""
            return {name for name in names("checkpoints/") if "/ocdbt.process_0/d/" in name and size(name) > 40_000}

        def size(name: str) -> int:
            return len(store.objects["bucket", name][0])

        def cut_off() -> None:
            """Leaves the files of a run that was killed before it logged its last step."""
            lines = store.objects["bucket", f"{RUN}/metrics.jsonl"][0].splitlines(keepends=True)
            store.put("bucket", f"{RUN}/metrics.jsonl", b"".join(lines[:5]))
            del store.objects["bucket", f"{RUN}/fit.json"]

        assert "damaged" not in fit(tmp_path / "config.yaml", address)
        assert checkpoints() == {"2", "4", "6"}
        # No values are read, not even to seal. Less than half may be: these files can hold a part of Orbax's index.
        assert {name.split("/")[3] for name in values()} == {"2", "4", "6"}
        assert all(store.read[name] < size(name) / 2 for name in values())
        straight = metrics(store.objects["bucket", f"{RUN}/metrics.jsonl"][0])
        assert [step for step, *_ in straight] == [1, 2, 3, 4, 5, 6]

        # The newest checkpoint was not written completely; in the one before, a bit has flipped.
        cut_off()
        for name in (*names("checkpoints/6/checksums/"), f"{RUN}/checkpoints/6/commit_success.txt"):
            del store.objects["bucket", name]
        arrays = max(names("checkpoints/4/parameters/ocdbt"), key=size)
        content = store.objects["bucket", arrays][0]
        store.put("bucket", arrays, content[:-1] + bytes([content[-1] ^ 1]))
        log = fit(tmp_path / "config.yaml", address)
        folder = "gs://bucket/runs/mine/checkpoints"
        assert f"the checkpoint of step 6 in {folder} was not finished when the run ended; removing it" in log
        assert f"the checkpoint of step 4 in {folder} is damaged (" in log
        assert f"{arrays.removeprefix(f'{RUN}/checkpoints/4/')} has changed since it was written" in log
        assert checkpoints() == {"2", "4", "4.damaged", "6"}
        assert metrics(store.objects["bucket", f"{RUN}/metrics.jsonl"][0]) == straight
