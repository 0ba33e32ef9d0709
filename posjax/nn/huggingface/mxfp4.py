"""Tensors of experts in MXFP4, the format of gpt-oss, read as bfloat16.

Every 32 numbers of a row share a scale: the byte s means ``2^(s - 127)``. A number has 4 bits. A byte holds two
numbers, the first one in its lower half (OCP Microscaling Formats, version 1.0).
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from posjax._checks import check
from posjax.nn.huggingface.files import Entry, TensorFolder

_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = _VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]
"""The two numbers that a byte holds, for all 256 bytes."""
_AT_ONCE = 2**18
"""Numbers unpacked at a time, which limits the extra float32 memory."""


class Mxfp4:
    """The tensors of a folder; tensors in MXFP4 get the names and shapes that unpacked releases use.

    ``NAME_blocks [experts, rows, groups, 16]`` and ``NAME_scales [experts, rows, groups]`` are together
    ``NAME [experts, 32 groups, rows]``.

    Args:
        folder: the tensors of the files.
    """

    def __init__(self, folder: TensorFolder):
        self._folder = folder
        packed = [name.removesuffix(_BLOCKS) for name in folder.entries if name.endswith(_BLOCKS)]
        packed_names = {name + end for name in packed for end in (_BLOCKS, _SCALES)}
        plain = {name: entry for name, entry in folder.entries.items() if name not in packed_names}
        self.entries: Mapping[str, Entry] = plain | {name: self._entry(name) for name in packed}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, bfloat16 if it is packed in the file."""
        if name in self._folder.entries:
            return self._folder.tensor(name)
        experts, width, rows = self.entries[name].shape
        blocks, scales = (self._folder.tensor(name + end) for end in (_BLOCKS, _SCALES))
        blocks = blocks.reshape(-1, width // 32, 16)
        scales = scales.reshape(-1, width // 32)
        numbers = np.empty((experts * rows, width), jnp.bfloat16)
        step = max(1, _AT_ONCE // width)
        for n in range(0, len(numbers), step):
            numbers[n : n + step] = _unpacked(blocks[n : n + step], scales[n : n + step])
        return numbers.reshape(experts, rows, width).swapaxes(1, 2)

    def _entry(self, name: str) -> Entry:
        """The entry of a packed tensor. Raises ValueError for blocks and scales that do not fit each other."""
        blocks = self._folder.entries[name + _BLOCKS]
        scales = self._folder.entries.get(name + _SCALES)
        check(scales is not None, f"tensor {name + _SCALES!r} is missing: the numbers of {name}{_BLOCKS} need scales")
        fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape and blocks.shape[3] == 16
        check(
            fits,
            f"tensor {name + _BLOCKS!r} has shape {blocks.shape} and its scales {scales.shape}; they must be "
            "(experts, rows, groups, 16) and (experts, rows, groups)",
        )
        experts, rows, groups, half = blocks.shape
        return Entry(blocks.file, blocks.start, np.dtype(jnp.bfloat16), (experts, groups * half * 2, rows))


def _unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``value(nibble) 2^(scale - 127)``, float32 ``[rows, 32 groups]``.

    From blocks ``uint8 [rows, groups, 16]``, two nibbles a byte, and scales ``uint8 [rows, groups]``.
    """
    exponents = scales.astype(np.int32)[..., None, None] - 127
    return np.ldexp(_PAIRS[blocks], exponents).reshape(len(blocks), -1)


def is_packed(folder: TensorFolder) -> bool:
    """Whether a folder has tensors in MXFP4."""
    return any(name.endswith(_BLOCKS) for name in folder.entries)
