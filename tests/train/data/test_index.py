"""The index is read block by block and memory-mapped, not loaded; packing with it takes bounded memory."""

import json
import tracemalloc

import numpy as np
import pytest

from train.data import index, packing
from train.data.corpus import HASHES, INDEX, SIZES, dump_arrays, open_corpus, tokens_name
from train.data.held_out import hold_out
from train.data.left_out import LeftOut
from train.data.packing import pack_corpora
from train.data.storage import LocalFolder

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


@pytest.mark.parametrize("how", ["concatenate", "best-fit"])
def test_neither_index_nor_packing_is_in_memory(many, monkeypatch, how):
    """Without memory mapping the index would take 16 bytes per document, and the packing as much again."""
    monkeypatch.setattr(packing, "GROUP_PIECES", 2**15)
    monkeypatch.setattr(index, "_RUN", 2**4)
    tracemalloc.start()
    try:
        corpus = open_corpus(LocalFolder(many))
        (held_out,) = hold_out([corpus.index.columns()], 0.05, 10_000)
        trained = corpus.select(held_out.trained)
        rows = pack_corpora([trained], [1.0], 64, how, 259)
        rows.batch(np.random.default_rng(0).permutation(len(rows))[:16])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.tokens > 0.9 * EACH * MANY
    assert held < 0.25 * MANY
    assert peak < 4 * MANY
