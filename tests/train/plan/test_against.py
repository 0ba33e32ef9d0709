"""Steps kept in folders: they are read back, invalid folders are one-line errors, and steps are compared."""

import dataclasses
import json

import pytest

from train.cli import WRONG_INPUT, main
from train.config import load
from train.plan import kept
from train.plan.compiling import CompiledStep, Memory
from train.plan.pods import GIB, pod

CONFIG = """
model: {num_layers: 2, model_dim: 256, num_heads: 4, mlp_dim: 1024, vocab_size: 8192, compute_dtype: bfloat16}
train: {length: 512, batch_tokens: 4096, mesh: {data: 1, fsdp: 4}}
"""
PROGRAM = """
ENTRY %main (x: bf16[1024,256], w: bf16[256,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,256]{1,0} parameter(0)
  %w = bf16[256,1024]{1,0} parameter(1)
  %y = bf16[1024,1024]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, \
metadata={op_name="jit(step)/jvp(decoder)/layers/mlp/dot_general"}, backend_config={"estimated_cycles":"1750000"}
  %k = bf16[1024,256]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %g = f32[1024]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
PLACES = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]
SIZES = {
    "argument_size_in_bytes": 2 * GIB,
    "temp_size_in_bytes": 3 * GIB,
    "generated_code_size_in_bytes": 0,
    "output_size_in_bytes": 5 * GIB,
    "alias_size_in_bytes": 4 * GIB,
}
STEP = {"memory": SIZES, "axes": {"data": 1, "stage": 1, "fsdp": 4}, "coordinates": PLACES, "tokens": 8192}


def folder(path, **changes):
    """A step as another trainer keeps it."""
    path.mkdir()
    (path / kept.PROGRAM).write_text(PROGRAM)
    content = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    (path / kept.STEP).write_text(json.dumps(content))
    return path


@pytest.fixture
def config(tmp_path):
    """The file of a config of the same model."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def test_a_folder_of_another_trainer_is_read(tmp_path):
    found = kept.read(folder(tmp_path / "theirs"), pod("v6e:2x2"))
    assert (found.name, found.tokens, found.schedules) == ("theirs", 8192, None)
    assert found.step.axes == {"data": 1, "stage": 1, "fsdp": 4}
    assert found.step.coordinates[2] == (1, 1, 0, 0)
    assert found.step.memory.total == 6 * GIB  # four of the five GiB of outputs reuse the memory of arguments


def test_what_is_kept_is_read_again(tmp_path):
    memory = Memory(parameters=1, optimizer=2, batch=3, arguments=7, temp=11, program=13, kept=17)
    step = CompiledStep(PROGRAM, memory, {"fsdp": 4}, tuple(map(tuple, PLACES)), "--xla_flag=1")
    kept.keep(tmp_path / "new" / "ours", step, 4096)
    found = kept.read(tmp_path / "new" / "ours", pod("v6e:2x2"))
    assert found.step == step
    assert found.tokens == 4096


def test_schedules_in_a_folder_are_found(tmp_path):
    place = folder(tmp_path / "theirs")
    (place / kept.SCHEDULES).mkdir()
    assert kept.read(place, pod("v6e:2x2")).schedules == place / kept.SCHEDULES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"memory": None}, "memory: expected the bytes of argument_size_in_bytes, "),
        ({"memory": {**SIZES, "temp_size_in_bytes": "much"}}, "memory: expected the bytes of argument_size_in_bytes, "),
        ({"axes": [4]}, "step.axes: expected a section of keys, found [4]"),
        ({"axes": {"fsdp": 0}}, """axes: expected sizes by name, as in {"fsdp": 256}, found {'fsdp': 0}"""),
        ({"coordinates": [["x"] * 4] * 4}, "step.coordinates[0][0]: expected a whole number, found 'x'"),
        ({"coordinates": PLACES[:3]}, "coordinates: expected [x, y, z, core] of each of the 4 devices"),
        ({"coordinates": [[0, 0]] * 4}, "coordinates: expected [x, y, z, core] of each of the 4 devices"),
        (
            {"axes": {"fsdp": 2}, "coordinates": PLACES[:2]},
            "expected those of the 4 devices of v6e:2x2, found 2; --topology",
        ),
        ({"tokens": -1}, "tokens: expected those of a step over all devices, found -1"),
        ({"token": 8192}, "step: unknown key 'token'; did you mean 'tokens'"),
    ],
)
def test_an_invalid_folder_is_a_one_line_error(changes, reason, config, tmp_path, capsys):
    place = folder(tmp_path / "theirs", **changes)
    assert main(["plan", str(config), "--topology", "v6e:2x2", "--against", str(place)]) == WRONG_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"error: --against: {place}")
    assert reason in error
    assert error.count("\n") == 1


def test_a_folder_without_a_step_is_a_one_line_error(config, tmp_path, capsys):
    assert main(["plan", str(config), "--topology", "v6e:2x2", "--against", str(tmp_path)]) == WRONG_INPUT
    assert "expected program.txt and step.json, found no program.txt" in capsys.readouterr().err
    place = folder(tmp_path / "theirs")
    (place / kept.STEP).write_text("{")
    assert main(["plan", str(config), "--topology", "v6e:2x2", "--against", str(place)]) == WRONG_INPUT
    assert "step.json: Expecting property name enclosed in double quotes: line 1 column 2" in capsys.readouterr().err
    folder(tmp_path / "empty")
    (tmp_path / "empty" / kept.PROGRAM).write_text("nothing")
    assert main(["plan", str(config), "--topology", "v6e:2x2", "--against", str(tmp_path / "empty")]) == WRONG_INPUT
    assert "no program found in the compiler's text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--against", "a", "--against", "b", "--keep", "c"),
            "--keep: nothing is compiled where --against names several",
        ),
        (
            ("--against", "a", "--against", "b", "--flags="),
            "--flags: nothing is compiled where --against names several",
        ),
        (("--blocks", "1024,1024"), "--blocks: these describe kernels in a folder of --against, found no folder"),
        (("--against", "a", "--blocks", "many"), "--blocks: expected queries and keys of a tile"),
        (("--against", "a", "--sweep", "2"), "--sweep: only a single step can be kept or compared"),
    ],
)
def test_flags_that_exclude_each_other_are_a_one_line_error(arguments, reason, config, capsys):
    assert main(["plan", str(config), "--topology", "v6e:2x2", *arguments]) == WRONG_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"error: {reason}")
    assert error.count("\n") == 1


def test_stages_are_not_compared(config, capsys):
    stages = "stages=[{name: first}, {name: second}]"
    assert main(["plan", str(config), "--topology", "v6e:2x2", "--keep", "folder", stages]) == WRONG_INPUT
    assert "the config has the stages first, second" in capsys.readouterr().err


def cells(output: str, row: str) -> list[str]:
    """The cells of the first table row that begins with `row`."""
    line = next(line for line in output.splitlines() if line.startswith(f"│ {row} "))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_two_kept_steps_are_compared_without_a_compiler(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.plan.command.compile_step", None)
    first = folder(tmp_path / "first")
    second = folder(tmp_path / "second", tokens=None, flags="--xla_flag=1")
    (second / kept.PROGRAM).write_text(PROGRAM.replace("1750000", "3500000").replace("tpu_custom_call", "Buffer"))
    arguments = ["--against", str(first), "--against", str(second)]
    assert main(["plan", str(config), "--topology", "v6e:2x2", *arguments]) == 0
    output = capsys.readouterr().out
    assert cells(output, "MLP") == ["0.001 = 0.001 / 0 / 0", "0.002 = 0.002 / 0 / 0"]
    assert cells(output, "attention kernels") == ["> 0 = 1 x unknown", "none"]
    assert cells(output, "tokens of a step and chip") == ["2,048", "1,024"]
    assert cells(output, "HBM GiB: temporaries") == ["3.00", "3.00"]
    assert cells(output, "all-reduce f32")[0].startswith("1 x, 6.14e-06 GB")
    assert cells(output, "step")[0].startswith("> ")
    assert "Not included, because unknown: kernel k x 1 of first" in " ".join(output.split())
    text = " ".join(output.split())
    assert 'second: compiled with these flags, which a run needs too: export LIBTPU_INIT_ARGS="--xla_flag=1"' in text
    assert "first: compiled" not in text  # its folder has no flags


def test_a_kept_step_is_compared_with_ours(config, tmp_path, capsys, monkeypatch):
    memory = Memory(*[float(GIB)] * 7)
    axes = {"replica": 1, "data": 1, "fsdp": 4, "context": 1, "tensor": 1}
    ours = CompiledStep(PROGRAM, memory, axes, tuple(map(tuple, PLACES)))
    monkeypatch.setattr("train.plan.command.compile_step", lambda config, on, flags: ours)
    theirs, keep = folder(tmp_path / "theirs"), tmp_path / "kept"
    arguments = ["--against", str(theirs), "--keep", str(keep)]
    assert main(["plan", str(config), "--topology", "v6e:2x2", *arguments]) == 0
    output = capsys.readouterr().out
    assert cells(output, "HBM GiB: arguments") == ["1.00", "2.00"]
    assert cells(output, "TFLOP executed, kernels left out") == ["0.0005369"] * 2  # 2 x 1024 x 256 x 1024
    again = kept.read(keep, pod("v6e:2x2"))
    assert dataclasses.replace(again.step, memory=memory) == ours
    assert again.tokens == load(config).train.batch_tokens
