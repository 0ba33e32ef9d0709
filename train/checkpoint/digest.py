"""A digest of every array of a checkpoint, which shows whether any bit changed between save and restore.

TensorStore checks the index of a checkpoint when it reads it, but not the values: a bit that flips in a file of values
on a disk is read as another weight. Reading every file after a save, to compute its checksum, would cost as much as the
save. So the values have a digest of their own. The devices compute it from what they hold, before a save and after a
restore, with any storage in between.

The digest of an array is the sum, modulo 2^32, of a mixed word for each of its elements: of the element's bits and its
position. A sum does not depend on its order, so the digest is the same on every mesh, and the digest of an array is the
sum of the digests of its blocks. One changed element always changes the digest; any other change goes unnoticed with
probability 2^-32.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, UInt32

from train.runtime.paths import is_local

_AXIS = 0x9E3779B1  # odd, so that neighbours along any axis get unrelated words
_MIX = (0x85EBCA6B, 0xC2B2AE35)  # MurmurHash3's last step, which maps words to words one to one
_READERS = 8  # blocks read at a time
# Prefixes of TensorStore's errors that do not mean damaged files; it raises ValueError for everything.
_UNREAD = (
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE"),
)


def names(items: Mapping[str, Any]) -> list[str]:
    """The name of every array of a checkpoint's items, as ``parameters/stacks.0.0.mlp.up``: item and Orbax's name."""
    return [
        f"{item}/{keystr(path, simple=True, separator='.')}"
        for item in sorted(items)
        for path, _ in tree_flatten_with_path(items[item])[0]
    ]


@jax.jit
def digests(items: Mapping[str, Any]) -> UInt32[Array, "arrays"]:
    """The digests of all arrays, in the order of `names`, on every device; all processes call it together."""
    leaves = [leaf for item in sorted(items) for leaf in jax.tree.leaves(items[item])]
    return jnp.stack([_digest(_words(leaf), (0,) * leaf.ndim, jnp) for leaf in leaves])


def by_name(arrays: Sequence[str], found: UInt32[Array, "arrays"]) -> dict[str, int]:
    """The result of `digests` by the names of the arrays; waits until the devices have computed it."""
    return dict(zip(arrays, np.asarray(found).tolist(), strict=True))


def _words(array: Any) -> UInt32[Array, "..."]:
    """The bits of every element as one word of 32 bits, or as two along a last axis."""
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    width = min(array.dtype.itemsize, 4)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


def _digest(words: Any, start: tuple[int, ...], xp: ModuleType) -> Any:
    """The digest of a block of words that begins at `start` in its array; `xp` is numpy or jax.numpy."""
    words = words.reshape(words.shape or (1,))
    start = start + (0,) * (words.ndim - len(start))
    for axis, (first, size) in enumerate(zip(start, words.shape, strict=True)):
        indices = xp.arange(size, dtype=np.uint32) + np.uint32(first)
        weighted = indices * np.uint32(pow(_AXIS, axis + 1, 2**32))
        words = words ^ weighted.reshape([size if each == axis else 1 for each in range(words.ndim)])
        words = words * np.uint32(_MIX[0])
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(_MIX[1])
    return (words ^ (words >> np.uint32(16))).sum(dtype=np.uint32)


def read_digests(folder: Path, item: str, process: int = 0, processes: int = 1) -> dict[str, int]:
    """This process's part of the digests of an item's arrays, from its files; the sum over all processes is the
    digest of each array.

    An array is read block by block, as its devices wrote it, so it need not fit into memory. Raises ValueError for
    files that TensorStore finds damaged, and OSError for those that it cannot read.
    """
    try:
        return _read_digests(folder, item, process, processes)
    except ValueError as error:
        if str(error).startswith(_UNREAD):
            raise OSError(str(error)) from error
        raise


def _read_digests(folder: Path, item: str, process: int, processes: int) -> dict[str, int]:
    context = tensorstore.Context()
    with ThreadPoolExecutor(_READERS) as readers:
        found = {}
        for name in _stored_names(folder / item):
            spec = {"driver": "zarr", "kvstore": {**_database(folder / item), "path": f"{name}/"}}
            array = tensorstore.open(spec, context=context, read=True).result()
            mine = itertools.islice(_blocks(array), process, None, processes)
            parts = readers.map(lambda block, array=array: _read_digest(array, block), mine)
            found[f"{item}/{name}"] = sum(parts) % 2**32
    return found


def _read_digest(array: tensorstore.TensorStore, block: tuple[slice, ...]) -> int:
    values = np.ascontiguousarray(array[block].read().result()).reshape([each.stop - each.start for each in block])
    width = min(values.dtype.itemsize, 4)
    shape = values.shape + ((-1,) if values.dtype.itemsize > width else ())
    words = values.reshape(-1).view(f"uint{8 * width}").reshape(shape).astype(np.uint32)
    return int(_digest(words, tuple(each.start for each in block), np))


def _blocks(array: tensorstore.TensorStore) -> Iterator[tuple[slice, ...]]:
    """The blocks in which an array was written."""
    sizes = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    axes = [
        [slice(first, min(first + step, size)) for first in range(0, size, step)]
        for size, step in zip(array.shape, sizes, strict=True)
    ]
    return itertools.product(*axes)


def _stored_names(folder: Path) -> list[str]:
    keys = tensorstore.KvStore.open(_database(folder)).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))


def _database(folder: Path) -> dict[str, Any]:
    """Where TensorStore keeps the arrays of an item."""
    if is_local(folder):
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}
    bucket, _, root = str(folder).partition("://")[2].partition("/")
    return {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": bucket, "path": f"{root.rstrip('/')}/"}}
