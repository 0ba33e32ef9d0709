"""Steps kept in folders: they are read back, invalid folders are refused, and steps are compared."""

import json

import pytest
from refusals import refused

from train.cli import WRONG_INPUT, main
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
CUBE = pod("v6e:2x2")


def folder(path, **changes):
    """A step as another trainer keeps it."""
    path.mkdir()
    (path / "program.txt").write_text(PROGRAM)
    content = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    (path / "step.json").write_text(json.dumps(content))
    return path


def test_a_folder_of_another_trainer_is_read(tmp_path):
    place = folder(tmp_path / "theirs")
    found = kept.read(place, CUBE)
    assert (found.name, found.tokens, found.schedules) == ("theirs", 8192, None)
    assert found.step.axes == STEP["axes"]
    assert found.step.coordinates[2] == (1, 1, 0, 0)
    assert found.step.memory.total == 6 * GIB  # four of the five GiB of outputs reuse the memory of arguments
    (place / "schedules").mkdir()
    refused("program.txt", lambda: kept.read(tmp_path, CUBE))
    assert kept.read(place, CUBE).schedules == place / "schedules"


def test_what_is_kept_is_read_again(tmp_path):
    memory = Memory(parameters=1, optimizer=2, batch=3, arguments=7, temp=11, program=13, kept=17)
    step = CompiledStep(PROGRAM, memory, {"fsdp": 4}, tuple(map(tuple, PLACES)), "--xla_flag=1")
    kept.keep(tmp_path / "new" / "ours", step, 4096)
    found = kept.read(tmp_path / "new" / "ours", CUBE)
    assert (found.step, found.tokens) == (step, 4096)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("memory", {"memory": None}),
        ("memory", {"memory": {**SIZES, "temp_size_in_bytes": "much"}}),
        ("step.axes", {"axes": {"fsdp": 0}}),
        ("step.coordinates[0][0]", {"coordinates": [["x"] * 4] * 4}),
        ("coordinates", {"coordinates": PLACES[:3]}),
        ("--topology", {"axes": {"fsdp": 2}, "coordinates": PLACES[:2]}),
        ("tokens", {"tokens": -1}),
        ("token", {"token": 8192}),
    ],
)
def test_an_invalid_folder_is_refused(name, changes, tmp_path):
    place = folder(tmp_path / "theirs", **changes)
    refused("--against", lambda: kept.read(place, CUBE))
    refused(name, lambda: kept.read(place, CUBE))


@pytest.fixture
def plan(tmp_path, capsys):
    """A function that runs ``python -m train plan`` on a config of the same model; it gives the output of both."""
    (tmp_path / "run.yaml").write_text(CONFIG)

    def run(*arguments):
        status = main(["plan", str(tmp_path / "run.yaml"), *arguments])
        return status, capsys.readouterr()

    return run


STAGES = "stages=[{name: first}, {name: second}]"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("--topology", ["--topology", "v5p", "--flags=--xla_a=1"]),
        ("v9", ["--topology", "v9:2x2", "--flags="]),
        ("3 dimensions", ["--topology", "v5p:8x8"]),
        ("--slices", ["--topology", "v5e:2x4", "--slices", "0"]),
        ("train.mesh.replica=2", ["--topology", "v5e:2x2", "--slices", "2"]),
        ("train.mesh.data", ["--topology", "v5e:2x4", "train.mesh={data: 3}"]),
        ("--sweep", ["--topology", "v6e:2x2", "--against", "a", "--sweep", "2"]),
        ("--sweep", ["--topology", "v5e:2x4", "--evaluate", "--sweep"]),
        ("--sweep", ["--topology", "v5e:2x4", "--sweep", "2", "model.model_dim=131072"]),  # nothing fits
        ("first, second", ["--topology", "v6e:2x2", "--keep", "folder", STAGES]),
        ("--keep", ["--topology", "v6e:2x2", "--against", "a", "--against", "b", "--keep", "c"]),
        ("--blocks", ["--topology", "v6e:2x2", "--blocks", "1024,1024"]),
        ("--blocks", ["--topology", "v6e:2x2", "--against", "a", "--blocks", "0,1024"]),
        ("--evaluate", ["--topology", "v6e:2x2", "--evaluate", "--keep", "kept"]),
    ],
)
def test_mistakes_at_the_command_line_are_one_line(plan, name, arguments):
    status, output = plan(*arguments)
    assert status == WRONG_INPUT
    assert output.err.startswith("error: ")
    assert name in output.err
    assert output.err.count("\n") == 1


def cells(output, row):
    """The cells of the first table row that begins with `row`."""
    line = next(line for line in output.splitlines() if line.startswith(f"│ {row} "))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_two_kept_steps_are_compared_without_a_compiler(plan, tmp_path):
    first = folder(tmp_path / "first")
    second = folder(tmp_path / "second", tokens=None, flags="--xla_flag=1")
    (second / "program.txt").write_text(PROGRAM.replace("1750000", "3500000").replace("tpu_custom_call", "Buffer"))
    status, output = plan("--topology", "v6e:2x2", "--against", str(first), "--against", str(second))
    assert status == 0
    output = output.out
    assert cells(output, "MLP") == ["0.001 = 0.001 / 0 / 0", "0.002 = 0.002 / 0 / 0"]
    assert cells(output, "attention kernels") == ["> 0 = 1 x unknown", "none"]
    assert cells(output, "tokens of a step and chip") == ["2,048", "1,024"]
    assert cells(output, "HBM GiB: temporaries") == ["3.00", "3.00"]
    assert cells(output, "TFLOP executed, kernels left out") == ["0.0005369"] * 2  # 2 x 1024 x 256 x 1024
    assert cells(output, "all-reduce f32")[0].startswith("1 x, 6.14e-06 GB")
    assert cells(output, "step")[0].startswith("> ")
    text = " ".join(output.split())
    assert "kernel k x 1 of first" in text
    assert 'LIBTPU_INIT_ARGS="--xla_flag=1"' in text
