"""Held-out text: a sample of a bounded number of tokens, chosen by the documents' names, and read only when needed."""

import hashlib
import json
import re

import chex
import numpy as np
import pytest
from documents import pack

from train.config import differences, parse, to_dict
from train.data import held_out
from train.data.held_out import hold_out
from train.data.index import GONE
from train.data.packing import pack_sample
from train.data.pipeline import held_out_documents, held_out_sample, training_rows, warnings_of_shared_text
from train.data.sources import all_documents, name_hash
from train.data.storage import LocalFolder, RemoteFolder

SHARE = 0.3


def parts_of(*counts):
    generator = np.random.default_rng(len(counts))
    return [
        (generator.integers(0, 2**48, count).astype(np.uint64), generator.integers(2, 90, count)) for count in counts
    ]


def in_runs(part, size=13):
    hashes, sizes = part
    return [(hashes[first : first + size], sizes[first : first + size]) for first in range(0, len(hashes), size)]


def masks_of(parts, share, tokens=float("inf")):
    found = hold_out([in_runs(part) for part in parts], share, tokens)
    return [each.out(np.arange(len(hashes)), hashes) for each, (hashes, _) in zip(found, parts, strict=True)]


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


@pytest.mark.parametrize("many", [3, 10**6])
@pytest.mark.parametrize("tokens", [100, 1000, 3333, 10**9])
def test_the_lowest_hashes_are_held_out_up_to_a_number_of_tokens(monkeypatch, tokens, many):
    monkeypatch.setattr(held_out, "_MANY", many)  # documents that are kept before the excess is dropped
    parts = parts_of(400, 100, 7)
    chex.assert_trees_all_equal(masks_of(parts, SHARE, tokens), naive(parts, SHARE, tokens))
    total = sum(sizes[mask].sum() for mask, (_, sizes) in zip(masks_of(parts, SHARE, tokens), parts, strict=True))
    assert 0 < total <= tokens


def test_of_equal_hashes_all_or_none():
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


def test_documents_of_damaged_files_are_on_neither_side():
    ((hashes, sizes),) = parts_of(60)
    gone = np.arange(60) % 4 == 0
    (rule,) = hold_out([in_runs((np.where(gone, GONE, hashes), sizes))], SHARE, 500)
    out, trained = (which(np.arange(60), np.where(gone, GONE, hashes)) for which in (rule.out, rule.trained))
    assert not (out & trained).any()
    np.testing.assert_array_equal(out | trained, ~gone)
    assert sizes[out].sum() <= 500


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
    unbounded = config_of(texts)
    held, trained = held_out_documents(unbounded), training_rows(unbounded).tokens
    bounded = config_of(texts, held_out_tokens=400)
    fewer = held_out_documents(bounded)
    names = {document.tobytes() for document in held}
    assert {document.tobytes() for document in fewer} < names
    assert 300 < sum(map(len, fewer)) <= 400
    assert training_rows(bounded).tokens + sum(map(len, fewer)) == trained + sum(map(len, held))
    assert len(held) == sum(name_hash(name) < 0.2 * 2**48 for name, _ in all_documents(unbounded.data))
    assert differences(unbounded, bounded) == ["data.held_out_tokens was 67108864, now 400"]


def in_stages(texts, *stages, **data):
    values = to_dict(config_of(texts, **data))
    values["stages"] = [{"name": "first"}, *({"name": f"later {n}", "data": own} for n, own in enumerate(stages))]
    return parse(values)


@pytest.mark.parametrize("changes", [{"paths": ["{above}/*/*.jsonl"]}, {"held_out_tokens": 400}, {"paths": ["{link}"]}])
def test_a_stage_that_may_train_on_held_out_text_is_reported(texts, changes):
    (texts.parent / "link.jsonl").symlink_to(texts / "b.jsonl")
    names = {"above": texts.parent, "link": texts.parent / "link.jsonl"}
    changes = {key: [text.format(**names) for text in own] if key == "paths" else own for key, own in changes.items()}
    config = in_stages(texts, changes)
    measured = {document.tobytes() for document in held_out_documents(config)}
    assert measured - {document.tobytes() for document in held_out_documents(config.stage(1))}
    [line] = warnings_of_shared_text(config)
    assert re.match(r"stage 'later 0' reads \d files of data as part of another text, as .*/[ab].jsonl, and may", line)


def test_stages_of_the_same_text_or_of_other_text_are_not_reported(texts):
    (texts.parent / "other.jsonl").write_text((texts / "a.jsonl").read_text())
    same = {"mixture": [{"paths": [f"{texts}/{name}.jsonl"], "weight": 1.0 + (name == "b")} for name in "ab"]}
    same["mixture"][0]["paths"] = [f"{texts}/[a].jsonl"]
    assert warnings_of_shared_text(in_stages(texts, same, {"paths": [f"{texts.parent}/other.jsonl"]})) == []
    assert warnings_of_shared_text(in_stages(texts, {"paths": [f"{texts}/*.jsonl"]}, held_out=0.0)) == []


@pytest.mark.parametrize("where", ["disk", "url"])
def test_held_out_text_is_read_row_by_row(texts, tmp_path, monkeypatch, where):
    kept = tmp_path / "kept" if where == "disk" else f"memory://{tmp_path.name}/kept"
    config = config_of(texts, kept)
    whole = held_out_documents(config)
    asked = []
    for kind in (LocalFolder, RemoteFolder):
        plain = kind.spans
        monkeypatch.setattr(kind, "spans", lambda self, spans, plain=plain: asked.extend(spans) or plain(self, spans))
    sample = held_out_sample(config)
    rows = pack_sample(sample, 16)
    assert asked == []
    assert sample.tokens == sum(map(len, whole))
    half = len(rows) // 2  # so the second part is read too
    some = np.array([half + 1, 0, len(rows) - 1])
    batch = rows.batch(some)
    assert sum(span.stop - span.start for span in asked) <= 3 * 2 * (16 + 16)  # rows, and a token after each piece
    expected = pack(whole, 16)
    chex.assert_trees_all_equal(batch, expected.batch(some))
    chex.assert_trees_all_equal(rows.batch(np.arange(len(rows))), expected.batch(np.arange(len(rows))))


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"data.held_out_tokens must be positive, found 0"):
        parse({"data": {"held_out_tokens": 0}})


GOLDEN = {
    "concatenate": ("92e3cf7f862f17a3", "0ccdbe1200920e69"),
    "best-fit": ("92e3cf7f862f17a3", "5f1c5953d1f39001"),
}
MIXED = {
    "concatenate": ("b1dc8ea54f9b1ff7:2-00dc7e2b5ac77d5e:1", "3a11b2a16bf05bf9"),
    "best-fit": ("b1dc8ea54f9b1ff7:2-00dc7e2b5ac77d5e:1", "0bd0a491609efb25"),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["one", "mixture"])
@pytest.mark.parametrize("packing", GOLDEN)
def test_a_small_corpus_is_the_same_as_before_the_index_was_mapped(tmp_path, packing, mixed):
    """Digests and rows that were recorded with the loader that had the whole index in memory."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * (3 + number))
    lines = [json.dumps({"text": f"line {number} " * (1 + number % 7)}) + "\n" for number in range(500)]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    frame = pytest.importorskip("zstandard").ZstdCompressor().compress(b'{"text": "first"}\n')
    (tmp_path / "bad.jsonl.zst").write_bytes(frame + frame[:6])
    parts = [{"paths": [f"{tmp_path}/*.txt"], "weight": 2.0}, {"paths": [f"{tmp_path}/*.jsonl*"]}]
    text = {"mixture": parts} if mixed else {"paths": [f"{tmp_path}/*"]}
    values = {"source": "files", "held_out": 0.2, "packing": packing, **text}
    config = parse({"data": values, "train": {"length": 16, "batch_tokens": 64}})
    rows = training_rows(config)
    content = b"".join(column.tobytes() for column in rows.batch(np.arange(len(rows))))
    assert (rows.digest(), hashlib.sha256(content).hexdigest()[:16]) == (MIXED if mixed else GOLDEN)[packing]
    held = b"|".join(document.tobytes() for document in held_out_documents(config))
    assert hashlib.sha256(held).hexdigest()[:16] == "8899466a4df52924"
