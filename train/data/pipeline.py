"""The training stream: packed rows, shuffled, mixed, repeated and batched by Grain; its state is a small JSON value."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from train.config import Config, DataConfig
from train.config.settings.checks import check
from train.data.cache import open_corpora
from train.data.corpus import Corpus, HeldOutText, join
from train.data.index import DOCUMENT, GONE, Index
from train.data.packing import Batch, PackedRows, pack_corpora
from train.data.sources import Log, list_files, resolved, silent
from train.data.storage import RemoteFolder
from train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain  # imports jax: 150 MB that workers of `tokenize` do not need

_MANY_ROWS = 2**48
_MANY_PASSES = 2**16
_HASH_RANGE = 2**48


def training_rows(config: Config, tokenizer: Tokenizer, log: Log = silent) -> PackedRows:
    """The packed rows of the training documents; `log` gets a line about omitted files.

    If several processes share a cache at a URL, all of them must call this together.

    Raises FileNotFoundError and ValueError for missing, empty, unreadable or too little text.
    """
    corpora = open_corpora(config, tokenizer, log)
    trained = [
        corpus.select(below, int(GONE)) for corpus, below in zip(corpora, _held_out(config, corpora), strict=True)
    ]
    weights = [part.weight for part in config.data.parts]
    return pack_corpora(trained, weights, config.train.length, config.data.packing, tokenizer.padding)


def held_out_sample(config: Config, tokenizer: Tokenizer, log: Log = silent) -> HeldOutText:
    """The held-out documents, by part of the mixture, file and offset in it; each is read on demand.

    The errors, and the processes that must call it, are those of `training_rows`.
    """
    check(config.data.held_out > 0, "data.held_out is 0, so no documents are held out to evaluate on; 0.05 would work")
    corpora = open_corpora(config, tokenizer, log)
    return join([corpus.select(0, below) for corpus, below in zip(corpora, _held_out(config, corpora), strict=True)])


def _held_out(config: Config, corpora: Sequence[Corpus]) -> list[int]:
    return hold_out([corpus.index for corpus in corpora], config.data.held_out, config.data.held_out_tokens)


def hold_out(parts: Sequence[Index], share: float, tokens: float = math.inf) -> list[int]:
    """For each part of a mixture a number: documents whose hash is below it are held out of training.

    The rule needs no list of documents, so memory does not grow with their number. It is the same number for all parts:
    `share` of the range of hashes. If the documents below it have more than `tokens` tokens, it is lower, so that those
    of all parts with the lowest hashes are held out, up to that many tokens. But of every part at least one document is
    trained on, the one with the highest hash. And at least one document overall is held out, the one with the lowest
    hash among the parts with several documents, unless the share is 0.

    Raises ValueError when there is no such document.
    """
    ends = [_lowest_and_highest(part) for part in parts]
    below = _bound(parts, math.ceil(share * _HASH_RANGE), tokens)
    found = [min(below, highest) for _, highest in ends]
    if share and not any(lowest < bound for (lowest, _), bound in zip(ends, found, strict=True)):
        several = [(lowest, part) for part, (lowest, highest) in enumerate(ends) if lowest < highest]
        if not several:
            raise ValueError(
                "data: the text is a single document, so none can be held out; split it into several files, or set "
                "data.held_out=0 to train without evaluation"
            )
        lowest, part = min(several)
        found[part] = lowest + 1
    return found


def _lowest_and_highest(part: Index) -> tuple[int, int]:
    """The ends of the hashes of a part's documents, without those of damaged files."""
    ends = []
    for documents in part.parts():
        present = documents["hash"][documents["hash"] != GONE]
        ends += [present.min(), present.max()] if present.size else []
    return int(min(ends)), int(max(ends))


def _bound(parts: Sequence[Index], below: int, tokens: float) -> int:
    """The hash up to which documents have at most `tokens` tokens, at most `below`.

    Of documents with equal hashes all are below it, or none. Excess documents are dropped, so memory is bounded.
    """
    kept = np.empty(0, DOCUMENT)
    for documents in itertools.chain.from_iterable(part.parts() for part in parts):
        kept = np.concatenate([kept, documents[documents["hash"] < np.uint64(below)]])
        if kept["size"].sum() > tokens:
            kept = kept[np.argsort(kept["hash"], kind="stable")]
            below = int(kept["hash"][np.argmax(np.cumsum(kept["size"]) > tokens)])
            kept = kept[kept["hash"] < np.uint64(below)]
    return below


def warnings_of_shared_text(config: Config) -> list[str]:
    """A warning for every stage that may train on documents that ``config.data`` holds out and `evaluate` measures.

    If a stage reads some files of ``config.data`` as part of another text, it holds out other documents of these files.
    Errors are those of `training_rows`.
    """
    found = []
    for name, stage in zip(config.stage_names, config.every_stage, strict=True):
        if config.data.held_out and stage.data != config.data:
            ours, measured = _held_out_by(stage.data), _held_out_by(config.data)
            shared = sorted(_locations(ours) & _locations(measured))
            if shared and ours != measured:
                found.append(
                    f"stage {name!r} reads {len(shared)} files of data as part of another text, as {shared[0]}, and "
                    "may train on documents in them that evaluate measures; give data files of its own, which no "
                    "stage reads"
                )
    return found


def _held_out_by(data: DataConfig) -> tuple:
    """What determines the held-out documents: the files of every part, by name and location; their share and tokens."""
    parts = [[(file.name, resolved(file.path)) for file in part] for part in list_files(data)]
    return parts, data.held_out, data.held_out_tokens


def _locations(documents: tuple) -> set[str]:
    return {location for part in documents[0] for _, location in part}


def batches(rows: PackedRows, batch_rows: int, seed: int, part: slice = slice(None)) -> "grain.DatasetIterator[Batch]":
    """An endless iterator over batches of `batch_rows` rows, of which this process gets the rows `part`.

    Batch number n holds the same rows in the same order on every process, for any number of processes. The rows of each
    part of a mixture come in an order of their own, shuffled anew from `seed` at each pass over them, and are repeated
    as often as needed. Grain interleaves the parts, evenly, by shares that are whole percents of the smallest. Weights
    count tokens: a part with emptier rows, because best-fit left padding, gets more rows.

    ``get_state()`` and ``set_state(state)`` save and restore the position in the stream, which is the number of the
    next batch, so nothing is read again.
    """
    import grain

    starts = zip(rows.starts.tolist(), rows.parts, strict=True)
    orders = [_order(start, len(each.packing), seed + n * _MANY_PASSES) for n, (start, each) in enumerate(starts)]
    numbers = grain.MapDataset.mix(orders, [each.weight / each.tokens_per_row for each in rows.parts])

    def read(number: int) -> Batch:
        # Whole batches, because Grain's cost per row would exceed the cost of reading the row.
        wanted = range(number * batch_rows, (number + 1) * batch_rows)[part]
        return rows.batch(np.asarray([numbers[n] for n in wanted]))

    # A batch is read at once, so one thread that reads a few batches ahead is enough. At URLs threads wait for replies.
    remote = any(isinstance(owner.corpus.folder, RemoteFolder) for owner in rows.parts)
    ahead = grain.ReadOptions(num_threads=8 if remote else 1, prefetch_buffer_size=8 if remote else 4)
    return iter(grain.MapDataset.range(_MANY_ROWS // batch_rows).map(read).to_iter_dataset(ahead))


def _order(start: int, rows: int, seed: int) -> "grain.MapDataset":
    """The numbers of the rows of a part, pass after pass; Grain shuffles pass n by the seed plus n."""
    import grain

    # Practically endless: the length of Grain's own endless repetition is too large for batches of one row.
    numbers = grain.MapDataset.range(start, start + rows)
    return numbers.seed(seed % 2**32).shuffle().repeat(_MANY_ROWS // rows + 1)
