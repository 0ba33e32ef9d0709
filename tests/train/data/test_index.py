"""The index is read block by block and memory-mapped, not loaded; packing with it takes bounded memory."""

import json
import tracemalloc

import chex
import numpy as np
import pytest

from train.data import index, packing, storage
from train.data.corpus import HASHES, INDEX, SIZES, dump_arrays, open_corpus, tokens_name
from train.data.held_out import hold_out
from train.data.index import Index
from train.data.left_out import LeftOut
from train.data.packing import pack_corpora
from train.data.storage import LocalFolder, RemoteFolder


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(index, "BLOCK", 3)
    monkeypatch.setattr(index, "_RUN", 2)


def chosen(numbers, hashes):
    return (hashes % 3 != 0) & (numbers % 7 != 0)


def test_places_sizes_and_ends_are_running_sums(small_blocks):
    sizes = np.random.default_rng(0).integers(1, 50, 101)
    hashes = np.random.default_rng(1).integers(0, 2**48, 101).astype(np.uint64)
    whole = Index(sizes, hashes).select(chosen)
    mask = chosen(np.arange(101), hashes)
    expected = (np.cumsum(sizes) - sizes)[mask], sizes[mask], np.cumsum(sizes[mask])
    found = [np.concatenate(column) for column in zip(*whole.runs(), strict=True)]
    chex.assert_trees_all_equal(found, list(expected))
    assert whole.tokens == sizes[mask].sum()
    some = whole.load(np.array([0, 4, 5, 20, 33]))
    numbers = np.concatenate([np.arange(3 * block, min(3 * block + 3, 101)) for block in (0, 4, 5, 20, 33)])
    here = np.isin(np.flatnonzero(mask), numbers)
    chex.assert_trees_all_equal(list(some), [column[here] for column in expected])


MANY = 1_500_000
EACH = 8


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A cache of very many short documents; its file of tokens is sparse and takes no space."""
    folder = LocalFolder(tmp_path_factory.mktemp("many"))
    with (folder.path / tokens_name(0, 0)).open("wb") as file:
        file.truncate(2 * EACH * MANY)
    folder.write(SIZES, np.full(MANY, EACH, np.int64).tobytes())
    folder.write(HASHES, np.random.default_rng(0).integers(0, 2**48, MANY).astype(np.uint64).tobytes())
    about = {"digest": "x", "left_out": LeftOut().dump(), "files": 1, "kind": "<u2", "documents": MANY}
    folder.write(INDEX, dump_arrays(shards=np.array([1]), shard_sizes=np.array([EACH * MANY]), about=json.dumps(about)))
    return folder.path


def peak_of(function):
    tracemalloc.start()
    try:
        result = function()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, held, peak


@pytest.mark.parametrize("how", ["concatenate", "best-fit"])
def test_neither_index_nor_packing_is_in_memory(many, monkeypatch, how):
    """Without memory mapping the index would take 16 bytes per document, and the packing as much again."""
    monkeypatch.setattr(packing, "GROUP_PIECES", 2**15)
    monkeypatch.setattr(index, "_RUN", 2**4)

    def rows():
        corpus = open_corpus(LocalFolder(many))
        (held_out,) = hold_out([corpus.index.columns()], 0.05, 10_000)
        trained = corpus.select(held_out.trained)
        rows = pack_corpora([trained], [1.0], 64, how, 259)
        rows.batch(np.random.default_rng(0).permutation(len(rows))[:16])
        return rows

    rows, held, peak = peak_of(rows)
    assert rows.tokens > 0.9 * EACH * MANY
    assert held < 0.25 * MANY
    assert peak < 4 * MANY


def test_the_index_behind_a_url_is_copied_once_and_mapped(tmp_path, monkeypatch):
    folder = RemoteFolder(f"memory://{tmp_path.name}")
    folder.write("sizes", np.arange(1000).tobytes())
    fetched = []
    original = type(folder._system).get_file
    monkeypatch.setattr(
        type(folder._system),
        "get_file",
        lambda self, *given, **named: fetched.append(1) or original(self, *given, **named),
    )
    first = folder.map("sizes", np.dtype(np.int64))
    again = RemoteFolder(f"memory://{tmp_path.name}").map("sizes", np.dtype(np.int64))
    np.testing.assert_array_equal(first, np.arange(1000))
    assert again is first
    assert isinstance(first, np.memmap)
    assert len(fetched) == 1
    del first, again
    assert not storage._copies.get((folder.url, "sizes"))


@pytest.mark.parametrize("make", ["local", "remote"])
def test_a_file_that_fails_in_the_middle_is_not_there(tmp_path, make):
    folder = LocalFolder(tmp_path) if make == "local" else RemoteFolder(f"memory://{tmp_path.name}")

    def failing():
        yield b"half"
        raise KeyError

    with pytest.raises(KeyError):
        folder.write_chunks("file", failing())
    assert folder.read("file") is None
    assert folder.sizes() == {}
    folder.write_chunks("file", [b"whole", b"ly"])
    assert folder.read("file") == b"wholely"
