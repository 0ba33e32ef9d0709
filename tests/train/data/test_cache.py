"""The cache of tokens: built once, resumed after a kill, the same on disk and at a URL; who builds it, who waits."""

import dataclasses
import json
import threading
import time
import tracemalloc

import chex
import numpy as np
import pytest

from train.config import differences, parse
from train.data import building, cache, readers
from train.data.pipeline import batches, held_out_documents, training_rows
from train.data.storage import LocalFolder, MemoryFolder, RemoteFolder, Span, find, folder_at, open_url
from train.data.tokenizer import ByteTokenizer, load_tokenizer
from train.runtime.paths import path


class Killed(BaseException):
    """Ends a build between two shards, as a kill would."""


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
def small_shards(monkeypatch):
    monkeypatch.setattr(building, "SHARD_TOKENS", 100)
    monkeypatch.setattr(building, "_GROUP_BYTES", 64)
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.01)


@pytest.fixture
def encoded(monkeypatch):
    """Every text that is handed to the tokenizer."""
    seen = []
    original = ByteTokenizer.encode_all
    monkeypatch.setattr(ByteTokenizer, "encode_all", lambda self, given: seen.extend(given) or original(self, given))
    return seen


def config_of(texts, kept=None, **data):
    values = {"source": "files", "paths": [f"{texts}/*.txt", f"{texts}/*.jsonl"], "held_out": 0.2, **data}
    values |= {} if kept is None else {"cache": str(kept)}
    return parse({"data": values, "train": {"length": 16, "batch_tokens": 64}, "output": f"{texts}/../runs"})


def everything(config):
    rows = training_rows(config)
    return [*rows.batch(np.arange(len(rows))), *held_out_documents(config)]


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_cache_gives_what_memory_gives(texts, tmp_path, where, packing, encoded):
    plain = config_of(texts, packing=packing)
    kept = config_of(texts, tmp_path / "kept" if where == "disk" else f"memory://{tmp_path.name}/kept", packing=packing)
    first = everything(plain)
    chex.assert_trees_all_equal(everything(kept), first)
    assert training_rows(kept).digest() == training_rows(plain).digest()
    encoded.clear()
    chex.assert_trees_all_equal(everything(kept), first)
    assert encoded == []
    chex.assert_trees_all_equal(next(batches(training_rows(kept), 4, 0)), next(batches(training_rows(plain), 4, 0)))


def test_the_place_of_a_cache_does_not_change_the_training(texts, tmp_path):
    assert differences(config_of(texts), config_of(texts, tmp_path / "kept")) == []


def stop_at(monkeypatch, kind, count):
    """Ends the build when it is about to write file number `count`."""
    written = []
    original = kind.write_chunks

    def write(self, name, chunks):
        if len(written) == count:
            raise Killed
        written.append(name)
        original(self, name, chunks)

    monkeypatch.setattr(kind, "write_chunks", write)
    return written


def write_cut_zst(path, content):
    """A file of which only a second frame is cut off, so the content is read before the damage is seen."""
    frame = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    path.write_bytes(frame + frame[:6])


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("pieces", ["one", "many"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 9])
def test_a_killed_build_resumes_where_it_stopped(texts, tmp_path, monkeypatch, encoded, count, pieces, damaged):
    if pieces == "many":
        monkeypatch.setattr(building, "PIECE_BYTES", 70)
    data = {"bad_records": 0.5, "paths": [f"{texts}/*.txt", f"{texts}/*.jsonl*"]}
    if damaged:  # one file is found damaged at once, another when most of its lines are in shards already
        line = b'{"text": "twenty letters or so"}\n'
        (texts / "00.jsonl").write_bytes(b"{\n" + line + b'{"text": null}\n' + line * 20 + b"[1]\n\xff")
        write_cut_zst(texts / "000.jsonl.zst", line)
        write_cut_zst(texts / "lines.jsonl.zst", line * 41)
    whole = everything(config_of(texts, tmp_path / "whole", **data))
    all_encoded = len(encoded)
    encoded.clear()
    killed = config_of(texts, tmp_path / "killed", **data)
    with monkeypatch.context() as patched:
        written = stop_at(patched, LocalFolder, count)
        with pytest.raises(Killed):
            training_rows(killed)
    assert len(written) == count
    before = len(encoded)
    left = sum(len(np.load(path)["sizes"]) for path in (tmp_path / "killed").glob("*/shard-*.npz"))
    assert count < 3 or left
    chex.assert_trees_all_equal(everything(killed), whole)
    assert len(encoded) - before == all_encoded - left
    (first,), (second,) = ((tmp_path / name).glob("*") for name in ("whole", "killed"))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_a_shard_that_was_cut_off_is_written_again(texts, tmp_path, monkeypatch):
    killed = config_of(texts, tmp_path / "kept")
    with monkeypatch.context() as patched:
        stop_at(patched, LocalFolder, 6)
        with pytest.raises(Killed):
            training_rows(killed)
    (shard,) = (tmp_path / "kept").glob("*/shard-000000-000001.tokens")
    shard.write_bytes(shard.read_bytes()[:-4])
    chex.assert_trees_all_equal(everything(killed), everything(config_of(texts)))


def test_a_damaged_cache_is_named(texts, tmp_path):
    config = config_of(texts, tmp_path / "kept")
    training_rows(config)
    (shard,) = (tmp_path / "kept").glob("*/shard-000000-000001.tokens")
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"data.cache: .*/shard-000000-000001.tokens is damaged; delete .*/kept/\w+ "):
        training_rows(config)


@pytest.mark.parametrize("name", ["documents.sizes", "documents.hashes"])
def test_a_damaged_index_is_named(texts, tmp_path, name):
    config = config_of(texts, tmp_path / "kept")
    training_rows(config)
    (file,) = (tmp_path / "kept").glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=rf"data.cache: .*/{name} is damaged"):
        training_rows(config)


def test_a_shard_that_vanished_before_there_is_an_index_is_named(texts, tmp_path):
    config = config_of(texts, tmp_path / "kept")
    training_rows(config)
    for name in ("index.npz", "shard-000000-000001.npz"):
        (file,) = (tmp_path / "kept").glob(f"*/{name}")
        file.unlink()
    with pytest.raises(ValueError, match=r"data.cache: .*/shard-000000-000001.npz is damaged"):
        training_rows(config)


def test_damaged_files_and_bad_records_are_reported_at_every_start(texts, tmp_path):
    write_cut_zst(texts / "cut.jsonl.zst", b'{"text": "lost"}\n')
    (texts / "lines.jsonl").write_text((texts / "lines.jsonl").read_text() + '\n{\n{"text": null}')
    config = config_of(texts, tmp_path / "kept", paths=[f"{texts}/*"], bad_records=0.06)
    first, second = [], []
    training_rows(config, first.append)
    training_rows(config, second.append)
    assert first[0].startswith(f"data: tokenising 8 files into {tmp_path}/kept/")
    shards = len(list((tmp_path / "kept").glob("*/shard-*.tokens")))
    assert first[1] == f"data: 1 shards of piece 0, in {texts}/3.txt"
    assert sum(" shards of piece 0, in " in line for line in first) in (shards, shards - 1)  # the last one is not full
    assert [line for line in first[1:] if " shards of piece 0, in " not in line] == second
    assert second[0].startswith(f"data: 1 of 8 files are damaged and left out: {texts}/cut.jsonl.zst (the file ends")
    assert second[1] == "data: 2 of 34 records, in 1 of 8 files, are bad and left out"  # 6 texts, 1 + 27 lines
    assert second[2].startswith(f"data: {texts}/lines.jsonl: 2 bad: line 26: not valid JSON")
    assert second[2].endswith("; line 27: no text under 'text', found null")
    kept = training_rows(config).tokens + sum(map(len, held_out_documents(config)))
    lines = sum(len(f"line {number} " * number) + 2 for number in range(1, 25))
    assert kept == sum(32 + number for number in range(6)) + lines  # each with BOS and EOS
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*/*")}
    stricter = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_records=0.05))
    with pytest.raises(ValueError, match=r"2 of 34 .*data.bad_records=0.05 allows: .*lines.jsonl \(line 26"):
        training_rows(stricter)
    assert built == {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*/*")}
    assert differences(config, stricter) == []
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the files can be read, 1 in all"):
            training_rows(config_of(texts, tmp_path / "kept", paths=[f"{texts}/cut.jsonl.zst"]))


def test_a_wrong_key_of_the_text_is_noticed_early(tmp_path, encoded):
    """After 1,000 records, although a corpus may be left out to a large part."""
    with (tmp_path / "lines.jsonl").open("w") as file:
        file.writelines(f'{{"{"body" if number < 1000 else "text"}": "some text"}}\n' for number in range(1200))
    paths = [f"{tmp_path}/lines.jsonl"]
    with pytest.raises(ValueError, match=r"lines.jsonl.* 1,000 .*line 1: no text under 'text', found keys \['body'\]"):
        training_rows(config_of(tmp_path, paths=paths, bad_records=0.95))
    assert encoded == []
    training_rows(config_of(tmp_path, paths=paths, bad_records=1.0))
    assert len(encoded) == 200


def test_only_what_changed_is_built_anew(texts, tmp_path, encoded):
    def build(**changes):
        encoded.clear()
        parts = [{"paths": [f"{texts}/*.txt"]}, {"paths": [f"{texts}/*.jsonl"], "weight": 2.0}]
        training_rows(config_of(texts, tmp_path / "kept", paths=[], mixture=parts, **changes))
        return len(encoded)

    assert build() == 6 + 24  # the first line has no text
    assert build(packing="best-fit", held_out=0.5) == 0
    (texts / "6.txt").write_bytes(b"new" * 20)
    assert build() == 7
    (texts / "6.txt").write_bytes(b"old" * 20)
    assert build() == 7
    assert build() == 0


def test_a_corpus_need_not_fit_into_memory(tmp_path, monkeypatch):
    lines = [json.dumps({"text": chr(97 + number) * 100_000}) + "\n" for number in range(25)]
    (tmp_path / "large.jsonl").write_text("".join(lines))
    monkeypatch.setattr(building, "SHARD_TOKENS", 2**17)
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
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, other = (config_of(texts, tmp_path / "kept", tokenizer=t) for t in ("bytes", f"{tmp_path}/tokenizer.json"))
    before = everything(plain)
    words = held_out_documents(other)
    loaded = load_tokenizer(other.data)
    assert all(document[0] == loaded.bos and document[-1] == loaded.eos for document in words)
    assert max(document.max() for document in words) == loaded.eos
    assert training_rows(other).padding == loaded.padding == 5
    chex.assert_trees_all_equal(everything(plain), before)
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_without_a_cache_in_the_config_only_the_bytes_of_a_small_corpus_are_not_kept(texts, tmp_path, monkeypatch):
    training_rows(config_of(texts))
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(cache, "_SMALL_BYTES", 100)
    training_rows(config_of(texts))
    assert list((tmp_path / "runs" / "tokens").glob("*/index.npz"))


def test_whoever_comes_first_builds_on_a_disk(texts, tmp_path):
    # A lock belongs to an open file, so it excludes threads as it does processes.
    barrier, lines = threading.Barrier(3), []

    def build():
        barrier.wait(60)
        training_rows(config_of(texts, tmp_path / "kept"), lines.append)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [line.startswith("data: tokenising 7 files") for line in lines].count(True) == 1


@pytest.mark.parametrize("named", [True, False], ids=["data.cache", "output"])
def test_other_hosts_wait_for_the_first_ones_cache(texts, tmp_path, monkeypatch, named):
    keys, got = [], []

    def from_first(given):
        if given[0]:
            keys[:] = given
        while not keys:
            time.sleep(0.01)
        return keys

    index = threading.local()
    monkeypatch.setattr(cache, "_from_first", from_first)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: getattr(index, "value", 0))
    url = f"memory://{tmp_path.name}/kept"
    opened = cache.folder_at
    monkeypatch.setattr(cache, "folder_at", lambda path: opened(path.replace("gs://bucket/runs/tokens", url)))

    def config(texts):
        return config_of(texts, url) if named else dataclasses.replace(config_of(texts), output="gs://bucket/runs")

    def wait():
        index.value = 1
        got.append(training_rows(config("/nowhere")))  # this host sees none of the files

    waiting = threading.Thread(target=wait)
    waiting.start()
    rows = training_rows(config(texts))
    waiting.join(60)
    assert got[0].digest() == rows.digest()
    chex.assert_trees_all_equal(got[0].batch(np.arange(5)), rows.batch(np.arange(5)))


@pytest.mark.parametrize("make", [MemoryFolder, "local", "remote"], ids=["memory", "local", "remote"])
def test_folders(tmp_path, make):
    kinds = {"local": lambda: LocalFolder(tmp_path), "remote": lambda: RemoteFolder(f"memory://{tmp_path.name}")}
    folder = kinds.get(make, make)()
    content = np.random.default_rng(0).bytes(1000)
    assert folder.read("a") is None
    assert folder.sizes() == {}
    folder.write("a", content)
    folder.write("b", content[::-1])
    folder.write("b", content)
    assert folder.read("b") == content
    assert folder.sizes() == {"a": 1000, "b": 1000}
    spans = [
        Span("a", 5, 9),
        Span("b", 990, 1000),
        Span("a", 0, 5),
        Span("a", 3, 4),
        Span("a", 9, 9),
        Span("a", 50, 60),
    ]
    assert [bytes(found) for found in folder.spans(spans)] == [content[span.start : span.stop] for span in spans]


def test_a_span_that_cannot_be_read_is_an_error(tmp_path):
    folder = RemoteFolder(f"memory://{tmp_path.name}")
    folder.write("a", b"content")
    with pytest.raises(FileNotFoundError, match="gone"):
        folder.spans([Span("a", 0, 3), Span("gone", 0, 3)])


def test_neighbouring_spans_are_one_request(tmp_path, monkeypatch):
    folder = RemoteFolder(f"memory://{tmp_path.name}")
    folder.write("a", bytes(100))
    asked = []
    original = type(folder._system).cat_ranges
    monkeypatch.setattr(
        type(folder._system),
        "cat_ranges",
        lambda self, paths, starts, ends, **options: (
            asked.append(list(zip(starts, ends, strict=True))) or original(self, paths, starts, ends, **options)
        ),
    )
    folder.spans([Span("a", 0, 5), Span("a", 20, 30), Span("a", 5, 12)])
    assert asked == [[(0, 12), (20, 30)]]


def test_a_url_that_cannot_be_a_cache_is_refused(texts):
    with pytest.raises(ValueError, match=r"data.cache: cannot open 'nowhere://a/\w+': Protocol not known: nowhere"):
        training_rows(config_of(texts, "nowhere://a"))


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_this_machine_is_the_same_folder_for_data_and_for_outputs(tmp_path, scheme):
    """Also with %20 for a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "text.txt").write_text("some text")
    address = f"{scheme}://{tmp_path}/a%20folder"
    assert folder_at(address).path == path(address) == folder
    assert list(find(f"{address}/*.txt", "data.paths")) == [str(folder / "text.txt")]
    assert open_url(f"{address}/text.txt", "data.tokenizer")[1] == str(folder / "text.txt")
