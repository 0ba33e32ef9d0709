"""The command line in real processes: an interrupt saves, the same command resumes; help; a store without access."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from flags import environment
from object_store import of_the_store

from train import cli
from train.config import Config
from train.config.config import about_sections, keys_beside_sections

CHECKOUT = Path(cli.__file__).parents[1]
CONFIG = """
imports: [own_methods]
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
scheme: {name: rope, mask: {name: even}}
train: {length: 16, batch_tokens: 128, steps: 200, warmup_steps: 2, log_every: 10, learning_rate: 0.01}
evaluate: {lengths: [16, 32], tokens: 32, batch_tokens: 32}
"""
METHODS = """
import dataclasses
import jax
import posjax as pj

@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Even(pj.masks.Mask):
    def pairs(self, i, j):
        return (i - j < 3) | (j % 2 == 0)

pj.register("mask", "even", Even)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    file = tmp_path / "mine.yaml"
    file.write_text(CONFIG.replace("TEXT", str(tmp_path)))
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "own_methods.py").write_text(METHODS)
    return file


def run_fit(config, directory, *paths, interrupt_at=None):
    """Runs ``fit`` in a new process, and interrupts it when it prints step ``interrupt_at``."""
    places = [f"output={config.parent}/runs", f"monitor.compilation_cache={config.parent}/compiled"]
    command = [sys.executable, "-m", "train", "fit", str(config), *places]
    env = environment(PYTHONPATH=os.pathsep.join(map(str, [CHECKOUT, *paths])))
    process = subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if interrupt_at and f"step {interrupt_at}/" in line:
            process.send_signal(signal.SIGINT)
    process.stdout.close()
    return process.wait(), lines


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_command_resumes(config):
    """A module with own methods is found in the working directory first, then on PYTHONPATH."""
    methods = config.parent / "methods"
    status, lines = run_fit(config, methods, interrupt_at=20)
    directory = config.parent / "runs" / "mine"
    assert status == 130
    assert lines[-1].startswith("stopped after ")
    saved = sorted(int(path.name) for path in (directory / "checkpoints").iterdir())
    assert 20 <= saved[-1] < 200
    status, lines = run_fit(config, config.parent, methods)
    assert status == 0
    shown = [int(line.split("step ")[1].split("/")[0]) for line in lines[:-1]]
    assert shown[0] > saved[-1]
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10, 201, 10))
    kept = yaml.safe_load((directory / "config.yaml").read_text())
    assert kept["imports"] == ["own_methods"]
    assert kept["scheme"]["mask"] == {"name": "even"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no module 'broken_methods'"),
        ("import nowhere_at_all", "'broken_methods' cannot be imported: ModuleNotFoundError"),
        ("x = 1\nx.y", "'broken_methods' cannot be imported: AttributeError: .*broken_methods.py, line 2"),
        ("def f(:", "'broken_methods' cannot be imported: SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(config, monkeypatch, capsys, text, message):
    monkeypatch.syspath_prepend(str(config.parent))
    if text is not None:
        (config.parent / "broken_methods.py").write_text(text)
    assert cli.main(["fit", "mine.yaml", "imports=[broken_methods]"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: imports: {message}", error)
    assert error.count("\n") == 1


def test_traceback_on_request(config):
    with pytest.raises(ValueError, match="stepz"):
        cli.main(["fit", "mine.yaml", "train.stepz=3", "--traceback"])


@pytest.mark.parametrize(
    ("command", "reported"), [(["evaluate"], True), (["search", "--length", "64"], False), (["verify"], True)]
)
def test_a_comparison_is_not_a_run_and_its_runs_are_listed(config, capsys, command, reported):
    """If the comparison has ended (``reported``), its folder has a config of its own."""
    folders = [*(["mine"] if reported else []), "mine/alibi-seed0", "mine/rope-seed0", "mine/trials/rope-1"]
    for folder in folders:
        Path("runs", folder).mkdir(parents=True)
        shutil.copy(config, f"runs/{folder}/config.yaml")
    assert cli.main([command[0], "runs/mine", *command[1:]]) == 2
    printed = capsys.readouterr()
    first, *listed = printed.err.splitlines()
    assert first.startswith("error: runs/mine is not a run")
    assert listed == ["  runs/mine/alibi-seed0", "  runs/mine/rope-seed0"]
    assert not printed.out


class Refusing(BaseHTTPRequestHandler):
    """A store that denies all access."""

    def do_GET(self):
        self.send_error(401, "no access for anonymous callers")

    def log_message(self, *_):
        pass


def test_a_store_that_denies_access_is_one_line(config):
    pytest.importorskip("gcsfs")
    with ThreadingHTTPServer(("localhost", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = environment(**of_the_store(f"http://localhost:{server.server_port}")) | {"PYTHONPATH": str(CHECKOUT)}
        command = [sys.executable, "-m", "train", "evaluate", "gs://bucket/runs/mine"]
        done = subprocess.run(command, env=env, cwd=config.parent, capture_output=True, text=True, check=False)
        server.shutdown()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"error: .*401.*\n$", done.stderr)
    assert done.stderr.count("\n") == 1


def test_help_does_not_start_jax():
    code = """
import sys, train.cli
try: train.cli.main(["fit", "--help"])
except SystemExit: sys.exit("jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert "CONFIG" in capsys.readouterr().out


def test_the_help_of_a_config_names_every_section_and_key_beside_them():
    named = [*about_sections(), *keys_beside_sections()]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Config))
