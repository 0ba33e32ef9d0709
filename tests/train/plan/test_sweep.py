"""Sweeps: which ways to split a config are tried, by which rough estimates, and how they are ranked."""

import dataclasses
import io
import itertools
import math

import pytest
from jax.sharding import AbstractMesh
from rich.console import Console

from train.cli import WRONG_INPUT, main
from train.config import load
from train.model.build import placement
from train.model.flops import update_flops
from train.model.mesh import mesh_shape
from train.plan.compiling import DoesNotCompile, Memory
from train.plan.plan import Plan, check_split
from train.plan.pods import pod
from train.plan.sweep import candidates, rough_seconds, sweep
from train.plan.timeline import Tally

LONG = """
model: {num_layers: 4, model_dim: 1024, num_heads: 4, num_kv_heads: 2, vocab_size: 32000, compute_dtype: bfloat16}
train: {length: 4096, batch_tokens: 16384}
"""


@pytest.fixture
def long_rows(tmp_path):
    """A config whose rows, heads and length can be split."""
    (tmp_path / "long.yaml").write_text(LONG)
    return load(tmp_path / "long.yaml")


def test_layers_without_a_window_take_the_next_strategy(tmp_path):
    (tmp_path / "long.yaml").write_text(LONG)

    def split(strategy: str) -> str:
        scheme, mesh = "scheme={name: hwfa, length: 4096, window: 256}", "train.mesh={data: 1, context: 8}"
        config = load(tmp_path / "long.yaml", [scheme, mesh, f"train.context.strategy={strategy}"])
        check_split(config, pod("v5e:2x4"))
        axes = mesh_shape(config.train.mesh, 8)
        return placement(config, AbstractMesh(tuple(axes.values()), tuple(axes))).layout.kind

    assert split("[neighbour, ring]") == "zigzag"
    assert split("[neighbour, all-gather]") == "contiguous"
    with pytest.raises(ValueError, match=r"strategy='neighbour': .*without a window.*; strategy='ulysses'"):
        split("[neighbour, ulysses]")
    with pytest.raises(ValueError, match=r"strategy='neighbour'.*without a window"):
        split("neighbour")


def test_a_sweep_tries_what_can_be_split(long_rows):
    found = list(candidates(long_rows, pod("v5e:2x4")))
    names = {one.name for one in found}
    assert len(names) == len(found)
    meshes = {tuple(one.axes.values()) for one in found}
    # Four rows, four query heads: eight devices can share neither. Two key heads are repeated for four.
    powers = [(d, f, c, t) for d, f, c, t in itertools.product((1, 2, 4, 8), repeat=4) if d * f * c * t == 8]
    assert meshes == {(1, *sizes) for sizes in powers if sizes[0] * sizes[1] <= 4 and sizes[3] <= 4}
    assert "fsdp 4 x context 2, full, ulysses" in names
    assert "context 8, full, ulysses" not in names  # four query heads


def test_a_sweep_spans_slices_with_replicas(long_rows):
    found = list(candidates(long_rows, pod("v5e:2x4", 2)))
    assert {one.axes["replica"] for one in found} == {2}
    assert {math.prod(one.axes.values()) for one in found} == {16}
    by_name = {one.name: one for one in candidates(long_rows, pod("v6e:2x4"))}
    alone, both = by_name["fsdp 2 x context 4, full, ulysses"], candidates(long_rows, pod("v6e:2x4", 2))
    (both,) = [one for one in both if one.name == "replica 2 x fsdp 2 x context 4, full, ulysses"]
    assert both.bytes < alone.bytes  # half the tokens


def test_the_network_between_slices_bounds_a_sweep(long_rows):
    axes = {"replica": 2, "data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    parameters = 4 * 1024 * (2 * 1024 + 2 * 512 + 3 * 2736) + 32000 * 1024
    # Each of the four chips in a slice sends a quarter of the gradients in bfloat16: half of them out, half back.
    assert rough_seconds(long_rows, axes, pod("7x:2x2x1", 2)) == pytest.approx(2 * parameters / 4 / 12.5e9)


def test_parameters_are_gathered_over_context_as_over_fsdp(long_rows):
    target, axes = pod("v5e:2x4"), {"replica": 1, "data": 1, "fsdp": 1, "context": 8, "tensor": 1}
    few = dataclasses.replace(long_rows, train=dataclasses.replace(long_rows.train, batch_tokens=8, length=8))
    parameters = 4 * 1024 * (2 * 1024 + 2 * 512 + 3 * 2736) + 32000 * 1024
    keys_and_values = 6 * 2 * 1 * 4 * 512 * 7
    assert rough_seconds(few, axes, target) == pytest.approx(
        (6 * parameters + keys_and_values) / (2e9 * target.network.link)
    )


def test_rough_memory_is_that_of_state_and_activations(long_rows):
    by_name = {one.name: one for one in candidates(long_rows, pod("v5e:2x4"))}
    whole, split = by_name["data 4 x tensor 2, full"], by_name["fsdp 4 x tensor 2, full"]
    parameters = 4 * 1024 * (2 * 1024 + 2 * 512 + 3 * 2736) + 32000 * 1024
    assert whole.bytes - split.bytes == pytest.approx(16 * parameters / 2 * 3 / 4)
    (rows,) = {one.bytes for name, one in by_name.items() if name.startswith("context 4 x tensor 2, full")}
    assert rows == split.bytes  # parameters are split over context too
    kept = by_name["fsdp 4 x tensor 2, dots"].bytes - split.bytes
    attended = 2 * 4096 * 4 * 1024 / 2
    assert kept == pytest.approx(2 * 4096 * 4 * (2 * 1024 + 2 * 512 + 3 * 2736) / 2 + attended)
    assert by_name["fsdp 4 x tensor 2, attention"].bytes - split.bytes == attended


def test_a_sweep_ranks_what_was_planned_and_reports_what_was_not(long_rows, monkeypatch):
    seconds = iter([3.0, None, 1.0, 2.0])

    def made(config, on, flags):
        assert flags == "--xla_a=1"
        found = next(seconds)
        if found is None:
            raise DoesNotCompile("the compiler died")
        tally, memory = Tally(compute=found), Memory(*[2.0**30] * 7)
        return Plan(config, on, {}, memory, update_flops(config), tally)

    monkeypatch.setattr("train.plan.sweep.make_plan", made)
    console = Console(width=120, record=True, file=io.StringIO())
    found = [plan for _, plan in sweep(long_rows, pod("v5e:2x4"), 4, console, "--xla_a=1")]
    assert [plan.seconds for plan in found[:3]] == [1.0, 2.0, 3.0]
    assert found[3] == "the compiler died"
    assert 'LIBTPU_INIT_ARGS="--xla_a=1"' in console.export_text()


def test_a_sweep_of_what_cannot_fit_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "large.yaml").write_text(LONG.replace("model_dim: 1024", "model_dim: 65536"))
    status = main(["plan", str(tmp_path / "large.yaml"), "--topology", "v5e:2x4", "--sweep", "2"])
    assert status == WRONG_INPUT
    error = capsys.readouterr().err
    assert "ways to split the work over v5e:2x4 fits into its memory" in error
    assert error.count("\n") == 1
