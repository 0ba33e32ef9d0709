"""The training stream: packed rows, shuffled, mixed, repeated and batched by Grain; its state is a small JSON value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from train.config import Config, DataConfig
from train.data.cache import open_corpora
from train.data.corpus import Corpus, HeldOutText, sample
from train.data.held_out import HeldOut, check_held_out, hold_out
from train.data.packing import Batch, PackedRows, pack_corpora
from train.data.sources import Log, list_files, resolved, silent
from train.data.storage import RemoteFolder
from train.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import grain  # imports jax: 150 MB that workers of `tokenize` do not need

_MANY_ROWS = 2**48
_CYCLE = 2**14
_MANY_PASSES = 2**16


def training_rows(config: Config, log: Log = silent) -> PackedRows:
    """The packed rows of the training documents; `log` gets a line about omitted files.

    If several processes share a cache at a URL, all of them must call this together.

    Raises FileNotFoundError and ValueError for missing, empty, unreadable or too little text.
    """
    tokenizer = load_tokenizer(config.data)
    corpora = open_corpora(config, tokenizer, log)
    trained = [corpus.select(out.trained) for corpus, out in zip(corpora, _held_out(config, corpora), strict=True)]
    weights = [part.weight for part in config.data.parts]
    return pack_corpora(trained, weights, config.train.length, config.data.packing, tokenizer.padding)


def held_out_sample(config: Config, log: Log = silent) -> HeldOutText:
    """The held-out documents, by part of the mixture, file and offset in it; each is read on demand.

    The errors, and the processes that must call it, are those of `training_rows`.
    """
    check_held_out(config.data.held_out)
    corpora = open_corpora(config, load_tokenizer(config.data), log)
    return sample(corpora, [out.out for out in _held_out(config, corpora)])


def held_out_documents(config: Config, log: Log = silent) -> list[np.ndarray]:
    """The tokens of every document of `held_out_sample`."""
    return held_out_sample(config, log).documents()


def _held_out(config: Config, corpora: Sequence[Corpus]) -> list[HeldOut]:
    columns = [corpus.index.columns() for corpus in corpora]
    return hold_out(columns, config.data.held_out, config.data.held_out_tokens)


def warnings_of_shared_text(config: Config) -> list[str]:
    """A warning for every stage that may train on documents that ``config.data`` holds out and `evaluate` measures.

    If a stage reads some files of ``config.data`` as part of another text, it holds out other documents of these files.
    Errors are those of `training_rows`.
    """
    found = []
    for name, stage in zip(config.stage_names, config.every_stage, strict=True):
        if config.data.held_out and stage.data != config.data:
            ours, measured = _documents_of(stage.data), _documents_of(config.data)
            shared = sorted(_locations(ours) & _locations(measured))
            found += [_shared_text(name, shared)] if shared and ours != measured else []
    return found


def _documents_of(data: DataConfig) -> tuple:
    """What determines the held-out documents: the files of every part, by name and location; their share and tokens."""
    parts = [[(file.name, resolved(file.path)) for file in part] for part in list_files(data)]
    return parts, data.held_out, data.held_out_tokens


def _locations(documents: tuple) -> set[str]:
    return {location for part in documents[0] for _, location in part}


def _shared_text(stage: str, shared: Sequence[str]) -> str:
    return (
        f"stage {stage!r} reads {len(shared)} files of data as part of another text, as {shared[0]}, and may train on "
        "documents in them that evaluate measures; give data files of its own, which no stage reads"
    )


@dataclass(frozen=True)
class Mixture:
    """The part of row n of the stream, and how many rows of that part come before it.

    The stream repeats a cycle of 16,384 rows. Part s has c_s of them, its share of the rows rounded by largest
    remainder, and its k-th is at (k + 1/2) / c_s of the cycle; ties go to the part named first. So any stretch of the
    stream has each part's share, up to about one row per part.
    """

    owners: Int64[np.ndarray, "cycle"]
    ranks: Int64[np.ndarray, "cycle"]
    counts: Int64[np.ndarray, "parts"]

    def __call__(self, number: int) -> tuple[int, int]:
        cycle, index = divmod(int(number), len(self.owners))
        owner = int(self.owners[index])
        return owner, cycle * int(self.counts[owner]) + int(self.ranks[index])


def mix(shares: Sequence[float]) -> Mixture:
    """The mixture of parts by their shares of the rows. Raises ValueError for a share that would get no row."""
    exact = np.asarray(shares, np.float64) / sum(shares) * _CYCLE
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: _CYCLE - counts.sum()]] += 1
    if not counts.all():
        part = int(np.argmin(counts))
        raise ValueError(f"data.mixture[{part}].weight is too small: the part would be below one row in {_CYCLE}")
    owners = np.repeat(np.arange(len(counts)), counts)
    ranks = np.arange(_CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort((ranks + 0.5) / counts[owners], kind="stable")
    return Mixture(owners[order], ranks[order], counts)


def batches(rows: PackedRows, batch_rows: int, seed: int, part: slice = slice(None)) -> "grain.DatasetIterator[Batch]":
    """An endless iterator over batches of `batch_rows` rows, of which this process gets the rows `part`.

    Batch number n holds the same rows in the same order on every process, for any number of processes. The rows of each
    part of a mixture come in an order of their own, shuffled anew from `seed` at each pass over them, and are repeated
    as often as needed; `Mixture` defines how parts are interleaved. Weights count tokens: a part with emptier rows,
    because best-fit left padding, gets more rows.

    ``get_state()`` and ``set_state(state)`` save and restore the position in the stream, which is the number of the
    next batch, so nothing is read again.
    """
    import grain

    mixture = mix([owner.weight / owner.tokens_per_row for owner in rows.parts])
    orders = [_order(len(owner.packing), seed + index * _MANY_PASSES) for index, owner in enumerate(rows.parts)]
    starts = rows.starts.tolist()

    def row(number: int) -> int:
        owner, rank = mixture(number)
        return starts[owner] + int(orders[owner][rank])

    def read(number: int) -> Batch:
        # Whole batches, because Grain's cost per row would exceed the cost of reading the row.
        numbers = range(number * batch_rows, (number + 1) * batch_rows)[part]
        return rows.batch(np.asarray([row(n) for n in numbers]))

    # A batch is read at once, so one thread that reads a few batches ahead is enough. At URLs threads wait for replies.
    remote = any(isinstance(owner.corpus.folder, RemoteFolder) for owner in rows.parts)
    ahead = grain.ReadOptions(num_threads=8 if remote else 1, prefetch_buffer_size=8 if remote else 4)
    return iter(grain.MapDataset.range(_MANY_ROWS // batch_rows).map(read).to_iter_dataset(ahead))


def _order(rows: int, seed: int) -> "grain.MapDataset":
    """The numbers of the rows, pass after pass; Grain shuffles pass n by the seed plus n."""
    import grain

    # Practically endless: the length of Grain's own endless repetition is too large for batches of one row.
    return grain.MapDataset.range(rows).seed(seed % 2**32).shuffle().repeat(_MANY_ROWS // rows + 1)
