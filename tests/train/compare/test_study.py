"""A study of a released model under many extensions: its numbers, what is kept, its page."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import refused
from released_models import GPT2, LENGTH, TEXT, write_released
from rich.console import Console

import posjax as pj
from posjax.nn import Decoder, DecoderConfig, Norm, save_pretrained
from train.checkpoint.directory import RESULTS
from train.compare.compare import compare
from train.compare.study import study as running
from train.compare.study.cells import cells_of, digest_of_model, is_to_be_searched, read_texts
from train.compare.study.study import CELLS
from train.config import dump, load, parse
from train.data.tokenizer import load_tokenizer
from train.evaluate.decoder import predictor_of
from train.evaluate.perplexity import perplexity_in_one_window
from train.evaluate.predictor import next_nll
from train.evaluate.tasks import Vocabulary, cases
from train.model.build import Setup, evaluated_scheme
from train.model.extension import completed
from train.runtime.rows import read_rows

pytestmark = pytest.mark.usefixtures("unpainted")


def released_as(label, **extend):
    return {"name": "released", "label": label, **({"extend": extend} if extend else {})}


PLAIN, YARN = released_as("as released"), released_as("YaRN", frequencies={"name": "yarn"})
REROPE = released_as("ReRoPE", remap={"name": "rerope"})
LONG = released_as("LongRoPE", frequencies={"name": "longrope"})
EVALUATE = {"lengths": [16, 64], "tokens": 512, "batch_tokens": 512}
PASSKEY = {"tasks": ["passkey"], "passkey": {"depths": 2, "cases": 2, "lengths": [256]}}


@pytest.fixture(scope="module", autouse=True)
def caches_stay():
    """Keeps JAX's caches. A study clears them after each cell, but here programs are small and many are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "clear_caches", lambda: None)
        yield


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    """A study of both kinds of cells, with a search of LongRoPE's factors."""
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
        "evaluate": {**EVALUATE, **PASSKEY},
        "compare": {
            "schemes": [PLAIN, YARN, LONG],
            "texts": 2,
            "search": {"length": 64, "population": 4, "iterations": 1},
        },
    }


def studied(values, output="", **changes):
    """The directory of a study, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    changes |= {"output": str(output)} if output else {}
    return compare(parse({**values, **changes}), console), console.file.getvalue()


def small(*schemes, lengths=(16,)):
    """Changes of the config: one text, no pass keys."""
    return {
        "evaluate": {**EVALUATE, "lengths": list(lengths)},
        "compare": {"schemes": list(schemes or [PLAIN]), "texts": 1},
    }


@pytest.fixture(scope="module")
def study(values):
    return studied(values)


@nnx.jit
def log_probabilities(decoder, tokens):
    return jax.nn.log_softmax(decoder(tokens))


def test_the_losses_are_those_of_the_extended_model(released, values, study):
    rows = read_rows(study[0] / RESULTS)
    text = read_texts(Setup(parse(values)))[0]
    for label, extend in (("as released", {}), ("YaRN", {"frequencies": pj.rotary.YaRN(2.0, LENGTH, base=500.0)})):
        decoder = released[1].with_scheme(released[1].config.scheme.extend(**extend))
        tokens = text.last(64)
        nll = -np.asarray(log_probabilities(decoder, tokens[None, :-1]))[0, np.arange(64), tokens[1:]]
        (row,) = (r for r in rows if (r.get("label"), r["length"], r.get("text")) == (label, 64, text.name))
        np.testing.assert_allclose(row["last_nll"], nll[-8:].mean(), rtol=1e-5)
        ends = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
        assert row["position_ends"] == ends
        wanted = [nll[a:b].mean() for a, b in zip([0, *ends], ends, strict=False)]
        np.testing.assert_allclose(row["position_nll"], wanted, rtol=1e-5)
        assert row["tokens_per_second"] > 0
        share = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder))) / len(jax.devices())
        assert share < row["memory_bytes"] < 20 * share
        assert row["error"] is None


def test_without_positions_only_the_end_of_a_text_has_a_loss(values, study, tmp_path):
    changes = small(lengths=[64])
    changes["compare"]["positions"] = False
    (row,) = read_rows(studied(values, tmp_path, **changes)[0] / CELLS)
    whole = [each for each in read_rows(study[0] / CELLS) if each.get("text") == row["text"] and each["length"] == 64]
    (wanted,) = (each for each in whole if each["label"] == "as released")
    np.testing.assert_allclose(row["last_nll"], wanted["last_nll"], rtol=1e-6)
    assert (row["position_ends"], row["position_nll"]) == ([], [])
    assert row["key"] != wanted["key"]


def test_pass_keys_count_if_every_token_is_the_likeliest(released, values, study):
    """And their loss is that of the key's tokens."""
    config = parse(values)
    vocabulary = Vocabulary(load_tokenizer(config.data))
    rows = [row for row in read_rows(study[0] / RESULTS) if row.get("task") and row["label"] == "as released"]
    assert [(row["length"], row["depth"]) for row in rows] == [(256, 0.0), (256, 1.0)]
    for row, group in zip(rows, cases("passkey", config.evaluate.passkey, vocabulary, 256), strict=True):
        right, losses = [], []
        for sample in group.samples:
            ((start, end),) = sample.answers
            tokens, size = sample.tokens[None], end - start
            text, answer = vocabulary.tokenizer.decode(tokens[0]).decode(), tokens[0, -size:]
            key = vocabulary.tokenizer.decode(answer).decode().strip()
            assert key.isdigit()
            assert text.count(key) == 3, "twice in the text, once as the answer"
            logits = np.asarray(log_probabilities(released[1], tokens[:, :-1]))[0, -size:]
            losses.append(-logits[np.arange(size), answer].mean())
            right.append((logits.argmax(-1) == answer).all())
        np.testing.assert_allclose((row["accuracy"], row["answer_nll"]), (np.mean(right), np.mean(losses)), rtol=1e-5)


def test_factors_are_searched_on_text_that_no_cell_reads(values, study):
    rows = read_rows(study[0] / CELLS)
    tried = [row for row in rows if "rule" in row]
    assert 4 <= len(tried) <= 6
    (row, _) = (r for r in rows if r.get("text") and r["label"] == "LongRoPE" and r["length"] == 64)
    best = min(tried, key=lambda r: r["nll"])
    assert row["extend"]["frequencies"]["long_factor"] == best["rule"][0]
    document = load_tokenizer(parse(values).data).tokens(b"This is two. " + TEXT.encode() * 40)
    read = read_texts(Setup(parse(values)))
    assert [text.name.rpartition("/")[2] for text in read] == ["two.txt", "one.txt"]
    np.testing.assert_array_equal(read[0].last(64), document[-65:])
    np.testing.assert_array_equal(read[0].last(16), document[-17:])
    assert len(document) > 130, "the search reads the other end"


def test_what_is_finished_is_not_done_again(values, study, tmp_path):
    """Numbers written by hand stay, and decide: cells are not measured again, nor rules of the search tried again."""
    shutil.copytree(study[0], tmp_path / "study")
    kept = [row for row in read_rows(study[0] / CELLS) if "options" not in row]
    tried = [row for row in kept if "rule" in row]
    tried[-1]["nll"] = 0.5
    kept = [row for row in kept if row.get("label") != "LongRoPE"]
    kept[-1]["accuracy"] = 0.125
    lines = "".join(f"{json.dumps(row)}\n" for row in kept)
    (tmp_path / "study" / CELLS).write_text(lines + '{"key": "te')  # the last line was cut off
    directory, _ = studied(values, tmp_path)
    after = read_rows(directory / CELLS)
    assert after[: len(kept)] == kept
    (found,) = (row for row in after if "options" in row)
    assert found["options"]["long_factor"] == tried[-1]["rule"][0]
    assert {row.get("label", "LongRoPE") for row in after[len(kept) :]} == {"LongRoPE"}


def test_more_extensions_are_added_and_the_report_is_of_the_config_alone(values, study, tmp_path):
    shutil.copytree(study[0], tmp_path / "study")
    before = read_rows(study[0] / CELLS)
    more = {**values["compare"], "schemes": [PLAIN, YARN, LONG, REROPE], "only": ["ReRoPE"]}
    directory, printed = studied(values, tmp_path, compare=more, evaluate={**EVALUATE, "lengths": [64]})
    after = read_rows(directory / CELLS)
    assert after[: len(before)] == before
    assert [(row["label"], row["length"]) for row in after[len(before) :]] == [("ReRoPE", 64)] * 2
    assert "(64 tokens)" in printed
    assert {row["length"] for row in read_rows(directory / RESULTS)} == {64}


def keys(config):
    setup = Setup(config)
    cells = cells_of(setup, digest_of_model(setup), config.compare.schemes[:2], read_texts(setup))
    return {cell.key for cell in cells}


def test_another_option_text_or_model_is_another_cell(released, values, study, tmp_path):
    known = {row["key"] for row in read_rows(study[0] / CELLS)}
    assert keys(parse(values)) <= known
    factor = released_as("YaRN", frequencies={"name": "yarn", "factor": 8.0})
    for change in (
        {"compare": {**values["compare"], "schemes": [factor]}},
        {"compare": {**values["compare"], "scored": 4}},
        {"model": {"compute_dtype": "bfloat16"}},
    ):
        assert known.isdisjoint(keys(parse({**values, "evaluate": EVALUATE, **change})))
    shutil.copytree(released[0], tmp_path / "tiny")
    moved = parse({**values, "init": str(tmp_path / "tiny")})
    assert digest_of_model(Setup(moved)) == digest_of_model(Setup(parse(values)))
    shutil.rmtree(tmp_path / "tiny")
    (tmp_path / "tiny").mkdir()
    write_released(tmp_path / "tiny", seed=1)
    assert known.isdisjoint(keys(moved))


def test_the_page_says_which_is_best_and_has_the_differences_by_text(values, study):
    page, output = (study[0] / "index.html").read_text(), study[1]
    # Up to the model's own length YaRN changes nothing, so there its cells are not measured again.
    measured = [row["length"] for row in read_rows(study[0] / CELLS) if row.get("label") == "YaRN" and row.get("text")]
    assert set(measured) == {64}
    assert "(64 tokens)" in output
    differences = "Paired differences from as released in nats per token of the last tokens, by 2 texts"
    for part in (differences, "Perplexity of the last 8 tokens", "Passkey: right", "Cost of one pass over 64 tokens"):
        assert part in page


def test_texts_begin_as_the_tokenizer_begins_them(released, values, tmp_path):
    from tokenizers import Tokenizer, processors

    shutil.copytree(released[0], tmp_path / "tiny")
    place = str(tmp_path / "tiny" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(place)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(place)
    begun, plain = (read_texts(Setup(parse({**values, "init": str(p)})))[0] for p in (tmp_path / "tiny", released[0]))
    for length in (16, 64):
        np.testing.assert_array_equal(begun.last(length), [0, *plain.last(length)[1:]])


def test_what_does_not_fit_the_model_is_reported_and_the_rest_is_measured(tmp_path, values):
    """A refusal is not saved, because a later version may accept it."""
    write_released(tmp_path, **GPT2)
    changes = small(PLAIN, YARN, LONG, lengths=[16, 64])
    directory, printed = studied(values, tmp_path / "runs", init=str(tmp_path), **changes)
    page = (directory / "index.html").read_text()
    assert "<h2>Not measured</h2>" in page
    for part in (
        "as released at 64: ",
        "YaRN at 16, 64: frequencies",
        "LongRoPE at 16, 64: search rescales plain RoPE",
    ):
        assert part in page
    assert "LongRoPE: search rescales plain RoPE" in printed
    assert [(row["label"], row["length"], row["error"]) for row in read_rows(directory / CELLS)] == [
        ("as released", 16, None)
    ]


def test_a_loss_that_is_not_finite_is_an_error(tmp_path, values):
    decoder = write_released(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    save_pretrained(nnx.merge(nnx.graphdef(decoder), jax.tree.map(lambda x: x * np.nan, nnx.state(decoder))), tmp_path)
    directory, _ = studied(values, tmp_path / "runs", init=str(tmp_path), **small())
    (row,) = read_rows(directory / CELLS)
    assert "finite" in row["error"]


def test_what_needs_more_memory_is_left_for_a_larger_machine(values, tmp_path, monkeypatch):
    """The device has too little memory for a search and for longer texts."""

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def read(predictor, parameters, tokens, *sizes):
        return exhausted() if len(tokens) == 65 else perplexity_in_one_window(predictor, parameters, tokens, *sizes)

    monkeypatch.setattr(running, "perplexity_in_one_window", read)
    monkeypatch.setattr("train.compare.study.search.search_factors", exhausted)
    directory, printed = studied(values, tmp_path, **small(PLAIN, LONG, lengths=[16, 64]))
    assert [(row["label"], row["length"]) for row in read_rows(directory / CELLS)] == [("as released", 16)]
    assert "LongRoPE: more memory is needed" in printed
    assert "more memory is needed" in (directory / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extend", [{"remap": {"name": "rerope"}}, pytest.param({}, marks=pytest.mark.wide)], ids=["rerope", "plain"]
)
def test_a_model_like_smollm2_reads_32768_tokens_within_4_gib(extend):
    """Read from the compiled program; nothing is computed. The logits of all tokens alone would take 6 GiB."""
    scheme = pj.Scheme(features=pj.rotary.Rotary(pj.rotary.Plain(1e5)))
    sizes = {"vocab_size": 49152, "num_layers": 30, "model_dim": 576, "num_heads": 9, "num_kv_heads": 3}
    sizes |= {"mlp_dim": 1536, "trained_length": 8192}
    config = DecoderConfig(**sizes, norm=Norm(eps=1e-5), scheme=scheme.extend(**completed(extend, 8192, 32768)))
    predictor, parameters = predictor_of(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), 0)
    tokens = jax.ShapeDtypeStruct((1, 32769), jnp.int32)
    program = jax.jit(lambda parameters, tokens: next_nll(predictor, parameters, tokens, 32768))
    memory = program.lower(parameters, tokens).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert 0.5 * 2**30 < total < 4 * 2**30


def compared(**compare):
    return {"compare": {"schemes": [LONG], **compare}}


def measured_with(**evaluate):
    return {"evaluate": {**EVALUATE, "lengths": [64], **evaluate}}


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("compare.schemes", compared(schemes=[])),
        ("'rope'", compared(schemes=["rope"])),
        ("'yarn'", compared(schemes=[released_as("x", frequencies={"name": "yran"})])),
        ("frequencies", compared(schemes=[{**PLAIN, "frequencies": {"name": "linear", "factor": 4.0}}])),
        ("stage", compared(schemes=[{**PLAIN, "stage": "0"}])),
        ("compare.only", compared(only=["yarn"])),
        ("compare.search.length", compared(search={"length": 16})),
        ("population", compared(search={"population": 2})),
        ("compare.seeds", compared(seeds=[0, 1])),
        ("evaluate.lengths", measured_with(lengths=[64, 100_000], tokens=100_000, batch_tokens=100_000)),
        ("evaluate.tasks", measured_with(tasks=["passkey"], passkey={"lengths": [8]})),
        ("evaluate.stride", measured_with(stride=4)),
        ("scheme", {"scheme": "alibi"}),
        ("scheme", {"scheme": released_as("x", remap={"name": "rerope"})}),
        ("stages", {"stages": [{"name": "a"}]}),
        ("train.mesh", {"train": {"steps": 0, "mesh": {"data": 2}}}),
        ("model.vocab_size", {"data": {"source": "stdlib", "special_tokens": "added"}}),
        ("init", {"init": "", "scheme": "rope"}),
    ],
)
def test_mistakes_are_refused_before_anything_is_read(values, tmp_path, named, changes):
    refused(named, lambda: studied(values, tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_a_study_a_comparison_and_other_files_leave_each_other_alone(values, study, tmp_path):
    shutil.copytree(study[0], tmp_path / "study")
    before = (study[0] / RESULTS).read_text()
    train = {"steps": 2, "warmup_steps": 1, "length": 16, "batch_tokens": 64, "mesh": {"data": 1}}
    data, schemes = {**values["data"], "held_out": 0.4}, {"schemes": [PLAIN, YARN]}
    trained = parse({**values, "train": train, "output": str(tmp_path), "data": data, "compare": schemes})
    refused("study", lambda: compare(trained))
    assert (tmp_path / "study" / RESULTS).read_text() == before
    (tmp_path / "study" / "config.yaml").write_text(dump(trained))
    refused("comparison", lambda: studied(values, tmp_path))
    (tmp_path / "study" / "config.yaml").unlink()
    refused("study", lambda: studied(values, tmp_path))


def test_the_released_config_is_a_study(released):
    config = load("configs/extend.yaml", [f"init={released[0]}"])
    assert config.evaluate.lengths == (8, 32, 64, 128)
    for entry in config.compare.schemes:  # each fits a model with RoPE, at every length
        for length in () if is_to_be_searched(entry) else config.evaluate.lengths:
            evaluated_scheme(config, entry, length)
