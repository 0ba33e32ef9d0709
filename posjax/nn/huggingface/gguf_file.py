"""The metadata of a GGUF file, and where its tensors are (the format: docs/gguf.md of ggml-org/ggml).

The reader of the package gguf makes an array of every token of a vocabulary, which takes ten seconds for the 262,144
tokens of Gemma 3. Quantised numbers are decoded by that package.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posjax._checks import POINTER, check, check_count, check_no_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensors, in files that do not say
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_TEXT, _ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """A tensor of a file: its shape, rows first; the number of its format; where its bytes are."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class Header(NamedTuple):
    """The metadata by key, and the tensors by llama.cpp's names."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: str | Path) -> Header:
    """Reads all of a file but its tensors.

    Raises:
        ValueError: for a file that is not a GGUF file of a known version, or is cut short.
    """
    with open(path, "rb") as file:
        start = file.read(max(len(POINTER), len(_MAGIC)))
        check_no_pointer(start, path)
        check(start.startswith(_MAGIC), f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _header(_Cursor(content, len(_MAGIC)), len(content))
            except (ValueError, KeyError, struct.error) as error:
                raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


class _Cursor:
    """Reads the values of a file one after the other."""

    def __init__(self, content: mmap.mmap, place: int):
        self._content, self.place = content, place

    def number(self, kind: str) -> Any:
        """A number of a NumPy kind."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> list[Any]:
        """Several numbers of one kind."""
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def text(self) -> str:
        """A text, after its length in bytes."""
        (length,) = struct.unpack("<Q", self._take(8))
        return self._take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value of the metadata: a number, a text, or a list of either."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        of, count = self.number("u4"), self.number("u8")
        return self.numbers(_NUMBERS[of], count) if of in _NUMBERS else [self.value(of) for _ in range(count)]

    def _take(self, size: int) -> bytes:
        found = self._content[self.place : self.place + size]
        check(len(found) == size, "it is cut short")
        self.place += size
        return found


def _header(cursor: _Cursor, size: int) -> Header:
    version = cursor.number("u4")
    check(version in _VERSIONS, f"it has version {version}; little-endian files of {_VERSIONS} can be read")
    tensor_count, value_count = cursor.numbers("u8", 2)
    values = {cursor.text(): cursor.value(cursor.number("u4")) for _ in range(value_count)}
    infos = list(_tensor_infos(cursor, tensor_count))
    alignment = values.get("general.alignment", _ALIGNMENT)
    check_count("general.alignment", alignment)
    data = -(-cursor.place // alignment) * alignment
    tensors = {each.name: each._replace(offset=data + each.offset) for each in infos}
    for each in tensors.values():
        check(each.offset + math.prod(byte_shape(each)) <= size, f"it is cut short in tensor {each.name}")
    return Header(values, tensors)


def _tensor_infos(cursor: _Cursor, count: int) -> Iterator[StoredTensor]:
    for _ in range(count):
        name, axes = cursor.text(), cursor.number("u4")
        shape = tuple(reversed(cursor.numbers("u8", axes)))
        yield StoredTensor(name, shape, cursor.number("u4"), cursor.number("u8"))


def byte_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """The shape of a tensor's bytes. Raises ValueError for an unknown format."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    return quant_shape_to_byte_shape(tensor.shape, GGMLQuantizationType(tensor.kind))


def read_tensor(path: str | Path, tensor: StoredTensor) -> np.ndarray:
    """A tensor in float32. Raises ValueError for a format that the package gguf cannot decode."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    stored = np.memmap(path, np.uint8, "r", tensor.offset, byte_shape(tensor))
    try:
        return np.asarray(dequantize(stored, kind), np.float32).reshape(tensor.shape)
    except NotImplementedError:
        raise ValueError(f"{path}: tensor {tensor.name} is stored as {kind.name}, which cannot be decoded") from None
