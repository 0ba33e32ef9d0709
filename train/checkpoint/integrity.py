"""Whether a checkpoint is still what was saved, checked against its seal, which was written at the save.

The seal has: the name and size of every file, from one listing; the CRC-32 of the small files, which describe the
arrays; for files of arrays the checksum that an object store (such as Google's) gives in the same listing; and the
`digest` of every array, which is compared at restore. So neither sealing nor checking reads an array.

The processes share the work. Of n processes, number p seals the files whose name's own CRC-32 is p modulo n, so the
processes need no coordination. It writes ``checksums/p-of-n.json`` into the folder, after all else: ``{"files": {name:
[bytes, checksum]}, "arrays": {name: digest}}``. A folder is complete when all n of these exist and everything matches
them. Any number of processes can check it.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import fsspec

from train.runtime.distributed import decide
from train.runtime.lines import in_a_line
from train.runtime.paths import names_in, write_file

FOLDER = "checksums"
_READERS = 8  # files read at a time


class File(NamedTuple):
    """A file in a listing: its size in bytes, and the store's checksum of it; None if the store has none."""

    size: int
    mark: str | None


class Seal(NamedTuple):
    """The content of all parts of a seal: size and checksum (if any) of each file, and the digest of each array."""

    files: dict[str, tuple[int, int | str | None]]
    arrays: dict[str, int]


def seal(folder: Path, process: int, processes: int, arrays: Mapping[str, int]) -> None:
    """Writes this process's part of the seal. Call it after all processes have written everything else."""
    found = files(folder)
    mine = _share(found, process, processes)
    small = [name for name in mine if not _holds_values(name)]
    sums = {name: found[name].mark for name in mine} | dict(zip(small, _checksums(folder, small), strict=True))
    part = {"files": {name: [found[name].size, sums[name]] for name in mine}, "arrays": dict(arrays)}
    (folder / FOLDER).mkdir(exist_ok=True)
    write_file(folder / FOLDER / f"{process}-of-{processes}.json", json.dumps(part) + "\n")


def _holds_values(name: str) -> bool:
    """Whether a file is one of TensorStore's files of values, which hold nearly all bytes of a checkpoint."""
    return PurePosixPath(name).parent.name == "d"


def problems(folder: Path, process: int = 0, processes: int = 1) -> Iterator[str]:
    """The problems of this process's share of a folder, each in a few words.

    All names and sizes are compared first, which takes one listing; then the checksums of the share. No array is read.

    Raises OSError for what cannot be read, for example when the network is down: that is not damage.
    """
    changed = "{} has changed since it was written".format
    try:
        expected, found = read_seal(folder).files, files(folder)
        same = []
        for name, (size, sealed) in sorted(expected.items()):
            if name not in found:
                yield f"{name} is missing"
            elif found[name].size != size:
                yield f"{name} has {found[name].size} bytes of {size}"
            elif isinstance(sealed, str) and found[name].mark not in (None, sealed):
                yield changed(name)
            elif isinstance(sealed, int):
                same.append(name)
        mine = _share(same, process, processes)
        checksums = zip(mine, _checksums(folder, mine), strict=True)
        yield from (changed(name) for name, checksum in checksums if checksum != expected[name][1])
    except FileNotFoundError as error:
        yield f"{error.filename or error} is missing"
    except ValueError as error:
        yield in_a_line(error)


def differing(folder: Path, arrays: Mapping[str, int]) -> list[str]:
    """The problems of arrays that were read, found by their digests; all processes call it together."""
    expected = decide(lambda: read_seal(folder).arrays)
    other = [name for name, digest in arrays.items() if expected.get(name) != digest]
    return [f"the values of the array {name} have changed since they were saved" for name in other]


def files(folder: Path) -> dict[str, File]:
    """Every file under a folder except the seal, by its relative name, from one listing."""
    system, root = fsspec.core.url_to_fs(str(folder))
    system.invalidate_cache()  # other processes write there too
    # Otherwise a folder that cannot be read would look like an empty one.
    found = system.find(root, detail=True, on_error="raise")
    names = {name: name[len(root) :].lstrip("/") for name in found}
    return {
        names[name]: File(entry["size"], f"crc32c {entry['crc32c']}" if entry.get("crc32c") else None)
        for name, entry in found.items()
        if not names[name].startswith(FOLDER + "/")
    }


def missing(folder: Path) -> str:
    """What is missing of the seal, in a few words; empty if all processes have sealed the folder."""
    parts = _parts(folder)
    count = int(parts[0].stem.partition("-of-")[2]) if parts else 1
    if len(parts) == count:
        return ""
    found = f": {len(parts)} of {count} parts of its checksums exist" if parts else ""
    return f"it was not completely written{found}"


def _parts(folder: Path) -> list[Path]:
    return [folder / FOLDER / name for name in names_in(folder / FOLDER) if name[0].isdigit()]


def read_seal(folder: Path) -> Seal:
    """All parts of the seal together. Raises ValueError when one is missing or unreadable."""
    if found := missing(folder):
        raise ValueError(found)
    whole = Seal({}, {})
    for part in _parts(folder):
        try:
            values = json.loads(part.read_bytes())
            whole.files.update(values["files"])
            whole.arrays.update(values["arrays"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{FOLDER}/{part.name} is unreadable") from None
    return whole


def _share(names: Mapping | list[str], process: int, processes: int) -> list[str]:
    return sorted(name for name in names if zlib.crc32(name.encode()) % processes == process)


def _checksums(folder: Path, names: list[str]) -> list[int]:
    """The CRC-32 of each file."""
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda name: zlib.crc32((folder / name).read_bytes()), names))
