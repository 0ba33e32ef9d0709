"""The training stream: packed rows, shuffled, repeated and batched by Grain; its state is a small JSON value."""

import grain
import numpy as np

from train.config import Config
from train.data.packing import Batch, PackedRows, pack
from train.data.sources import documents
from train.data.tokenizer import encode

_MANY_ROWS = 2**48


def training_rows(config: Config) -> PackedRows:
    """The packed rows of the training documents. Raises ValueError for missing, empty or too little text."""
    return pack([encode(document.text) for document in documents(config.data, "train")], config.train.length)


def batches(
    rows: PackedRows, batch_rows: int, seed: int, process: int = 0, processes: int = 1
) -> grain.DatasetIterator[Batch]:
    """An endless iterator over batches of `batch_rows` rows, of which this process gets its own part.

    Each pass over the rows is shuffled anew from `seed`. Batch number n holds the same rows in the same order
    whatever the number of processes: process p gets part p of each batch. ``get_state()`` and ``set_state(state)``
    save and restore the place in the stream.
    """
    if batch_rows % processes:
        raise ValueError(f"a batch of {batch_rows} rows cannot be shared by {processes} processes evenly")
    part = slice(process * batch_rows // processes, (process + 1) * batch_rows // processes)
    # Endless in name: Grain's own endless repetition has a length that no batch of one row can count.
    passes = _MANY_ROWS // len(rows) + 1
    numbers = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat(passes).batch(batch_rows)
    # Rows are cut in memory for a whole batch at once, so one thread, ahead by a few batches, is enough.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(numbers.map(lambda batch: rows.batch(np.asarray(batch)[part])).to_iter_dataset(ahead))
