"""Perplexity against models whose probabilities are known in closed form."""

from itertools import count, pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from train.evaluate import perplexity
from train.evaluate.perplexity import perplexities
from train.evaluate.predictor import Predictor
from train.evaluate.windows import full_pieces, pieces

VOCABULARY = 11
TABLE = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))
COST = -np.asarray(TABLE, np.float64)
DOCUMENTS = [np.random.default_rng(0).integers(0, VOCABULARY, size).astype(np.uint16) for size in (100, 7, 33, 17)]


def uniform(parameters, tokens, length):
    return jnp.zeros((*tokens.shape, VOCABULARY))


def bigram(parameters, tokens, length):
    """Logits that are the rows of a table of log-probabilities: the oracle knows each token's cost."""
    return TABLE[tokens]


def by_position(parameters, tokens, length):
    """Gives token 0 the probability 1/(2 + position), so that a target costs log(2 + position)."""
    probability = 1 / (2 + jnp.arange(tokens.shape[1]))
    others = jnp.log((1 - probability) / (VOCABULARY - 1))
    logits = jnp.concatenate([jnp.log(probability)[:, None], jnp.repeat(others[:, None], VOCABULARY - 1, 1)], 1)
    return jnp.broadcast_to(logits, (tokens.shape[0], *logits.shape))


def run(apply, documents=DOCUMENTS, **changes):
    options = {"lengths": (4, 8, 16), "last_length": 4, "tokens": 10_000, "batch_tokens": 32}
    predictor = Predictor(apply, lambda parameters, hidden: hidden)
    return [found for (found,) in perplexities(predictor, [None], documents, **{**options, **changes})]


def zeros(*sizes):
    return [np.zeros(size, np.uint16) for size in sizes]


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity():
    for found in run(uniform):
        row = found.as_row()
        assert row["window_perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
        assert row["last_perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
        assert (found.sliding_nll, found.error) == (None, None)


def test_every_target_is_scored_once_at_every_length():
    wanted = np.concatenate([COST[document[:-1], document[1:]] for document in DOCUMENTS])
    for found in run(bigram):
        assert found.window_tokens == wanted.size == 153
        assert found.window_nll == pytest.approx(wanted.mean(), rel=1e-6)


def test_the_last_tokens_are_the_same_at_every_length_and_see_the_full_context():
    """Of each whole piece of 16 targets: six of the first document, two of the third, one of the last."""
    found = run(bigram)
    pairs = [
        (document[end - 4 : end], document[end - 3 : end + 1])
        for document in DOCUMENTS
        for end in range(16, len(document), 16)
    ]
    wanted = np.concatenate([COST[before, after] for before, after in pairs]).mean()
    assert [measurement.last_tokens for measurement in found] == [36, 36, 36]
    np.testing.assert_allclose([measurement.last_nll for measurement in found], wanted, rtol=1e-6)


def test_the_last_tokens_are_at_the_end_of_the_window():
    found = run(by_position, zeros(17))
    wanted = [np.log(np.arange(2, 2 + length)[-4:]).mean() for length in (4, 8, 16)]
    np.testing.assert_allclose([measurement.last_nll for measurement in found], wanted, rtol=1e-6)


def test_sliding_windows_score_every_target_that_the_longest_can_reach_once():
    wanted = []
    for document in DOCUMENTS:
        steps = (len(document) - 1 - 16) // 3 + 1  # windows of 16 inputs that fit, 3 tokens apart
        if steps > 0:
            start, end = 16 - 3, 16 + 3 * (steps - 1)
            wanted.append(COST[document[start:end], document[start + 1 : end + 1]])
    for found in run(bigram, stride=3):
        assert found.sliding_tokens == sum(map(len, wanted)) == 105
        assert found.sliding_nll == pytest.approx(np.concatenate(wanted).mean(), rel=1e-6)
        assert found.as_row()["sliding_perplexity"] == pytest.approx(np.exp(found.sliding_nll))


def test_a_sliding_window_has_full_context_but_for_its_stride():
    found = run(by_position, zeros(40), stride=2)
    wanted = [np.log([length, length + 1]).mean() for length in (4, 8, 16)]
    np.testing.assert_allclose([measurement.sliding_nll for measurement in found], wanted, rtol=1e-6)


def test_the_loss_by_position_and_its_mean_are_weighted_by_tokens():
    """Windows of up to 16 targets, of 99, 6, 32 and 16 targets; a target costs log(2 + position)."""
    found = run(by_position, zeros(100, 7, 33, 17))[-1]
    assert found.position_ends == (1, 2, 3, 4, 6, 8, 12, 16)
    costs = np.log(np.arange(2, 18))
    sizes = [16] * 6 + [3] + [6] + [16] * 2 + [16]
    counts = np.array([sum(size > place for size in sizes) for place in range(16)])
    edges = [0, *found.position_ends]
    wanted = [np.average(costs[a:b], weights=counts[a:b]) for a, b in pairwise(edges)]
    np.testing.assert_allclose(found.position_nll, wanted, rtol=1e-6)
    assert found.window_nll == pytest.approx(np.average(costs, weights=counts), rel=1e-6)


def test_positions_without_a_token_have_no_number():
    """The budget takes one piece, and it is the short one in the middle."""
    found = run(by_position, zeros(17, 3, 17), lengths=(16,), tokens=1)[0]
    assert found.window_tokens == 2
    assert found.position_nll == (pytest.approx(np.log(2)), pytest.approx(np.log(3)), *[None] * 6)


@pytest.mark.parametrize(("tokens", "kept"), [(1, [2]), (4, [1, 3]), (7, [0, 2, 3]), (8, [0, 1, 2, 3])])
def test_the_pieces_that_are_kept_are_spread_evenly(tokens, kept):
    documents = [np.arange(10, 15), np.arange(20, 25)]  # four pieces of two targets
    found = [[10, 11, 12], [12, 13, 14], [20, 21, 22], [22, 23, 24]]
    assert [piece.tolist() for piece in pieces(documents, 2, tokens)] == [found[n] for n in kept]


def test_the_budget_is_kept_and_spread_over_the_documents():
    documents = [np.full(1601, name, np.uint16) for name in range(10)]
    chosen = pieces(documents, 16, 320)
    assert sum(len(piece) - 1 for piece in chosen) == 320
    assert [piece[0] for piece in chosen] == [name for name in range(10) for _ in range(2)]
    slid = full_pieces([document[:100] for document in documents], 16, 320, 2)
    assert sorted(piece[0] for piece in slid) == [name for name in range(10) for _ in range(2)]


def test_tokens_per_second_count_every_batch(monkeypatch):
    """39 whole windows of 4 tokens and as many last ones are 5 batches of 8 each; the clock reads 10, 12, 14, ..."""
    monkeypatch.setattr(perplexity, "time", SimpleNamespace(perf_counter=count(10, 2).__next__))
    (found,) = run(uniform, lengths=(4,), batch_tokens=32)
    assert found.tokens_per_second == 2 * 5 * 8 * 4 / 2


def refuses(above):
    def apply(parameters, tokens, length):
        if length > above:
            raise ValueError(f"positions: 8 rows,\n  found {length}")
        return uniform(parameters, tokens, length)

    return apply


def test_a_refused_length_is_reported_and_the_others_are_measured():
    found = run(refuses(8))
    assert [measurement.error for measurement in found] == [None, None, "positions: 8 rows, found 16"]
    row = found[2].as_row()
    assert row["window_perplexity"] is row["last_perplexity"] is None


@pytest.mark.parametrize("size", [12, 16])
def test_a_length_beyond_every_document_is_refused(size):
    refused("evaluate.lengths", lambda: run(uniform, zeros(size)))


def test_a_refusal_at_the_training_length_is_an_error():
    with pytest.raises(ValueError, match="positions"):
        run(refuses(3))


def test_a_loss_that_is_not_finite_is_reported_unless_it_is_that_of_padding():
    """Padding tokens are 0, those of the documents are not."""
    documents = [np.maximum(document, 1) for document in DOCUMENTS]

    def broken_at(token):
        def apply(parameters, tokens, length):
            return jnp.where((tokens == token)[..., None], jnp.nan, uniform(parameters, tokens, length))

        return apply

    assert all("not finite" in measurement.error for measurement in run(broken_at(1), documents))
    (found,) = run(broken_at(0), documents, lengths=(8,))
    assert found.window_nll == found.last_nll == pytest.approx(np.log(VOCABULARY), rel=1e-6)
