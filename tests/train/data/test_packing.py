"""Packing against plain loops: every token is predicted once, best-fit follows its rule, mixtures their weights."""

import itertools
import tracemalloc

import chex
import numpy as np
import pytest
from documents import EOS, collect, encode, pack

from train.data import index
from train.data.packing import pack_corpora
from train.data.pipeline import batches
from train.data.tokenizer import PADDING


def documents_of(sizes, seed=0):
    """Documents in which no pair of neighbouring tokens occurs twice, so that a pair identifies its place."""
    numbers = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.uint16) + 300
    return np.split(numbers, np.cumsum(sizes)[:-1])


def pairs(batch):
    predicted = batch.labels >= 0
    return sorted(zip(batch.tokens[predicted].tolist(), batch.labels[predicted].tolist(), strict=True))


def everything(rows):
    return rows.batch(np.arange(len(rows)))


def naive_best_fit(sizes, length):
    """The sizes in each row. Largest pieces first, each into the fullest row with room, of equals the last filled."""
    pieces = []
    for size in sizes:
        cuts = [min(length, size - first) for first in range(0, size, length)]
        pieces += cuts if len(cuts) == 1 or cuts[-1] > 1 else cuts[:-1]
    rows = []
    for piece in sorted(pieces, reverse=True):
        fits = [index for index, row in enumerate(rows) if sum(row) + piece <= length]
        chosen = rows.pop(max(fits, key=lambda index: (sum(rows[index]), index))) if fits else []
        rows.append([*chosen, piece])
    return sorted(sorted(row) for row in rows)


SIZES = {
    "few": [5, 9, 3, 12, 2, 2, 30],
    "many": (2 + np.random.default_rng(1).geometric(0.08, 300)).tolist(),
    "equal": [4] * 23,
    "edges": [16, 17, 18, 32, 33, 34, 2, 15],
}


CASES = [("few", 2), ("few", 16), ("many", 5), ("many", 29), ("equal", 16), ("edges", 1), ("edges", 2), ("edges", 16)]


@pytest.mark.parametrize(("sizes", "length"), CASES[:5] + CASES[6:])
def test_best_fit_follows_its_rule(sizes, length):
    sizes = SIZES[sizes]
    batch = everything(pack(documents_of(sizes), length, "best-fit"))
    found = []
    for segments in batch.segment_ids:
        counts = np.bincount(segments[segments >= 0]).tolist()
        assert segments.tolist() == [n for n, count in enumerate(counts) for _ in range(count)] + [-1] * (
            length - sum(counts)
        )
        found.append(sorted(counts))
    assert sorted(found) == naive_best_fit(sizes, length)


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize(("sizes", "length"), CASES)
def test_each_token_but_the_first_of_a_document_is_predicted_once(sizes, length, packing):
    documents = documents_of(SIZES[sizes])
    rows = pack(documents, length, packing)
    batch = everything(rows)
    chex.assert_shape(batch, (len(rows), length))
    chex.assert_type(batch, np.int32)
    expected = itertools.chain.from_iterable(itertools.pairwise(document.tolist()) for document in documents)
    assert pairs(batch) == sorted(expected)


@pytest.mark.parametrize(("tokens", "rows"), [(9, 1), (10, 2), (16, 2), (17, 2), (18, 3)])
def test_a_stream_takes_no_row_in_which_nothing_is_predicted(tokens, rows):
    packed = pack(documents_of([tokens]), 8, "concatenate")
    assert len(packed) == rows
    assert (everything(packed).labels >= 0).any(axis=1).all()


def test_segments_and_positions_of_a_row_by_hand():
    rows = pack([encode(text) for text in (b"abc", b"defghij", b"k", b"lmnopqrstu")], 6)
    batch = rows.batch(np.array([0, 1, 4]))  # documents of 5, 9, 3 and 12 tokens: 29 in all
    np.testing.assert_array_equal(batch.segment_ids[0], [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.labels[0], [*b"abc", EOS, -1, ord("d")])
    np.testing.assert_array_equal(batch.segment_ids[1], [0] * 6)
    np.testing.assert_array_equal(batch.positions[1], range(6))
    np.testing.assert_array_equal(batch.tokens[2], [*b"rstu", EOS, PADDING])
    np.testing.assert_array_equal(batch.segment_ids[2], [0, 0, 0, 0, 0, -1])
    np.testing.assert_array_equal(batch.labels[2], [*b"stu", EOS, -1, -1])


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_positions_restart_and_padding_is_marked(packing):
    batch = everything(pack(documents_of(SIZES["many"]), 16, packing))
    same = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (batch.segment_ids[:, 1:] >= 0)
    np.testing.assert_array_equal(batch.positions[:, 1:], np.where(same, batch.positions[:, :-1] + 1, 0))
    np.testing.assert_array_equal(batch.labels[:, :-1][same], batch.tokens[:, 1:][same])
    padding = batch.segment_ids < 0
    np.testing.assert_array_equal(batch.tokens == PADDING, padding)
    assert (batch.labels[padding] == -1).all()


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_long_rows_take_little_more_memory_than_their_own_size(packing):
    length = 2**20
    rows = pack([np.zeros(1000, np.uint16)] * 2200, length, packing)
    tracemalloc.start()
    try:
        batch = rows.batch(np.array([0, 1]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(part.nbytes for part in batch) == 2 * length * 16
    assert peak < 1.5 * 2 * length * 16


def part_of(value, documents, size):
    return collect([np.full(size, value, np.uint16) for _ in range(documents)])


@pytest.mark.parametrize(
    ("packing", "weights"),
    [("concatenate", (5.0, 3.0, 2.0)), ("best-fit", (1.0, 1.0, 1.0)), ("best-fit", (0.9, 0.05, 0.05))],
)
def test_mixtures_give_each_part_its_share_of_tokens(packing, weights):
    # Rows of the second part are three quarters full when packed best-fit, so it needs more of them.
    corpora = [part_of(300, 4000, 16), part_of(301, 4000, 12), part_of(302, 400, 160)]
    rows = pack_corpora(corpora, weights, 16, packing, PADDING)
    stream = batches(rows, 50, seed=0)
    tokens = np.concatenate([next(stream).tokens for _ in range(40)])
    shares = np.array([(tokens == value).sum() for value in (300, 301, 302)]) / (tokens >= 300).sum()
    np.testing.assert_allclose(shares, np.array(weights) / sum(weights), atol=0.003)
    owners = tokens.max(axis=1)
    assert ((tokens == owners[:, None]) | (tokens == PADDING)).all()  # no row mixes two parts


def test_each_part_is_shuffled_on_its_own_and_repeats_when_it_is_used_up():
    documents = [[np.full(5, 300 + 50 * part + number, np.uint16) for number in range(20)] for part in range(2)]
    rows = pack_corpora([collect(part) for part in documents], [3.0, 1.0], 5, "concatenate", PADDING)
    stream = batches(rows, 8, seed=3)
    first = np.concatenate([next(stream).tokens[:, 0] for _ in range(20)])  # 120 rows of one, 40 of the other
    often, seldom = first[first < 350].reshape(6, 20), first[first >= 350].reshape(2, 20)
    for passes in (often, seldom):
        assert (np.sort(passes) == np.sort(passes[0])).all()
        assert len(np.unique(passes, axis=0)) == len(passes)
    assert not any((one + 50 == other).all() for one in often for other in seldom)


def test_mixtures_resume_and_are_shared_by_processes():
    corpora = [part_of(300, 40, 16), collect([encode(bytes(range(65, 90)))] * 9)]
    rows = pack_corpora(corpora, [1.0, 2.0], 8, "best-fit", PADDING)
    stream = batches(rows, 4, seed=1)
    for _ in range(7):
        next(stream)
    state = stream.get_state()
    rest = [next(stream) for _ in range(5)]
    for part in (slice(None), slice(3, 4)):
        fresh = batches(rows, 4, 1, part)
        fresh.set_state(state)
        for batch in rest:
            chex.assert_trees_all_equal(next(fresh), type(batch)(*(field[part] for field in batch)))


@pytest.fixture
def small_blocks(monkeypatch):
    """A function that makes an index have blocks of three documents, looked through two at a time."""

    def change():
        monkeypatch.setattr(index, "BLOCK", 3)
        monkeypatch.setattr(index, "_RUN", 2)

    return change


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_chosen_documents_are_packed_as_if_there_were_no_others(small_blocks, packing):
    documents = documents_of(SIZES["many"])
    hashes = np.random.default_rng(2).integers(0, 2**48, len(documents)).astype(np.uint64)
    hashes[100:150] = index.GONE  # whole blocks of documents of a damaged file
    mask = (hashes >= 2**46) & (hashes != index.GONE)
    alone = pack([document for document, there in zip(documents, mask, strict=True) if there], 16, packing)
    expected = everything(alone)
    small_blocks()
    corpus = collect(documents)
    corpus.index.documents["hash"] = hashes
    found = pack_corpora([corpus.select(2**46, int(index.GONE))], [1.0], 16, packing, PADDING)
    assert (len(found), found.tokens) == (len(alone), alone.tokens)
    chex.assert_trees_all_equal(everything(found), expected)
    some = np.random.default_rng(0).permutation(len(found))[:9]
    chex.assert_trees_all_equal(found.batch(some), type(expected)(*(part[some] for part in expected)))
