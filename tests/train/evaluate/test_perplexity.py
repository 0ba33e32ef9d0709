"""Perplexity against models whose probabilities are known in closed form."""

from itertools import count, pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.evaluate import perplexity
from train.evaluate import predictor as predictor_module
from train.evaluate.perplexity import measure, position_ends
from train.evaluate.predictor import Predictor
from train.evaluate.windows import full_pieces, last_windows, pieces, whole_windows

VOCABULARY = 11


def uniform(parameters, tokens, length):
    return jnp.zeros((*tokens.shape, VOCABULARY))


def bigram(parameters, tokens, length):
    """Logits that are the rows of a table of log-probabilities: the oracle knows each token's cost."""
    return parameters[tokens]


def by_position(parameters, tokens, length):
    """Gives token 0 the probability 1/(2 + position), so that a target costs log(2 + position)."""
    probability = 1 / (2 + jnp.arange(tokens.shape[1]))
    others = jnp.log((1 - probability) / (VOCABULARY - 1))
    logits = jnp.concatenate([jnp.log(probability)[:, None], jnp.repeat(others[:, None], VOCABULARY - 1, 1)], 1)
    return jnp.broadcast_to(logits, (tokens.shape[0], *logits.shape))


def run(apply, documents, parameters=None, **changes):
    options = {"lengths": (4, 8, 16), "last_length": 4, "tokens": 10_000, "batch_tokens": 32}
    predictor = Predictor(apply, lambda parameters, hidden: hidden)
    return [found for (found,) in measure(predictor, [parameters], documents, **{**options, **changes})]


@pytest.fixture
def documents():
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, size).astype(np.uint16) for size in (100, 7, 33, 17)]


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity(documents):
    for found in run(uniform, documents):
        row = found.as_row()
        assert row["window_perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
        assert row["last_perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
        assert found.error is None


def test_every_target_is_scored_once_at_every_length(documents):
    table = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))
    cost = -np.asarray(table, np.float64)
    wanted = np.concatenate([cost[document[:-1], document[1:]] for document in documents])
    for found in run(bigram, documents, table):
        assert found.window_tokens == wanted.size == 153
        assert found.window_nll == pytest.approx(wanted.mean(), rel=1e-6)


def test_a_batch_has_about_the_tokens_that_are_asked_for(documents):
    shapes = set()

    def seen(parameters, tokens, length):
        shapes.add(tokens.shape)
        return uniform(parameters, tokens, length)

    run(seen, documents, lengths=(4, 8, 64), batch_tokens=32)
    assert shapes == {(8, 4), (4, 8), (1, 64)}


def test_tokens_per_second_count_every_batch(monkeypatch, documents):
    """39 whole windows of 4 tokens and as many last ones are 5 batches of 8 each; the clock reads 10, 12, 14, ..."""
    monkeypatch.setattr(perplexity, "time", SimpleNamespace(perf_counter=count(10, 2).__next__))
    (found,) = run(uniform, documents, lengths=(4,), batch_tokens=32)
    assert found.tokens_per_second == 2 * 5 * 8 * 4 / 2


def test_nll_is_weighted_by_tokens_not_by_windows():
    # 10 targets in windows of 8: costs log 2 .. log 9 in the first, log 2 and log 3 in the second.
    document = np.zeros(11, np.uint16)
    found = run(by_position, [document], lengths=(8,))[0]
    costs = [np.log(np.arange(2, 10)), np.log(np.arange(2, 4))]
    assert found.window_nll == pytest.approx(np.concatenate(costs).mean(), rel=1e-6)
    assert abs(found.window_nll - np.mean([cost.mean() for cost in costs])) > 0.2


def test_the_last_tokens_are_the_same_at_every_length_and_see_the_full_context(documents):
    table = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))
    found = run(bigram, documents, table)
    ends = full_pieces(documents, 16, 10_000)
    targets = [piece[-4:] for piece in ends]
    before = [piece[-5:-1] for piece in ends]
    wanted = -np.asarray(table, np.float64)[np.concatenate(before), np.concatenate(targets)].mean()
    assert [measurement.last_tokens for measurement in found] == [36, 36, 36]
    np.testing.assert_allclose([measurement.last_nll for measurement in found], wanted, rtol=1e-6)


def test_the_last_tokens_are_at_the_end_of_the_window():
    found = run(by_position, [np.zeros(17, np.uint16)])
    wanted = [np.log(np.arange(2, 2 + length)[-4:]).mean() for length in (4, 8, 16)]
    np.testing.assert_allclose([measurement.last_nll for measurement in found], wanted, rtol=1e-6)


def test_sliding_windows_score_every_target_that_the_longest_can_reach_once(documents):
    table = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))
    cost = -np.asarray(table, np.float64)
    wanted = []
    for document in documents:
        steps = (len(document) - 1 - 16) // 3 + 1  # windows of 16 inputs that fit, 3 tokens apart
        if steps > 0:
            start, end = 16 - 3, 16 + 3 * (steps - 1)
            wanted.append(cost[document[start:end], document[start + 1 : end + 1]])
    for found in run(bigram, documents, table, stride=3):
        assert found.sliding_tokens == sum(map(len, wanted)) == 105
        assert found.sliding_nll == pytest.approx(np.concatenate(wanted).mean(), rel=1e-6)
        assert found.as_row()["sliding_perplexity"] == pytest.approx(np.exp(found.sliding_nll))


def test_a_sliding_window_has_full_context_but_for_its_stride():
    found = run(by_position, [np.zeros(40, np.uint16)], stride=2)
    wanted = [np.log([length, length + 1]).mean() for length in (4, 8, 16)]
    np.testing.assert_allclose([measurement.sliding_nll for measurement in found], wanted, rtol=1e-6)


def test_sliding_windows_keep_the_budget():
    documents = [np.full(100, name, np.uint16) for name in range(10)]
    assert len(full_pieces(documents, 16, 320, 2)) == 20
    assert len(full_pieces(documents, 16, 10**6, 2)) == 10 * 42
    assert {piece[0] for piece in full_pieces(documents, 16, 320, 2)} == set(range(10))


def test_without_a_stride_nothing_slides(documents):
    assert {found.sliding_nll for found in run(uniform, documents)} == {None}


def test_perplexity_by_position_tells_the_places_of_a_window_apart():
    found = run(by_position, [np.zeros(size, np.uint16) for size in (100, 7, 33, 17)])[-1]
    assert found.position_ends == (1, 2, 3, 4, 6, 8, 12, 16)
    costs = np.log(np.arange(2, 18))
    # Windows of up to 16 targets: of 100 - 1, 7 - 1, 33 - 1 and 17 - 1.
    sizes = [16] * 6 + [3] + [6] + [16] * 2 + [16]
    counts = np.array([sum(size > place for size in sizes) for place in range(16)])
    edges = [0, *found.position_ends]
    wanted = [np.average(costs[a:b], weights=counts[a:b]) for a, b in pairwise(edges) if counts[a:b].any()]
    np.testing.assert_allclose(found.position_nll, wanted, rtol=1e-6)
    parts = [counts[a:b].sum() for a, b in pairwise(edges)]
    assert found.window_nll == pytest.approx(np.average(found.position_nll, weights=parts), rel=1e-6)


def test_positions_without_a_token_have_no_number():
    # The budget takes one piece, and it is the short one in the middle.
    documents = [np.zeros(size, np.uint16) for size in (17, 3, 17)]
    found = run(by_position, documents, lengths=(16,), tokens=1)[0]
    assert found.window_tokens == 2
    assert found.position_nll == (pytest.approx(np.log(2)), pytest.approx(np.log(3)), *[None] * 6)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 100])
def test_the_parts_of_a_window_double_every_second_time_and_end_with_it(length):
    ends = position_ends(length)
    assert ends[-1] == length
    assert list(ends) == sorted(set(ends))
    assert all(c == 2 * a for a, c in zip(ends[1:-1], ends[3:-1], strict=False))


def test_logits_in_parts_are_the_same_numbers(documents, monkeypatch):
    table = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))
    whole = run(bigram, documents, table)
    monkeypatch.setattr(predictor_module, "_LOGITS", 12 * VOCABULARY)
    seen = []

    def logits(parameters, hidden):
        seen.append(hidden.shape[:2])
        return hidden

    given = {"lengths": (4, 8, 16), "last_length": 4, "tokens": 10_000, "batch_tokens": 32}
    for (part,), found in zip(measure(Predictor(bigram, logits), [table], documents, **given), whole, strict=True):
        assert part.window_nll == pytest.approx(found.window_nll, rel=1e-6)
        assert part.position_nll == pytest.approx(found.position_nll, rel=1e-6)
    assert (
        max(rows * places for rows, places in seen) == 12
    )  # 8 rows of one place, 4 of 3, 2 of 6, the last part padded


def test_last_windows_differ_by_context_alone(documents):
    ends = full_pieces(documents, 16, 10_000)
    longest = last_windows(ends, 16, 4)
    for length in (4, 8):
        shorter = last_windows(ends, length, 4)
        np.testing.assert_array_equal(shorter.tokens, longest.tokens[:, -length - 1 :])
        np.testing.assert_array_equal(shorter.weights, longest.weights[:, -length:])
        assert shorter.scored == longest.scored


def test_documents_shorter_than_the_longest_length_have_no_part_in_the_last_tokens():
    ends = full_pieces([np.full(size, size, np.uint16) for size in (16, 17, 5, 40)], 16, 10_000)
    assert [piece[0] for piece in ends] == [17, 40, 40]


def test_windows_stay_inside_their_document():
    chosen = pieces([np.full(size, size, np.uint16) for size in (9, 20)], 16, 10_000)
    windows = whole_windows(chosen, 8)
    for tokens, weights in zip(*windows, strict=True):
        assert len(set(tokens[: int(weights.sum()) + 1].tolist())) == 1


def test_the_budget_is_kept_and_spread_over_the_documents():
    documents = [np.full(1601, name, np.uint16) for name in range(10)]
    chosen = pieces(documents, 16, 320)
    assert sum(len(piece) - 1 for piece in chosen) == 320
    assert [piece[0] for piece in chosen] == [name for name in range(10) for _ in range(2)]
    assert len(full_pieces(documents, 16, 320)) == 20


def test_a_document_shorter_than_the_longest_length_is_refused_when_there_is_no_other():
    for size in (12, 16):
        message = rf"length 16 needs a held-out document of 17 tokens, the longest has {size}"
        with pytest.raises(ValueError, match=message):
            run(uniform, [np.zeros(size, np.uint16)])


def test_a_refused_length_is_reported_and_the_others_are_measured(documents):
    def refuses(parameters, tokens, length):
        if length > 8:
            raise ValueError(f"positions: 8 rows,\n  found {length}")
        return uniform(parameters, tokens, length)

    found = run(refuses, documents)
    assert [measurement.error for measurement in found] == [None, None, "positions: 8 rows, found 16"]
    row = found[2].as_row()
    assert row["window_perplexity"] is row["last_perplexity"] is None


def test_a_refusal_at_the_training_length_is_an_error(documents):
    def refuses(parameters, tokens, length):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(refuses, documents)


def test_a_loss_that_is_not_finite_is_reported(documents):
    def broken(parameters, tokens, length):
        return jnp.full((*tokens.shape, VOCABULARY), jnp.nan)

    assert all("not finite" in measurement.error for measurement in run(broken, documents))


def test_what_a_model_says_about_padding_does_not_matter(documents):
    """Padding tokens are 0, those of the documents are not."""
    documents = [np.maximum(document, 1) for document in documents]

    def broken(parameters, tokens, length):
        padding = (tokens == 0)[..., None]
        return jnp.where(padding, jnp.nan, uniform(parameters, tokens, length))

    (found,) = run(broken, documents, lengths=(8,))
    assert found.window_nll == found.last_nll == pytest.approx(np.log(VOCABULARY), rel=1e-6)


def test_each_length_is_compiled_once_with_its_own_length(documents):
    traced = []

    def remembers(parameters, tokens, length):
        traced.append((length, tokens.shape[1]))
        return uniform(parameters, tokens, length)

    run(remembers, documents)
    assert traced == [(4, 4), (8, 8), (16, 16)]
