"""Plans of configs on pods: memory by kind, the predicted step, ways to split, the compiler's reports."""

import importlib.util
import io
import itertools
import os
import subprocess
import sys

import jax
import pytest
from compiled_step import PROGRAM
from refusals import refused
from rich.console import Console

from train.cli import WRONG_INPUT, main
from train.config import load, parse
from train.plan.compiling import (
    Allocation,
    CompiledStep,
    DeviceMemory,
    batch_of_evaluation,
    compiler_flags,
    largest,
    out_of_memory,
)
from train.plan.plan import check_split, make_plan, plan_evaluation, plan_of
from train.plan.pods import GIB, Pod, pod_of
from train.plan.report import assumptions, show
from train.plan.sweep import candidates, sweep


def test_pods_have_the_published_chips_and_rings():
    assert pod_of("7x:4x4x4") == pod_of("tpu7x:4x4x4") == Pod("7x", (4, 4, 4))
    assert (pod_of("7x:4x4x4").devices, pod_of("v5p:8x8x8").devices, pod_of("v5e:16x16").devices) == (128, 512, 256)
    assert pod_of("v5p:2x2x1").peak_flops == pytest.approx(459e12, rel=1e-3)
    four = pod_of("v5p:4x4x4", 4)
    assert (four.name, four.slice_name, four.chips) == ("4 slices of v5p:4x4x4", "v5p:4x4x4", 256)
    rings = {"v5p:4x4x8": (True,) * 3, "v5p:2x4x4": (False,) * 3, "v6e:8x16": (False, True)}
    assert {name: pod_of(name).rings for name in rings} == rings


@pytest.fixture
def plan(wider, capsys):
    """A function that runs ``python -m train plan``; it gives the status and what was printed."""

    def run(*arguments):
        status = main(["plan", wider, *arguments])
        return status, capsys.readouterr()

    return run


STAGES = "stages=[{name: first}, {name: second}]"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("--topology", ["--topology", "v9:2x2", "--flags=--xla_a=1"]),
        ("3 dimensions", ["--topology", "v5p:8x8"]),
        ("--slices", ["--topology", "v5e:2x4", "--slices", "0"]),
        ("train.mesh.replica=2", ["--topology", "v5e:2x2", "--slices", "2"]),
        ("train.mesh.data", ["--topology", "v5e:2x4", "train.mesh={data: 3}"]),
        ("--sweep", ["--topology", "v5e:2x4", "--evaluate", "--sweep"]),
        (
            "--sweep",
            ["--topology", "v5e:1x2", "--sweep", "2", "train.mesh={data: 1}", "model.model_dim=131072"],
        ),  # nothing fits
        ("first, second", ["--topology", "v6e:2x2", "--keep", "folder", STAGES]),
        ("--keep", ["--topology", "v6e:2x2", "--against", "a", "--against", "b", "--keep", "c"]),
        ("--evaluate", ["--topology", "v6e:2x2", "--evaluate", "--keep", "kept"]),
    ],
)
def test_mistakes_at_the_command_line_are_one_line(plan, name, arguments):
    status, output = plan(*arguments)
    assert status == WRONG_INPUT
    assert output.err.startswith("error: ")
    assert name in output.err
    assert output.err.count("\n") == 1


TINY = """
model: {num_layers: 2, model_dim: 256, num_heads: 2, vocab_size: 1024, compute_dtype: bfloat16, remat: full}
train: {length: 1024, batch_tokens: 8192, mesh: {data: 2, fsdp: 2, tensor: 2}}
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "run.yaml").write_text(TINY)
    return str(tmp_path / "run.yaml")


@pytest.fixture
def wider(tmp_path):
    """The tiny config with more vocabulary and hidden units, so that they show among gigabytes."""
    wide = TINY.replace("vocab_size: 1024", "mlp_dim: 1024, vocab_size: 8192").replace(", remat: full", "")
    (tmp_path / "run.yaml").write_text(wide)
    return str(tmp_path / "run.yaml")


LONG = {
    "model": {"num_layers": 4, "model_dim": 1024, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 32000},
    "train": {"length": 4096, "batch_tokens": 16384, "mesh": {"data": 1, "fsdp": 4}},
}
PARAMETERS = 4 * 1024 * (2 * 1024 + 2 * 512 + 3 * 2736) + 32000 * 1024


@pytest.fixture(scope="module")
def long_rows():
    """A config whose rows, heads and length can be split."""
    return parse(LONG)


def test_the_plan_of_a_compiled_step_adds_its_memory_and_predicts_its_speed(long_rows):
    memory = DeviceMemory(*(n * GIB for n in (1.0, 2.0, 0.5, 4.0, 3.0, 0.25, 0.125)))
    axes = {"replica": 1, "data": 1, "fsdp": 4, "context": 1, "tensor": 1}
    places = ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0))
    step = CompiledStep(PROGRAM, memory, axes, places, "--xla_a=1", (Allocation(GIB, "f32[8,9]"),))
    plan = plan_of(check_split(long_rows, pod_of("v6e:2x2")), pod_of("v6e:2x2"), step)
    assert (plan.memory.total, plan.memory.padding) == (7.375 * GIB, 0.5 * GIB)
    seconds = 0.001 + 2 * 4 * 1024 * 3 / 4 / (2 * 90e9) + 4e-6
    assert plan.seconds == pytest.approx(seconds)
    assert plan.tokens_per_second == pytest.approx(16384 / 4 / seconds)
    pairs = 4 * 4096 * 4097 / 2
    flops = 6 * PARAMETERS * 16384 + 12 * 1024 * 4 * pairs
    assert plan.mfu == pytest.approx(flops / seconds / 4 / (2 * 2 * 131072 * 1.75e9))
    console = Console(width=120, record=True, file=io.StringIO())
    show(plan, console)
    text = console.export_text()
    for part in ("7.38", "0.50", "f32[8,9]", "all-reduce", f"{plan.mfu:.1%}", "1.75 GHz", '"--xla_a=1"'):
        assert part in text


def test_a_sweep_tries_what_can_be_split(long_rows):
    found = {one.name: one for one in candidates(long_rows, pod_of("v5e:2x4"))}
    meshes = {tuple(one.axes[axis] for axis in ("data", "fsdp", "context", "tensor")) for one in found.values()}
    # Four rows, four query heads: eight devices can share neither. Two key heads are repeated for four.
    powers = [(d, f, c, t) for d, f, c, t in itertools.product((1, 2, 4, 8), repeat=4) if d * f * c * t == 8]
    assert meshes == {sizes for sizes in powers if sizes[0] * sizes[1] <= 4 and sizes[3] <= 4}
    assert "fsdp 4 x context 2, full, ulysses" in found
    assert "context 8, full, ulysses" not in found  # four query heads


def test_a_sweep_without_a_compiler_says_so(long_rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    console = Console(width=120, record=True, file=io.StringIO())
    found = sweep(long_rows, pod_of("v6e:2x2"), 2, console, "--xla_a=1")
    assert ["pip install libtpu" in plan for _, plan in found] == [True, True]
    assert 'LIBTPU_INIT_ARGS="--xla_a=1"' in console.export_text()
    refused("libtpu", lambda: make_plan(long_rows, pod_of("v6e:2x2")))


def test_the_longest_batch_of_an_evaluation_is_planned():
    evaluate = {"lengths": [32, 64], "tokens": 64, "batch_tokens": 128}
    train = batch_of_evaluation(parse({**LONG, "evaluate": evaluate}), 8, 1)
    assert (train.length, train.rows, train.mesh.context) == (64, 2, 4)


def test_a_program_that_does_not_fit_is_reported_in_gib():
    both = "memory required for HLO temporaries (41.87G) exceeds available HBM (15.75G)."
    assert all(part in out_of_memory(both) for part in ("temporaries", "41.9 GiB", "15.8"))
    assert "1,536.0 GiB" in out_of_memory("XLA:TPU compile permanent error. Used 1.50T of 95.74G hbm.")
    assert out_of_memory("INTERNAL: something else") is None


def test_flags_are_passed_to_the_compiler(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--first=1")
    assert compiler_flags("v6e", "--second=2") == "--first=1 --second=2"
    assert compiler_flags("v6e", "") == "--first=1"
    assert compiler_flags("v6e").startswith("--first=1 --xla_")
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert compiler_flags("v6e", "--second=2") == "--second=2"


# Lines of a report of libtpu 0.0.42.1, two more lines for small arrays, and the report's part about fast memory. The
# number before a multiplication sign counts equal shapes.
REPORT = """Memory Space: default (color=0)
Total bytes: 303001075712 (282.19GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00GiB( 20%);   64.00GiB;      5603328;               12; f32[32,8192,2048], 4\u00d7(), bf16[16,32,8192,8192]
  321.62GiB( 99%);  256.00MiB; 299445354496;               16; f32[32,16,1,8192], 8\u00d7bf16[32,4,8192,64]
  321.63GiB( 99%);   12.50KiB; 299445354496;                1; pred[12800]
  321.63GiB( 99%);        20B; 299445354496;                1; ()

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00MiB(100%);   64.00MiB;            0;                2; 2\u00d7f32[16,128,8192]
"""


def test_the_largest_arrays_are_those_of_the_compilers_report(tmp_path):
    assert largest(tmp_path) == []
    (tmp_path / "module_0001.jit_f.after_optimizations-memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "module_0002.jit_g.after_optimizations-memory-usage-report.txt").write_text("Total bytes: 0\n")
    found = [(64 * 2.0**30, "bf16[16,32,8192,8192]"), (2.0**28, "bf16[32,4,8192,64]"), (12.5 * 2**10, "pred[12800]")]
    assert largest(tmp_path) == found
    assert largest(tmp_path, 2) == found[:2]


needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")


@needs_compiler
@pytest.mark.compile
def test_a_tiny_config_is_planned(tiny, capsys):
    assert main(["plan", tiny, "--topology", "v5e:2x4"]) == 0
    out = capsys.readouterr().out
    for part in ("HBM of a chip: v5e:2x4", "Largest temporary arrays", "bf16[", "fsdp", "all-gather", "1.5 GHz"):
        assert part in out
    assert "Not included" not in out
    assert main(["plan", tiny, "--topology", "v5e:2x4", "--sweep", "2"]) == 0
    assert "2 of" in capsys.readouterr().out


GATHERED = """
import jax, jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from train.plan.compiling import devices_of
from train.plan.pods import pod_of
devices = mesh_utils.create_device_mesh((64,), devices=devices_of(pod_of("v5p:4x4x4")))
mesh = jax.sharding.Mesh(devices, ("all",), axis_types=(jax.sharding.AxisType.Explicit,))
x = jax.ShapeDtypeStruct((4096, 11008), jnp.bfloat16, sharding=NamedSharding(mesh, P("all")))
whole = jax.jit(lambda x: jnp.sin(jax.sharding.reshard(x, NamedSharding(mesh, P()))))
print(whole.trace(x).lower(lowering_platforms=("tpu",)).compile().as_text())
"""


@needs_compiler
@pytest.mark.compile
def test_arrays_on_a_pod_with_rings_are_gathered():
    """Without rings, libtpu uses an all-reduce of arrays that are mostly zeros."""
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", GATHERED], env=environment, capture_output=True, text=True, check=True)
    assert " all-gather" in done.stdout
    assert " all-reduce" not in done.stdout


@needs_compiler
@pytest.mark.compile
def test_the_evaluation_of_a_tiny_config_is_planned(tiny):
    """One row of a text, split over all eight chips; each has an eighth of the parameters."""
    sizes = ["evaluate.lengths=[8192]", "evaluate.tokens=8192", "evaluate.batch_tokens=8192"]
    plan = plan_evaluation(load(tiny, sizes), pod_of("v5e:2x4"))
    count = sum(leaf.size for leaf in jax.tree.leaves(plan.setup.shapes))
    assert plan.memory.parameters == 4 * count / 8
    assert plan.memory.optimizer == 0


@needs_compiler
@pytest.mark.compile
def test_a_tiny_config_is_planned_for_two_slices(tiny):
    settings = ("train.mesh={replica: 2, data: 1, fsdp: 8, tensor: 1}", "train.batch_tokens=16384")
    plan = make_plan(load(tiny, settings), pod_of("v5e:2x4", 2))
    ((crossing, sent),) = [(axes, size) for (axes, _), size in plan.tally.moved.items() if "DCN" in axes]
    gradients = plan.memory.parameters / 4  # numbers per device; half of them are sent twice, in bfloat16 or float32
    assert crossing == "replica (DCN)"
    assert "3.125 GB/s of a chip to other slices" in assumptions(plan)
    assert 2 * gradients <= sent <= 4.1 * gradients
    assert not plan.tally.unknown


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize(
    ("topology", "override", "reason"),
    [
        ("v5e:3x5", "train.mesh={data: 1}", "the compiler knows no pod v5e:3x5"),
        # So wide that the hidden units, half of them on each device, are among the largest arrays.
        ("v5e:2x4", "model.mlp_dim=33554432", ",16777216] "),
    ],
)
def test_a_tiny_config_that_a_pod_cannot_run_is_a_one_line_error(topology, override, reason, tiny, capsys):
    assert main(["plan", tiny, "--topology", topology, override]) == WRONG_INPUT
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
