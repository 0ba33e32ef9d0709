"""A run that an earlier version saved can be evaluated, resumed and used to generate text: see keepsake/README.txt."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from train.config import load
from train.evaluate.generate import SamplingOptions, generate
from train.evaluate.saved import evaluate
from train.loop.fit import fit

KEEPSAKE = Path(__file__).parent / "keepsake"
RECORDED = json.loads((KEEPSAKE / "recorded.json").read_text())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run's directory. The working directory is a copy of the keepsake, because the config has relative paths."""
    shutil.copytree(KEEPSAKE, tmp_path, dirs_exist_ok=True)
    shutil.unpack_archive(tmp_path / "run.tar.gz", tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_its_evaluation_gives_the_recorded_numbers(run):
    rows = evaluate(run, console=Console(file=io.StringIO()))
    found = [{name: row[name] for name in wanted} for row, wanted in zip(rows, RECORDED["evaluated"], strict=True)]
    assert found == [pytest.approx(wanted, rel=1e-4) for wanted in RECORDED["evaluated"]]


def test_it_resumes_training_from_its_last_checkpoint(run):
    before = (run / "metrics.jsonl").read_text()
    found = fit(load("keepsake.yaml"))
    assert found.finished
    assert found.final_loss == pytest.approx(RECORDED["final_loss"], rel=1e-4)
    after = (run / "metrics.jsonl").read_text()
    assert after.startswith(before)
    assert [json.loads(line)["step"] for line in after.removeprefix(before).splitlines()] == [400]


def test_it_continues_a_prompt_with_the_same_text(run):
    found = generate(run, RECORDED["prompt"], SamplingOptions(tokens=40, temperature=0), write=lambda _: None)
    assert found == RECORDED["generated"]
