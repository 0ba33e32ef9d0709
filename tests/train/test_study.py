"""A study of a released model under many extensions: its cells, what is kept, its page."""

import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from released_models import LENGTH, TEXT, write_released
from rich.console import Console

import posjax as pj
from posjax.nn import Norm
from train import cli
from train.config import load, parse
from train.extension import completed
from train.study import run as running
from train.study import run_study
from train.study.cells import RESULTS, append_row, is_done, read_rows, text_cells
from train.study.report import findings, losses, tables

GPT2 = {"activation": "gelu", "mlp_dim": 128, "num_kv_heads": 4, "norm": Norm("layer", 1e-5, bias=True)}
GPT2 |= {"biases": ("qkv", "output", "mlp")}
SCHEMES = [
    {"name": "released", "label": "as released"},
    {"name": "released", "label": "YaRN", "extend": {"frequencies": {"name": "yarn"}}},
    {"name": "released", "label": "ReRoPE", "extend": {"far": {"name": "rerope"}}},
]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "tiny"
    folder.mkdir()
    return folder, write_released(folder)


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, times in (("one", 30), ("two", 40), ("short", 1)):
        (folder / f"{name}.txt").write_text(f"This is {name}. " + TEXT * times)
    return {
        "name": "study",
        "init": str(released[0]),
        "output": str(folder / "runs"),
        "data": {"source": "files", "paths": [f"{folder}/*.txt"]},
        "train": {"steps": 0},
        "monitor": {"compilation_cache": ""},
        "evaluate": {"lengths": [16, 64], "tokens": 128, "batch_tokens": 128},
        "compare": {"schemes": SCHEMES[:2], "texts": 2},
    }


@pytest.fixture(scope="module")
def study(values):
    console = Console(file=io.StringIO(), width=200)
    directory = run_study(parse(values), console)
    return directory, console.file.getvalue()


def test_the_numbers_are_those_of_the_extended_model(released, values, study):
    rows, config = read_rows(study[0]), parse(values)
    text = running.read_texts(config)[0]
    for label, extend in (("as released", {}), ("YaRN", {"frequencies": pj.rotary.YaRN(2.0, LENGTH, base=500.0)})):
        decoder = released[1].with_scheme(released[1].config.scheme.extend(**extend))
        tokens = jnp.asarray(text.last(64))[None]
        logits = jax.nn.log_softmax(decoder(tokens[:, :-1]))
        nll = -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[0, :, 0]
        (row,) = (r for r in rows if (r["label"], r["length"], r["text"]) == (label, 64, text.name))
        np.testing.assert_allclose(row["nll"], nll[-16:].mean(), rtol=1e-5)
        np.testing.assert_allclose(row["position_nll"][0], nll[0], rtol=1e-5)
        assert row["memory_bytes"] > 100_000
        assert row["error"] is None


def test_every_text_ends_alike_at_every_length(values):
    config = parse(values)
    texts = running.read_texts(config)
    assert [text.name.rpartition("/")[2] for text in texts] == ["two.txt", "one.txt"]
    np.testing.assert_array_equal(texts[0].last(64)[-16:], texts[0].last(16)[-16:])


def test_what_is_done_is_not_done_again(values, study, monkeypatch):
    before = (study[0] / RESULTS).read_text()
    monkeypatch.setattr(running, "measure", lambda *_: pytest.fail("measured again"))
    run_study(parse(values), Console(file=io.StringIO()))
    assert (study[0] / RESULTS).read_text() == before


def test_more_extensions_are_added(values, study):
    before = read_rows(study[0])
    more = {**values, "compare": {"schemes": SCHEMES, "texts": 2, "only": ["ReRoPE"]}}
    run_study(parse(more), Console(file=io.StringIO()))
    after = read_rows(study[0])
    assert after[: len(before)] == before
    assert {row["label"] for row in after[len(before) :]} == {"ReRoPE"}
    assert len(after) == len(before) + 4


def test_another_option_is_another_cell(values, study):
    config = parse(values)
    cells = list(text_cells(config, config.compare.schemes, running.read_texts(config)))
    rows = read_rows(study[0])
    assert all(is_done(cell, rows) for cell in cells)
    schemes = [{**SCHEMES[1], "extend": {"frequencies": {"name": "yarn", "factor": 8.0}}}]
    other = parse({**values, "compare": {"schemes": schemes, "texts": 2}})
    assert not any(is_done(cell, rows) for cell in text_cells(other, other.compare.schemes, running.read_texts(other)))


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    append_row(tmp_path, {"a": 1})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"b": ')
    assert read_rows(tmp_path) == [{"a": 1}]
    append_row(tmp_path, {"c": 3})
    assert read_rows(tmp_path) == [{"a": 1}, {"c": 3}]


def test_the_report_has_a_sentence_for_each_length_a_table_and_a_figure(values, study):
    directory, told = study
    page = (directory / "index.html").read_text()
    assert (directory / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "At 64 tokens" in told
    assert "At 64 tokens" in page
    assert "Loss of the last 16 tokens" in page
    assert "<h2>Versions</h2>" in page


def test_which_is_best_is_told_with_the_error_over_texts(values):
    config = parse({**values, "compare": {"schemes": SCHEMES}})

    def row(label, text, nll):
        sizes = {"sizes": {"scored": 16}, "kind": "text", "length": 64, "error": None}
        return {"label": label, "text": text, "nll": nll, "tokens_per_second": 1.0, "memory_bytes": 2**20, **sizes}

    rows = [row("as released", "a", 3.0), row("as released", "b", 5.0)]
    rows += [row("YaRN", "a", 2.5), row("YaRN", "b", 4.4), row("ReRoPE", "a", 2.4), row("ReRoPE", "b", 4.6)]
    (sentence,) = findings(config, rows)
    assert sentence.startswith(
        "At 64 tokens YaRN is best, 3.450 nats per token, 0.550 below as released; ReRoPE follows"
    )
    assert "0.050 ± 0.150 behind over 2 texts, which so few texts do not tell apart" in sentence
    table = tables(config, rows)[0]
    assert table.rows[1] == ("YaRN", "3.450 ±0.071")
    assert losses(rows, "YaRN", 64) == {"a": 2.5, "b": 4.4}


def test_pass_keys_by_depth(values):
    evaluate = {"lengths": [128], "tokens": 512, "batch_tokens": 512, "tasks": ["passkey"]}
    evaluate |= {"passkey": {"depths": 2, "cases": 2, "lengths": [256]}}
    config = parse({**values, "name": "keys", "evaluate": evaluate, "compare": {"schemes": SCHEMES[:1], "texts": 1}})
    directory = run_study(config, Console(file=io.StringIO()))
    rows = [row for row in read_rows(directory) if row["kind"] == "passkey"]
    assert [(row["length"], row["depth"]) for row in rows] == [(256, 0.0), (256, 1.0)]
    assert all(row["accuracy"] in (0, 0.5, 1) and row["answer_nll"] > 0 for row in rows)
    assert "pass key found in %" in (directory / "index.html").read_text()


def test_factors_are_searched_once_on_other_text(values, monkeypatch):
    schemes = [SCHEMES[0], {"name": "released", "label": "LongRoPE", "extend": {"frequencies": {"name": "longrope"}}}]
    compare = {"schemes": schemes, "texts": 1, "search": {"length": 64, "population": 4, "iterations": 1}}
    config = parse({**values, "name": "searched", "compare": compare})
    directory = run_study(config, Console(file=io.StringIO()))
    rows = read_rows(directory)
    tried = [row for row in rows if row["kind"] == "search"]
    assert 4 <= len(tried) <= 6
    (row,) = (r for r in rows if r["kind"] == "text" and r["label"] == "LongRoPE" and r["length"] == 64)
    best = min(tried, key=lambda r: r["nll"])
    assert row["extend"]["frequencies"]["long_factor"] == json.loads(best["rule"])[1]
    assert row["error"] is None
    monkeypatch.setattr("train.search._fitness", lambda *_: pytest.fail)
    run_study(config, Console(file=io.StringIO()))
    assert read_rows(directory) == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compare": {"schemes": []}}, "compare.schemes is empty"),
        ({"compare": {"schemes": ["rope"]}}, "'rope' is not the scheme of the model under init"),
        (
            {"compare": {"schemes": SCHEMES, "only": ["yarn"]}},
            "compare.only: unknown label 'yarn' (known: as released, YaRN",
        ),
        (
            {"evaluate": {"lengths": [64, 100_000], "tokens": 100_000, "batch_tokens": 100_000}},
            "no document has 100001",
        ),
        (
            {"compare": {"schemes": [{**SCHEMES[1], "extend": {"frequencies": {"name": "yran"}}}]}},
            "did you mean 'yarn'",
        ),
        ({"init": "", "scheme": "rope"}, "a released model is measured, named as in init=PATH"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(values, changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_study(parse({**values, "output": str(tmp_path), **changes}))
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_model_is_told_and_the_rest_is_measured(tmp_path, values):
    write_released(tmp_path, scheme=pj.scheme("learned", max_length=32), embedding_scale=1.0, **GPT2)
    evaluate = {"lengths": [16, 64], "tokens": 128, "batch_tokens": 128}
    sections = {"output": str(tmp_path / "runs"), "init": str(tmp_path), "evaluate": evaluate}
    directory = run_study(parse({**values, **sections}), Console(file=io.StringIO()))
    found = {(row["label"], row["length"]): row["error"] for row in read_rows(directory)}
    assert found["as released", 16] is None
    assert "32" in found["as released", 64] or "not finite" in found["as released", 64]
    assert "rotates nothing" in found["YaRN", 16]
    page = (directory / "index.html").read_text()
    assert "<h2>Not measured</h2>" in page


def test_a_study_that_was_stopped_in_its_first_cell_continues(values, tmp_path, monkeypatch):
    config = parse({**values, "output": str(tmp_path)})
    monkeypatch.setattr(running, "measure", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_study(config, Console(file=io.StringIO()))
    monkeypatch.undo()
    run_study(config, Console(file=io.StringIO()))
    assert len(read_rows(config.directory)) == 8


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_directory_of_something_else_is_left_alone(values, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="holds other things than a study"):
        run_study(parse({**values, "output": str(tmp_path)}))


def test_the_released_config_is_a_study(released):
    config = load("configs/extend.yaml", [f"init={released[0]}"])
    assert config.evaluate.lengths == (8, 32, 64, 128)
    assert len(config.compare.schemes) == 18


def test_the_command_is_one_line_for_a_mistake(capsys):
    assert cli.main(["compare", "configs/extend.yaml", "init=/nowhere"]) == 2
    assert capsys.readouterr().err == "error: there is no /nowhere/config.json\n"


@pytest.mark.parametrize(
    ("extend", "length", "wanted"),
    [
        ({"frequencies": {"name": "yarn"}}, 16384, {"name": "yarn", "factor": 4.0, "original_length": 4096}),
        (
            {"frequencies": {"name": "yarn", "factor": 2.0}},
            16384,
            {"name": "yarn", "factor": 2.0, "original_length": 4096},
        ),
        ({"frequencies": {"name": "linear"}}, 2048, {"name": "linear", "factor": 1.0}),
        ({"far": {"name": "rerope"}}, 16384, {"name": "rerope", "window": 2048}),
        ({"far": {"name": "self-extend"}}, 16384, {"name": "self-extend", "window": 512, "group": 16}),
        ({"far": {"name": "self-extend"}}, 4096, {"name": "self-extend", "window": 512, "group": 1}),
        ({"far": {"name": "leaky-rerope"}}, 16384, {"name": "leaky-rerope", "window": 1024, "factor": 16.0}),
        ({"far": {"name": "streaming"}}, 16384, {"name": "streaming", "sinks": 4, "recent": 4092}),
        ({"mask": {"name": "lambda"}}, 16384, {"name": "lambda", "window": 4092, "sinks": 4}),
        ({"scale": {"name": "clipped-log-n"}}, 16384, {"name": "clipped-log-n", "length": 4096}),
        ({"far": None}, 16384, None),
    ],
)
def test_options_follow_from_the_lengths(extend, length, wanted):
    (slot,) = extend
    assert completed(extend, 4096, length) == {slot: wanted}
