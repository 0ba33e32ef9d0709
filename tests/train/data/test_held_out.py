"""Held-out text: a sample of a bounded number of tokens, chosen by the documents' names, and read only when needed."""

import json
import re

import chex
import numpy as np
import pytest
from documents import held_out_documents, held_out_sample, pack, training_rows

from train.config import differences, parse, to_dict
from train.data import index
from train.data.index import Index, documents_of
from train.data.packing import pack_sample
from train.data.pipeline import hold_out, warnings_of_shared_text

SHARE = 0.3


def parts_of(*counts):
    generator = np.random.default_rng(len(counts))
    return [
        (generator.integers(0, 2**48, count).astype(np.uint64), generator.integers(2, 90, count)) for count in counts
    ]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    """Thirteen documents are looked at together."""
    monkeypatch.setattr(index, "BLOCK", 13)
    monkeypatch.setattr(index, "_RUN", 1)


def index_of(hashes, sizes):
    documents = documents_of(sizes)
    documents["hash"] = hashes
    return Index(documents)


def masks_of(parts, share, tokens=float("inf")):
    found = hold_out([index_of(*part) for part in parts], share, tokens)
    return [hashes < np.uint64(below) for below, (hashes, _) in zip(found, parts, strict=True)]


def naive(parts, share, tokens):
    """The documents below the share, from the lowest hash up, until the next would bring them above `tokens`."""
    everything = sorted(
        (int(hash_), int(size), part, number)
        for part, (hashes, sizes) in enumerate(parts)
        for number, (hash_, size) in enumerate(zip(hashes, sizes, strict=True))
        if hash_ < share * 2**48
    )
    masks, total = [np.zeros(len(hashes), bool) for hashes, _ in parts], 0
    for _, size, part, number in everything:
        total += size
        if total > tokens:
            break
        masks[part][number] = True
    return masks


@pytest.mark.parametrize("tokens", [100, 1000, 3333, 10**9])
def test_the_lowest_hashes_are_held_out_up_to_a_number_of_tokens(tokens):
    parts = parts_of(400, 100, 7)
    chex.assert_trees_all_equal(masks_of(parts, SHARE, tokens), naive(parts, SHARE, tokens))
    total = sum(sizes[mask].sum() for mask, (_, sizes) in zip(masks_of(parts, SHARE, tokens), parts, strict=True))
    assert 0 < total <= tokens


def test_of_equal_hashes_all_or_none_and_the_bound_itself_is_allowed():
    hashes = np.array([5, 9, 9, 9, 2**47], np.uint64)
    for tokens, out in [(10, 1), (19, 1), (40, 4)]:
        (mask,) = masks_of([(hashes, np.full(5, 10))], SHARE, tokens)
        assert mask.sum() == out


def test_at_least_one_document_is_held_out_and_one_of_each_part_is_trained_on():
    parts = parts_of(1, 40, 30)
    masks = masks_of(parts, SHARE, 1)
    lowest = min((1, 2), key=lambda part: parts[part][0].min())
    assert [mask.sum() for mask in masks] == [int(part == lowest) for part in range(3)]
    assert masks[lowest][np.argmin(parts[lowest][0])]
    for mask, (hashes, _) in zip(masks_of(parts, 0.999999), parts, strict=True):
        assert not mask[np.argmax(hashes)]
        assert mask.sum() == len(hashes) - 1


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for part in "ab":
        lines = [json.dumps({"text": f"{part} {number} " * (1 + number % 7)}) for number in range(200)]
        (tmp_path / "texts" / f"{part}.jsonl").write_text("\n".join(lines))
    return tmp_path / "texts"


def config_of(texts, kept="", **data):
    parts = [{"paths": [f"{texts}/{name}.jsonl"]} for name in "ab"]
    values = {"source": "files", "mixture": parts, "held_out": 0.2, "cache": str(kept), **data}
    return parse({"data": values, "train": {"length": 16, "batch_tokens": 64}})


def test_what_the_bound_leaves_out_is_trained_on(texts):
    unbounded, bounded = config_of(texts), config_of(texts, held_out_tokens=400)
    held, fewer = held_out_documents(unbounded), held_out_documents(bounded)
    assert {document.tobytes() for document in fewer} < {document.tobytes() for document in held}
    assert 300 < sum(map(len, fewer)) <= 400
    sizes = [training_rows(each).tokens for each in (unbounded, bounded)]
    assert sizes[1] + sum(map(len, fewer)) == sizes[0] + sum(map(len, held))
    assert differences(unbounded, bounded) == ["data.held_out_tokens was 67108864, now 400"]


def in_stages(texts, *stages, **data):
    values = to_dict(config_of(texts, **data))
    values["stages"] = [{"name": "first"}, *({"name": f"later {n}", "data": own} for n, own in enumerate(stages))]
    return parse(values)


def test_a_stage_that_may_train_on_held_out_text_is_reported(texts):
    (texts.parent / "link.jsonl").symlink_to(texts / "b.jsonl")
    for changes in ({"held_out_tokens": 400}, {"paths": [f"{texts.parent}/link.jsonl"]}):
        [line] = warnings_of_shared_text(in_stages(texts, changes))
        assert re.match(r"stage 'later 0' reads \d files of data as part of another text, as .*/[ab].jsonl", line)


def test_stages_of_the_same_text_or_of_other_text_are_not_reported(texts):
    (texts.parent / "other.jsonl").write_text((texts / "a.jsonl").read_text())
    same = {"mixture": [{"paths": [f"{texts}/[{name}].jsonl"], "weight": 1.0 + (name == "b")} for name in "ab"]}
    assert warnings_of_shared_text(in_stages(texts, same, {"paths": [f"{texts.parent}/other.jsonl"]})) == []


def test_held_out_text_is_that_of_the_whole_row_by_row(texts):
    config = config_of(texts)
    whole = held_out_documents(config)
    sample = held_out_sample(config)
    rows, expected = pack_sample(sample, 16), pack(whole, 16)
    assert sample.tokens == sum(map(len, whole))
    half = len(rows) // 2  # so the second part is read too
    for some in (np.array([half + 1, 0, len(rows) - 1]), np.arange(len(rows))):
        chex.assert_trees_all_equal(rows.batch(some), expected.batch(some))


def test_training_rows_leave_held_out_text_alone(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(bytes([65 + number]) * 40)
    values = {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 1e-9}
    config = parse({"data": values, "train": {"length": 8}})
    rows = training_rows(config)
    assert rows.tokens == 3 * 42
    seen = set(rows.batch(np.arange(len(rows))).tokens.ravel().tolist()) & set(b"ABCD")
    (held_out,) = held_out_documents(config)
    assert len(seen) == 3
    assert seen ^ set(held_out.tolist()) >= set(b"ABCD")
