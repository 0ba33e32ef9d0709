"""A user's own methods in a run: the config names the module that registers them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flags import environment

from train import cli

CHECKOUT = Path(cli.__file__).parents[1]
MODULE = """
import dataclasses

import jax

import posjax as pj


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Strided(pj.masks.Mask):
    stride: int = dataclasses.field(metadata={"static": True})

    def pairs(self, i, j):
        return (i - j < 3) | (j % self.stride == 0)


pj.register("mask", "strided", Strided)
"""
CONFIG = """
imports: [strided_methods]
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
scheme: {name: rope, mask: {name: strided, stride: 4}}
train: {length: 16, batch_tokens: 128, steps: 4, warmup_steps: 1, log_every: 2, checkpoint_every: 4}
evaluate: {lengths: [16, 32], tokens: 32, batch_tokens: 32}
monitor: {compilation_cache: TEXT/compiled}
"""


@pytest.fixture
def folder(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    (tmp_path / "mine.yaml").write_text(CONFIG.replace("TEXT", str(tmp_path)))
    (tmp_path / "strided_methods.py").write_text(MODULE)
    return tmp_path


def run(*arguments, directory, paths=()):
    """Runs ``python -m train`` in a directory, with more folders on PYTHONPATH."""
    env = environment(PYTHONPATH=os.pathsep.join(map(str, [CHECKOUT, *paths])))
    command = [sys.executable, "-m", "train", *arguments]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_saved_run_imports_its_methods_wherever_it_is_used(folder):
    """First from the working directory, then from PYTHONPATH."""
    assert "4 steps · loss" in run("fit", f"{folder}/mine.yaml", f"output={folder}/runs", directory=folder)
    saved = folder / "runs" / "mine"
    kept = yaml.safe_load((saved / "config.yaml").read_text())
    assert kept["imports"] == ["strided_methods"]
    assert kept["scheme"]["mask"] == {"name": "strided", "stride": 4}
    run("evaluate", str(saved), directory=folder.parent, paths=[folder])
    assert (saved / "evaluation.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no module 'broken_methods' in the working directory or on PYTHONPATH\n"),
        ("import nowhere_at_all", "'broken_methods' cannot be imported: ModuleNotFoundError: No module"),
        ("x = 1\nx.y", "'broken_methods' cannot be imported: AttributeError: .*broken_methods.py, line 2"),
        ("def f(:", "'broken_methods' cannot be imported: SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(folder, monkeypatch, capsys, text, message):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    if text is not None:
        (folder / "broken_methods.py").write_text(text)
    assert cli.main(["fit", "mine.yaml", "imports=[broken_methods]"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: imports: {message}", error)
    assert error.count("\n") == 1
