"""Generating text from a saved run equals forward passes; the search for LongRoPE's factors on it."""

import json

import jax
import numpy as np
import pytest
from documents import EOS, encode
from flax import nnx
from refusals import refused
from released_models import write_released

from posjax import rotary
from posjax.nn import choose
from train import cli
from train.checkpoint.restore import restore_model
from train.config import load, parse
from train.evaluate.generate import SamplingOptions, generate, tokens_after
from train.evaluate.search import Effort, check_searchable, search_factors
from train.loop.fit import fit

pytestmark = pytest.mark.usefixtures("unpainted")

CONFIG = """
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 32, num_heads: 2, mlp_dim: 32}
train: {length: 32, batch_tokens: 512, steps: 80, warmup_steps: 5, log_every: 20, learning_rate: 0.01, mesh: {data: 1},
  stop_loss: 0.3}
evaluate: {lengths: [32, 64], tokens: 256, batch_tokens: 128}
"""
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny model with RoPE that has learned to repeat the alphabet."""
    folder = tmp_path_factory.mktemp("generate")
    for index in range(6):
        (folder / f"{index}.txt").write_text(ALPHABET * 8)
    file = folder / "tiny.yaml"
    file.write_text(CONFIG.replace("TEXT", str(folder)))
    config = load(file, [f"output={folder / 'runs'}"])
    fit(config)
    return config.directory


@pytest.fixture(scope="module")
def model(run):
    return restore_model(run)[1]


def test_the_command_streams_what_the_model_learned(run, capsys):
    assert cli.main(["generate", str(run), "--prompt", "abcdefghijkl", "--tokens", "9", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "abcdefghijklmnopqrstu\n"


def drawn_without_a_cache(model, prompt, sampling):
    """The tokens after a prompt, each drawn from a forward pass over the whole length."""
    graph, state = nnx.split(model)
    forward = jax.jit(lambda tokens, last: nnx.merge(graph, state)(tokens)[:, last])
    text = np.zeros((1, len(prompt) + sampling.tokens), np.int32)
    text[0, : len(prompt)] = prompt
    for n in range(sampling.tokens):
        logits, key = forward(text, len(prompt) + n - 1), jax.random.fold_in(jax.random.key(sampling.seed), n)
        text[0, len(prompt) + n] = choose(key, logits, sampling.choice)[0]
    return text[0, len(prompt) :].tolist()


def test_a_prompt_in_chunks_and_beyond_the_training_length_is_the_full_forward_pass(model):
    prompt, sampling = encode(ALPHABET.encode() * 5)[:-1], SamplingOptions(tokens=3, temperature=0)
    assert list(tokens_after(model, prompt, sampling, {EOS})) == drawn_without_a_cache(model, prompt, sampling)


def test_an_extended_scheme_uses_the_length_of_the_prompt_and_the_new_tokens(run, model):
    rule = {"name": "dynamic-ntk", "original_length": 32}
    extended = model.with_scheme(model.config.scheme.extend(frequencies=rule))
    # At this temperature a small change of the logits soon changes what is drawn.
    prompt, sampling = encode(b"abc")[:-1], SamplingOptions(tokens=60, temperature=3, top_k=5, seed=0)
    text = generate(run, "abc", sampling, [f"scheme.extend={json.dumps({'frequencies': rule})}"], lambda text: None)
    wanted, plain = (drawn_without_a_cache(each, prompt, sampling) for each in (extended, model))
    assert list(text.encode()) == wanted != plain


def test_tokens_follow_until_an_end_or_their_number(model):
    def after(tokens, ends=()):
        return list(
            tokens_after(model, encode(b"abcdefgh")[:-1], SamplingOptions(tokens=tokens, temperature=0), set(ends))
        )

    assert bytes(after(4)) == b"ijkl"
    assert bytes(after(4, b"k")) == b"ij"
    assert after(0) == []
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * np.nan, state))
    with pytest.raises(ValueError, match="no finite logits after 4 tokens"):
        list(tokens_after(broken, encode(b"abc")[:-1], SamplingOptions(tokens=2), set()))


def test_text_is_written_in_whole_characters(run, model):
    """At this temperature every byte is about as likely, so most are parts of no character: Python replaces them."""
    sampling, pieces = SamplingOptions(tokens=120, temperature=1e4, seed=0), []
    text = generate(run, "a\u00e9", sampling, write=pieces.append)
    tokens = list(tokens_after(model, encode("a\u00e9".encode())[:-1], sampling, {EOS}))
    assert len(tokens) == 120
    assert text == bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert any(ord(character) > 127 for character in text.replace("\ufffd", ""))
    assert "".join(pieces) == "a\u00e9" + text
    assert len(pieces) > 60


def test_the_text_continues_with_the_space_between_words(tmp_path):
    """A tokenizer such as Llama's leaves out the space of the first token that it decodes."""
    library = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1} | {f"▁w{n}": n for n in range(2, 40)}
    own = library.Tokenizer(library.models.WordLevel(words, unk_token="<s>"))
    own.pre_tokenizer, own.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    write_released(tmp_path, vocab_size=40)
    own.save(str(tmp_path / "tokenizer.json"))
    prompt, pieces = "w3 " * 30 + "w5", []
    text = generate(tmp_path, prompt, SamplingOptions(tokens=5, temperature=1, seed=1), write=pieces.append)
    assert text.startswith(" w")
    assert len(own.encode(prompt + text).ids) == len(own.encode(prompt).ids) + 5
    assert pieces[0] == prompt
    assert pieces[1].startswith(" ")
    own.add_special_tokens(["<extra>"])
    own.save(str(tmp_path / "tokenizer.json"))
    refused("--prompt", lambda: generate(tmp_path, "<extra>", SamplingOptions(tokens=1), write=pieces.append))


def test_the_search_writes_an_extension_that_evaluate_accepts_and_finds_as_good(run, capsys):
    arguments = ["search", str(run), "--length", "64", "--population", "4", "--iterations", "1"]
    assert cli.main(arguments) == 0
    found = json.loads((run / "longrope.json").read_text())
    assert capsys.readouterr().out.splitlines()[-1] == f"extend: {json.dumps(found['extend'])}"
    assert cli.main(["evaluate", str(run), f"scheme.extend={json.dumps(found['extend'])}"]) == 0
    row = json.loads((run / "evaluation.jsonl").read_text().splitlines()[-1])
    assert row["length"] == 64
    np.testing.assert_allclose(row["last_nll"], found["fitness"], rtol=1e-4)
    assert cli.main(["search", str(run), "--length", "32"]) == 2
    assert "--length" in capsys.readouterr().err


def test_the_search_minimises_the_loss_of_the_last_tokens_under_a_rule(run, model):
    rule = rotary.LongRoPE((1.0,) * 8, (1.5,) * 4 + (2.5,) * 4, 32, factor=2.0, select="long", unscaled_first=4)
    tokens, found = np.random.default_rng(0).integers(97, 123, (3, 65)), []

    def wrap(fitness):
        found.append(fitness(rule))
        return lambda rule: 0.0

    search_factors(load(run / "config.yaml"), model, list(tokens), 64, Effort(4, 1), 32, wrap)
    longer = model.with_scheme(model.config.scheme.extend(frequencies=rule))
    logits = np.asarray(nnx.jit(lambda model: jax.nn.log_softmax(model(tokens[:, :-1])))(longer))
    wanted = -np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[:, -32:].mean()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_training_that_ends_at_a_loss_has_the_updates_until_then(run):
    assert cli.main(["evaluate", str(run)]) == 0
    row = json.loads((run / "evaluation.jsonl").read_text().splitlines()[-1])
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] < 0.3
    assert (row["stop_loss"], row["updates"], row["updates_to_loss"]) == (0.3, 80, last["step"])


def plain(scheme):
    return check_searchable(parse({"model": {"num_layers": 1, "model_dim": 16, "num_heads": 2}, "scheme": scheme}))


REFUSED = [
    ("--tokens", lambda: SamplingOptions(tokens=-1)),
    ("--top-k", lambda: SamplingOptions(top_k=2**32)),
    ("--top-k", lambda: SamplingOptions(top_k=2.5)),
    ("--temperature", lambda: SamplingOptions(temperature=float("nan"))),
    ("--temperature", lambda: SamplingOptions(temperature=-0.5)),
    ("--top-p", lambda: SamplingOptions(top_p=0)),
    ("population", lambda: Effort(population=3)),
    ("iterations", lambda: Effort(iterations=0)),
    ("RoPE", lambda: plain("alibi")),
    ("RoPE", lambda: plain({"name": "rope", "partial_rotary_factor": 0.5})),
    ("search", lambda: plain({"name": "rope", "norm": {"name": "qk-norm", "after_features": True}})),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[name for name, _ in REFUSED])
def test_settings_of_draws_and_searches_are_limited(name, call):
    refused(name, call)
