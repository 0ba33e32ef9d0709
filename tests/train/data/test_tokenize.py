"""``train tokenize``: jobs that share only a folder, killed commands, and a training that uses what was built."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import numpy as np
import pytest
from documents import held_out_documents, training_rows
from flags import environment
from object_store import of_the_store, serving
from refusals import refused

from train.config import dump, parse
from train.data import building
from train.data.tokenize import tokenize

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
    return sorted(path.name for path in folder.glob("piece-*.json"))


@pytest.mark.parametrize("where", ["disk", "gs"])
def test_a_training_finds_the_tokens_and_makes_none(texts, tmp_path, monkeypatch, where):
    with serving() as (_, address):
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        if where == "gs":
            pytest.importorskip("gcsfs").GCSFileSystem.clear_instance_cache()
        kept = "gs://bucket/kept" if where == "gs" else str(tmp_path / "kept")
        lines, messages = [], []
        tokenize(config_of(texts, kept), lines.append, workers=1)
        assert f"data: {FILES} of {FILES} pieces are done" in lines
        plain, found = config_of(texts, ""), config_of(texts, kept)
        assert training_rows(found, messages.append).digest() == training_rows(plain).digest()
        assert messages == []
        chex.assert_trees_all_equal(everything(found), everything(plain))


def test_jobs_build_what_is_theirs_in_any_order_and_the_last_one_writes_the_index(texts, tmp_path):
    tokenize(config_of(texts, tmp_path / "alone"), print, workers=1)
    seen = set()
    for number in (2, 0, 1):
        lines = []
        tokenize(config_of(texts, tmp_path / "kept"), lines.append, number, 3, workers=1)
        assert lines[0] == f"data: 2 of 2 pieces of this job, {FILES} in all, are to be tokenised"
        assert len(set(built(tmp_path / "kept")) - seen) == 2
        seen.update(built(tmp_path / "kept"))
        assert ("index.json" in contents(tmp_path / "kept")) == (number == 1)
    assert lines[-1].endswith(" is complete: 1,655 tokens")
    assert contents(tmp_path / "kept") == contents(tmp_path / "alone")


def test_the_text_of_every_stage_is_tokenised_once(texts, tmp_path):
    stages = [{"name": "short"}, {"name": "more"}, {"name": "long", "data": {"paths": [f"{texts}/[0-2].jsonl"]}}]
    values = {"source": "files", "paths": [f"{texts}/*.jsonl"], "cache": str(tmp_path / "kept")}
    config = parse({"data": values, "train": {"length": 16, "batch_tokens": 64}, "stages": stages})
    lines, messages = [], []
    tokenize(config, lines.append, workers=1)
    assert lines[0] == f"data: {FILES + 3} of {FILES + 3} pieces of this job, {FILES + 3} in all, are to be tokenised"
    for stage in config.every_stage:
        training_rows(stage, messages.append)
    assert messages == []
    assert len(list((tmp_path / "kept").iterdir())) == 2


DRIVER = """
import os, signal, sys, time
from pathlib import Path
from train import cli
from train.data import building
from train.data.storage import LocalFolder

building.PIECE_BYTES = 1
whole = LocalFolder.write

def write(self, name, chunks):
    def half():
        for chunk in list(chunks)[:3]:
            yield chunk
        (Path("marks") / str(os.getpid())).touch()
        time.sleep(600)
    whole(self, name, half() if name == "piece-000003.tokens" else chunks)

LocalFolder.write = write
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    sys.exit(cli.main(["tokenize", "config.yaml", "--workers", "2"]))
"""


def wait_for(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 60
        time.sleep(0.02)


@pytest.mark.parametrize("harmed", ["command", "worker", "interrupt"])
def test_a_command_that_ends_in_the_middle_leaves_no_worker_and_is_resumed(texts, tmp_path, harmed):
    """While one of two workers is busy and the other has finished. Ctrl-C reaches every process."""
    config, marks = config_of(texts, tmp_path / "kept"), tmp_path / "marks"
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "config.yaml").write_text(dump(config))
    marks.mkdir()
    outputs = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "driver.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True, **outputs)
    wait_for(lambda: list(marks.iterdir()) and len(built(tmp_path / "kept")) == FILES - 1)
    worker = int(next(marks.iterdir()).name)
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if harmed == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill({"command": process.pid, "worker": worker}[harmed], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {"command": -signal.SIGKILL, "worker": 2, "interrupt": 130}[harmed]
    if harmed == "worker":
        assert err.splitlines()[-1].startswith("error: one of 2 workers was killed")
    wait_for(lambda: not any(os.path.exists(f"/proc/{child}") for child in started))
    assert any(name.endswith(".part") for name in contents(tmp_path / "kept")) or harmed == "interrupt"
    lines = []
    tokenize(config, lines.append, workers=1)
    assert lines[0] == f"data: 1 of {FILES} pieces of this job, {FILES} in all, are to be tokenised"
    tokenize(config_of(texts, tmp_path / "alone"), print, workers=1)
    assert contents(tmp_path / "kept") == contents(tmp_path / "alone")  # without the killed one's partial file
    chex.assert_trees_all_equal(everything(config), everything(config_of(texts, "")))


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("--jobs", lambda: tokenize(parse({}), job=1)),
        ("--job", lambda: tokenize(parse({}), jobs=2)),
        ("--job", lambda: tokenize(parse({}), job=2, jobs=2)),
        ("--job", lambda: tokenize(parse({}), job=-1, jobs=2)),
        ("--workers", lambda: tokenize(parse({}), workers=0)),
    ],
)
def test_invalid_jobs_are_refused(named, call):
    refused(named, call)
