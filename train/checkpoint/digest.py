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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

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


@jax.jit
def digests(items: Mapping[str, Any]) -> dict[str, UInt32[Array, ""]]:
    """The digest of every array of a checkpoint's items, on every device; all processes call it together.

    An array's name is its item and Orbax's name, as in ``parameters/stacks.0.0.mlp.up``.
    """
    return {
        f"{item}/{array_name(path)}": _digest(leaf, (0,) * leaf.ndim)
        for item, tree in items.items()
        for path, leaf in tree_flatten_with_path(tree)[0]
    }


def array_name(path: tuple[Any, ...]) -> str:
    """Orbax's name of the array at a path of an item's tree."""
    return keystr(path, simple=True, separator=".")


def values_of(found: Mapping[str, UInt32[Array, ""]]) -> dict[str, int]:
    """The result of `digests` as numbers; waits until the devices have computed it."""
    return {name: int(digest) for name, digest in found.items()}


def _words(array: Any) -> UInt32[Array, "..."]:
    """The bits of every element as one word of 32 bits, or as two along a last axis."""
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    width = min(array.dtype.itemsize, 4)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


@jax.jit
def _digest(block: Array, start: tuple[int, ...]) -> UInt32[Array, ""]:
    """The digest of a block that begins at `start` in its array; one program, which needs no memory but the block's."""
    words = _words(block)
    words = words.reshape(words.shape or (1,))
    start = start + (0,) * (words.ndim - len(start))
    for axis, (first, size) in enumerate(zip(start, words.shape, strict=True)):
        indices = jnp.arange(size, dtype=jnp.uint32) + first
        weighted = indices * np.uint32(pow(_AXIS, axis + 1, 2**32))
        words = words ^ weighted.reshape([size if each == axis else 1 for each in range(words.ndim)])
        words = words * np.uint32(_MIX[0])
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(_MIX[1])
    return (words ^ (words >> np.uint32(16))).sum(dtype=jnp.uint32)


def read_digests(folder: Path, item: str, process: int = 0, processes: int = 1) -> dict[str, int]:
    """This process's part of the digests of an item's arrays, from its files; the sum over all processes is the
    digest of each array.

    An array is read block by block, as its devices wrote it, so it need not fit into memory. Raises ValueError for
    files that TensorStore finds damaged, and OSError for those that it cannot read.
    """
    found, context, kept = {}, tensorstore.Context(), _database(folder / item)
    try:
        with ThreadPoolExecutor(_READERS) as readers:
            for name in _stored_names(kept):
                spec = {"driver": "zarr", "kvstore": {**kept, "path": f"{name}/"}}
                array = tensorstore.open(spec, context=context, read=True).result()
                mine = itertools.islice(_blocks(array), process, None, processes)
                parts = readers.map(partial(_read_digest, array), mine)
                found[f"{item}/{name}"] = sum(parts) % 2**32
    except ValueError as error:
        if str(error).startswith(_UNREAD):
            raise OSError(str(error)) from error
        raise
    return found


def _read_digest(array: tensorstore.TensorStore, block: tuple[slice, ...]) -> int:
    values = np.reshape(array[block].read().result(), [each.stop - each.start for each in block])
    return int(_digest(jnp.asarray(values), tuple(each.start for each in block)))


def _blocks(array: tensorstore.TensorStore) -> Iterator[tuple[slice, ...]]:
    """The blocks in which an array was written."""
    sizes = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    axes = [
        [slice(first, min(first + step, size)) for first in range(0, size, step)]
        for size, step in zip(array.shape, sizes, strict=True)
    ]
    return itertools.product(*axes)


def _stored_names(database: Mapping[str, Any]) -> list[str]:
    keys = tensorstore.KvStore.open(database).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))


def _database(folder: Path) -> dict[str, Any]:
    """Where TensorStore keeps the arrays of an item."""
    address = folder.absolute().as_uri() if is_local(folder) else quote(str(folder), safe=":/")
    return {"driver": "ocdbt", "base": f"{address}/"}
