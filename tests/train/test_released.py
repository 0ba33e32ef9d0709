"""A released model in place of a run: trained further, evaluated, continued, searched and exported."""

import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import shared_programs
from released_models import LENGTH, TEXT, VOCABULARY, few_steps, with_changes, write_released, write_tokenizer

from posjax import rotary
from posjax.coca import Coca, merge_projection
from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface.load import named_parameters
from train import cli
from train.checkpoint.restore import restore, restore_model
from train.config import parse
from train.data.tokenizer import load_tokenizer
from train.evaluate.saved import evaluation_documents
from train.evaluate.windows import full_pieces, last_windows
from train.loop.fit import fit, initial_parameters
from train.model.build import Setup
from train.model.extension import completed
from train.model.mesh import make_mesh
from train.runtime.rows import read_rows


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of the same model and training share their programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    return few_steps(released[0], tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(values):
    config = parse(values)
    fit(config)
    return config


@pytest.fixture(scope="module")
def measured(released, values):
    """The arguments of ``evaluate`` and ``search`` for the released model, under the name ``tiny``."""
    data = ["data.source=files", f"data.paths={json.dumps(values['data']['paths'])}", "data.held_out=0.2"]
    sizes = ["evaluate.lengths=[16, 64]", "evaluate.tokens=128", "evaluate.batch_tokens=128"]
    arguments = [str(released[0]), f"output={values['output']}", *data, *sizes]
    assert cli.main(["evaluate", *arguments]) == 0
    return arguments


def numbers(model):
    return dict(named_parameters(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_alike_on_a_mesh(values, trained):
    config = with_changes(values, name="mesh", train={"mesh": {"data": 1, "fsdp": 2, "tensor": 2}})
    found, wanted = losses(fit(config).directory), losses(trained.directory)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "share"), [({"data": 2, "tensor": 2}, 2), ({"data": 1, "context": 2, "tensor": 4}, 8)]
)
def test_meshes_read_their_own_parts(released, values, mesh, share):
    config = with_changes(values, train={"mesh": mesh})
    on_mesh = make_mesh(config.train.mesh, config.train.rows)
    found = dict(named_parameters(initial_parameters(Setup(config, on_mesh))))
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, each) for each in (found, numbers(released[1]))))
    up = found["stacks/0/0/mlp/up"]
    assert up.addressable_shards[0].data.size == up.size // share


def test_rope_becomes_coca_and_only_a_part_is_trained(released, values):
    """The keys of CoCA start from the mean of both halves of RoPE's keys; the rest stays as released."""
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
    key = before["stacks/0/0/attention/k"]
    start = (key[..., :4] + key[..., 4:]) / 2
    np.testing.assert_allclose(merge_projection(key), start, rtol=1e-6)
    change = np.abs(after["stacks/0/0/attention/k"] - start).max()
    assert 0 < change < 0.1 * np.abs(start).max()


def test_an_extension_that_was_trained_is_used_as_it_was_trained(values, capsys):
    """Four times longer rows, so a factor of 4. The command has its own options, which contradict that."""
    longer = {"length": 128, "batch_tokens": 128, "steps": 2, "warmup_steps": 1}
    scheme = {"name": "released", "frequencies": {"name": "yarn"}}
    data = values["data"] | {"held_out": 0.4}
    config = with_changes(values, name="longer", scheme=scheme, train=longer, data=data)
    fit(config)
    assert restore_model(config.directory)[1].config.scheme.features.frequencies.factor == 4.0
    given = "scheme.extend={frequencies: {name: linear, factor: 3.0}}"
    assert cli.main(["generate", str(config.directory), "--prompt", "The cat", "--tokens", "1", given]) == 2
    assert "YaRN" in capsys.readouterr().err


# --- use --------------------------------------------------------------------------------------------------------------


def last_nll(decoder, values, length, scored):
    """The mean loss of the last tokens of every full-length piece of held-out text, from the model's logits."""
    config = with_changes(values, evaluate={"lengths": [16, 64], "tokens": 128, "batch_tokens": 128})
    windows = last_windows(full_pieces(evaluation_documents(Setup(config)), length, 128), length, scored)
    tokens = np.asarray(windows.tokens, np.int32)
    found = np.asarray(nnx.jit(lambda model, t: jax.nn.log_softmax(model(t)))(decoder, tokens[:, :-1]))
    nll = -np.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
    return (nll * windows.weights).sum() / windows.scored


def test_evaluate_gives_the_losses_of_the_logits(released, values, measured):
    place = Path(values["output"]) / "tiny"
    rows = read_rows(place / "evaluation.jsonl")
    assert [(row["length"], row["last_length"], row["label"]) for row in rows[:2]] == [
        (16, 16, "released"),
        (64, 16, "released"),
    ]
    np.testing.assert_allclose(rows[1]["last_nll"], last_nll(released[1], values, 64, 16), rtol=1e-5)
    assert (place / "index.html").is_file()
    assert cli.main(["evaluate", *measured, "scheme.extend={frequencies: {name: yarn}}"]) == 0
    *before, shorter, longer = read_rows(place / "evaluation.jsonl")
    assert before == rows
    for row in (shorter, longer):
        assert (row["label"], row["base"]) == ("released + yarn", "released")
    scheme = released[1].config.scheme.extend(frequencies=rotary.YaRN(2.0, LENGTH, base=500.0))
    wanted = last_nll(released[1].with_scheme(scheme), values, 64, 16)
    np.testing.assert_allclose(longer["last_nll"], wanted, rtol=1e-5)


@pytest.mark.filterwarnings("default:.*only the text part")
def test_a_release_that_also_sees_has_the_losses_of_its_text_part(released, values, measured, tmp_path, capsys):
    """Training from it and exporting the run gives a model of text alone."""
    seeing = shutil.copytree(released[0], tmp_path / "seeing")
    inner = config_of(seeing) | {"model_type": "mistral", "sliding_window": None}
    (seeing / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": inner}))
    library = pytest.importorskip("safetensors.numpy")
    tensors = library.load_file(seeing / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    library.save_file(tensors | {"vision_tower.norm.weight": np.ones(3, np.float32)}, seeing / "model.safetensors")
    capsys.readouterr()
    assert cli.main(["evaluate", str(seeing), *measured[1:], f"output={tmp_path}"]) == 0
    assert capsys.readouterr().err.startswith(f"warning: {seeing}: only the text part of mistral3 is read; ")
    places = tmp_path / "seeing", Path(values["output"]) / "tiny"
    found, wanted = (read_rows(place / "evaluation.jsonl") for place in places)
    assert [row["last_nll"] for row in found] == [row["last_nll"] for row in wanted[:2]]
    config = with_changes(values, init=str(seeing), name="from-seeing", train={"steps": 2})
    with pytest.warns(UserWarning, match="only the text part of mistral3"):
        fit(config)
    assert cli.main(["export", str(config.directory), str(tmp_path / "exported")]) == 0
    assert config_of(tmp_path / "exported")["model_type"] == "mistral"


def test_results_of_different_models_are_kept_apart(released, trained, measured, tmp_path, capsys):
    shutil.copytree(released[0], tmp_path / "tiny")
    for command in (
        ["evaluate", *measured, "name=run"],
        ["search", *measured, "name=run", "--length", "64"],
        ["evaluate", str(tmp_path / "tiny"), *measured[1:]],
        ["evaluate", *measured, f"init={tmp_path}/tiny"],
    ):
        assert cli.main(command) == 2
        assert re.search("holds a run|holds results of|the command is for", capsys.readouterr().err)


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


def test_a_search_finds_factors_whose_loss_evaluate_gives(values, measured):
    """The search minimises the loss of the last tokens: of 16, the shortest length."""
    search = ["--length", "64", "--population", "4", "--iterations", "1", "name=searched"]
    assert cli.main(["search", *measured, *search]) == 0
    found = json.loads((Path(values["output"]) / "searched" / "longrope.json").read_text())
    assert len(found["extend"]["frequencies"]["long_factor"]) == 4
    extend = f"scheme.extend={json.dumps(found['extend'])}"
    assert cli.main(["evaluate", *measured, "name=searched", extend]) == 0
    row = read_rows(Path(values["output"]) / "searched" / "evaluation.jsonl")[-1]
    assert (row["length"], row["last_length"]) == (64, 16)
    np.testing.assert_allclose(row["last_nll"], found["fitness"], rtol=1e-4)


# --- export -----------------------------------------------------------------------------------------------------------


def test_a_run_is_exported_with_its_tokenizer_and_needs_the_model_no_longer(values, released, trained, tmp_path):
    shutil.copytree(released[0], tmp_path / "tiny")
    config = with_changes(values, init=str(tmp_path / "tiny"), name="alone")
    fit(config)
    shutil.move(tmp_path / "tiny", tmp_path / "moved")
    assert cli.main(["generate", str(config.directory), "--prompt", "The cat", "--tokens", "2"]) == 0
    assert cli.main(["export", str(config.directory), str(tmp_path / "out")]) == 0
    again, model = from_pretrained(tmp_path / "out"), restore_model(trained.directory)[1]
    chex.assert_trees_all_equal(*map(numbers, (again, model)))
    assert again.config.trained_length == LENGTH
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (released[0] / name).read_bytes()
    assert fit(with_changes(values, init=str(tmp_path / "moved"), name="alone")).finished


def test_a_run_from_random_parameters_is_exported_with_a_tokenizer_and_a_chat_template_of_its_own(values, tmp_path):
    write_tokenizer(tmp_path, "quite another text " + TEXT, VOCABULARY)
    model = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}
    said = "{% for each in messages %}{{ each.role + ': ' + each.content + '\n' }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(said + "{% if add_generation_prompt %}assistant: {% endif %}")
    messages = [{"role": "user", "content": "The cat?"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 40)
    mixture = [{"paths": values["data"]["paths"]}, {"paths": [f"{tmp_path}/chats.jsonl"], "messages_key": "messages"}]
    own = {"tokenizer": f"{tmp_path}/tokenizer.json", "chat_template": f"{tmp_path}/own.jinja"}
    data = {"source": "files", "mixture": mixture, **own}
    config = parse({**values, "init": "", "name": "seed", "model": model, "data": data})
    fit(config)
    assert cli.main(["export", str(config.directory), f"file://{tmp_path}/out"]) == 0
    for name, written in (("tokenizer.json", "tokenizer.json"), ("own.jinja", "chat_template.jinja")):
        assert (tmp_path / "out" / written).read_bytes() == (tmp_path / name).read_bytes()
    again, own = from_pretrained(tmp_path / "out"), restore(config.directory, config)[1]
    assert again.config == dataclasses.replace(own.config, query_scale=8**-0.5)  # its default, written out
    chex.assert_trees_all_equal(numbers(again), numbers(own))
    tokenizer = load_tokenizer(config.data)
    written = [config_of(tmp_path / "out")[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert written == [tokenizer.bos, tokenizer.eos, tokenizer.padding]


def test_export_keeps_the_dtype_of_the_files(released, tmp_path):
    save_pretrained(released[1], tmp_path / "half", like=released[0], dtype="bfloat16")
    assert cli.main(["export", str(tmp_path / "half"), str(tmp_path / "out")]) == 0
    assert cli.main(["export", str(tmp_path / "half"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert [config_of(tmp_path / name)["dtype"] for name in ("out", "wide")] == ["bfloat16", "float32"]
    chex.assert_trees_all_equal(*(numbers(from_pretrained(tmp_path / name)) for name in ("out", "wide")))


def test_a_narrow_model_stays_narrow_and_gives_the_numbers_of_the_widened_one(tmp_path):
    """Parameters are widened only where they are used, so an evaluation needs no more memory than the model's files.

    The scale of the embeddings is a number that bfloat16 rounds.
    """
    write_released(tmp_path, embedding_scale=7.3)
    save_pretrained(from_pretrained(tmp_path), tmp_path / "narrow", like=tmp_path, dtype="bfloat16")
    kept = restore(tmp_path / "narrow", parse({"init": str(tmp_path / "narrow")}))[1]
    chex.assert_type(jax.tree.leaves(nnx.state(kept, nnx.Param)), jnp.bfloat16)
    widened = from_pretrained(tmp_path / "narrow", dtype="float32")
    forward = nnx.jit(lambda decoder: decoder(np.arange(20).reshape(2, 10)))
    np.testing.assert_array_equal(forward(kept), forward(widened))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["ntk", "yarn", "dynamic-ntk", *(pytest.param(n, marks=pytest.mark.wide) for n in ("linear", "llama3"))]
)
def test_an_exported_extension_is_the_same_model_to_transformers(released, tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    extend = f"scheme.extend={{frequencies: {{name: {name}}}}}"
    assert cli.main(["export", str(released[0]), str(tmp_path / "out"), extend]) == 0
    reach = LENGTH if name == "dynamic-ntk" else 4 * LENGTH
    assert config_of(tmp_path / "out")["max_position_embeddings"] == reach
    tokens = np.arange(3 * LENGTH)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor(tokens)).logits
    change = completed({"frequencies": {"name": name}}, LENGTH, 4 * LENGTH)
    extended = released[1].with_scheme(released[1].config.scheme.extend(**change))
    forward = nnx.jit(lambda decoder: decoder(tokens))
    found = forward(extended)
    assert np.abs(found - forward(released[1])).max() > 1e-2
    np.testing.assert_allclose(found, theirs.numpy(), atol=1e-4)
    np.testing.assert_allclose(forward(from_pretrained(tmp_path / "out")), found, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.compile
def test_a_training_from_a_released_model_is_planned(values, capsys):
    sizes = ["train.length=64", "train.batch_tokens=1024", "train.mesh={fsdp: 8}", "scheme=coca-strict"]
    arguments = ["plan", "configs/released-coca.yaml", f"init={values['init']}", "--topology", "v5e:2x4", *sizes]
    assert cli.main([*arguments, "train.accumulate=1"]) == 0
    assert "HBM" in capsys.readouterr().out
