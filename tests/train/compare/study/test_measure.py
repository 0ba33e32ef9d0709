"""The numbers of a cell: from given losses and logits, and the text of a pass key."""

from types import SimpleNamespace

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from train.compare.study import measure as measuring
from train.data.tokenizer import ByteTokenizer
from train.evaluate.tasks import Vocabulary

BYTES = Vocabulary(ByteTokenizer())


def predictor(**methods):
    """Of two devices that compute whole rows, so that each row is computed twice."""
    return SimpleNamespace(filled=lambda rows: 2 * rows, **methods)


@pytest.mark.parametrize(("kind", "wanted"), [("text", "read"), ("passkey", "found")])
def test_a_cell_is_of_a_text_or_of_pass_keys(monkeypatch, kind, wanted):
    monkeypatch.setattr(measuring, "scheme_of", lambda config, entry: SimpleNamespace(extend=lambda **slots: slots))
    monkeypatch.setattr(measuring, "predictor_of", lambda model, seed, mesh: (model, None))
    monkeypatch.setattr(measuring, "_read", lambda config, model, parameters, cell: ("read", model))
    monkeypatch.setattr(measuring, "_find", lambda config, model, parameters, cell: ("found", model))
    model = SimpleNamespace(with_scheme=lambda scheme: scheme)
    cell = SimpleNamespace(refusal="", entry=None, extend={"mask": None}, kind=kind)
    assert measuring.measure(SimpleNamespace(seed=0), model, cell) == (wanted, {"mask": None})


@pytest.mark.parametrize("last", [7.0, np.inf])
def test_losses_are_averaged_over_the_last_tokens_and_by_position(monkeypatch, last):
    """Eight tokens, in parts that end after 1, 2, 3, 4, 6 and 8 of them."""
    costs = {"seconds": 2.0, "memory_bytes": 5}
    monkeypatch.setattr(measuring, "_run", lambda function, table, tokens: (function(table, tokens), costs))

    def next_nll(predictor, table, tokens, length):
        chex.assert_shape(tokens, (2, length + 1))
        return table[tokens[:, 1:]]

    monkeypatch.setattr(measuring, "next_nll", next_nll)
    cell = SimpleNamespace(
        length=8, sizes={"scored": 3}, text=SimpleNamespace(last=lambda length: np.array([5, *range(length)]))
    )
    found = measuring._read(None, predictor(), jnp.array([0.0, 1, 2, 3, 4, 5, 6, last]), cell)
    if last == 7:
        parts = {"position_ends": [1, 2, 3, 4, 6, 8], "position_nll": [0, 1, 2, 3, 4.5, 6.5]}
        assert found == {"nll": 6.0, "tokens_per_second": 4.0, **parts, **costs}
    else:
        assert found == {"error": "the loss is not finite", **costs}


def test_a_pass_key_is_found_if_each_of_its_tokens_is_the_likeliest(monkeypatch):
    """Three tokens at the end of a text of six. In the second case the first of them is only second best."""
    table = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
    ranked = table[3:].argsort(-1)
    keys = [ranked[:, -1], np.array([ranked[0, -2], *ranked[1:, -1]])]
    prompts = iter(keys)
    monkeypatch.setattr(measuring, "_prompt", lambda *_: (np.array([[0, 1, 2, 3, *next(prompts)]]), 3))
    monkeypatch.setattr(measuring, "load_tokenizer", lambda data: None)

    def hidden_at(predictor, table, tokens, at, length):
        chex.assert_shape((tokens, at), [(2, length), (2, 3)])
        return at

    monkeypatch.setattr(measuring, "hidden_at", hidden_at)
    of_table = predictor(ready=lambda table: table, logits=lambda table, at: table[at])
    cell = SimpleNamespace(length=6, sizes={"cases": 2})
    found = measuring._find(SimpleNamespace(data=None), of_table, jnp.asarray(table), cell)
    logits = np.log(np.exp(table[3:]) / np.exp(table[3:]).sum(-1, keepdims=True))
    assert found["accuracy"] == 0.5
    np.testing.assert_allclose(found["answer_nll"], -np.mean([logits[range(3), key] for key in keys]), rtol=1e-6)


def test_time_and_memory_of_a_program():
    """It reads and writes a thousand numbers of four bytes."""
    found, costs = measuring._run(lambda table, tokens: table[tokens], jnp.ones(1000), np.arange(1000, dtype=np.int32))
    np.testing.assert_array_equal(found, np.ones(1000))
    assert costs["memory_bytes"] >= 3 * 4000
    assert 0 < costs["seconds"] < 60


def test_a_prompt_ends_in_its_key_and_is_the_same_every_time():
    def prompt(case=0, depth=0.5):
        return measuring._prompt(BYTES, SimpleNamespace(length=300, depth=depth), case)

    tokens, size = prompt()
    assert (tokens.shape, tokens.dtype, size) == ((1, 301), np.int32, 6)
    text = BYTES.tokenizer.decode(tokens[0]).decode()
    *_, key = text.split(" ")
    assert text.count(key) == 3, "twice in the text, once as the answer"
    np.testing.assert_array_equal(tokens, prompt()[0])
    others = [prompt(case=1)[0], prompt(depth=0.501)[0]]
    assert not any((tokens[0, -6:] == other[0, -6:]).all() for other in others)
