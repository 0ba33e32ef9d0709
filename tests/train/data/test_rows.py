"""Tokens, packing and the stream of batches."""

import json

import chex
import numpy as np
import pytest
from documents import BOS, BYTES, EOS, encode, pack

from train.config import parse
from train.data.pipeline import batches, held_out_documents, training_rows
from train.data.tokenizer import PADDING

TEXTS = [b"abc", b"defghij", b"k", b"lmnopqrstu"]


def rows_of(length, texts=TEXTS):
    return pack([encode(text) for text in texts], length)


def test_every_byte_is_a_token():
    text = bytes(range(256))
    tokens = encode(text)
    np.testing.assert_array_equal(tokens, [BOS, *range(256), EOS])
    assert BYTES.decode(tokens) == text
    assert max(BOS, EOS, PADDING) < BYTES.vocabulary_size
    np.testing.assert_array_equal(encode(b""), [BOS, EOS])


@pytest.mark.parametrize("length", [1, 2, 3, 7, 28])
def test_each_token_is_predicted_once_and_never_across_documents(length):
    rows = rows_of(length)
    batch = rows.batch(np.arange(len(rows)))
    chex.assert_shape(batch, (len(rows), length))
    chex.assert_type(batch, np.int32)
    expected = [(int(a), int(b)) for text in TEXTS for a, b in zip(encode(text), encode(text)[1:], strict=False)]
    predicted = batch.labels >= 0
    pairs = list(zip(batch.tokens[predicted].tolist(), batch.labels[predicted].tolist(), strict=True))
    assert pairs == expected
    stream = batch.tokens[batch.segment_ids >= 0]
    np.testing.assert_array_equal(stream, np.concatenate([encode(text) for text in TEXTS])[: stream.size])


def test_segments_and_positions_of_a_row_by_hand():
    batch = rows_of(6).batch(np.array([0, 1, 4]))  # documents of 5, 9, 3 and 12 tokens: 29 in all
    np.testing.assert_array_equal(batch.segment_ids[0], [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.labels[0], [*b"abc", EOS, -1, ord("d")])
    np.testing.assert_array_equal(batch.segment_ids[1], [0] * 6)
    np.testing.assert_array_equal(batch.positions[1], range(6))
    np.testing.assert_array_equal(batch.tokens[2], [*b"rstu", EOS, PADDING])
    np.testing.assert_array_equal(batch.segment_ids[2], [0, 0, 0, 0, 0, -1])
    np.testing.assert_array_equal(batch.positions[2], [0, 1, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.labels[2], [*b"stu", EOS, -1, -1])


def test_too_little_text_is_refused():
    assert len(rows_of(28)) == 1
    with pytest.raises(ValueError, match=r"the corpus has 29 tokens, too few for one row of train.length=29"):
        rows_of(29)


def test_digest_depends_on_the_corpus():
    assert rows_of(4).digest() == rows_of(4).digest()
    assert rows_of(4).digest() != rows_of(4, TEXTS[::-1]).digest()
    assert rows_of(4).digest() != rows_of(4, [b"abc", b"defghij", b"k", b"lmnopqrstv"]).digest()


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_stream_is_deterministic_and_each_pass_is_shuffled_anew():
    rows = rows_of(2)  # 14 rows
    first, again, other = (take(batches(rows, 7, seed), 4) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    passes = [np.concatenate([batch.tokens for batch in part]) for part in (first[:2], first[2:], other[:2])]
    everything = sorted(rows.batch(np.arange(14)).tokens.tolist())
    assert all(sorted(part.tolist()) == everything for part in passes)
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[0], passes[2])


def test_stream_resumes_where_it_was():
    iterator = batches(rows_of(2), 3, 5)
    take(iterator, 9)
    state = iterator.get_state()
    rest = take(iterator, 5)
    fresh = batches(rows_of(2), 3, 5)
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 5), rest)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_stream_does_not_depend_on_the_number_of_processes(processes):
    rows = rows_of(2)
    whole = take(batches(rows, 8, 0), 5)
    share = 8 // processes
    slices = [slice(index * share, (index + 1) * share) for index in range(processes)]
    streams = [batches(rows, 8, 0, part) for part in slices]
    for batch in whole:
        joined = [np.concatenate(fields) for fields in zip(*(next(stream) for stream in streams), strict=True)]
        chex.assert_trees_all_equal(joined, list(batch))
    states = [stream.get_state() for stream in streams]
    assert all(json.loads(json.dumps(state)) == states[0] for state in states)


def test_training_rows_leave_held_out_text_alone(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_bytes(bytes([65 + index]) * 40)
    config = parse(
        {"data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 1e-9}, "train": {"length": 8}}
    )
    rows = training_rows(config)
    assert rows.tokens == 3 * 42
    seen = set(BYTES.decode(rows.batch(np.arange(len(rows))).tokens))
    (held_out,) = held_out_documents(config)
    assert len(seen) == 3
    assert seen | set(BYTES.decode(held_out)) == set(b"ABCD")
    assert seen.isdisjoint(BYTES.decode(held_out))


def test_a_batch_may_be_one_row():
    rows = rows_of(4)
    stream = batches(rows, 1, seed=0)
    seen = {next(stream).tokens.tobytes() for _ in range(len(rows))}
    assert len(seen) == len(rows)
