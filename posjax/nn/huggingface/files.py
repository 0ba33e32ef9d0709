"""Tensors in safetensors files: memory-mapped, so that a view copies only the part that is needed.

The format is a JSON header and the tensors' bytes (https://github.com/huggingface/safetensors). The ``safetensors``
package slices only along the stored axes and saves only whole arrays; to read or write one device's shard of a fused
tensor in place, this module maps the bytes itself.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from posjax._checks import POINTER, check, check_no_pointer, describe

SUFFIX = ".safetensors"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a released folder that are copied unchanged."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """The location of a tensor: its file, its first byte, dtype and shape.

    ``strides`` are the bytes between neighbours along each axis, as in NumPy; None if no other tensor lies in between.
    """

    file: str
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """The bytes in the file from the first number to the last."""
        size = self.dtype.itemsize
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape) * size
        return size + sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True))


def every(tensor: str) -> bool:
    """True: of all tensors of a folder."""
    return True


class TensorFolder:
    """The tensors of a folder of safetensors files, local or at a URL.

    A tensor that a file's ``__metadata__`` names as another name of one in the file is found under both names
    (``safetensors.torch.save_model`` stores shared tensors so). If there is an index, a tensor is read from the file
    that the index names.

    Args:
        path: the folder.
        needed: says by its name whether a tensor is needed; the others are left out, and a file that by the index has
            none that is needed may be missing.

    Attributes:
        files: the names of the files with the tensors.
        entries: the tensors, by name.

    Raises:
        FileNotFoundError: if the folder or a safetensors file in it does not exist.
        ValueError: for files that are broken, for a tensor that stands in two files or not in the file that the index
            names, and for pickles, which can run code when they are read.
    """

    def __init__(self, path: str | Path, needed: Callable[[str], bool] = every):
        self._needed = needed
        self._files, self._root = open_location(path)
        with reaching(path):
            names = names_in(self._files, self._root)
        self._check_found(names)
        self.files, file_of = self._wanted(names)
        headers = [self._read_header(file) for file in self.files]
        self.entries = self._merged([entries for entries, _ in headers], file_of)
        for _, aliases in headers:
            kept = {name: self.entries[other] for name, other in aliases.items() if other in self.entries}
            self.entries = kept | self.entries

    def tensor(self, name: str) -> np.ndarray:
        """A tensor: memory-mapped if the folder is local, otherwise downloaded."""
        entry = self.entries[name]
        path = f"{self._root}/{entry.file}"
        if not entry.bytes:
            return np.empty(entry.shape, entry.dtype)
        if is_local(self._files):
            content = np.memmap(path, np.uint8, "r", entry.start, entry.bytes)
        else:
            content = self._files.cat_file(path, start=entry.start, end=entry.start + entry.bytes)
        return np.ndarray(entry.shape, entry.dtype, content, strides=entry.strides)

    def _check_found(self, names: Sequence[str]) -> None:
        if any(name.endswith(SUFFIX) for name in names):
            return
        pickles = [name for name in names if name.endswith(_PICKLES)]
        check(
            not pickles,
            f"{self._root} holds its tensors as a pickle ({pickles[0] if pickles else None}), which can run code when "
            "it is read; convert it to safetensors first",
        )
        raise FileNotFoundError(f"{self._root} has no *.safetensors file")

    def _wanted(self, names: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """The files to read, and the file of every tensor by the index, if that is read.

        ``model.safetensors`` comes first, as in transformers; else the files in the index; else all.
        """
        if WHOLE in names:
            return [WHOLE], {}
        if INDEX not in names:
            return [name for name in names if name.endswith(SUFFIX)], {}
        file_of = read_json(self._files, f"{self._root}/{INDEX}").get("weight_map")
        check(isinstance(file_of, dict), f"{self._root}/{INDEX} is broken: it has no weight_map of tensors to files")
        file_of = {name: str(file) for name, file in file_of.items() if self._needed(name)}
        wanted = sorted(set(file_of.values()))
        lost = [name for name in wanted if name not in names]
        check(not lost, f"{self._root}: {INDEX} names {describe(lost[0] if lost else None)}, which does not exist")
        return wanted, file_of

    def _merged(self, headers: Sequence[Mapping[str, Entry]], file_of: Mapping[str, str]) -> dict[str, Entry]:
        """The tensors of all files. Raises ValueError unless every tensor has one place."""
        entries: dict[str, Entry] = {}
        for name, entry in (item for header in headers for item in header.items()):
            if file_of.get(name, entry.file) != entry.file or not self._needed(name):
                continue
            other = entries.setdefault(name, entry)
            check(
                other is entry,
                f"{self._root}: tensor {name!r} is in {other.file} and in {entry.file}; remove the file that does not "
                f"belong to the model, or add a {INDEX}",
            )
        lost = next((name for name in file_of if name not in entries), "")
        check(not lost, f"{self._root}: {INDEX} says that {file_of.get(lost)} has tensor {lost!r}, but it does not")
        return entries

    def _read_header(self, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
        """The tensors of a file, and other names for them."""
        path = f"{self._root}/{file}"
        total = self._files.size(path)
        check(total >= 8, f"{path} is not a safetensors file: it has {total} bytes")
        start = self._files.cat_file(path, start=0, end=len(POINTER))
        check_no_pointer(start, path)
        size = int.from_bytes(start[:8], "little")
        check(
            8 + size <= total,
            f"{path} is cut short or not a safetensors file: its header ends after the end of the file",
        )
        header = _header(self._files.cat_file(path, start=8, end=8 + size), path)
        metadata = header.pop("__metadata__", None)
        aliases = {k: v for k, v in metadata.items() if isinstance(v, str)} if isinstance(metadata, dict) else {}
        return {name: _entry(name, fields, file, 8 + size, total, path) for name, fields in header.items()}, aliases


def _header(content: bytes, path: str) -> dict[str, Any]:
    try:
        header = json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from None
    except KeyError as error:
        raise ValueError(f"{path} is broken: its header has {error} twice") from None
    check(
        isinstance(header, dict), f"{path} is not a safetensors file: its header is {describe(header)}, not an object"
    )
    return header


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises KeyError for a name that it has twice."""
    members = {}
    for name, value in pairs:
        if name in members:
            raise KeyError(name)
        members[name] = value
    return members


def _is_whole(fields: Any) -> bool:
    """Whether the header of a tensor has its dtype, its shape and where its bytes start and end."""
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        return False
    numbers = [fields["shape"], fields["data_offsets"]]
    counts = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in numbers)
    return counts and isinstance(fields["dtype"], str) and len(fields["data_offsets"]) == 2


def _entry(name: str, fields: Mapping[str, Any], file: str, base: int, total: int, path: str) -> Entry:
    check(_is_whole(fields), f"{path} is broken: its header has {describe(fields)} for tensor {name!r}")
    known = fields["dtype"] in _DTYPES
    check(known, f"tensor {name!r} in {path} has dtype {describe(fields['dtype'])}; {', '.join(_DTYPES)} can be read")
    start, end = fields["data_offsets"]
    dtype = np.dtype(_DTYPES[fields["dtype"]])
    shape = tuple(fields["shape"])
    check(base + end <= total, f"{path} is cut short: tensor {name!r} ends after the end of the file")
    fits = end - start == math.prod(shape) * dtype.itemsize
    check(fits, f"{path} is broken: tensor {name!r} has {end - start} bytes, which do not fit its shape {shape}")
    return Entry(file, base + start, dtype, shape)


class FileLayout(NamedTuple):
    """A file to be written: its name, its header and the location of each tensor."""

    file: str
    header: bytes
    entries: dict[str, Entry]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max(e.start + math.prod(e.shape) * e.dtype.itemsize for e in self.entries.values())


def lay_out(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], most: int) -> list[FileLayout]:
    """The files for tensors of these dtypes and shapes, each of at most ``most`` bytes unless one tensor is larger."""
    groups: list[dict] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if groups[-1] and filled + size > most:
            groups.append({})
            filled = 0
        groups[-1][name] = (np.dtype(dtype), tuple(shape), filled, filled + size)
        filled += size
    one = len(groups) == 1
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    return [_layout(WHOLE if one else name, group) for name, group in zip(names, groups, strict=True)]


def _layout(file: str, group: Mapping[str, tuple]) -> FileLayout:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape, start, end) in group.items():
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    base = 8 + len(text)
    entries = {name: Entry(file, base + start, dtype, shape) for name, (dtype, shape, start, _) in group.items()}
    return FileLayout(file, len(text).to_bytes(8, "little") + text, entries)


def create(folder: Path, layouts: Sequence[FileLayout]) -> None:
    """Creates the files with headers and space for the tensors, and the index if there are several files."""
    for layout in layouts:
        with (folder / layout.file).open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.size)
    if len(layouts) > 1:
        entries = [entry for layout in layouts for entry in layout.entries.values()]
        total = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
        file_of = {name: layout.file for layout in layouts for name in layout.entries}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def writable(folder: Path, entry: Entry) -> np.ndarray:
    """A tensor in a file made by ``create``, mapped for writing."""
    return np.memmap(folder / entry.file, entry.dtype, "r+", entry.start, entry.shape)


def sync(file: Path) -> None:
    """Waits until the content of a file is on disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def open_location(path: str | Path) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it."""
    try:
        import fsspec  # only needed for released models
    except ModuleNotFoundError:
        how = 'released models need the package fsspec: pip install -e ".[hf]"'
        raise ModuleNotFoundError(f"{path}: {how}") from None
    check(bool(str(path)), "path is empty; give a folder or a file")
    files, root = fsspec.core.url_to_fs(str(path))
    return files, root.rstrip("/")


@contextmanager
def reaching(path: str | Path) -> Iterator[None]:
    """Converts exceptions of a file system (no network, no permission) to OSError, in one line with the path."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # every file system of fsspec has its own exceptions
        raise OSError(f"{path} cannot be reached: {type(error).__name__}: {' '.join(str(error).split())}") from error


def names_in(files: Any, root: str) -> list[str]:
    """The names in a folder, sorted; none if the folder does not exist."""
    paths = files.ls(root, detail=False) if files.isdir(root) else []
    return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)


def is_local(files: Any) -> bool:
    """Whether a file system is local."""
    return "file" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)


def read_json(files: Any, path: str) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError without the file, and ValueError if the file holds anything else."""
    if not files.isfile(path):
        raise FileNotFoundError(f"there is no {path}")
    content = files.cat_file(path)
    check_no_pointer(content, path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    check(isinstance(value, dict), f"{path} must hold an object, found {type(value).__name__}")
    return value
