"""Recommended flags of the TPU compiler: which are missing, and what a run prints about them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from train.plan.pods import KNOWN
from train.runtime.chips import CHIPS, GPUS
from train.runtime.flags import RECOMMENDED, advice, missing

CHIP = "v6e"
FIRST, *OTHERS = RECOMMENDED[CHIP]


def test_what_is_set_by_hand_stays():
    name = FIRST.partition("=")[0]
    assert missing(CHIP, "") == " ".join(RECOMMENDED[CHIP])
    assert missing(CHIP, f"--other=1 {name}=7") == missing(CHIP, f"{name[1:]}=7") == " ".join(OTHERS)
    assert missing(CHIP, f"{name}_more=7") == " ".join(RECOMMENDED[CHIP])
    assert set(RECOMMENDED) <= {*KNOWN, *GPUS}


def test_a_run_on_tpus_is_told_what_its_environment_lacks(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1")
    wanted = f'export LIBTPU_INIT_ARGS="--other=1 {" ".join(RECOMMENDED[CHIP])}"'
    assert advice(CHIPS[CHIP].kind, 1).endswith(wanted)


def test_a_run_on_gpus_is_told_what_helps_several_of_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    kind = GPUS["h100"].kind
    assert advice(kind, 8).endswith(f'export XLA_FLAGS="{" ".join(RECOMMENDED["h100"])}"')
    assert advice(kind, 1) is None


PROGRAM = """
import jax, jax.numpy as jnp, sys
from jax.experimental import topologies
device = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices[0]
x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
jax.jit(jnp.sin).trace(x).lower(lowering_platforms=("tpu",)).compile()
"""


@pytest.mark.compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed")
@pytest.mark.parametrize("chip", [chip for chip in RECOMMENDED if chip in CHIPS])
def test_the_compiler_knows_them(chip):
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment = {**os.environ, **variables, "LIBTPU_INIT_ARGS": " ".join(RECOMMENDED[chip])}
    subprocess.run([sys.executable, "-c", PROGRAM, CHIPS[chip].topology], env=environment, check=True)
