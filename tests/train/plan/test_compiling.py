"""How the compiler is called, and how its errors and programs are read."""

import importlib.util
import os
import subprocess
import sys

import pytest

from train.cli import _parse
from train.plan import compiling
from train.plan.compiling import compiler_flags, out_of_memory
from train.plan.pods import pod
from train.plan.report import compiled_with


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (41.87G) "
            "exceeds available HBM (15.75G).",
            "does not fit: temporaries alone need 41.9 GiB of HBM, a device has 15.8; ",
        ),
        ("XLA:TPU compile permanent error. Used 1.50T of 95.74G hbm.", "does not fit: needs 1,536.0 GiB of HBM, "),
    ],
)
def test_a_program_that_does_not_fit_is_reported_in_gib(message, line):
    assert out_of_memory(message).startswith(line)
    assert out_of_memory("INTERNAL: something else") is None


def test_flags_are_passed_to_the_compiler(monkeypatch):
    monkeypatch.setattr("train.runtime.flags.RECOMMENDED", {"v6e": ("--third=3", "--first=2")})
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--first=1")
    assert compiler_flags("v6e") == "--first=1 --third=3"
    assert compiler_flags("v5p") == compiler_flags("v6e", "") == "--first=1"
    assert compiler_flags("v6e", "--second=2") == "--first=1 --second=2"
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert compiler_flags("v6e", "--second=2") == "--second=2"
    assert compiler_flags("v6e") == "--third=3 --first=2"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--xla_a=1", 'compiled with these flags, which a run needs too: export LIBTPU_INIT_ARGS="--xla_a=1"'),
        ("", "compiled without flags of the compiler"),
    ],
)
def test_a_plan_reports_its_flags(flags, line):
    assert compiled_with(flags) == line


def test_a_flag_that_the_compiler_does_not_know_is_named(monkeypatch):
    died = subprocess.CompletedProcess([], 1, stdout="", stderr="\nERROR: Unknown command line flag 'xla_no'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    with pytest.raises(
        ValueError, match=r"^--flags: this libtpu knows no flag --xla_no, found among --xla_no=1; take it out"
    ):
        compiling._run("folder", pod("v6e:2x2"), 1, "--xla_no=1", compiling.UPDATE)


GATHERED = """
import sys, jax, jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from train.plan.compiling import devices_of
from train.plan.pods import pod
devices = devices_of(pod(sys.argv[1]))
devices = mesh_utils.create_device_mesh((len(devices),), devices=devices)
mesh = jax.sharding.Mesh(devices, ("all",), axis_types=(jax.sharding.AxisType.Explicit,))
x = jax.ShapeDtypeStruct((4096, 11008), jnp.bfloat16, sharding=NamedSharding(mesh, P("all")))
whole = jax.jit(lambda x: jnp.sin(jax.sharding.reshard(x, NamedSharding(mesh, P()))))
print(whole.trace(x).lower(lowering_platforms=("tpu",)).compile().as_text())
"""


@pytest.mark.compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed")
def test_arrays_on_a_pod_with_rings_are_gathered():
    """Without rings, libtpu uses an all-reduce of arrays that are mostly zeros."""
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", GATHERED, "v5p:4x4x4"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert " all-gather" in text
    assert " all-reduce" not in text


def test_a_single_flag_is_read():
    """Its value begins with dashes, like an option."""
    assert _parse(["plan", "c.yaml", "--topology", "v6e:2x2", "--flags=--xla_a=1"])["flags"] == "--xla_a=1"
    assert _parse(["plan", "c.yaml", "--topology", "v6e:2x2", "--flags="])["flags"] == ""
