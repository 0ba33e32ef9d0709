"""Compiled steps beside each other: what a folder of a saved step holds, and what is printed of two of them."""

import json

import pytest
from compiled_step import PLACES, PROGRAM
from refusals import refused

from train.cli import main
from train.lab.steps import saved_step
from train.plan.compiling import CompiledStep, DeviceMemory
from train.plan.pods import GIB, pod_of

SIZES = {
    "argument_size_in_bytes": 2 * GIB,
    "temp_size_in_bytes": 3 * GIB,
    "generated_code_size_in_bytes": 0,
    "output_size_in_bytes": 5 * GIB,
    "alias_size_in_bytes": 4 * GIB,
}
STEP = {"memory": SIZES, "axes": {"data": 1, "stage": 1, "fsdp": 4}, "coordinates": PLACES, "tokens": 4096}
CUBE = pod_of("v6e:2x2")


def folder(path, **changes):
    """A step as another trainer saves it."""
    path.mkdir()
    (path / "program.txt").write_text(PROGRAM)
    content = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    (path / "step.json").write_text(json.dumps(content))
    return path


@pytest.mark.lab
def test_a_folder_of_another_trainer_is_read(tmp_path):
    place = folder(tmp_path / "theirs")
    found = saved_step.read(place, CUBE)
    assert (found.name, found.tokens, found.schedules) == ("theirs", 4096, None)
    assert found.step.axes == STEP["axes"]
    assert found.step.coordinates[2] == (1, 1, 0, 0)
    assert found.step.memory.total == 6 * GIB  # four of the five GiB of outputs reuse the memory of arguments
    (place / "schedules").mkdir()
    refused("program.txt", lambda: saved_step.read(tmp_path, CUBE))
    assert saved_step.read(place, CUBE).schedules == place / "schedules"


@pytest.mark.lab
def test_what_is_saved_is_read_again(tmp_path):
    memory = DeviceMemory(parameters=0, optimizer=0, batch=0, arguments=7, temp=11, program=13, kept=17)
    step = CompiledStep(PROGRAM, memory, {"fsdp": 4}, tuple(map(tuple, PLACES)), "--xla_flag=1")
    saved_step.save(tmp_path / "new" / "ours", step, 4096)
    found = saved_step.read(tmp_path / "new" / "ours", CUBE)
    assert (found.step, found.tokens) == (step, 4096)


@pytest.mark.lab
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("memory", {"memory": None}),
        ("memory", {"memory": {**SIZES, "temp_size_in_bytes": "much"}}),
        ("step.coordinates[0][0]", {"coordinates": [["x"] * 4] * 4}),
        ("coordinates", {"coordinates": PLACES[:3]}),
        ("--topology", {"axes": {"fsdp": 2}, "coordinates": PLACES[:2]}),
        ("tokens", {"tokens": -1}),
        ("token", {"token": 8192}),
    ],
)
def test_an_invalid_folder_is_refused(name, changes, tmp_path):
    place = folder(tmp_path / "theirs", **changes)
    refused("--against", lambda: saved_step.read(place, CUBE))
    refused(name, lambda: saved_step.read(place, CUBE))


CONFIG = """
model: {num_layers: 2, model_dim: 256, num_heads: 2, mlp_dim: 1024, vocab_size: 8192, compute_dtype: bfloat16}
train: {length: 1024, batch_tokens: 8192, mesh: {data: 2, fsdp: 2, tensor: 2}}
"""


@pytest.fixture
def plan(tmp_path, capsys):
    """A function that runs ``python -m train plan``; it gives the status and what was printed."""
    (tmp_path / "run.yaml").write_text(CONFIG)

    def run(*arguments):
        status = main(["plan", str(tmp_path / "run.yaml"), *arguments])
        return status, capsys.readouterr()

    return run


def cells(output, row):
    """The cells of the first table row that begins with `row`."""
    line = next(line for line in output.splitlines() if line.startswith(f"│ {row} "))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_two_saved_steps_are_compared_without_a_compiler(plan, tmp_path):
    first = folder(tmp_path / "first")
    second = folder(tmp_path / "second", tokens=None, flags="--xla_flag=1")
    (second / "program.txt").write_text(PROGRAM.replace("1750000", "3500000").replace("tpu_custom_call", "Buffer"))
    status, output = plan("--topology", "v6e:2x2", "--against", str(first), "--against", str(second))
    assert status == 0
    output = output.out
    assert cells(output, "MLP") == ["0.001 = 0.001 / 0 / 0", "0.002 = 0.002 / 0 / 0"]
    assert cells(output, "kernels") == ["> 0", "0"]
    assert cells(output, "k") == ["1 x unknown", ""]
    assert cells(output, "tokens of a step and chip") == ["1,024", "2,048"]
    assert cells(output, "HBM GiB: temporaries") == ["3.00", "3.00"]
    assert cells(output, "TFLOP executed, kernels left out") == ["0.0005369"] * 2  # 2 x 1024 x 256 x 1024
    assert cells(output, "all-reduce f32")[0].startswith("1 x, 6.14e-06 GB")
    assert cells(output, "step")[0].startswith("> ")
    text = " ".join(output.split())
    assert "kernel k x 1 of first" in text
    assert 'LIBTPU_INIT_ARGS="--xla_flag=1"' in text
