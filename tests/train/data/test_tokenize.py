"""``train tokenize``: jobs that share only a folder, killed commands, and a training that uses what was built."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import chex
import numpy as np
import pytest
from flags import environment
from object_store import serving

from train import cli
from train.config import dump, parse
from train.data import building
from train.data.pipeline import held_out_documents, training_rows
from train.data.storage import LocalFolder
from train.data.tokenize import Job, job_of, share, tokenize
from train.data.tokenizer import ByteTokenizer

FILES = 6


@pytest.fixture(autouse=True)
def each_file_is_a_piece(monkeypatch):
    monkeypatch.setattr(building, "PIECE_BYTES", 1)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(FILES):
        lines = [f'{{"text": "file {number} line {line} {"x" * line}"}}\n' for line in range(10 + number)]
        (tmp_path / "texts" / f"{number}.jsonl").write_text("".join(lines))
    return tmp_path / "texts"


def config_of(texts, kept, **data):
    values = {"source": "files", "paths": [f"{texts}/*.jsonl"], "held_out": 0.2, "cache": str(kept), **data}
    return parse({"data": values, "train": {"length": 16, "batch_tokens": 64}, "output": f"{texts}/../runs"})


def everything(config):
    rows = training_rows(config)
    return [*rows.batch(np.arange(len(rows))), *held_out_documents(config)]


def contents(kept):
    """The files in the cache of a corpus, except the lock of a training."""
    (folder,) = kept.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def built(kept):
    """The names of the files that record finished pieces. None is read, because other processes may be writing."""
    (folder,) = kept.iterdir()
    return sorted(path.name for path in folder.glob("piece-*"))


@pytest.fixture(params=["disk", "gs"])
def kept(request, tmp_path, monkeypatch):
    """The address of a cache that every process can reach."""
    if request.param == "disk":
        yield str(tmp_path / "kept")
        return
    gcsfs = pytest.importorskip("gcsfs")
    with serving() as (_, address):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://bucket/kept"
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_training_finds_the_tokens_and_makes_none(texts, monkeypatch, kept, packing):
    lines = []
    tokenize(config_of(texts, kept), lines.append, workers=1 if packing == "best-fit" else 2)
    assert f"data: {FILES} of {FILES} pieces are done" in lines
    plain = everything(config_of(texts, "", packing=packing))  # without a cache
    digest = training_rows(config_of(texts, "", packing=packing)).digest()
    monkeypatch.setattr(ByteTokenizer, "encode_all", None)
    found = config_of(texts, kept, packing=packing)
    chex.assert_trees_all_equal(everything(found), plain)
    messages = []
    assert training_rows(found, messages.append).digest() == digest
    assert messages == []


def test_jobs_build_what_is_theirs_in_any_order_and_the_last_one_writes_the_index(texts, tmp_path):
    tokenize(config_of(texts, tmp_path / "alone"), print, workers=2)
    lines = {number: [] for number in (2, 0, 1)}
    seen = set()
    for count, (number, log) in enumerate(lines.items(), start=1):
        tokenize(config_of(texts, tmp_path / "kept"), log.append, Job(number, 3), workers=1)
        assert log[0] == f"data: 2 of 2 pieces of this job, {FILES} in all, are to be tokenised"
        assert len(set(built(tmp_path / "kept")) - seen) == 2
        seen.update(built(tmp_path / "kept"))
        assert ("index.npz" in contents(tmp_path / "kept")) == (count == 3)
    assert lines[2][-1].endswith(f": 4 of {FILES} pieces, of other jobs, are still missing")
    assert lines[1][-1].endswith(" is complete: 1,655 tokens")
    assert contents(tmp_path / "kept") == contents(tmp_path / "alone")


def test_the_text_of_every_stage_is_tokenised_once(texts, tmp_path):
    (tmp_path / "long").mkdir()
    for number in range(3):
        (tmp_path / "long" / f"{number}.txt").write_text(f"a long text {number} " * 50)
    stages = [{"name": "short"}, {"name": "more"}, {"name": "long", "data": {"paths": [f"{tmp_path}/long/*.txt"]}}]
    values = {"source": "files", "paths": [f"{texts}/*.jsonl"], "cache": str(tmp_path / "kept")}
    config = parse({"data": values, "train": {"length": 16, "batch_tokens": 64}, "stages": stages})
    lines = []
    tokenize(config, lines.append, workers=1)
    assert lines[0] == f"data: {FILES + 3} of {FILES + 3} pieces of this job, {FILES + 3} in all, are to be tokenised"
    messages = []
    for stage in config.every_stage:
        training_rows(stage, messages.append)
    assert messages == []
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_another_command_builds_what_a_job_never_did(texts, tmp_path):
    tokenize(config_of(texts, tmp_path / "kept"), print, Job(1, 2), workers=1)
    before = contents(tmp_path / "kept")
    lines = []
    tokenize(config_of(texts, tmp_path / "kept"), lines.append, workers=1)
    assert lines[0] == f"data: 3 of {FILES} pieces of this job, {FILES} in all, are to be tokenised"
    assert before.items() <= contents(tmp_path / "kept").items()
    lines.clear()
    tokenize(config_of(texts, tmp_path / "kept"), lines.append, workers=1)
    assert lines[0] == f"data: 0 of {FILES} pieces of this job, {FILES} in all, are to be tokenised"


def test_a_killed_worker_is_reported_in_one_line(texts, tmp_path):
    process = start(tmp_path, config_of(texts, tmp_path / "kept"), HANG)
    wait_for(lambda: list((tmp_path / "marks").glob("hangs-*")))
    (mark,) = (tmp_path / "marks").glob("hangs-*")
    os.kill(int(mark.name.removeprefix("hangs-")), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("error: one of 2 workers was killed, perhaps for lack of memory")


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_ends_the_command_and_its_workers_at_once_with_one_line(texts, tmp_path, begun):
    """While one worker is busy and the other has finished, and while both start. Ctrl-C reaches every process."""
    process = start(tmp_path, config_of(texts, tmp_path / "kept"), HANG)
    if begun:
        wait_for(lambda: list((tmp_path / "marks").glob("hangs-*")) and len(built(tmp_path / "kept")) == FILES - 1)
    else:
        wait_for(lambda: len(children_of(process.pid)) > 2)  # multiprocessing's own process, and the workers
        time.sleep(0.3)
    started = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stopped; the same command resumes\n")
    wait_for(lambda: not any(os.path.exists(f"/proc/{child}") for child in started))


def children_of(process):
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


DRIVER = """
import os, signal, sys, time
from pathlib import Path
from train import cli
from train.data import building, tokenize
from train.data.storage import LocalFolder

building.PIECE_BYTES = 1
marks = Path(sys.argv[2])

{patch}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    sys.exit(cli.main(["tokenize", sys.argv[1], "--workers", "2"]))
"""

HANG = """
whole = LocalFolder.write_chunks

def write(self, name, chunks):
    def half():
        for chunk in list(chunks)[:3]:
            yield chunk
        (marks / f"hangs-{os.getpid()}").touch()
        time.sleep(600)
    whole(self, name, half() if name == "shard-000003-000000.tokens" else chunks)

LocalFolder.write_chunks = write
"""

MEET = """
plain = tokenize.build_piece

def build(piece, *given):
    (marks / f"begun-{os.getpid()}").touch()
    began = time.monotonic()
    while len(list(marks.glob("begun-*"))) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    plain(piece, *given)

tokenize.build_piece = build
"""


def start(tmp_path, config, patch):
    """Starts the command in its own process; the patch holds in its workers too."""
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER).format(patch=patch))
    (tmp_path / "marks").mkdir()
    (tmp_path / "config.yaml").write_text(dump(config))
    command = [sys.executable, "driver.py", "config.yaml", "marks"]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 60
        time.sleep(0.02)


def test_after_a_killed_command_only_the_missing_files_are_built(texts, tmp_path):
    config, marks = config_of(texts, tmp_path / "kept"), tmp_path / "marks"
    process = start(tmp_path, config, HANG)
    wait_for(lambda: list(marks.glob("hangs-*")) and len(built(tmp_path / "kept")) == FILES - 1)
    (mark,) = marks.glob("hangs-*")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not os.path.exists(f"/proc/{mark.name.removeprefix('hangs-')}"))  # workers end with it
    left = contents(tmp_path / "kept")
    assert not any(name.startswith("shard-000003") for name in left)
    assert any(name.endswith(".part") for name in left)
    lines = []
    tokenize(config, lines.append, workers=1)
    assert lines[0] == f"data: 1 of {FILES} pieces of this job, {FILES} in all, are to be tokenised"
    tokenize(config_of(texts, tmp_path / "alone"), print, workers=1)
    assert contents(tmp_path / "kept") == contents(tmp_path / "alone")  # without the killed one's partial file
    chex.assert_trees_all_equal(everything(config), everything(config_of(texts, "")))


def test_several_processes_work_at_once(texts, tmp_path):
    process = start(tmp_path, config_of(texts, tmp_path / "kept"), MEET)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"data: {FILES} of {FILES} pieces are done" in out
    assert len(list((tmp_path / "marks").glob("begun-*"))) == 2


def test_two_writers_of_one_file_leave_it_whole(tmp_path):
    first, second = LocalFolder(tmp_path), LocalFolder(tmp_path)
    content = [bytes([number]) * 2**16 for number in (1, 2)]
    begun, go = threading.Event(), threading.Event()

    def late():
        begun.set()
        assert go.wait(60)
        yield from content

    other = threading.Thread(target=lambda: second.write_chunks("file", late()))

    def interrupted():
        yield content[0]
        other.start()
        assert begun.wait(60)
        yield content[1]

    first.write_chunks("file", interrupted())
    assert first.read("file") == b"".join(content)
    go.set()
    other.join(60)
    assert first.read("file") == b"".join(content)

    def swept():
        second.remove_leftovers()
        yield from content

    first.write_chunks("file", swept())  # the file is there already
    assert first.sizes() == {"file": 2**17}
    with pytest.raises(FileNotFoundError):
        first.write_chunks("other", swept())


def test_bytes_that_a_training_does_not_cache_are_not_tokenised(texts, tmp_path):
    lines = []
    tokenize(config_of(texts, ""), lines.append)
    assert "set data.cache to have one" in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_every_piece_belongs_to_one_job_and_jobs_have_similar_work(count):
    sizes = np.random.default_rng(count).integers(0, 1000, 30).tolist()
    shares = [share(sizes, Job(number, count)) for number in range(count)]
    assert sorted(index for mine in shares for index in mine) == list(range(30))
    most = max(sum(sizes[index] + 1 for index in mine) for mine in shares)
    best = max(sum(sizes) + 30, max(sizes) * count + count) / count  # no split is better than that
    assert most <= (4 / 3 - 1 / (3 * count)) * max(best, sum(sorted(sizes)[-count - 1 :][:2]) + 2)  # Graham 1969


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, Job(0, 1)),
        ({"JAX_PROCESS_ID": "2", "JAX_NUM_PROCESSES": "3"}, Job(2, 3)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Job(0, 1)),  # the script, outside srun
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, Job(3, 4)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "3",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            Job(2, 3),
        ),
        (
            {
                "SLURM_ARRAY_TASK_ID": "2",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_STEP_NODELIST": "a",
                "SLURM_NTASKS": "4",
                "SLURM_PROCID": "3",
            },
            Job(7, 12),
        ),
    ],
)
def test_the_environment_tells_which_job_this_is(variables, job):
    assert job_of(variables) == job


def test_an_array_with_gaps_is_refused():
    """Otherwise a task whose number is too high would get no pieces, and some pieces no task."""
    variables = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "1"}
    with pytest.raises(ValueError, match=r"^the job array has gaps: this is task 5 of 2, .* by --job and --jobs$"):
        job_of(variables)


def test_the_command_takes_jobs(texts, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(dump(config_of(texts, tmp_path / "kept")))
    command = ["tokenize", str(tmp_path / "config.yaml")]
    assert cli.main([*command, "--job", "1", "--jobs", "2", "--workers", "1"]) == 0
    assert len(built(tmp_path / "kept")) == FILES // 2
    for wrong, message in [
        (["--job", "1"], "error: --job and --jobs go together"),
        (["--job", "2", "--jobs", "2"], "error: --job must be from 0 to the number of jobs less 1, found 2 of 2"),
        (["--job", "-1", "--jobs", "2"], "error: --job must be from 0"),
        (["--workers", "0"], "error: --workers must be positive, found 0"),
    ]:
        assert cli.main([*command, *wrong]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_a_wrong_job_in_the_environment_is_named(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    (tmp_path / "config.yaml").write_text(dump(config_of(texts, tmp_path / "kept")))
    assert cli.main(["tokenize", str(tmp_path / "config.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: JAX_PROCESS_ID must be from 0 to the number of jobs less 1")
