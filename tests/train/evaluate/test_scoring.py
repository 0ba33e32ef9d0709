"""The scores of tasks, for models that are certain of known tokens; decoding against forward passes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from train.config.settings.evaluate import EvaluateConfig
from train.data.tokenizer import ByteTokenizer
from train.evaluate.decoder import predictor_of
from train.evaluate.generate import SamplingOptions, tokens_after
from train.evaluate.predictor import Predictor
from train.evaluate.tasks import TASKS, Vocabulary, cases, sizes_of, task_rows

BYTES = Vocabulary(ByteTokenizer())
CONFIG = EvaluateConfig()
SIZE = 260


def certain(tokens):
    """Logits of a model that is certain of these tokens."""
    return 50.0 * jax.nn.one_hot(tokens, SIZE)


def knowing(parameters, tokens, length):
    """A model that sees one token ahead, and gets the tokens in `parameters` wrong."""
    ahead = jnp.roll(tokens, -1, axis=1)
    return certain(jnp.where(jnp.isin(ahead, parameters), (ahead + 1) % 256, ahead))


def measured(hidden, name, length=600, parameters=None, config=CONFIG):
    parameters = jnp.array([], jnp.int32) if parameters is None else parameters
    predictor = Predictor(hidden, lambda parameters, hidden: hidden)
    return list(task_rows(predictor, parameters, BYTES, config, name, length))


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_knows_every_token_has_all_answers_right(name):
    rows = measured(knowing, name)
    assert [row["accuracy"] for row in rows] == [1.0] * len(rows)
    depths = np.linspace(0, 1, 5).tolist() if "depth" in sizes_of(name) else [None]
    assert [row["depth"] for row in rows] == depths
    assert {row["cases"] for row in rows} == {20}
    assert {(row["task"], row["length"], row["error"]) for row in rows} == {(name, 600, None)}


@pytest.mark.parametrize("name", ["needle_single", "needle_multi_value", "copy"])
def test_an_answer_is_right_if_all_its_tokens_are(name):
    wrong = {ord(symbol) for symbol in "37ABCxyz"}
    rows = measured(knowing, name, parameters=jnp.array(sorted(wrong)))
    for row, group in zip(rows, cases(name, CONFIG.section(name), BYTES, 600), strict=True):
        shares = []
        for sample in group.samples:
            right = [not wrong & set(sample.tokens[a:b].tolist()) for a, b in sample.answers]
            shares.append(sum(right) / len(right))
        assert row["accuracy"] == pytest.approx(np.mean(shares), rel=1e-12)
    assert 0 < np.mean([row["accuracy"] for row in rows]) < 1


def test_a_model_that_is_certain_of_one_symbol_is_right_by_chance():
    config = EvaluateConfig(batch_tokens=2**16, copy=CONFIG.copy.__class__(cases=50))
    (row,) = measured(lambda _, tokens, __: certain(jnp.full_like(tokens, ord("k"))), "copy", config=config)
    assert row["chance"] == 1 / 93
    asked = 50 * 299
    assert row["accuracy"] == pytest.approx(1 / 94, abs=4 * np.sqrt(1 / 94 / asked))


def test_a_refused_length_and_logits_that_are_not_finite_are_reported():
    def refusing(parameters, tokens, length):
        raise ValueError(f"no row\n for {length}")

    def broken(parameters, tokens, length):
        return jnp.where(tokens[:, :1, None] == 256, jnp.nan, knowing(parameters, tokens, length))

    rows = measured(refusing, "induction")
    assert [(row["accuracy"], row["error"]) for row in rows] == [(None, "no row for 600")] * 5
    (row,) = measured(broken, "mqar")
    assert (row["accuracy"], row["error"]) == (None, "the logits are not finite")


NTK = {"name": "dynamic-ntk", "original_length": 16}
SCHEMES = {
    "dynamic NTK": pj.scheme("rope").extend(frequencies=NTK),
    "coca": pj.scheme("coca-strict"),
    "drawn": pj.scheme("rope", training_positions={"name": "randomised", "max_length": 128, "test": "random"}),
}


@pytest.mark.parametrize(("name", "size"), [("dynamic NTK", 70), ("coca", 5), ("drawn", 70)])
def test_greedy_decoding_writes_what_one_forward_pass_over_the_whole_text_predicts(name, size):
    shape = {"vocab_size": SIZE, "num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16, "tied_head": False}
    config = pj.nn.DecoderConfig(**shape, scheme=SCHEMES[name])
    decoder = nnx.jit(lambda: pj.nn.Decoder(config, rngs=nnx.Rngs(3)))()
    graph, drawn = nnx.split(decoder)
    # Thrice as large, so that much depends on what attention finds.
    decoder = nnx.merge(graph, jax.tree.map(lambda x: 3 * np.asarray(x), drawn))
    predictor, parameters = predictor_of(decoder, seed=0)
    predicted = jax.jit(lambda p, x: predictor.logits(p, predictor.hidden(p, x, size + 6)))
    found = set()
    for prompt in np.random.default_rng(0).integers(0, SIZE, (2, size), np.int32):
        new = list(tokens_after(decoder, prompt, SamplingOptions(tokens=6, temperature=0), ends=set()))
        logits = predicted(parameters, np.concatenate([prompt, new])[None])
        chex.assert_shape(logits, (1, size + 6, SIZE))
        np.testing.assert_array_equal(new, np.asarray(logits).argmax(-1)[0, size - 1 : -1])
        found |= set(new)
    assert len(found) > 6
