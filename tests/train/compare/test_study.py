"""A study of a released model under many extensions: its cells, what is kept, its page."""

import io
import json
import math
import re
import shutil
import string
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from released_models import GPT2, LENGTH, TEXT, write_released
from rich.console import Console

import posjax as pj
import train.evaluate.search
from posjax.nn import Decoder, DecoderConfig, Norm
from train import cli
from train.checkpoint.directory import RESULTS
from train.compare.compare import compare
from train.compare.study import measure as measuring
from train.compare.study import run as running
from train.compare.study import run_study
from train.compare.study.cells import append_row, cells_of, digest_of_model, finished_rows, is_to_be_searched, result
from train.compare.study.report import at_length, common_texts, findings, losses, tables
from train.compare.study.search import search_text
from train.config import dump, load, parse
from train.data.tokenizer import load_tokenizer
from train.evaluate.decoder import predictor_of
from train.evaluate.predictor import next_nll
from train.evaluate.tasks import Vocabulary
from train.model.build import evaluated_scheme
from train.model.extension import completed

pytestmark = pytest.mark.usefixtures("unpainted")

SCHEMES = [
    {"name": "released", "label": "as released"},
    {"name": "released", "label": "YaRN", "extend": {"frequencies": {"name": "yarn"}}},
    {"name": "released", "label": "ReRoPE", "extend": {"remap": {"name": "rerope"}}},
]


LONG = {"name": "released", "label": "LongRoPE", "extend": {"frequencies": {"name": "longrope"}}}


@pytest.fixture(scope="module", autouse=True)
def caches_stay():
    """Keeps JAX's caches. A study clears them after each cell, but here programs are small and many are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "clear_caches", lambda: None)
        yield


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
    assert (directory / "figure.png").read_bytes().startswith(b"\x89PNG"), "the one figure that is painted"
    return directory, console.file.getvalue()


def measured(config, model, cell, mesh):
    """Replaces the measuring of a cell where its numbers do not matter."""
    numbers = {"nll": 1.0, "seconds": 1.0, "tokens_per_second": 16.0, "memory_bytes": 1}
    return numbers | {"position_ends": [16], "position_nll": [1.0]}


@nnx.jit
def log_probabilities(decoder, tokens):
    return jax.nn.log_softmax(decoder(tokens))


def test_the_numbers_are_those_of_the_extended_model(released, values, study):
    rows, config = finished_rows(study[0]), parse(values)
    text = running.read_texts(config)[0]
    for label, extend in (("as released", {}), ("YaRN", {"frequencies": pj.rotary.YaRN(2.0, LENGTH, base=500.0)})):
        decoder = released[1].with_scheme(released[1].config.scheme.extend(**extend))
        tokens = text.last(64)
        nll = -np.asarray(log_probabilities(decoder, tokens[None, :-1]))[0, np.arange(64), tokens[1:]]
        (row,) = (r for r in rows if (r["label"], r["length"], r["text"]) == (label, 64, text.name))
        np.testing.assert_allclose(row["nll"], nll[-8:].mean(), rtol=1e-5)
        np.testing.assert_allclose(row["position_nll"][0], nll[0], rtol=1e-5)
        share = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder))) / len(jax.devices())
        assert share < row["memory_bytes"] < 20 * share
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
    before = finished_rows(study[0])
    more = {**values, "compare": {"schemes": SCHEMES, "texts": 2, "only": ["ReRoPE"]}}
    run_study(parse(more), Console(file=io.StringIO()))
    after = finished_rows(study[0])
    assert after[: len(before)] == before
    assert {row["label"] for row in after[len(before) :]} == {"ReRoPE"}
    assert len(after) == len(before) + 4


def test_another_option_is_another_cell(values, study):
    rows = finished_rows(study[0])
    assert all(result(cell, rows) for cell in cells(parse(values)))
    schemes = [{**SCHEMES[1], "extend": {"frequencies": {"name": "yarn", "factor": 8.0}}}]
    for change in (
        {"compare": {**values["compare"], "schemes": schemes}},
        {"compare": {**values["compare"], "scored": 4}},
        {"model": {"compute_dtype": "bfloat16"}},
    ):
        assert not any(result(cell, rows) for cell in cells(parse({**values, **change})))


def cells(config):
    return cells_of(config, digest_of_model(config), config.compare.schemes, running.read_texts(config))


def test_other_weights_are_another_model(released, values, study, tmp_path):
    shutil.copytree(released[0], tmp_path / "tiny")
    moved = parse({**values, "init": str(tmp_path / "tiny")})
    assert digest_of_model(moved) == digest_of_model(parse(values))
    shutil.rmtree(tmp_path / "tiny")
    (tmp_path / "tiny").mkdir()
    write_released(tmp_path / "tiny", seed=1)
    assert moved.init.values == parse({**values, "init": str(tmp_path / "tiny")}).init.values
    assert not any(result(cell, finished_rows(study[0])) for cell in cells(moved))


def test_the_report_is_of_this_config_alone(values, study):
    shorter = {**values, "evaluate": {**values["evaluate"], "lengths": [16]}}
    console = Console(file=io.StringIO(), width=200)
    run_study(parse(shorter), console)
    assert "At 16 tokens all are alike, " in console.file.getvalue()
    assert "At 64 tokens" not in console.file.getvalue()
    run_study(parse(values), Console(file=io.StringIO()))


def test_what_needs_more_memory_is_left_for_a_larger_machine(values, tmp_path, monkeypatch):
    def exhausted(config, model, cell, mesh):
        if cell.length == 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return measured(config, model, cell, mesh)

    monkeypatch.setattr(running, "measure", exhausted)
    console = Console(file=io.StringIO(), width=200)
    directory = run_study(parse({**values, "output": str(tmp_path)}), console)
    assert {row["length"] for row in finished_rows(directory)} == {16}
    assert "more memory is needed than this machine has" in console.file.getvalue()


def test_results_of_an_earlier_version_have_the_names_of_today(tmp_path):
    append_row(tmp_path, {"kind": "text", "extend": {"far": {"name": "streaming", "sinks": 4}}})
    assert finished_rows(tmp_path) == [{"kind": "text", "extend": {"remap": {"name": "streaming", "first": 4}}}]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    append_row(tmp_path, {"a": 1})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"b": ')
    assert finished_rows(tmp_path) == [{"a": 1}]
    append_row(tmp_path, {"c": 3})
    assert finished_rows(tmp_path) == [{"a": 1}, {"c": 3}]


def test_the_report_has_a_sentence_for_each_length_a_table_and_a_figure(values, study):
    directory, output = study
    page = (directory / "index.html").read_text()
    # Up to the model's own length YaRN changes nothing, so there its cells are not measured again.
    lengths = [row["length"] for row in finished_rows(directory) if row["label"] == "YaRN"]
    assert set(lengths) == {64}
    assert "At 64 tokens" in output
    assert "At 64 tokens" in page
    assert "Loss of the last 8 tokens" in page
    assert "<h2>Versions</h2>" in page


def test_the_report_says_which_is_best_with_the_error_over_texts(values):
    config = parse({**values, "compare": {"schemes": SCHEMES}})

    def row(label, text, nll):
        sizes = {"sizes": {"scored": 16}, "kind": "text", "length": 64, "error": None}
        return {"label": label, "text": text, "nll": nll, "tokens_per_second": 1.0, "memory_bytes": 2**20, **sizes}

    rows = [row("as released", "a", 3.0), row("as released", "b", 5.0)]
    rows += [row("YaRN", "a", 2.5), row("YaRN", "b", 4.4), row("ReRoPE", "a", 2.4), row("ReRoPE", "b", 4.6)]
    (sentence,) = findings(config, rows)
    assert sentence == (
        "At 64 tokens YaRN is best, 3.450 nats per token; as released is 0.550 ± 0.050 behind, on 2 of 2 texts; ReRoPE "
        "is 0.050 ± 0.150 behind, on 1 of 2 texts."
    )
    table = tables(config, rows)[0]
    assert table.rows[1] == ("YaRN", "3.450 ±0.071")
    assert losses(rows, "YaRN", 64) == {"a": 2.5, "b": 4.4}


def test_a_line_over_lengths_uses_the_same_texts(values):
    """Only the harder of two texts reaches the longest length; that must not look like a loss due to the length."""
    config = parse({**values, "compare": {"schemes": SCHEMES[:1]}})

    def row(length, text, nll):
        sizes = {"sizes": {"scored": 8}, "kind": "text", "error": None, "tokens_per_second": 1.0, "memory_bytes": 2**20}
        return {"label": "as released", "length": length, "text": text, "nll": nll, **sizes}

    rows = [row(32, "easy", 1.0), row(32, "hard", 5.0), row(64, "hard", 5.0)]
    assert common_texts(rows) == {"hard"}
    found = [at_length(config, rows, "as released", n, common_texts(rows)).mean for n in (32, 64)]
    assert found == [5.0, 5.0]
    assert tables(config, rows)[0].header == ("extension", "32 (1x)", "64 (2x, 1 of 2 texts)")


def keys_by_logits(decoder, config, length, depth, cases):
    """The share of keys whose every token is the most likely one, and their mean loss, from the decoder's logits."""
    vocabulary = Vocabulary(load_tokenizer(config.data))
    right, losses = [], []
    for case in range(cases):
        cell = SimpleNamespace(length=length, depth=depth)
        tokens, size = measuring._prompt(vocabulary, cell, case)
        assert tokens.shape == (1, length + 1)
        before, answer = tokens[0, :-size], tokens[0, -size:]
        key = vocabulary.tokenizer.decode(answer).strip()
        assert key.isdigit()
        assert key in vocabulary.tokenizer.decode(before)
        logits = np.asarray(log_probabilities(decoder, tokens[:, :-1]))[0, -size:]
        losses.append(-logits[np.arange(size), answer].mean())
        right.append((logits.argmax(-1) == answer).all())
    return np.mean(right), np.mean(losses)


def test_pass_keys_by_depth(released, values):
    evaluate = {"lengths": [128], "tokens": 512, "batch_tokens": 512, "tasks": ["passkey"]}
    evaluate |= {"passkey": {"depths": 2, "cases": 2, "lengths": [256]}}
    config = parse({**values, "name": "keys", "evaluate": evaluate, "compare": {"schemes": SCHEMES[:1], "texts": 1}})
    directory = run_study(config, Console(file=io.StringIO()))
    rows = [row for row in finished_rows(directory) if row["kind"] == "passkey"]
    assert [(row["length"], row["depth"]) for row in rows] == [(256, 0.0), (256, 1.0)]
    for row in rows:
        wanted = keys_by_logits(released[1], config, row["length"], row["depth"], cases=2)
        np.testing.assert_allclose((row["accuracy"], row["answer_nll"]), wanted, rtol=1e-5)
    assert "pass key found in %" in (directory / "index.html").read_text()


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ([1.0, 3.0, 8.0], {"accuracy": 2 / 3, "answer_nll": 4.0}),
        ([1.0, math.inf, 1.0], {"error": "the logits are not finite"}),
    ],
)
def test_pass_keys_are_counted_over_all_cases(monkeypatch, values, losses, wanted):
    """Of three keys of five tokens each, the last two are found completely."""
    answers = iter(zip([np.arange(5) > 0, np.ones(5, bool), np.ones(5, bool)], losses, strict=True))
    monkeypatch.setattr(measuring, "_run", lambda *arguments: (next(answers), {"seconds": 1.0}))
    monkeypatch.setattr(measuring, "_prompt", lambda *arguments: (np.zeros((1, 6)), 5))
    one_device = SimpleNamespace(filled=lambda rows: rows)
    found = measuring._find(parse(values), one_device, None, SimpleNamespace(sizes={"cases": 3}))
    assert found == {"seconds": 1.0, **wanted}


def test_pass_keys_are_tokens_of_the_whole_text():
    from tokenizers import Tokenizer, models, normalizers

    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate("▁ 0123456789" + string.ascii_letters + "?.\n")}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # Llama 2's

    class Spaced:
        def tokens(self, text):
            return np.asarray(tokenizer.encode(text).ids)

    found = measuring._answer(Spaced(), "12345")
    assert [tokenizer.id_to_token(n) for n in found] == ["▁", *"12345"]
    assert [tokenizer.id_to_token(n) for n in Spaced().tokens(" 12345")] == ["▁", "▁", *"12345"]


def test_texts_begin_as_the_tokenizer_begins_them(released, values, tmp_path):
    from tokenizers import Tokenizer, processors

    shutil.copytree(released[0], tmp_path / "tiny")
    place = str(tmp_path / "tiny" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(place)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(place)
    begun, plain = (running.read_texts(parse({**values, "init": str(p)}))[0] for p in (tmp_path / "tiny", released[0]))
    np.testing.assert_array_equal(begun.last(16), [0, *plain.last(16)[1:]])
    np.testing.assert_array_equal(begun.last(64), [0, *plain.last(64)[1:]])


def test_factors_are_searched_once_on_other_text(values, monkeypatch):
    schemes = [SCHEMES[0], {"name": "released", "label": "LongRoPE", "extend": {"frequencies": {"name": "longrope"}}}]
    compare = {"schemes": schemes, "texts": 1, "search": {"length": 64, "population": 4, "iterations": 1}}
    config = parse({**values, "name": "searched", "compare": compare})
    directory = run_study(config, Console(file=io.StringIO()))
    rows = finished_rows(directory)
    tried = [row for row in rows if row["kind"] == "search"]
    assert 4 <= len(tried) <= 6
    (row,) = (r for r in rows if r["kind"] == "text" and r["label"] == "LongRoPE" and r["length"] == 64)
    best = min(tried, key=lambda r: r["nll"])
    assert row["extend"]["frequencies"]["long_factor"] == json.loads(best["rule"])[0]
    assert row["error"] is None
    searched, read = search_text(config), running.read_texts(config)[0]
    document = load_tokenizer(config.data).tokens(b"This is two. " + TEXT.encode() * 40)
    np.testing.assert_array_equal(searched, document[:65])
    np.testing.assert_array_equal(read.last(64), document[-65:])
    assert len(document) > 130
    # What was tried before an interruption is not tried again.
    kept = [row for row in rows if row["kind"] == "search"][:2]
    (directory / RESULTS).write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    calls, fitness = [], train.evaluate.search._fitness

    def counted(*arguments):
        own = fitness(*arguments)
        return lambda rule: calls.append(rule) or own(rule)

    monkeypatch.setattr("train.evaluate.search._fitness", counted)
    run_study(config, Console(file=io.StringIO()))
    assert len(calls) == len(tried) - 2
    rows = finished_rows(directory)
    assert [row for row in rows if row["kind"] == "search"] == tried
    monkeypatch.setattr("train.evaluate.search._fitness", lambda *_: pytest.fail)
    run_study(config, Console(file=io.StringIO()))
    assert finished_rows(directory) == rows
    without = {**compare, "only": ["as released"]}
    run_study(parse({**values, "name": "searched", "compare": without}), Console(file=io.StringIO()))
    page = (directory / "index.html").read_text().partition("<h2>Config")[0]
    assert "LongRoPE: factors and temperature are those searched for 64 tokens, at every length" in page


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
        (
            {"compare": {"schemes": [{**SCHEMES[0], "frequencies": {"name": "linear", "factor": 4.0}}]}},
            "'as released' has frequencies beside its name, which only a training reads",
        ),
        ({"compare": {"schemes": [{**SCHEMES[0], "stage": "0"}]}}, "'as released' has stage beside its name"),
        (
            {"compare": {"schemes": [LONG], "search": {"length": 16}}},
            "compare.search.length must exceed the model's own",
        ),
        ({"compare": {"schemes": [LONG], "search": {"population": 2}}}, "population of a search must be at least 4"),
        (
            {"evaluate": {"lengths": [64], "tokens": 128, "batch_tokens": 128, "tasks": ["copy"]}},
            "a study has the task 'passkey' alone, found 'copy'",
        ),
        (
            {"evaluate": {"lengths": [64], "tokens": 128, "tasks": ["passkey"], "passkey": {"lengths": [8]}}},
            "evaluate.tasks: passkey: a length of 8 tokens is too short",
        ),
        (
            {"compare": {"schemes": [{**SCHEMES[1], "label": "YaRN, factor 4"}], "only": ["YaRN", "factor 4"]}},
            "compare.only: unknown label 'YaRN' (known: 'YaRN, factor 4')",
        ),
        ({"scheme": "alibi"}, "scheme: a study measures the entries of compare.schemes; put what changes the model"),
        (
            {"scheme": {"name": "released", "extend": {"remap": {"name": "rerope"}}}},
            "scheme: a study measures the entries",
        ),
        ({"compare": {"schemes": SCHEMES, "seeds": [0, 1]}}, "compare.seeds: a study does not read it; leave it out"),
        ({"stages": [{"name": "a"}]}, "stages: a study does not read it"),
        ({"train": {"steps": 0, "mesh": {"data": 2}}}, "train.mesh: a study does not read it"),
        (
            {"evaluate": {"lengths": [16, 64], "tokens": 128, "batch_tokens": 128, "stride": 4}},
            "evaluate.stride: a study",
        ),
        ({"data": {"source": "stdlib", "special_tokens": "added"}}, "model.vocab_size: the tokenizer has 282 tokens"),
        ({"init": "", "scheme": "rope"}, "0 measures a released model, which must be named, as in init=PATH"),
    ],
)
def test_mistakes_are_reported_before_anything_is_read(values, changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_study(parse({**values, "output": str(tmp_path), **changes}))
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_model_is_reported_and_the_rest_is_measured(tmp_path, values):
    write_released(tmp_path, **GPT2)
    evaluate = {"lengths": [16, 64], "tokens": 128, "batch_tokens": 128}
    sections = {"output": str(tmp_path / "runs"), "init": str(tmp_path), "evaluate": evaluate}
    directory = run_study(parse({**values, **sections}), Console(file=io.StringIO()))
    page = (directory / "index.html").read_text()
    assert "<h2>Not measured</h2>" in page
    assert "as released at 64: the model has 32 learned positions" in page
    assert "YaRN at 64: frequencies: this scheme rotates nothing" in page
    kept = [(row["label"], row["length"], row["error"]) for row in finished_rows(directory)]
    assert kept == [("as released", 16, None)] * 2  # a refusal is not saved, because a later version may accept it


def test_a_study_that_was_stopped_in_its_first_cell_continues(values, tmp_path, monkeypatch):
    config = parse({**values, "output": str(tmp_path), "compare": {"schemes": SCHEMES[:2], "texts": 1}})
    monkeypatch.setattr(running, "measure", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_study(config, Console(file=io.StringIO()))
    monkeypatch.setattr(running, "measure", measured)
    run_study(config, Console(file=io.StringIO()))
    assert len(finished_rows(config.directory)) == 3


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_study_and_a_comparison_leave_each_other_alone(values, study, tmp_path):
    before = (study[0] / RESULTS).read_text()
    shutil.copytree(study[0], tmp_path / "study")
    train = {"steps": 2, "warmup_steps": 1, "length": 16, "batch_tokens": 64, "mesh": {"data": 1}}
    trained = {**values, "train": train, "output": str(tmp_path), "data": {**values["data"], "held_out": 0.4}}
    with pytest.raises(ValueError, match="holds a study of a released model"):
        compare(parse(trained))
    assert (tmp_path / "study" / RESULTS).read_text() == before
    (tmp_path / "study" / "config.yaml").write_text(dump(parse(trained)))
    with pytest.raises(ValueError, match="holds a comparison of schemes that were trained"):
        run_study(parse({**values, "output": str(tmp_path)}))


def test_a_search_that_needs_too_much_memory_leaves_the_rest(values, tmp_path, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("train.compare.study.search.search_factors", exhausted)
    console = Console(file=io.StringIO(), width=200)
    sections = {"output": str(tmp_path), "compare": {"schemes": [SCHEMES[0], LONG], "texts": 1}}
    directory = run_study(parse({**values, **sections}), console)
    assert "LongRoPE: more memory is needed" in console.file.getvalue()
    assert {row["label"] for row in finished_rows(directory)} == {"as released"}
    assert "LongRoPE at 64: no factors of LongRoPE were found" in (directory / "index.html").read_text()


def test_nothing_is_searched_for_a_model_that_no_extension_fits(values, tmp_path, monkeypatch):
    """Every layer attends only to a local window, all of whose distances the model has seen in training."""
    monkeypatch.setattr("train.compare.study.search.search_factors", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(running, "measure", measured)
    window = pj.Scheme(features=pj.rotary.Rotary(pj.rotary.Plain(500.0)), mask=pj.masks.Window(8))
    write_released(tmp_path, scheme=window)
    console = Console(file=io.StringIO(), width=200)
    compare = {"schemes": [SCHEMES[0], LONG], "texts": 1}
    sections = {"output": str(tmp_path / "runs"), "init": str(tmp_path), "compare": compare}
    run_study(parse({**values, **sections}), console)
    why = "every layer of this model has a local window"
    assert f"LongRoPE: {why}" in console.file.getvalue()


def test_why_nothing_is_searched_is_on_the_page(values, tmp_path):
    scaled = pj.Scheme(features=pj.rotary.Rotary(pj.rotary.Linear(2.0, base=500.0)))
    write_released(tmp_path, scheme=scaled)
    sections = {"output": str(tmp_path / "runs"), "init": str(tmp_path)}
    sections["compare"] = {"schemes": [SCHEMES[0], LONG], "texts": 1}
    directory = run_study(parse({**values, **sections}), Console(file=io.StringIO()))
    why = "search rescales plain RoPE over the whole head of every layer"
    assert f"LongRoPE at 64: {why}" in (directory / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("extend", [{}, {"remap": {"name": "rerope"}}], ids=["plain", "rerope"])
def test_a_model_like_smollm2_reads_32768_tokens_within_4_gib(extend):
    """Read from the compiled program; nothing is computed. The logits of all tokens alone would take 6 GiB."""
    scheme = pj.Scheme(features=pj.rotary.Rotary(pj.rotary.Plain(1e5)))
    config = DecoderConfig(
        vocab_size=49152,
        num_layers=30,
        model_dim=576,
        num_heads=9,
        num_kv_heads=3,
        mlp_dim=1536,
        norm=Norm(eps=1e-5),
        trained_length=8192,
        scheme=scheme.extend(**completed(extend, 8192, 32768)),
    )
    predictor, parameters = predictor_of(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), 0)
    tokens = jax.ShapeDtypeStruct((1, 32769), jnp.int32)
    program = jax.jit(lambda parameters, tokens: next_nll(predictor, parameters, tokens, 32768))
    memory = program.lower(parameters, tokens).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert 0.5 * 2**30 < total < 4 * 2**30


def test_texts_of_one_name_are_told_apart(values, tmp_path):
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "book.txt").write_text(f"This is {part}. " + TEXT * 30)
    mixture = [{"paths": [f"{tmp_path}/{part}/*.txt"]} for part in ("a", "b")]
    config = parse({**values, "data": {"source": "files", "mixture": mixture}})
    assert len({text.name for text in running.read_texts(config)}) == 2


def test_lengths_alone_may_be_named(values):
    sections = {key: value for key, value in values.items() if key != "evaluate"}
    assert parse({**sections, "evaluate": {"lengths": [16, 8192]}}).evaluate.batch_tokens == 8192


def test_a_directory_of_something_else_is_left_alone(values, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="has files that are not of a study"):
        run_study(parse({**values, "output": str(tmp_path)}))


def test_the_released_config_is_a_study(released):
    config = load("configs/extend.yaml", [f"init={released[0]}"])
    assert config.evaluate.lengths == (8, 32, 64, 128)
    assert len(config.compare.schemes) == 18
    for entry in config.compare.schemes:  # each fits a model with RoPE, at every length
        for length in () if is_to_be_searched(entry) else config.evaluate.lengths:
            evaluated_scheme(config, entry, length)


@pytest.mark.wide
def test_every_entry_of_the_released_config_is_measured(values, tmp_path):
    changes = [f"init={values['init']}", "data.source=files", f"data.paths={json.dumps(values['data']['paths'])}"]
    changes += ["evaluate.lengths=[16,64]", "evaluate.tasks=[]", "compare.texts=1", f"output={tmp_path}"]
    config = load("configs/extend.yaml", changes)
    rows = finished_rows(run_study(config, Console(file=io.StringIO())))
    measured = {row["label"]: row["nll"] for row in rows if row["kind"] == "text" and row["length"] == 64}
    assert measured.keys() == {entry.label for entry in config.compare.schemes}
    assert np.isfinite(list(measured.values())).all()
    assert len(set(measured.values())) == 18, "no two are the same"


def test_the_command_reports_a_mistake_in_one_line(capsys):
    assert cli.main(["compare", "configs/extend.yaml", "init=/nowhere"]) == 2
    assert capsys.readouterr().err == "error: there is no /nowhere/config.json\n"
