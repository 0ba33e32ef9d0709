"""Files on disk and at URLs, and folders whose files are written atomically."""

import glob
import os
import tempfile
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from fsspec.utils import merge_offset_ranges

from train.runtime.paths import path as path_at


def is_url(path: str) -> bool:
    """Whether a path is a URL, not on this machine's disks; then every host sees the same file there."""
    return "://" in path and not path.startswith(("file://", "local://"))


def open_url(path: str, key: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path within it; `key` names the setting in errors."""
    try:
        return url_to_fs(path if is_url(path) else str(path_at(path)))
    except ImportError as error:
        raise ValueError(f"{key}: {path!r} needs a package that is not installed ({error})") from None
    except ValueError as error:
        raise ValueError(f"{key}: cannot open {path!r}: {error}") from None


def find(pattern: str, key: str) -> dict[str, dict[str, Any]]:
    """The files that a path, glob or URL names: fsspec's information on each, by full path."""
    system, path = open_url(pattern, key)
    if is_url(pattern):
        return {system.unstrip_protocol(name): info for name, info in system.glob(path, detail=True).items()}
    found = sorted(glob.glob(path, recursive=True))
    broken = {"type": "file", "size": 0}  # a link that leads nowhere, which its readers report
    return {name: system.info(name) if system.exists(name) else {"name": name, **broken} for name in found}


def optional(module: str, wanted_by: str) -> ModuleType:
    """A module of the extra `data`, or a ValueError that names the extra."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f'{wanted_by} needs {package}, not installed here: pip install -e ".[data]"') from None


class Span(NamedTuple):
    """Some bytes of a file."""

    name: str
    start: int
    stop: int


_PART = ".part"


class MemoryFolder:
    """Files in the memory of this process."""

    def __init__(self):
        self._files: dict[str, bytes] = {}

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Keeps the chunks, joined."""
        self._files[name] = b"".join(chunks)

    def read(self, name: str) -> bytes | None:
        """The content, or None."""
        return self._files.get(name)

    def map(self, name: str, kind: np.dtype) -> np.ndarray:
        """The numbers in a file."""
        return np.frombuffer(self._files[name], kind)

    def sizes(self) -> dict[str, int]:
        """The bytes of every file."""
        return {name: len(content) for name, content in self._files.items()}

    def spans(self, wanted: Sequence[Span]) -> list[memoryview]:
        """Views of the bytes of each span."""
        return [memoryview(self._files[span.name])[span.start : span.stop] for span in wanted]


class LocalFolder:
    """Files on a disk of this machine; spans of them are mapped into memory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._maps: dict[str, np.ndarray] = {}

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Writes a temporary file in the same folder, to disk, then renames it, so that the file is never partial.

        The temporary name is unique, since another host may write the same file; renaming is atomic on network disks
        too.
        """
        part = self.path / f".{name}.{uuid.uuid4().hex}{_PART}"
        try:
            with part.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            part.unlink(missing_ok=True)  # after an interrupt, or on a full disk
            raise
        try:
            os.replace(part, self.path / name)
        except FileNotFoundError:
            # `remove_leftovers` of another process removed this copy, which is harmless if the file existed before.
            if not (self.path / name).exists():
                raise

    def remove_leftovers(self) -> None:
        """Removes the temporary files that killed writers left. The files that others are still writing must already
        exist, because they lose their temporary copies."""
        for part in self.path.glob(f".*{_PART}"):
            part.unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        """The content, or None."""
        path = self.path / name
        return path.read_bytes() if path.exists() else None

    def map(self, name: str, kind: np.dtype) -> np.ndarray:
        """The numbers in an existing, nonempty file, mapped: loaded into memory only where they are accessed."""
        return np.memmap(self.path / name, kind, "r")

    def sizes(self) -> dict[str, int]:
        """The bytes of every file."""
        # A file that another process is writing may be gone before its size is read.
        return {entry.name: entry.stat().st_size for entry in os.scandir(self.path) if entry.name[-5:] != _PART}

    def spans(self, wanted: Sequence[Span]) -> list[np.ndarray]:
        """Views of the files, each of which is mapped into memory once."""
        return [self._map(span.name)[span.start : span.stop] for span in wanted]

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._maps[name] = np.memmap(self.path / name, np.uint8, "r").view(np.ndarray)
        return self._maps[name]


class RemoteFolder:
    """Files at a URL; object stores show a file only when it is complete. One request fetches adjacent spans."""

    def __init__(self, url: str):
        self.url = url
        self._system, self._path = open_url(url.rstrip("/"), "data.cache")

    def __str__(self) -> str:
        return self.url

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Assembles a file on this machine's disk and uploads it; nothing is uploaded if a chunk fails."""
        self._system.makedirs(self._path, exist_ok=True)
        with tempfile.NamedTemporaryFile() as local:
            for chunk in chunks:
                local.write(chunk)
            local.flush()
            self._system.put_file(local.name, f"{self._path}/{name}")

    def read(self, name: str) -> bytes | None:
        """The content, or None."""
        try:
            return self._system.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None

    def map(self, name: str, kind: np.dtype) -> np.ndarray:
        """The numbers in a file: memory-mapped from a copy on this machine's disk."""
        with tempfile.NamedTemporaryFile() as local:
            self._system.get_file(f"{self._path}/{name}", local.name)
            return np.memmap(local.name, kind, "r")  # the name is no longer needed

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, as the store lists them now."""
        self._system.invalidate_cache(self._path)
        found = self._system.ls(self._path, detail=True) if self._system.exists(self._path) else []
        return {info["name"].rpartition("/")[2]: info["size"] for info in found}

    def spans(self, wanted: Sequence[Span]) -> list[memoryview]:
        """The bytes of each span; spans that touch or overlap are fetched together."""
        columns = [f"{self._path}/{span.name}" for span in wanted], [s.start for s in wanted], [s.stop for s in wanted]
        paths, starts, stops = merge_offset_ranges(*map(list, columns), max_gap=0)
        contents = self._system.cat_ranges(paths, starts, stops, on_error="raise")
        runs = list(zip(paths, starts, strict=True))
        found = []
        for path, start, stop in zip(*columns, strict=True):
            run = bisect_right(runs, (path, start)) - 1
            found.append(memoryview(contents[run])[start - starts[run] : stop - starts[run]])
        return found


Folder = MemoryFolder | LocalFolder | RemoteFolder
"""Named files, each written atomically."""


def folder_at(path: str) -> Folder:
    """The folder at a path or URL."""
    return RemoteFolder(path) if is_url(path) else LocalFolder(path_at(path))


class Scratch:
    """An array that grows in an unnamed file of the temporary folder (``TMPDIR``), for data too large for memory."""

    def __init__(self, kind: type):
        self._kind, self._file = np.dtype(kind), tempfile.TemporaryFile()  # noqa: SIM115

    def append(self, values: np.ndarray) -> None:
        """Adds values at the end."""
        self._file.write(np.ascontiguousarray(values, self._kind).data)

    def mapped(self) -> np.ndarray:
        """All values, memory-mapped; there must be at least one. Nothing can be added afterwards; the file lives as
        long as the map."""
        with self._file as file:
            file.flush()
            return np.memmap(file, self._kind, "r").view(np.ndarray)
