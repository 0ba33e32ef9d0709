"""The index is read block by block and memory-mapped, not loaded; packing with it takes bounded memory."""

import json
import tracemalloc

import numpy as np
import pytest

from train.data import index, packing
from train.data.corpus import DOCUMENTS, INDEX, open_corpus, piece_file
from train.data.index import DOCUMENT, GONE
from train.data.packing import pack_corpora
from train.data.pipeline import hold_out
from train.data.sources import LeftOut
from train.data.storage import LocalFolder

MANY = 1_500_000
EACH = 8


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A cache of very many short documents; its file of tokens is sparse and takes no space."""
    folder = LocalFolder(tmp_path_factory.mktemp("many"))
    with (folder.path / piece_file(0, "tokens")).open("wb") as file:
        file.truncate(2 * EACH * MANY)
    documents = np.empty(MANY, DOCUMENT)
    documents["size"], documents["hash"] = EACH, np.random.default_rng(0).integers(0, 2**48, MANY)
    folder.write(DOCUMENTS, [documents.tobytes()])
    about = {"kind": "<u2", "tokens": [EACH * MANY], "documents": MANY, "digest": "x", "files": 1}
    folder.write(INDEX, [json.dumps({**about, "left_out": vars(LeftOut())}).encode()])
    return folder.path


@pytest.mark.parametrize("how", ["concatenate", "best-fit"])
def test_neither_index_nor_packing_is_in_memory(many, monkeypatch, how):
    """Without memory mapping the index would take 16 bytes per document, and the packing as much again."""
    monkeypatch.setattr(packing, "GROUP_PIECES", 2**15)
    monkeypatch.setattr(index, "_RUN", 2**4)
    tracemalloc.start()
    try:
        corpus = open_corpus(LocalFolder(many))
        (below,) = hold_out([corpus.index], 0.05, 10_000)
        trained = corpus.select(below, int(GONE))
        rows = pack_corpora([trained], [1.0], 64, how, 259)
        rows.batch(np.random.default_rng(0).permutation(len(rows))[:16])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.tokens > 0.9 * EACH * MANY
    assert held < 0.25 * MANY
    assert peak < 4 * MANY
