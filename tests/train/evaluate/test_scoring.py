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
from train.evaluate.predictor import NOT_FINITE, Predictor
from train.evaluate.tasks import TASKS, Vocabulary, cases, measure_task

BYTES = Vocabulary(ByteTokenizer())
CONFIG = EvaluateConfig()
SIZE = 260
FORCED = [name for name in TASKS if name != "passkey"]


def certain(tokens):
    """Logits of a model that is certain of these tokens."""
    return 50.0 * jax.nn.one_hot(tokens, SIZE)


def knowing(parameters, tokens, length):
    """A model that sees one token ahead, and gets the tokens in `parameters` wrong."""
    ahead = jnp.roll(tokens, -1, axis=1)
    return certain(jnp.where(jnp.isin(ahead, parameters), (ahead + 1) % 256, ahead))


def model(hidden, greedy=None):
    return Predictor(hidden, lambda parameters, hidden: hidden, greedy)


def measure(hidden, name, length=600, parameters=None, batch_tokens=4096, config=CONFIG):
    parameters = jnp.array([], jnp.int32) if parameters is None else parameters
    predictor = hidden if isinstance(hidden, Predictor) else model(hidden)
    return list(measure_task(predictor, parameters, BYTES, name, config.section(name), length, batch_tokens))


@pytest.mark.parametrize("name", FORCED)
def test_a_model_that_knows_every_token_has_all_answers_right(name):
    rows = measure(knowing, name)
    assert [row["accuracy"] for row in rows] == [1.0] * len(rows)
    depths = np.linspace(0, 1, 5).tolist() if TASKS[name].has_depth else [None]
    assert [row["depth"] for row in rows] == depths
    assert {row["cases"] for row in rows} == {20}
    assert {(row["task"], row["length"], row["error"]) for row in rows} == {(name, 600, None)}


@pytest.mark.parametrize("name", ["needle_single", "needle_multi_value", "copy"])
def test_an_answer_is_right_if_all_its_tokens_are(name):
    wrong = {ord(symbol) for symbol in "37ABCxyz"}
    rows = measure(knowing, name, parameters=jnp.array(sorted(wrong)))
    for row, group in zip(rows, cases(name, CONFIG.section(name), BYTES, 600), strict=True):
        shares = []
        for sample in group.samples:
            right = [not wrong & set(sample.tokens[a:b].tolist()) for a, b in sample.answers]
            shares.append(sum(right) / len(right))
        assert row["accuracy"] == pytest.approx(np.mean(shares), rel=1e-12)
    assert 0 < np.mean([row["accuracy"] for row in rows]) < 1


def test_a_model_that_is_certain_of_one_symbol_is_right_by_chance():
    config = EvaluateConfig(batch_tokens=2**16, copy=CONFIG.copy.__class__(cases=50))
    (row,) = measure(lambda _, tokens, __: certain(jnp.full_like(tokens, ord("k"))), "copy", config=config)
    assert row["chance"] == 1 / 93
    asked = 50 * 299
    assert row["accuracy"] == pytest.approx(1 / 94, abs=4 * np.sqrt(1 / 94 / asked))


def test_a_refused_length_and_logits_that_are_not_finite_are_reported():
    def refusing(parameters, tokens, length):
        raise ValueError(f"no row\n for {length}")

    def broken(parameters, tokens, length):
        return jnp.where(tokens[:, :1, None] == 256, jnp.nan, knowing(parameters, tokens, length))

    rows = measure(refusing, "induction")
    assert [(row["accuracy"], row["error"]) for row in rows] == [(None, "no row for 600")] * 5
    (row,) = measure(broken, "mqar")
    assert (row["accuracy"], row["error"]) == (None, "the logits are not finite")


def written(text, key):
    """Tokens of a text in which KEY stands for the key, `|` for the end of the document, `!` for no number."""
    found = np.frombuffer(text.replace("KEY", key).encode().ljust(64, b"."), np.uint8).astype(np.int32)
    return np.where(found == ord("|"), BYTES.tokenizer.eos, np.where(found == ord("!"), NOT_FINITE, found))


@pytest.mark.parametrize(
    ("text", "accuracy"),
    [
        (" KEY.", 1.0),
        ("..., I think KEY, or was it", 1.0),
        (" K E Y", 0.0),
        (" no idea| KEY", 0.0),
        ("KEY|!!!", 1.0),
        ("it is !KEY", None),
    ],
)
def test_a_passkey_counts_if_it_is_in_the_text_up_to_the_end_of_the_document(text, accuracy):
    prompts = [p for group in cases("passkey", CONFIG.passkey, BYTES, 600) for p in group.samples]
    answers = {p.tokens.tobytes(): written(text, p.answer.decode()) for p in prompts}

    def greedy(parameters, prompts, new):
        def look_up(prompts):
            return np.stack([answers[np.asarray(row).tobytes()] for row in prompts])

        return jax.pure_callback(look_up, jax.ShapeDtypeStruct((len(prompts), new), jnp.int32), prompts)

    rows = measure(model(knowing, greedy), "passkey")
    assert {row["accuracy"] for row in rows} == {accuracy}
    assert {row["error"] for row in rows} == {None if accuracy is not None else "the logits are not finite"}


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
    predictor, parameters = predictor_of(decoder, seed=0)
    parameters = jax.tree.map(lambda x: 3 * np.asarray(x), parameters)  # so that much depends on what attention finds
    prompts = np.random.default_rng(0).integers(0, SIZE, (2, size), np.int32)
    new = jax.jit(lambda p, x: predictor.greedy(p, x, 6))(parameters, prompts)
    chex.assert_shape(new, (2, 6))
    whole = np.concatenate([prompts, new], axis=1)
    logits = jax.jit(lambda p, x: predictor.logits(p, predictor.hidden(p, x, size + 6)))(parameters, whole)
    chex.assert_shape(logits, (2, size + 6, SIZE))
    np.testing.assert_array_equal(new, np.asarray(logits).argmax(-1)[:, size - 1 : -1])
    assert len(set(np.asarray(new).ravel().tolist())) > 6
