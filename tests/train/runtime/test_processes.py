"""Runs of several processes that are killed and resumed end with the numbers of an uninterrupted run."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import yaml
from processes import Processes

STEPS = 28
LOST = "another process ended or cannot be reached; start all of them again to resume"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config, its text, and compiled programs that all runs share."""
    folder = tmp_path_factory.mktemp("processes")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(6):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(("the", "of", "a", "text", "not"), k=200)))
    train = {"length": 16, "batch_tokens": 64, "steps": STEPS, "warmup_steps": 2, "checkpoint_every": 4, "log_every": 1}
    config = {
        "output": str(folder),
        "data": {"source": "files", "paths": [f"{folder}/text/*.txt"], "held_out": 0.2, "cache": ""},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
        "train": train,
        "monitor": {"compilation_cache": str(folder / "compiled"), "tensorboard": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def metrics(directory: Path) -> list[dict]:
    """The lines of a run's metrics, without what depends on time; the last one may be half written."""
    kept = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    lines = (directory / "metrics.jsonl").read_text().split("\n")[:-1] if directory.exists() else []
    return [{key: json.loads(line)[key] for key in kept} for line in lines]


def last_step(directory: Path) -> int:
    """The last step that a run has logged."""
    file = directory / "metrics.jsonl"
    whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return json.loads(whole[-1])["step"] if whole else 0


def checkpoints(directory: Path) -> set[str]:
    return {place.name for place in directory.glob("checkpoints/*")}


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """The metrics of an uninterrupted run of two processes with two devices each."""
    run = Processes(folder, "straight", 2, 2)
    run.end(0, 0)
    assert checkpoints(run.directory) == {"24", "28"}
    found = metrics(run.directory)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return found


def started(folder):
    """The killed run, started again, after some more steps."""
    run = Processes(folder, "killed", 2, 2)
    target = last_step(run.directory) + 4
    run.wait_until(lambda: last_step(run.directory) >= target)
    return run


def test_two_processes_killed_again_and_again_repeat_the_uninterrupted_run_bit_for_bit(folder, uninterrupted):
    """Then a signal stops them, their newest checkpoint is damaged, and a single process resumes the run."""
    run = Processes(folder, "killed", 2, 2)
    run.wait_until(lambda: any("tmp" in name for name in checkpoints(run.directory)))
    run.send(signal.SIGKILL, *run.all)
    run.end(-9, -9)

    run = started(folder)
    run.send(signal.SIGKILL, 1)
    run.end(None, -9)
    [error] = run.errors(0)
    assert error.startswith(f"error: process 0 of 2: {LOST}")

    run = started(folder)
    run.send(signal.SIGTERM, 1)
    run.send(signal.SIGSTOP, 0)  # jax checks for the signal once a second; so small a run might end before
    time.sleep(1.5)
    run.send(signal.SIGCONT, 0)
    run.end(130, 130)
    together = last_step(run.directory)
    assert f"stopped after {together} of {STEPS} steps; the same command resumes" in run.printed(0)
    assert metrics(run.directory) == uninterrupted[:together]

    saved = run.directory / "checkpoints" / str(together)
    place = max(saved.glob("parameters/ocdbt.process_1/d/*"), key=lambda place: place.stat().st_size)
    content = bytearray(place.read_bytes())
    content[::512] = bytes(byte ^ 1 for byte in content[::512])
    place.write_bytes(content)
    run = Processes(folder, "killed", 1, 1)
    run.end(0)
    assert f"the checkpoint of step {together} in {run.directory / 'checkpoints'} is damaged" in run.printed(0)
    assert f"{together}.damaged" in checkpoints(run.directory)
    found = metrics(run.directory)
    assert len(found) == STEPS > together
    for one, several in zip(found, uninterrupted, strict=True):
        assert one == pytest.approx(several, rel=1e-5), "it sums in another order"


def local_steps(disks: Path, index: int) -> set[int]:
    return {int(place.name) for place in disks.glob(f"{index}/*/{index}-of-2/*") if place.name.isdigit()}


def test_two_processes_resume_from_the_newest_step_on_both_local_disks(folder, uninterrupted, tmp_path):
    """There is no shared checkpoint. The old log is deleted, so the new log shows where the run resumes."""
    disks = {index: [f"train.local_folder={tmp_path}/{index}"] for index in range(2)}
    often = ("train.local_every=1", "train.checkpoint_every=100")
    run = Processes(folder, "local", 2, 2, *often, own=disks)
    run.wait_until(lambda: last_step(run.directory) >= 8)
    run.send(signal.SIGKILL, 1)
    run.end(None, -9)
    assert checkpoints(run.directory) == set()
    newest = max(local_steps(tmp_path, 0) & local_steps(tmp_path, 1))
    (run.directory / "metrics.jsonl").unlink()
    Processes(folder, "local", 2, 2, *often, own=disks).end(0, 0)
    assert newest >= 6
    assert metrics(run.directory) == uninterrupted[newest:]
    assert not list(tmp_path.rglob("state.npz"))


def test_a_mistake_on_one_host_ends_all_of_them(folder):
    run = Processes(folder, "apart", 2, 1, own={1: [f"data.paths=['{folder}/text/[0-4].txt']"]})
    run.end(None, None)
    errors = run.errors(0) + run.errors(1)
    assert len(errors) == 2
    assert any("of 2: process 1 has another config than process 0: data.paths was" in line for line in errors)
    assert checkpoints(run.directory) == set()
