"""A released model in place of a run: trained further, evaluated, continued, searched and exported."""

import dataclasses
import importlib.util
import io
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fsspec.implementations.memory import MemoryFileSystem
from programs import shared_programs
from released_models import LENGTH, TEXT, VOCABULARY, few_steps, with_changes, write_released, write_tokenizer
from rich.console import Console

import posjax as pj
from posjax import rotary
from posjax.coca import Coca, merge_projection
from posjax.nn import Decoder, from_pretrained, save_pretrained
from posjax.nn.huggingface.load import named_parameters
from train import cli
from train.checkpoint.restore import restore, restore_model
from train.compare.compare import compare
from train.config import parse
from train.data.tokenizer import load_tokenizer
from train.evaluate import saved
from train.evaluate.saved import evaluate, evaluation_documents, read_rows
from train.evaluate.windows import full_pieces, last_windows
from train.loop.fit import fit, initial_parameters, prepare
from train.model.extension import completed
from train.model.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("unpainted")


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of the same model and training share their programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released") / "tiny"
    folder.mkdir()
    return folder, write_released(folder)


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    return few_steps(released[0], tmp_path_factory.mktemp("text"))


def token_losses(decoder, tokens):
    """The loss of every token but the first of each row, from the decoder's logits."""
    graph, state = nnx.split(decoder)
    log_probabilities = jax.jit(lambda state, tokens: jax.nn.log_softmax(nnx.merge(graph, state)(tokens)))
    found = np.asarray(log_probabilities(state, tokens[:, :-1]))
    return -np.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]


def numbers(model):
    return dict(named_parameters(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(values):
    config = parse(values)
    fit(config)
    return config


def test_training_starts_from_the_model(values, tmp_path):
    """The released model is much worse than a new one, whose loss would be slightly above ln(280)."""
    model = write_released(tmp_path)
    model.embed[...] *= 8
    save_pretrained(model, tmp_path / "worse", like=tmp_path)
    config = with_changes(values, name="run", init=str(tmp_path / "worse"), output=str(tmp_path))
    fit(config)
    line = json.loads((config.directory / "metrics.jsonl").read_text().splitlines()[0])
    row = load_tokenizer(config.data).encode_all([f"{TEXT} ".encode() * 6])[0][:17].astype(np.int32)[None]
    wanted = token_losses(model, row).mean()
    assert wanted > 10
    np.testing.assert_allclose(line["loss"], wanted, rtol=0.1)  # rows of the same text, not the same row


def test_training_lowers_the_loss(trained):
    lines = [json.loads(line) for line in (trained.directory / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_resuming_is_bit_for_bit(values, trained, monkeypatch):
    config = with_changes(values, name="resumed")
    monkeypatch.setattr("train.loop.fit.stop_requested", _stop_after(monkeypatch, 2))
    assert not fit(config).finished
    monkeypatch.undo()
    assert fit(config).finished
    chex.assert_trees_all_equal(*(numbers(restore_model(c.directory)[1]) for c in (config, trained)))


def _stop_after(monkeypatch, steps):
    """A replacement for ``stop_requested``, with an event that is set after ``steps`` updates."""
    from contextlib import contextmanager
    from threading import Event

    from train.loop import fit as loop

    event, seen = Event(), loop.reached_preemption

    def reached(step, stop):
        if step >= steps:
            event.set()
        return seen(step, stop)

    monkeypatch.setattr(loop, "reached_preemption", reached)

    @contextmanager
    def requested():
        yield event

    return requested


MESHES = [{"data": 2, "tensor": 2}, {"data": 1, "fsdp": 4}]


@pytest.mark.parametrize(
    ("mesh", "share"),
    [({"data": 2, "tensor": 2}, 2), ({"data": 1, "fsdp": 4}, 4), ({"data": 1, "context": 2, "tensor": 4}, 8)],
)
def test_meshes_read_their_own_parts(released, values, mesh, share):
    config = with_changes(values, train={"mesh": mesh})
    on_mesh = make_mesh(config.train.mesh, config.train.rows)
    found = dict(named_parameters(initial_parameters(config, on_mesh)))
    wanted = numbers(released[1])
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted))
    up = found["stacks/0/0/mlp/up"]
    assert up.addressable_shards[0].data.size == up.size // share


@pytest.mark.parametrize(
    "mesh",
    [{"data": 1, "fsdp": 2, "tensor": 2}, *(pytest.param(m, marks=pytest.mark.wide) for m in MESHES)],
    ids=["fsdp, tensor", "data, tensor", "fsdp"],
)
def test_training_on_a_mesh_is_that_of_one_device(values, trained, mesh):
    config = with_changes(values, name="mesh", train={"mesh": mesh})
    losses = [
        [json.loads(line)["loss"] for line in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (fit(config).directory, trained.directory)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_stages_and_frozen_parts(released, values):
    stages = [
        {"name": "coca", "scheme": {"name": "coca-strict", "base": 500.0}, "train": {"trainable": ["*/attention/k"]}},
        {"name": "more"},
    ]
    config = with_changes(values, name="stages", stages=stages)
    fit(config)
    _, model = restore_model(config.directory, "coca")
    assert isinstance(model.config.scheme.features, Coca)
    before, after = numbers(released[1]), numbers(model)
    moved = {name for name in before if name.endswith("/k") or not np.array_equal(before[name], after[name])}
    assert moved == {"stacks/0/0/attention/k"}
    assert not np.array_equal(after["stacks/0/0/attention/k"], merge_projection(before["stacks/0/0/attention/k"]))


def test_what_a_stage_trained_is_used_as_it_was_trained(values, capsys, monkeypatch):
    longer = {"name": "long", "train": {"length": 128, "batch_tokens": 128, "steps": 2, "warmup_steps": 1}}
    longer["scheme"] = {"name": "released", "frequencies": {"name": "yarn"}}
    data = values["data"] | {"held_out": 0.4}
    config = with_changes(values, name="longer", stages=[{"name": "short"}, longer], data=data)
    fit(config, progress="longer")
    options = '{"frequencies": {"factor": 4.0, "original_length": 32, "name": "yarn"}}'
    assert f"stage long: the released scheme, with {options}" in capsys.readouterr().out
    trained = restore_model(config.directory)[1].config.scheme.features.frequencies
    assert trained.factor == 4.0
    used = []

    def recorded(model, scheme, own=Decoder.with_scheme):
        used.append(scheme.features.frequencies)
        return own(model, scheme)

    monkeypatch.setattr(Decoder, "with_scheme", recorded)
    assert cli.main(["generate", str(config.directory), "--prompt", "The cat", "--tokens", "1"]) == 0
    assert cli.main(["evaluate", str(config.directory), "evaluate.lengths=[16]"]) == 0
    assert used == [trained, trained]
    given = "scheme.extend={frequencies: {name: linear, factor: 3.0}}"
    assert cli.main(["generate", str(config.directory), "--prompt", "The cat", "--tokens", "1", given]) == 2
    assert "'linear' would replace the model's own YaRN" in capsys.readouterr().err


def test_a_change_without_effect_at_the_training_length_is_named(values):
    lines = []
    prepare(with_changes(values, scheme={"name": "released", "frequencies": {"name": "yarn"}}), lines.append)
    assert lines == ["the released scheme, unchanged up to the model's own length"]


def test_rope_becomes_coca_before_the_first_update(released, values):
    config = with_changes(values, scheme={"name": "coca-strict", "base": 500.0})
    mesh = make_mesh(config.train.mesh, config.train.rows)
    found, before = dict(named_parameters(initial_parameters(config, mesh))), numbers(released[1])
    k = before["stacks/0/0/attention/k"]
    half = k.shape[-1] // 2
    np.testing.assert_allclose(found["stacks/0/0/attention/k"], (k[..., :half] + k[..., half:]) / 2, rtol=1e-6)
    chex.assert_trees_all_equal(found["stacks/0/0/attention/q"], before["stacks/0/0/attention/q"])


def test_what_cannot_be_trained_is_refused(values):
    with pytest.raises(ValueError, match=r"train\.steps is 0: there is nothing to train"):
        fit(with_changes(values, name="none", train={"steps": 0, "length": LENGTH}))
    with pytest.raises(ValueError, match="cannot start from the weights of 'released'"):
        fit(with_changes(values, name="none", scheme="fox"))


# --- use --------------------------------------------------------------------------------------------------------------


def test_evaluate_takes_the_path_of_a_model(released, values, capsys):
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "data.held_out=0.2"]
    sizes = ["evaluate.lengths=[16, 64]", "evaluate.tokens=128", "evaluate.batch_tokens=128"]
    arguments = [str(released[0]), f"output={values['output']}", *data, *sizes]
    assert cli.main(["evaluate", *arguments]) == 0
    rows = read_rows(Path(values["output"]) / "tiny" / "evaluation.jsonl")
    assert [(row["length"], row["last_length"]) for row in rows] == [(16, 16), (64, 16)]
    np.testing.assert_allclose(rows[1]["last_nll"], last_nll(released[1], values, 64, 16), rtol=1e-5)
    assert "released" in capsys.readouterr().out
    assert (Path(values["output"]) / "tiny" / "index.html").is_file()
    extended = cli.main(["evaluate", *arguments, "scheme.extend={frequencies: {name: yarn}}"])
    assert extended == 0
    assert "released + yarn" in capsys.readouterr().out
    *before, shorter, longer = read_rows(Path(values["output"]) / "tiny" / "evaluation.jsonl")
    assert before == rows
    assert (shorter["label"], longer["label"], longer["length"]) == ("released + yarn", "released + yarn", 64)
    assert {row["base"] for row in (shorter, longer)} == {"released"}
    scheme = released[1].config.scheme.extend(frequencies=rotary.YaRN(2.0, LENGTH, base=500.0))
    wanted = last_nll(released[1].with_scheme(scheme), values, 64, 16)
    np.testing.assert_allclose(longer["last_nll"], wanted, rtol=1e-5)


def last_nll(decoder, values, length, scored):
    """The mean loss of the last tokens of every full-length piece of held-out text, from the model's logits."""
    config = with_changes(values, evaluate={"lengths": [16, 64], "tokens": 128, "batch_tokens": 128})
    pieces = full_pieces(evaluation_documents(config), length, config.evaluate.tokens)
    windows = last_windows(pieces, length, scored)
    nll = token_losses(decoder, np.asarray(windows.tokens, np.int32))
    return (nll * windows.weights).sum() / windows.scored


def test_generate_continues_a_prompt_as_the_forward_pass_does(released, capsys):
    prompt = "The cat stands"
    arguments = ["generate", str(released[0]), "--prompt", prompt, "--tokens", "5", "--temperature", "0"]
    assert cli.main(arguments) == 0
    tokenizer = load_tokenizer(parse({"init": str(released[0])}).data)
    tokens, made = list(tokenizer.encode_all([prompt.encode()])[0][:-1]), []
    forward, whole = nnx.jit(lambda decoder, tokens: decoder(tokens)), np.zeros((1, LENGTH), np.int32)
    for _ in range(5):
        whole[0, : len(tokens)] = tokens
        made.append(int(np.asarray(forward(released[1], whole))[0, len(tokens) - 1].argmax()))
        tokens.append(made[-1])
        if made[-1] == tokenizer.eos:
            break
    found = tokenizer.decode(np.asarray(made)).decode(errors="replace")
    assert capsys.readouterr().out.rstrip("\n") == f"{prompt}{found}".rstrip("\n")


def test_characters_of_several_tokens_are_written_whole(released, capsys, monkeypatch):
    tokenizer = load_tokenizer(parse({"init": str(released[0])}).data)
    for text in ("日本語", "é x", "😀 ok"):
        monkeypatch.setattr(
            "train.evaluate.generate.tokens_after", lambda *_, text=text: iter(tokenizer.tokens(text.encode()))
        )
        assert cli.main(["generate", str(released[0]), "--prompt", "The cat"]) == 0
        assert capsys.readouterr().out == f"The cat{text}\n"


def test_results_of_different_models_are_kept_apart(released, values, trained, tmp_path, monkeypatch, capsys):
    """After the first measurement, the same rows are returned for every folder and name."""
    rows = []

    def measured_once(*arguments, own=saved.measure_held_out):
        rows.extend([] if rows else own(*arguments))
        return iter(rows)

    monkeypatch.setattr(saved, "measure_held_out", measured_once)
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "data.held_out=0.2"]
    arguments = ["evaluate", str(released[0]), f"output={values['output']}", *data, "evaluate.lengths=[16]"]
    assert cli.main([*arguments, "name=run"]) == 2
    assert "holds a run" in capsys.readouterr().err
    shutil.copytree(released[0], tmp_path / "tiny")
    assert cli.main([*arguments, "name=apart"]) == 0
    assert cli.main(["evaluate", str(tmp_path / "tiny"), *arguments[2:], "name=apart"]) == 2
    assert f"holds results of {released[0]}" in capsys.readouterr().err
    assert cli.main(["evaluate", f"{released[0]}/", *arguments[2:], "name=apart"]) == 0, "the same folder"
    assert cli.main([*arguments, "name=apart", f"init={tmp_path}/tiny"]) == 2
    assert "but the command is for" in capsys.readouterr().err


def test_a_search_with_no_place_for_its_result_does_not_begin(released, values, trained, monkeypatch, capsys):
    monkeypatch.setattr("train.evaluate.search.search_factors", lambda *_: pytest.fail("searched"))
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "evaluate.lengths=[16]"]
    arguments = ["search", str(released[0]), "--length", "64", f"output={values['output']}", "name=run", *data]
    assert cli.main(arguments) == 2
    assert "holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["evaluate"], ["generate", "--prompt", "The"]])
def test_a_tokenizer_that_is_too_large_is_refused(released, values, command, capsys):
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "evaluate.lengths=[16]"]
    name, *rest = command
    assert cli.main([name, str(released[0]), *rest, *data, "data.special_tokens=added"]) == 2
    assert f"model.vocab_size: the tokenizer has {VOCABULARY + 2} tokens" in capsys.readouterr().err


def test_a_place_that_cannot_be_reached_is_one_line(monkeypatch, capsys):
    def unreachable(*_):
        raise RuntimeError("no\nnetwork")

    for name in ("isfile", "isdir", "ls", "info"):
        monkeypatch.setattr(MemoryFileSystem, name, unreachable)
    for command in (["compare", "configs/extend.yaml", "init=memory://tiny"], ["generate", "memory://tiny"]):
        assert cli.main(command) == 2
        assert "cannot be reached: RuntimeError: no network" in capsys.readouterr().err


def test_a_comparison_knows_before_it_trains_what_cannot_start_from_the_model(values, tmp_path, monkeypatch):
    """CoCA has no place for norms of queries and keys, which Qwen3 has."""
    monkeypatch.setattr("train.compare.compare.run_group", lambda *_: pytest.fail("trained"))
    rope = rotary.Rotary(rotary.Plain(500.0))
    write_released(tmp_path, scheme=pj.Scheme(features=rope, norm=pj.norms.QKNorm(eps=1e-5)))
    schemes = [{"name": "released"}, {"name": "coca-strict", "label": "CoCA"}]
    config = {**values, "output": str(tmp_path / "runs"), "compare": {"schemes": schemes}}
    with pytest.raises(ValueError, match=r"CoCA: .*'CoCA' would lose parameters that 'released' has learned"):
        compare(parse({**config, "init": str(tmp_path)}))
    with pytest.raises(ValueError, match=r"CoCA: train.loss_chunks must divide the vocabulary of 280"):
        compare(parse({**config, "train": {**values["train"], "loss_chunks": 3}, "compare": {"schemes": schemes[1:]}}))


def test_search_takes_the_path_of_a_model(released, values, capsys):
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "data.held_out=0.2"]
    sizes = ["evaluate.tokens=128", "evaluate.batch_tokens=128", "evaluate.lengths=[16, 64]"]
    arguments = ["search", str(released[0]), "--length", "64", "--population", "4", "--iterations", "1"]
    assert cli.main([*arguments, f"output={values['output']}", "name=searched", *data, *sizes]) == 0
    found = json.loads((Path(values["output"]) / "searched" / "longrope.json").read_text())
    assert len(found["extend"]["frequencies"]["long_factor"]) == 4
    # The search minimises what `evaluate` reports as the loss of the last tokens: of 16, the shortest length.
    extend = f"scheme.extend={json.dumps(found['extend'])}"
    assert (
        cli.main(["evaluate", arguments[1], f"output={values['output']}", "name=searched", *data, *sizes, extend]) == 0
    )
    row = read_rows(Path(values["output"]) / "searched" / "evaluation.jsonl")[-1]
    assert (row["length"], row["last_length"]) == (64, 16)
    np.testing.assert_allclose(row["last_nll"], found["fitness"], rtol=1e-4)


def test_export_writes_what_was_trained_with_its_tokenizer(released, trained, tmp_path, capsys):
    assert cli.main(["export", str(trained.directory), str(tmp_path / "out")]) == 0
    again, model = from_pretrained(tmp_path / "out"), restore_model(trained.directory)[1]
    chex.assert_trees_all_equal(*map(numbers, (again, model)))
    assert again.config.trained_length == LENGTH
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (released[0] / name).read_bytes()
    assert cli.main(["export", str(trained.directory), str(tmp_path / "out")]) == 2
    assert "holds a model already" in capsys.readouterr().err


def test_a_run_no_longer_needs_the_model_it_started_from(released, values, tmp_path, capsys):
    shutil.copytree(released[0], tmp_path / "tiny")
    config = with_changes(values, init=str(tmp_path / "tiny"), name="alone")
    fit(config)
    shutil.move(tmp_path / "tiny", tmp_path / "moved")
    assert cli.main(["generate", str(config.directory), "--prompt", "The cat", "--tokens", "2"]) == 0
    assert cli.main(["export", str(config.directory), str(tmp_path / "out")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (released[0] / name).read_bytes()
    assert fit(with_changes(values, init=str(tmp_path / "moved"), name="alone")).finished
    capsys.readouterr()
    shutil.rmtree(config.directory / "released")
    assert cli.main(["export", str(config.directory), str(tmp_path / "again")]) == 2
    assert "so its tokenizer cannot be written" in capsys.readouterr().err
    assert cli.main(["export", str(config.directory), str(tmp_path / "again"), f"init.path={tmp_path}/moved"]) == 0


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3", "ntk"])
def test_an_exported_extension_says_how_far_it_reaches(released, tmp_path, name):
    extend = f"scheme.extend={{frequencies: {{name: {name}, factor: 4.0}}}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 4 * LENGTH


def test_a_tokenizer_of_its_own_is_exported(values, tmp_path, capsys):
    write_tokenizer(tmp_path, "quite another text " + TEXT, VOCABULARY)
    config = with_changes(values, name="own", data={"tokenizer": str(tmp_path / "tokenizer.json")})
    fit(config)
    assert cli.main(["export", str(config.directory), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(config.data)
    (tmp_path / "tokenizer.json").unlink()
    assert cli.main(["export", str(config.directory), str(tmp_path / "without")]) == 0
    assert "no tokenizer was written" in capsys.readouterr().out
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    assert not tokenizer.opening  # it adds no token before a text
    assert special_tokens(tmp_path / "out") == [None, tokenizer.eos, tokenizer.padding]


def special_tokens(folder):
    values = json.loads((folder / "config.json").read_text())
    return [values[f"{name}_token_id"] for name in ("bos", "eos", "pad")]


def test_a_run_with_bytes_is_exported_without_the_tokenizer_of_its_model(values, tmp_path, capsys):
    config = with_changes(values, name="bytes", data={"tokenizer": "bytes"})
    fit(config)
    assert cli.main(["export", str(config.directory), str(tmp_path / "out")]) == 0
    assert sorted(place.name for place in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert special_tokens(tmp_path / "out") == [256, 257, 259]  # for bytes, as in docs/training.md
    assert "read it with data.tokenizer=bytes" in capsys.readouterr().out


def test_a_trained_run_is_labelled_by_its_name_and_its_extension_by_both(trained):
    sizes = ["evaluate.lengths=[16, 32]", "evaluate.tokens=64", "evaluate.batch_tokens=64"]
    plain = evaluate(trained.directory, sizes, Console(file=io.StringIO()))
    extend = "scheme.extend={frequencies: {name: linear, factor: 2.0}}"
    extended = evaluate(trained.directory, [*sizes, extend], Console(file=io.StringIO()))
    assert {(row["label"], row["base"]) for row in plain} == {(trained.name, None)}
    assert {(row["label"], row["base"]) for row in extended} == {(f"{trained.name} + linear", trained.name)}


def test_export_keeps_the_dtype_of_the_files(released, tmp_path):
    save_pretrained(released[1], tmp_path / "half", like=released[0], dtype="bfloat16")
    assert cli.main(["export", str(tmp_path / "half"), str(tmp_path / "out")]) == 0
    assert cli.main(["export", str(tmp_path / "half"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    kinds = [json.loads((tmp_path / name / "config.json").read_text())["dtype"] for name in ("out", "wide")]
    assert kinds == ["bfloat16", "float32"]
    chex.assert_trees_all_equal(*(numbers(from_pretrained(tmp_path / name)) for name in ("out", "wide")))


@pytest.mark.parametrize("options", [{}, {"embedding_scale": 7.3}], ids=["llama", "granite"])
def test_a_narrow_model_stays_narrow_and_gives_the_numbers_of_the_widened_one(options, tmp_path):
    """Parameters are widened only where they are used, so an evaluation needs no more memory than the model's files.

    The scale of the embeddings is a number that bfloat16 rounds.
    """
    wide = tmp_path / "wide"
    wide.mkdir()
    write_released(wide, **options)
    save_pretrained(from_pretrained(wide), tmp_path / "narrow", like=wide, dtype="bfloat16")
    kept = restore(tmp_path / "narrow", parse({"init": str(tmp_path / "narrow")}))[1]
    chex.assert_type(jax.tree.leaves(nnx.state(kept, nnx.Param)), jnp.bfloat16)
    tokens = np.arange(20).reshape(2, 10)
    widened = from_pretrained(tmp_path / "narrow", dtype="float32")
    forward = nnx.jit(lambda decoder: decoder(tokens))
    np.testing.assert_array_equal(forward(kept), forward(widened))


def test_export_of_an_extension(released, tmp_path, capsys):
    extend = "scheme.extend={frequencies: {name: yarn, factor: 2.0}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 0
    output = capsys.readouterr().out
    assert f'"factor": 2.0, "original_length": {LENGTH}' in output
    assert f"max_position_embeddings is {2 * LENGTH}" in output
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_parameters"]["rope_type"] == "yarn"
    assert values["max_position_embeddings"] == 2 * LENGTH


@pytest.mark.parametrize("name", ["ntk", "ntk-old", "linear", "llama3", "dynamic-ntk"])
def test_extensions_that_a_layout_can_store_are_the_same_model_when_read(released, tmp_path, name):
    extend = f"scheme.extend={{frequencies: {{name: {name}}}}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 0
    change = completed({"frequencies": {"name": name}}, LENGTH, 4 * LENGTH)
    extended = released[1].with_scheme(released[1].config.scheme.extend(**change))
    tokens = np.arange(96).reshape(1, 96)
    forward = nnx.jit(lambda decoder: decoder(tokens))
    np.testing.assert_allclose(forward(from_pretrained(tmp_path / "out")), forward(extended), atol=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear", "ntk", "yarn", "llama3", "dynamic-ntk"])
def test_transformers_reads_an_extension_as_the_same_model(released, tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    extend = f"scheme.extend={{frequencies: {{name: {name}}}}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 0
    tokens = np.arange(3 * LENGTH)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor(tokens)).logits
    extended = released[1].with_scheme(
        released[1].config.scheme.extend(**completed({"frequencies": {"name": name}}, LENGTH, 4 * LENGTH))
    )
    assert np.abs(extended(jnp.asarray(tokens)) - released[1](jnp.asarray(tokens))).max() > 1e-2
    np.testing.assert_allclose(extended(jnp.asarray(tokens)), theirs.numpy(), atol=1e-4)


def test_export_refuses_what_the_layout_cannot_store(released, tmp_path, capsys):
    extend = "scheme.extend={remap: {name: rerope}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 2
    error = capsys.readouterr().err
    assert "scheme: the layout of llama cannot store" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_from_random_parameters_is_exported_too(released, values, tmp_path):
    model = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}
    data = {**values["data"], "tokenizer": f"{released[0]}/tokenizer.json"}
    config = parse({**values, "init": "", "name": "seed", "model": model, "data": data})
    fit(config)
    assert cli.main(["export", str(config.directory), f"file://{tmp_path}/out"]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (released[0] / "tokenizer.json").read_bytes()
    again, own = from_pretrained(tmp_path / "out"), restore(config.directory, config)[1]
    assert again.config == dataclasses.replace(own.config, query_scale=8**-0.5), (
        "the same, with its default written out"
    )
    chex.assert_trees_all_equal(numbers(again), numbers(own))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.compile
def test_a_training_from_a_released_model_is_planned(values, capsys):
    sizes = ["train.length=64", "train.batch_tokens=1024", "train.mesh={fsdp: 8}", "scheme=coca-strict"]
    arguments = ["plan", "configs/released-coca.yaml", f"init={values['init']}", "--topology", "v5e:2x4", *sizes]
    assert cli.main([*arguments, "train.accumulate=1"]) == 0
    assert "HBM" in capsys.readouterr().out
