"""Runs of several processes that are killed and resumed end with the numbers of an uninterrupted run."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from object_store import of_the_store, serving
from processes import TIMEOUT, Processes

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


def newest_checkpoint(directory: Path) -> int:
    return max(int(name) for name in checkpoints(directory) if name.isdigit())


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """The metrics of an uninterrupted run of two processes with two devices each."""
    run = Processes(folder, "straight", 2, 2)
    run.end(0, 0)
    assert checkpoints(run.directory) == {"24", "28"}
    found = metrics(run.directory)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return found


def kill_all_in_a_save(run, _):
    before = checkpoints(run.directory)
    run.wait_until(lambda: any("tmp" in name for name in checkpoints(run.directory) - before))
    run.send(signal.SIGKILL, *run.all)
    run.end(*(-9 for _ in run.all))


def kill_one(victim):
    def kill(run, draw):
        target = last_step(run.directory) + draw.randint(2, 6)
        run.wait_until(lambda: last_step(run.directory) >= target)
        run.send(signal.SIGKILL, victim)
        run.end(*((-9, None) if victim == 0 else (None, -9)))
        errors = run.errors(1 - victim)
        by_jax = victim == 0 and "JAX distributed service detected fatal errors" in run.printed(1)
        assert len(errors) == 1 or (by_jax and not errors)
        assert all(line.startswith(f"error: process {1 - victim} of 2: {LOST}") for line in errors)

    return kill


def ask(*asked):
    def stop(run, draw):
        target = last_step(run.directory) + draw.randint(2, 6)
        run.wait_until(lambda: last_step(run.directory) >= target)
        run.send(signal.SIGTERM, *asked)
        run.send(signal.SIGSTOP, 0)  # jax checks for the signal once a second; so small a run might end before
        time.sleep(1.5)
        run.send(signal.SIGCONT, 0)
        run.end(*(130 for _ in run.all))
        newest = newest_checkpoint(run.directory)
        assert newest >= target
        assert f"stopped after {newest} of {STEPS} steps; the same command resumes" in run.printed(0)

    return stop


def damage_the_newest(directory):
    """Flips bits in the parameters that only process 1 reads; returns the step."""
    step = newest_checkpoint(directory)
    places = (directory / "checkpoints" / str(step)).glob("parameters/ocdbt.process_1/d/*")
    place = max(places, key=lambda place: place.stat().st_size)
    content = bytearray(place.read_bytes())
    content[::512] = bytes(byte ^ 1 for byte in content[::512])
    place.write_bytes(content)
    return step


def test_two_processes_killed_again_and_again_repeat_the_uninterrupted_run_bit_for_bit(folder, uninterrupted):
    """Then a signal stops them, and a single process resumes the run: it sums in another order."""
    draw = random.Random(5)
    for kill in (kill_all_in_a_save, kill_one(1)):
        run = Processes(folder, "killed", 2, 2)
        kill(run, draw)
    run = Processes(folder, "killed", 2, 2)
    ask(1)(run, draw)
    damaged = damage_the_newest(run.directory)
    together = last_step(run.directory)
    assert metrics(run.directory) == uninterrupted[:together]
    run = Processes(folder, "killed", 1, 1)
    run.end(0)
    assert f"the checkpoint of step {damaged} in {run.directory / 'checkpoints'} is damaged" in run.printed(0)
    assert f"{damaged}.damaged" in checkpoints(run.directory)
    found = metrics(run.directory)
    assert len(found) == STEPS > together
    for one, several in zip(found, uninterrupted, strict=True):
        assert one == pytest.approx(several, rel=1e-5)


@pytest.mark.wide
def test_two_processes_resume_to_the_end(folder, uninterrupted):
    run = Processes(folder, "again", 2, 2)
    kill_one(0)(run, random.Random(9))
    run = Processes(folder, "again", 2, 2)
    run.end(0, 0)
    assert metrics(run.directory) == uninterrupted


@pytest.mark.wide
def test_a_process_that_vanishes_is_noticed(folder):
    """Like a host without power, it closes no connection; jax notices that its heartbeats have stopped."""
    run = Processes(folder, "vanished", 2, 1, "train.steps=100000")
    run.wait_until(lambda: last_step(run.directory) >= 4)
    run.send(signal.SIGSTOP, 1)
    status = run._started[0].wait(timeout=TIMEOUT)
    run.send(signal.SIGKILL, 1)
    run._started[1].wait(timeout=TIMEOUT)
    assert status
    assert "unhealthy (stopped sending heartbeats)" in run.printed(0)


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


@pytest.fixture
def store(monkeypatch, folder):
    """A local server in place of Google's store, with the texts of the folder."""
    pytest.importorskip("gcsfs")
    with serving() as (store, address):
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        for text in (folder / "text").iterdir():
            store.put("bucket", f"text/{text.name}", text.read_bytes())
        yield store


def start(folder, tmp_path):
    """Two processes that share only the store: each has its own compiled programs."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data = config["data"] | {"paths": ["gs://bucket/text/*.txt"], "cache": "gs://bucket/tokens"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"output": "gs://bucket/runs", "data": data}))
    for index in range(2):
        shutil.copytree(folder / "compiled", tmp_path / f"compiled-{index}", dirs_exist_ok=True)
    caches = {index: [f"monitor.compilation_cache={tmp_path}/compiled-{index}"] for index in range(2)}
    return Processes(tmp_path, "stored", 2, 2, own=caches)


def losses(store):
    content, _ = store.objects.get(("bucket", "runs/stored/metrics.jsonl"), (b"", 0))
    return [json.loads(line)["loss"] for line in content.split(b"\n")[:-1]]


@pytest.mark.wide
def test_a_run_of_processes_that_share_no_disk_resumes_after_one_is_killed(folder, uninterrupted, tmp_path, store):
    """It repeats, bit for bit, the run of processes that share a disk."""
    killed = start(folder, tmp_path)
    killed.wait_until(lambda: len(losses(store)) >= 6)
    killed.send(signal.SIGKILL, 1)
    killed.end(None, -9)
    assert 6 <= len(losses(store)) < STEPS
    start(folder, tmp_path).end(0, 0)
    assert losses(store) == [line["loss"] for line in uninterrupted]
    assert {name.split("/")[0] for name in store.names("bucket")} == {"runs", "text", "tokens"}
    assert not list(tmp_path.rglob("checkpoints"))
