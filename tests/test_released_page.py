"""The page "Extend a released model": its commands and examples run, on a tiny model."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from released_models import TEXT, write_released

import posjax as pj
from posjax.nn import from_pretrained
from posjax.nn.huggingface import FAMILIES
from train import cli
from train.config import load_values
from train.model.build import Setup

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/released.md").read_text(encoding="utf-8")
SMALL = {
    "configs/extend.yaml": ["evaluate.tasks=[]", "compare.texts=1", "compare.only=[as released, ReRoPE]"],
    "configs/released-coca.yaml": [
        *("train.length=16", "train.batch_tokens=32", "train.steps=4", "train.warmup_steps=1", "train.mesh.data=1"),
        *("monitor.evaluate_every=2", "monitor.evaluate_tokens=64", "compare.processes=1"),
    ],
    "configs/lora.yaml": [
        *("train.length=16", "train.batch_tokens=32", "train.steps=2", "train.warmup_steps=1", "train.mesh.data=1"),
        "model.lora.rank=2",
    ],
}
TEXTS = ["data.source=files", "data.paths=[books/*.txt]", "data.held_out=0.3"]
SIZES = ["evaluate.tokens=64", "evaluate.lengths=[64]", "evaluate.batch_tokens=64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The working folder, with the files that the page's commands name."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "MODEL").mkdir()
    write_released(folder / "MODEL")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "books").mkdir()
    for n in range(4):
        (folder / "books" / f"{n}.txt").write_text(f"Book {n}. " + TEXT * (20 + n))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def commands():
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).splitlines()
    return [shlex.split(line)[3:] for line in lines if line]


def made_small(arguments):
    name, place, *rest = [argument.replace("16384", "64") for argument in arguments]
    measured = [] if name in ("generate", "export") else [*TEXTS, *SIZES]
    return [name, place, *rest, *SMALL.get(place, []), *measured]


@pytest.mark.slow
def test_the_commands_run_in_their_order(place, capsys):
    names = [arguments[0] for arguments in commands()]
    assert names == [
        "compare",
        "search",
        "evaluate",
        "generate",
        "compare",
        "evaluate",
        "evaluate",
        "export",
        "fit",
        *["export"] * 3,
    ]
    for arguments in commands():
        assert cli.main(made_small(arguments)) == 0, (arguments, capsys.readouterr().err)
    output = capsys.readouterr().out
    assert "At 64 tokens" in output
    exported, run = from_pretrained(place / "exported"), place / "runs/released-coca"
    assert (run / "training.png").is_file()
    merged, again = (from_pretrained(place / name).stacks[0][0].mlp.up[...] for name in ("merged", "merged-again"))
    np.testing.assert_allclose(again, merged, atol=1e-6)
    assert not np.array_equal(exported.embed[...], from_pretrained(place / "MODEL").embed[...])


def test_the_config_on_the_page_is_valid(place):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    config = load_values(yaml.safe_load(block.replace("2.0e-5", "0.00002")))
    rule = Setup(config).decoder.scheme.features.frequencies
    assert isinstance(rule, pj.rotary.YaRN)
    assert (rule.factor, rule.original_length) == (1024.0, 32)


def test_the_examples_run(place):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block.replace("4096", "16"), "released.md", "exec", dont_inherit=True), names)
    assert names["logits"].shape == (1, 8, 280)
    assert (place / "copy/tokenizer.json").is_file()
    up = names["decoder"].stacks[0][0].mlp.up[...]
    assert up.addressable_shards[0].data.size == up.size // 2
    assert len(up.sharding.device_set) == 4


def test_every_family_is_in_the_table():
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert [name for name in FAMILIES if f"`{name}`" not in rows] == []
