"""The command line: a mistake is one line and status 2; an interrupt saves; the same command resumes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flags import environment
from object_store import of_the_store

from train import cli
from train.config.sections import about_sections

CHECKOUT = Path(cli.__file__).parents[1]
CONFIG = """
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
train: {length: 16, batch_tokens: 128, steps: 200, warmup_steps: 2, log_every: 10, learning_rate: 0.01}
evaluate: {lengths: [16, 32], tokens: 32, batch_tokens: 32}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    file = tmp_path / "mine.yaml"
    file.write_text(CONFIG.replace("TEXT", str(tmp_path)))
    return file


@pytest.mark.parametrize("command", ["fit", "compare", "evaluate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "error: no config file 'none.yaml'\n"),
        (["mine.yaml", "train.stepz=3"], "error: train: unknown key 'stepz'; did you mean 'steps'?"),
        (["mine.yaml", "train.batch_tokens=100"], "error: train.batch_tokens must be a multiple of train.length (16)"),
    ],
)
def test_mistakes_in_a_config_are_one_line(config, capsys, command, arguments, message):
    assert cli.main([command, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "mine.yaml", "data.paths=[nothing.txt]"], "error: data.paths: no file matches 'nothing.txt'"),
        (["fit", "mine.yaml", "scheme=ropes"], "error: unknown scheme 'ropes'; did you mean 'rope'?"),
        (["fit", "mine.yaml", "train.length=8192", "train.batch_tokens=65536"], "error: data: the corpus has"),
        (["compare", "mine.yaml"], "error: compare.schemes is empty"),
        (["evaluate", "mine.yaml"], "error: runs/mine is neither a run nor a released model"),
    ],
)
def test_mistakes_found_later_are_one_line_too(config, capsys, arguments, message):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not (config.parent / "runs").exists()


def test_traceback_on_request(config):
    with pytest.raises(ValueError, match="stepz"):
        cli.main(["fit", "mine.yaml", "train.stepz=3", "--traceback"])


class Refusing(BaseHTTPRequestHandler):
    """A store that denies all access."""

    def do_GET(self):
        message = "Anonymous caller does not have storage.objects.get access"
        content = json.dumps({"error": {"code": 401, "message": message}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("command", [["verify"], ["evaluate"], ["export", "out"], ["fit"]])
def test_a_store_that_denies_access_is_one_line(config, command):
    pytest.importorskip("gcsfs")
    with ThreadingHTTPServer(("localhost", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = [str(config), "output=gs://bucket/runs"] if command == ["fit"] else ["gs://bucket/runs/mine"]
        arguments = [command[0], *where, *command[1:]]
        env = environment(**of_the_store(f"http://localhost:{server.server_port}")) | {"PYTHONPATH": str(CHECKOUT)}
        command_line = [sys.executable, "-m", "train", *arguments]
        done = subprocess.run(command_line, env=env, cwd=config.parent, capture_output=True, text=True, check=False)
        server.shutdown()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match("error: .*Anonymous caller does not have storage.objects.get access, 401\n$", done.stderr)


def stopped(*arguments):
    """The exit status of a command line that ends the program."""
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    return error.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evalute", "RUN"], r"unknown command 'evalute'; did you mean 'evaluate'\? \(known: fit, .*; see python"),
        (["zzz", "RUN"], r"unknown command 'zzz' \(known: fit, "),
        (["generate", "RUN", "--tokns", "5"], r"unrecognized arguments: --tokns 5; did you mean '--tokens'\?; see"),
        (["generate", "RUN", "--topk=5", "--seed", "5"], r"unrecognized arguments: --topk=5; did you mean '--top-k'\?"),
        (["fit", "RUN", "--tracebak"], r"unrecognized arguments: --tracebak; did you mean '--traceback'\?"),
        (["fit", "RUN", "--tokns", "5"], r"unrecognized arguments: --tokns 5; see python -m train fit --help"),
    ],
)
def test_unknown_commands_and_options_suggest_the_nearest(capsys, arguments, message):
    assert stopped(*arguments) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: {message}", error)
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["--help"], ["fit", "--help"]])
def test_help_does_not_start_jax(command):
    code = f"import sys, train.cli\ntry: train.cli.main({command})\nexcept SystemExit: sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


MODEL = (
    "a run's directory, whose newest checkpoint is taken, or the folder of a released model in the layout of Hugging "
    "Face, each on this machine or at a URL; a GGUF file on this machine; or the YAML file that a run was made from"
)


@pytest.mark.parametrize(
    ("command", "accepted"),
    [
        *((name, "CONFIG a YAML file, on this machine or at a URL") for name in ("fit", "tokenize", "compare", "plan")),
        *((name, f"CONFIG {MODEL}") for name in ("evaluate", "generate", "search", "export")),
        ("verify", "CONFIG a run's directory, on this machine or at a URL; or the YAML file that it was made from"),
        ("languages", "the keys of LanguagesConfig in train/languages/config.py"),
        ("bench", "the keys of BenchConfig in train/workshop/bench.py"),
    ],
)
def test_help_says_what_config_may_be(capsys, command, accepted):
    assert stopped(command, "--help") == 0
    assert accepted in " ".join(capsys.readouterr().out.split())


def test_only_commands_have_a_help_text_for_config():
    assert set(cli._CONFIGS) <= set(cli.COMMANDS)


def test_the_help_of_fit_has_a_line_for_every_section_and_says_where_the_keys_are(capsys):
    assert stopped("fit", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    for name, about in about_sections().items():
        assert [line.split() for line in lines].count([name, *about.split()]) == 1
    assert "beside them: name, output, seed, imports" in lines
    places = re.findall(r"(?:train|docs)/[\w/.]+", "\n".join(lines))
    assert places == ["train/config/settings/", "docs/training.md"]
    assert all((CHECKOUT / place).exists() for place in places)


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize(
    "command", [["generate"], ["evaluate"], ["search", "--length", "64"], ["export", "out"], ["verify"]]
)
def test_a_comparison_is_not_a_run_and_its_runs_are_listed(config, capsys, command, reported):
    """If the comparison has ended (``reported``), its folder has a config of its own."""
    folders = [*(["mine"] if reported else []), "mine/alibi-seed0", "mine/rope-seed0", "mine/trials/rope-1"]
    for folder in folders:
        Path("runs", folder).mkdir(parents=True)
        shutil.copy(config, f"runs/{folder}/config.yaml")
    Path("runs/mine/rope-seed0.log").touch()
    assert cli.main([command[0], "runs/mine", *command[1:]]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "error: runs/mine is not a run; name one of those in it:",
        "  runs/mine/alibi-seed0",
        "  runs/mine/rope-seed0",
    ]
    assert not printed.out


def run_fit(config, *, interrupt_at=None):
    """Runs ``fit`` in a new process, and interrupts it when it prints step ``interrupt_at``."""
    places = [f"output={config.parent}/runs", f"monitor.compilation_cache={config.parent}/compiled"]
    command = [sys.executable, "-m", "train", "fit", str(config), *places]
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environment(), stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if interrupt_at and f"step {interrupt_at}/" in line:
            process.send_signal(signal.SIGINT)
    process.stdout.close()
    return process.wait(), lines


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_command_resumes(config):
    status, lines = run_fit(config, interrupt_at=20)
    directory = config.parent / "runs" / "mine"
    assert status == 130
    assert lines[-1].startswith("stopped after ")
    saved = sorted(int(path.name) for path in (directory / "checkpoints").iterdir())
    assert 20 <= saved[-1] < 200
    status, lines = run_fit(config)
    assert status == 0
    assert f"{directory}: 200 steps · loss" in lines[-1]
    shown = [int(line.split("step ")[1].split("/")[0]) for line in lines[:-1]]
    assert shown[0] > saved[-1]
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10, 201, 10))
