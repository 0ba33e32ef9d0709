"""A run's directory, and the names of the parameters in its checkpoints."""

import re
from pathlib import Path

import jax
import pytest
from refusals import refused

from posjax.nn import logical_axes
from train.checkpoint.directory import check_one_run
from train.checkpoint.manager import Checkpoints
from train.cli import main
from train.config import dump, parse
from train.model.build import Setup
from train.model.state import is_axis_names
from train.runtime.lines import Listed
from train.runtime.paths import path, write_file


def config(**train):
    return parse({"model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}, "train": train})


def tree(**values):
    """The names of a model's parameters, and their axes."""
    model = Setup(parse(values)).abstract
    leaves = jax.tree_util.tree_leaves_with_path(logical_axes(model), is_leaf=is_axis_names)
    return {
        jax.tree_util.keystr(place, simple=True, separator="."): ", ".join(map(str, axes)) for place, axes in leaves
    }


def test_the_names_of_the_parameters_are_those_documented():
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```text\n(.*?)```", text, re.S)
    documented = dict(line.split(maxsplit=1) for line in block.splitlines())
    assert tree() == documented
    assert tree(model={"scan_layers": False}) == documented
    assert tree(model={"tied_head": False}) == {**documented, "head": "embed, vocab"}
    assert tree(scheme="t5").keys() - documented.keys() == {"shared.0.bias.table"}
    learned = {f"stacks.0.0.attention.learned.bias.{name}" for name in "bw"}
    assert tree(scheme="fox").keys() - documented.keys() == learned


def test_checkpoints_are_refused_where_their_arrays_cannot_be_written(capsys):
    """TensorStore cannot write to memory://, nor read from there."""
    refused("memory://", lambda: Checkpoints(config(), path("memory://runs/x"), []))
    write_file(path("memory://elsewhere") / "config.yaml", dump(config()))
    write_file(path("memory://elsewhere") / "checkpoints" / "3" / "_METADATA", "")
    assert main(["verify", "memory://elsewhere"]) == 2
    assert capsys.readouterr().err.startswith("error: memory://elsewhere/checkpoints: ")


def test_runs_are_listed_only_for_a_folder_of_runs_on_disk_or_at_a_url(tmp_path):
    for root in (path(tmp_path), path("memory://several")):
        for name in ("a", "b", "b/profile"):
            (root / name).mkdir(parents=True, exist_ok=True)
            write_file(root / name / "config.yaml", "")
        with pytest.raises(Listed) as error:
            check_one_run(root)
        assert str(error.value).splitlines()[1:] == [f"  {root}/a", f"  {root}/b"]
        for name in ("a", "nothing", "a/config.yaml"):
            check_one_run(root / name)
        (root / "b/checkpoints/1").mkdir(parents=True)
        write_file(root / "b/checkpoints/1/_METADATA", "")
        check_one_run(root / "b")
