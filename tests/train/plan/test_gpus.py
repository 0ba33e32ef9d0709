"""Plans for GPUs: times of collectives and products by hand; and, with jax's CUDA plugin, a config compiled for one."""

import importlib.util

import pytest
from refusals import refused

from train.cli import main
from train.config import load
from train.plan.gpus import machine_of
from train.plan.hlo import parse
from train.plan.plan import make_plan
from train.plan.roofline import GPUKernels, NodeNetwork, Roofline
from train.runtime.chips import GPUS

MIB = 2**20
NVLINK, OUTSIDE = 0.8 * 450e9, 0.8 * 50e9  # shares of the published rates that a plan assumes


def entry(*lines):
    return "ENTRY %main (x: f32[1048576]) -> f32[] {\n  %x = f32[1048576]{0} parameter(0)\n  " + "\n  ".join(
        [*lines, "ROOT %r = f32[] constant(0)\n}\n"]
    )


@pytest.mark.parametrize(
    ("kind", "groups", "sent", "seconds"),
    [
        ("all-gather", [range(8)], 7 / 8, 7 / 8 / NVLINK),
        ("all-reduce", [range(8)], 2 * 7 / 8, 2 * 7 / 8 / NVLINK),
        # Eight cards bring each node the half that it lacks; over NVLink comes more, but faster.
        ("all-gather", [range(16)], 15 / 16, max(15 / 16 / NVLINK, 1 / 2 / 8 / OUTSIDE)),
        ("all-gather", [[0, 8], [1, 9]], 1 / 2, 1 / 2 / OUTSIDE),
        ("all-to-all", [range(8)], 7 / 8, 7 / 8 / NVLINK),
        ("all-to-all", [range(16)], 15 / 16, 1 / 2 / OUTSIDE),
        ("collective-permute", [[0, 1], [1, 2]], 1, 1 / NVLINK),
        ("collective-permute", [[7, 8], [8, 9]], 1, 1 / OUTSIDE),
    ],
)
def test_a_collective_takes_the_time_of_nvlink_or_of_the_network(kind, groups, sent, seconds):
    written = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    name = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    line = parse(entry(f"%g = f32[{MIB}]{{0}} {kind}(%x), {name}={{{written}}}")).named["main"]["g"]
    found = NodeNetwork(machine_of("h100:16"), {"data": 16}).traffic(line, kind)
    assert found.bytes == 4 * MIB * sent
    assert found.seconds == pytest.approx(4 * MIB * seconds)


PRODUCT = """
%inside (a: {dtype}[4096,4096], b: {dtype}[4096,4096]) -> {dtype}[4096,4096] {{
  %a = {dtype}[4096,4096]{{1,0}} parameter(0)
  %b = {dtype}[4096,4096]{{1,0}} parameter(1)
  ROOT %dot = {dtype}[4096,4096]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: {dtype}[4096,4096], b: {dtype}[4096,4096]) -> {dtype}[4096,4096] {{
  %a = {dtype}[4096,4096]{{1,0}} parameter(0)
  %b = {dtype}[4096,4096]{{1,0}} parameter(1)
  ROOT %product = {dtype}[4096,4096]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%inside
}}
"""


def seconds(text):
    """The time of a program on one H100."""
    gpu = machine_of("h100:1")
    return Roofline(parse(text), NodeNetwork(gpu, {}), GPUKernels(gpu, lambda q, k: 1.0)).run().seconds


def test_a_product_takes_the_time_of_its_flops_and_a_sum_that_of_its_bytes():
    peak = GPUS["h100"].peak
    assert seconds(PRODUCT.format(dtype="bf16")) == pytest.approx(2 * 4096**3 / (0.65 * peak))
    assert seconds(PRODUCT.format(dtype="f32")) > 2 * seconds(PRODUCT.format(dtype="bf16"))
    total = entry(f"%sum = f32[{MIB}]{{0}} fusion(%x), kind=kLoop, calls=%none")
    assert seconds(total) == pytest.approx(2 * 4 * MIB / (0.85 * 3352e9))


def test_numbers_of_gpus_that_do_not_exist_and_slices_of_them_are_refused():
    refused("--topology", lambda: machine_of("h100:3"))
    refused("--topology", lambda: machine_of("h100:8x8"))
    refused("--slices", lambda: machine_of("h100:8", 2))


CUDA = any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin")))


@pytest.mark.skipif(CUDA, reason="the plugin is here")
def test_without_the_plugin_one_line_says_what_to_install(capsys):
    assert main(["plan", "configs/quickstart.yaml", "--topology", "h100:8"]) == 2
    assert '".[train,cuda]"' in capsys.readouterr().err


@pytest.mark.skipif(not CUDA, reason="needs jax's CUDA plugin")
@pytest.mark.compile
@pytest.mark.parametrize("name", ["h100:1", "h100:8", "h100:16"])
def test_a_config_is_compiled_for_gpus(name):
    sizes = ["model.num_layers=2", "train.batch_tokens=131072", "model.vocab_size=1024"]
    plan = make_plan(
        load("configs/gpus/llama-1b-8k.yaml", [*sizes, "train.mesh={data: 1, fsdp: -1}"]), machine_of(name)
    )
    devices = machine_of(name).devices
    assert plan.memory.optimizer == pytest.approx(2 * plan.memory.parameters, rel=1e-3)
    assert plan.tally.kernels > 0
    rows = plan.setup.config.train.rows
    assert (plan.rows_that_fit >= rows) == (plan.problem is None)
    assert not plan.tally.unknown
    assert bool(plan.tally.moved) == (devices > 1)
