"""Generating text from a saved run, and the search for LongRoPE's factors on it."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import BYTES, EOS, encode
from flax import nnx

from posjax import rotary
from train import cli
from train.checkpoint.restore import restore_model
from train.config import load
from train.data.tokenizer import HuggingFaceTokenizer
from train.evaluate import generate as module
from train.evaluate.generate import Draws, _check_embedded, _written, choose, generate, tokens_after
from train.evaluate.saved import evaluation_documents
from train.evaluate.search import _fitness, check_searchable
from train.evaluate.windows import full_pieces, last_windows
from train.loop.fit import fit

pytestmark = pytest.mark.usefixtures("unpainted")

CONFIG = """
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 32, num_heads: 2, mlp_dim: 32}
train: {length: 32, batch_tokens: 512, steps: 60, warmup_steps: 5, log_every: 20, learning_rate: 0.01, mesh: {data: 1}}
evaluate: {lengths: [32, 64], tokens: 256, batch_tokens: 128}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny model with RoPE that has learned to repeat the alphabet."""
    folder = tmp_path_factory.mktemp("generate")
    for index in range(6):
        (folder / f"{index}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 8)
    file = folder / "tiny.yaml"
    file.write_text(CONFIG.replace("TEXT", str(folder)))
    config = load(file, [f"output={folder / 'runs'}"])
    fit(config)
    return config.directory


def test_the_command_streams_what_the_model_learned(run, capsys):
    assert cli.main(["generate", str(run), "--prompt", "abcdefghijkl", "--tokens", "9", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "abcdefghijklmnopqrstu\n"


@pytest.mark.parametrize("prompt", ["the cat", "the cat " * 20 + "sat"])
def test_the_text_continues_with_the_space_between_words(prompt):
    """A tokenizer such as Llama's leaves out the space of the first token that it decodes."""
    library = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "▁the": 2, "▁cat": 3, "▁sat": 4}
    own = library.Tokenizer(library.models.WordLevel(words, unk_token="<s>"))
    own.pre_tokenizer, own.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    tokenizer = HuggingFaceTokenizer(own.to_str().encode(), {"bos": "<s>", "eos": "</s>"}, "here", own=True)
    assert tokenizer.decode(np.array([4, 2])) == b"sat the"
    pieces = []
    assert _written(iter([4, 2]), tokenizer.prompt(prompt.encode()), tokenizer, pieces.append) == " sat the"
    assert pieces[:2] == [" sat", " the"]


def drawn_without_a_cache(model, prompt, sampling):
    """The tokens after a prompt, each drawn from a forward pass over the whole length."""
    graph, state = nnx.split(model)
    forward = jax.jit(lambda tokens, last: nnx.merge(graph, state)(tokens)[:, last])
    text = np.zeros((1, len(prompt) + sampling.tokens), np.int32)
    text[0, : len(prompt)] = prompt
    for n in range(sampling.tokens):
        logits, key = forward(text, len(prompt) + n - 1), jax.random.fold_in(jax.random.key(sampling.seed), n)
        text[0, len(prompt) + n] = choose(key, logits, sampling.temperature, sampling.top_k)[0]
    return text[0, len(prompt) :].tolist()


def test_a_prompt_in_chunks_and_beyond_the_training_length_is_the_full_forward_pass(run):
    _, model = restore_model(run)
    prompt, sampling = encode(b"abcdefghijklmnopqrstuvwxyz" * 5)[:-1], Draws(tokens=3, temperature=0)
    assert list(tokens_after(model, prompt, sampling, {EOS})) == drawn_without_a_cache(model, prompt, sampling)


def test_an_extended_scheme_uses_the_length_of_the_prompt_and_the_new_tokens(run):
    _, model = restore_model(run)
    rule = {"name": "dynamic-ntk", "original_length": 32}
    extended = model.with_scheme(model.config.scheme.extend(frequencies=rule))
    # At this temperature a small change of the logits soon changes what is drawn.
    prompt, sampling = encode(b"abc")[:-1], Draws(tokens=60, temperature=3, top_k=5, seed=0)
    text = generate(run, "abc", sampling, [f"scheme.extend={json.dumps({'frequencies': rule})}"], lambda text: None)
    wanted, plain = (drawn_without_a_cache(each, prompt, sampling) for each in (extended, model))
    assert list(text.encode()) == wanted != plain


def test_the_likeliest_tokens_alone_are_drawn_and_all_that_are_equally_likely():
    logits = jnp.log(jnp.array([[0.1, 0.3, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]]))
    keys = jax.random.split(jax.random.key(0), 200)
    for top_k, wanted in ((1, ({1, 2, 3}, {0})), (3, ({1, 2, 3}, {0, 1, 2})), (4, ({0, 1, 2, 3},) * 2)):
        drawn = np.asarray(jax.jit(jax.vmap(lambda key, k=top_k: choose(key, logits, 1.0, k)))(keys))
        assert tuple(set(column.tolist()) for column in drawn.T) == wanted


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-39, 1e-45, 1e-300])
def test_ever_smaller_temperatures_end_at_the_likeliest_token(temperature, top_k):
    """The limit of softmax(z / T) for T -> 0; below 1e-38 float32 holds neither T nor z / T."""
    logits = jnp.array([[1.0, 3.0, 2.999, -50.0], [-7.0, -90.0, -6.0, -6.5], [0.0, -2.0, 80.0, 79.0]])
    keys = jax.random.split(jax.random.key(0), 50)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: choose(key, logits, temperature, top_k)))(keys))
    assert [set(column.tolist()) for column in drawn.T] == [{1}, {2}, {2}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": -1}, "--tokens must not be negative, found -1"),
        ({"top_k": 2**32}, r"--top-k must be below 2\*\*32, found 4294967296"),
        ({"top_k": 2.5}, "--top-k must be a whole number, found 2.5"),
        ({"temperature": float("nan")}, "--temperature must be a finite number, found nan"),
        ({"temperature": float("inf")}, "--temperature must be a finite number, found inf"),
        ({"temperature": -0.5}, "--temperature must not be negative, found -0.5"),
    ],
)
def test_numbers_of_a_draw_are_limited(given, message):
    Draws(tokens=0, temperature=0, top_k=2**32 - 1, seed=0)
    with pytest.raises(ValueError, match=message):
        Draws(**given)


def test_tokens_without_an_embedding_are_refused():
    _check_embedded(np.array([0, 6]), 7)
    with pytest.raises(ValueError, match=r"--prompt: the model has 7 tokens, and no embedding for \[7\]"):
        _check_embedded(np.array([0, 7, 8]), 7)


def test_text_is_written_in_whole_characters():
    """A character that is never completed is replaced, at the end."""
    text, pieces = "a\u00e9\u20ac".encode() + b"b\xe2\x82", []
    sizes = []
    tokenizer = SimpleNamespace(decode=lambda tokens: sizes.append(len(tokens)) or BYTES.decode(tokens))
    written = _written(iter(text), encode(b"x" * 40)[:-1], tokenizer, pieces.append)
    assert sizes == [*range(16, 17 + len(text))], "only the end of a long prompt is decoded again"
    assert [piece for piece in pieces if piece] == ["a", "\u00e9", "\u20ac", "b", "\ufffd"]
    assert written == "a\u00e9\u20acb\ufffd"


@pytest.fixture
def counting(monkeypatch):
    """A model of ten tokens that continues with the next number; one logit after token 8 is not finite."""

    def step(parameters, cache, tokens, valid):
        logits = 50 * jax.nn.one_hot(tokens + 1, 10)
        return jnp.where((tokens[..., None] == 8) & (jnp.arange(10) == 3), jnp.inf, logits), cache

    lengths = []
    monkeypatch.setattr(module, "to_decode", lambda model, mesh: (None, lambda parameters: parameters))
    monkeypatch.setattr(module, "drawn_in_use", lambda model, total, seed, rows: lengths.append((total, rows)))
    monkeypatch.setattr(module, "decoding", lambda graph, drawn, total: step)
    monkeypatch.setattr(module, "cache_for", lambda *_: jnp.zeros(()))
    last = lambda step, parameters, cache, prompts, mesh: (step(None, cache, prompts, None)[0][:, -1], cache)  # noqa: E731
    monkeypatch.setattr(module, "read", last)
    return lengths


def test_tokens_follow_until_an_end_or_their_number(counting):
    def after(prompt, tokens, ends=()):
        return list(tokens_after(nnx.Module(), np.array(prompt), Draws(tokens=tokens, temperature=0), set(ends)))

    assert after([7, 1, 2], 4) == [3, 4, 5, 6]
    assert after([1, 2], 4, {5}) == [3, 4]
    assert after([1, 2], 0) == []
    assert counting == [(7, 1), (6, 1), (2, 1)]
    with pytest.raises(ValueError, match="the model gives no finite logits after 5 tokens; generate fewer"):
        after([1, 2, 6], 4)


def test_choices_follow_the_distribution_and_its_seed():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    keys = jax.random.split(jax.random.key(0), 4000)
    for temperature, top_k, wanted in (
        (1.0, 0, [0.5, 0.3, 0.2]),
        (0.5, 0, [0.658, 0.237, 0.105]),
        (1.0, 2, [0.625, 0.375, 0]),
    ):
        drawn = jax.jit(jax.vmap(lambda key, t=temperature, k=top_k: choose(key, logits, t, k)[0]))(keys)
        np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 4000, wanted, atol=0.03)
    assert int(choose(keys[0], logits, 0, 0)[0]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "-1"], "error: --tokens must not be negative, found -1"),
        (["--temperature", "-0.5"], "error: --temperature must not be negative"),
        (["scheme=alibi"], "is trained, so this cannot change: scheme"),
        (["scheme.extend={bias: alibi}"], "error: bias: expected one of the specs"),
    ],
)
def test_mistakes_are_one_line(run, capsys, arguments, message):
    assert cli.main(["generate", str(run), "--prompt", "abc", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_there_must_be_a_run(capsys, tmp_path):
    assert cli.main(["generate", str(tmp_path), "--prompt", "abc"]) == 2
    assert capsys.readouterr().err.startswith("error:")


# --- search -----------------------------------------------------------------------------------------------------------


def test_the_search_writes_an_extension_that_evaluate_accepts(run, capsys):
    arguments = ["search", str(run), "--length", "64", "--population", "4", "--iterations", "1"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((run / "longrope.json").read_text())
    assert lines[-1] == f"extend: {json.dumps(found['extend'])}"
    assert cli.main(["evaluate", str(run), f"scheme.extend={json.dumps(found['extend'])}"]) == 0
    row = json.loads((run / "evaluation.jsonl").read_text().splitlines()[-1])
    assert row["length"] == 64
    np.testing.assert_allclose(row["last_nll"], found["fitness"], rtol=1e-4)
    assert cli.main(["search", str(run), "--length", "32"]) == 2
    assert "must exceed the model's own, 32" in capsys.readouterr().err


def test_the_fitness_of_a_rule_is_that_of_its_model(run):
    config, model = load(run / "config.yaml"), restore_model(run)[1]
    rule = rotary.LongRoPE((1.0,) * 8, (1.5,) * 4 + (2.5,) * 4, 32, factor=2.0, select="long", unscaled_first=4)
    documents = evaluation_documents(
        dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, lengths=(64,)))
    )
    pieces = full_pieces(documents, 64, 256)
    found = _fitness(model, check_searchable(config), config, pieces, 64, 32)(rule)
    longer = model.with_scheme(check_searchable(config).extend(frequencies=rule))
    windows = last_windows(pieces, 64, 32)
    tokens = np.asarray(windows.tokens, np.int32)
    logits = np.asarray(nnx.jit(lambda model: jax.nn.log_softmax(model(tokens[:, :-1])))(longer))
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, -(chosen * windows.weights).sum() / windows.scored, rtol=1e-5)
