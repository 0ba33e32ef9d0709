"""The cache of tokens: built once, resumed after a kill, the same on disk and at a URL; damage is named."""

import dataclasses
import json
import threading
import tracemalloc

import chex
import numpy as np
import pytest
from documents import held_out_documents, training_rows
from refusals import refused

from train.config import differences, parse
from train.data import building, cache, readers
from train.data.pipeline import batches
from train.data.storage import LocalFolder
from train.data.tokenizer import load_tokenizer


class Killed(BaseException):
    """Ends a build between two files, as a kill would."""


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_bytes(bytes([65 + number]) * (30 + number))
    lines = [json.dumps({"text": f"line {number} " * number}) for number in range(25)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(building, "_GROUP_BYTES", 64)
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.01)


def config_of(texts, kept=None, **data):
    values = {"source": "files", "paths": [f"{texts}/*.txt", f"{texts}/*.jsonl"], "held_out": 0.2, **data}
    values |= {} if kept is None else {"cache": str(kept)}
    return parse({"data": values, "train": {"length": 16, "batch_tokens": 64}, "output": f"{texts}/../runs"})


def everything(config):
    rows = training_rows(config)
    return [*rows.batch(np.arange(len(rows))), *held_out_documents(config)]


def tokenised(config):
    """How many files a training tokenises before it starts."""
    lines = []
    training_rows(config, lines.append)
    return sum(int(line.split()[2]) for line in lines if line.startswith("data: tokenising"))


@pytest.mark.parametrize(("where", "packing"), [("disk", "concatenate"), ("memory", "best-fit")])
def test_a_cache_gives_what_memory_gives(texts, tmp_path, where, packing):
    plain = config_of(texts, packing=packing)
    kept = config_of(texts, tmp_path / "kept" if where == "disk" else f"memory://{tmp_path.name}/kept", packing=packing)
    first = everything(plain)
    assert differences(plain, kept) == []
    chex.assert_trees_all_equal(everything(kept), first)
    assert training_rows(kept).digest() == training_rows(plain).digest()
    assert tokenised(kept) == 0
    chex.assert_trees_all_equal(everything(kept), first)
    chex.assert_trees_all_equal(next(batches(training_rows(kept), 4, 0)), next(batches(training_rows(plain), 4, 0)))


def kill_build(monkeypatch, config, count):
    """Builds a cache, and stops as if killed when file number `count` is about to be written."""
    written = []
    original = LocalFolder.write

    def write(self, name, chunks):
        if len(written) == count:
            raise Killed
        written.append(name)
        original(self, name, chunks)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "write", write)
        with pytest.raises(Killed):
            training_rows(config)


def write_cut_zst(path, content):
    """A file of which only a second frame is cut off, so the content is read before the damage is seen."""
    frame = pytest.importorskip("pyarrow").Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(frame + frame[:6])


@pytest.mark.parametrize(
    ("count", "pieces", "damaged"),
    [(0, "one", False), (2, "many", False), (2, "one", True), (4, "many", True), (9, "many", False), (3, "one", True)],
)
def test_a_killed_build_resumes_where_it_stopped(texts, tmp_path, monkeypatch, count, pieces, damaged):
    if pieces == "many":
        monkeypatch.setattr(building, "PIECE_BYTES", 70)
    data = {"bad_records": 0.5, "paths": [f"{texts}/*.txt", f"{texts}/*.jsonl*"]}
    if damaged:  # one file is found damaged at once, another when most of its lines are encoded already
        line = b'{"text": "twenty letters or so"}\n'
        (texts / "00.jsonl").write_bytes(b"{\n" + line + b'{"text": null}\n' + line * 20 + b"[1]\n\xff")
        write_cut_zst(texts / "000.jsonl.zst", line)
        write_cut_zst(texts / "lines.jsonl.zst", line * 41)
    whole = everything(config_of(texts, tmp_path / "whole", **data))
    killed = config_of(texts, tmp_path / "killed", **data)
    kill_build(monkeypatch, killed, count)
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/piece-*.json")}
    assert len(left) == count // 3
    chex.assert_trees_all_equal(everything(killed), whole)
    assert left.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/*")}.items()
    (first,), (second,) = ((tmp_path / name).glob("*") for name in ("whole", "killed"))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


@pytest.mark.parametrize("name", ["piece-000000.tokens", "documents"])
def test_a_damaged_cache_is_named(texts, tmp_path, name):
    config = config_of(texts, tmp_path / "kept")
    training_rows(config)
    (file,) = (tmp_path / "kept").glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-8])
    refused(name, lambda: training_rows(config))


def test_damaged_files_and_bad_records_are_reported_at_every_start(texts, tmp_path):
    write_cut_zst(texts / "cut.jsonl.zst", b'{"text": "lost"}\n')
    (texts / "lines.jsonl").write_text((texts / "lines.jsonl").read_text() + '\n{\n{"text": null}')
    config = config_of(texts, tmp_path / "kept", paths=[f"{texts}/*"], bad_records=0.07)
    for _ in range(2):
        lines = []
        rows = training_rows(config, lines.append)
        assert lines[-2].startswith(f"data: 1 of 8 files are damaged and left out: {texts}/cut.jsonl.zst (")
        counts = "2 of 33 records, in 1 of 8 files"  # 6 texts, 27 lines
        assert lines[-1].startswith(f"data: {counts}, are bad and left out: {texts}/lines.jsonl (2: line ")
    lines = sum(len(f"line {number} " * number) + 2 for number in range(1, 25))  # each with BOS and EOS
    held_out = sum(map(len, held_out_documents(config)))
    assert rows.tokens + held_out == sum(32 + number for number in range(6)) + lines
    stricter = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_records=0.05))
    refused("data.bad_records=0.05", lambda: training_rows(stricter))
    assert differences(config, stricter) == []


def test_a_wrong_key_of_the_text_is_noticed_early(tmp_path):
    """After 1,000 records, although a large part of the corpus may be left out."""
    records = ('{"body": "some text"}\n' if number < 1000 else '{"text": "some text"}\n' for number in range(1200))
    (tmp_path / "lines.jsonl").write_text("".join(records))
    paths = [f"{tmp_path}/lines.jsonl"]
    refused("'text'", lambda: training_rows(config_of(tmp_path, paths=paths, bad_records=0.95)))
    assert training_rows(config_of(tmp_path, paths=paths, bad_records=1.0)).tokens


def test_only_what_changed_is_built_anew(texts, tmp_path):
    def built(**changes):
        parts = [{"paths": [f"{texts}/*.txt"]}, {"paths": [f"{texts}/*.jsonl"], "weight": 2.0}]
        return tokenised(config_of(texts, tmp_path / "kept", paths=[], mixture=parts, **changes))

    assert built() == 7
    assert built(packing="best-fit", held_out=0.5) == 0
    (texts / "6.txt").write_bytes(b"new" * 20)
    assert built() == 7
    (texts / "6.txt").write_bytes(b"old" * 20)
    assert built() == 7
    assert built() == 0


def test_a_corpus_need_not_fit_into_memory(tmp_path, monkeypatch):
    lines = [json.dumps({"text": chr(97 + number) * 100_000}) + "\n" for number in range(25)]
    (tmp_path / "large.jsonl").write_text("".join(lines))
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 2**15)
    config = config_of(tmp_path, tmp_path / "kept", paths=[f"{tmp_path}/large.jsonl"])
    tracemalloc.start()
    try:
        rows = training_rows(config)
        next(batches(rows, 4, 0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.tokens > 2_000_000  # of two bytes
    assert peak < 2_000_000


def test_the_tokenizer_is_part_of_the_key(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"line": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, other = (config_of(texts, tmp_path / "kept", tokenizer=t) for t in ("bytes", f"{tmp_path}/tokenizer.json"))
    before = everything(plain)
    assert max(document.max() for document in held_out_documents(other)) == load_tokenizer(other.data).eos
    assert training_rows(other).padding == load_tokenizer(other.data).padding == 5
    chex.assert_trees_all_equal(everything(plain), before)


def test_whoever_comes_first_builds_on_a_disk(texts, tmp_path):
    # A lock belongs to an open file, so it excludes threads as it does processes.
    barrier, found = threading.Barrier(3), []

    def build():
        barrier.wait(60)
        found.append(tokenised(config_of(texts, tmp_path / "kept")))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 0, 7]
