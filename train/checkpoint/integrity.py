"""Whether what was written is still what is read: the size and CRC-32 of every file under a folder.

The processes share the work. Of n processes, number p reads the files whose name's own CRC-32 is p modulo n, so they
need not agree on anything, and writes ``checksums/p-of-n.json`` into the folder, last of all:
``{"files": {name: [bytes, CRC-32]}}``. A folder is whole when all n of these are there and every file is as they say.
Any other number of processes checks it.
"""

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec

from train.runtime.paths import write_file

FOLDER = "checksums"
_BLOCK = 1 << 24  # bytes read at a time
_READERS = 8  # files read at a time; zlib's CRC-32 lets other threads run


def seal(folder: Path, process: int, processes: int) -> None:
    """Writes this process's part of the checksums; after all processes have written all else."""
    names = _share(files(folder), process, processes)
    (folder / FOLDER).mkdir(exist_ok=True)
    sums = dict(zip(names, _checksums(folder, names), strict=True))
    write_file(folder / FOLDER / f"{process}-of-{processes}.json", json.dumps({"files": sums}) + "\n")


def problem(folder: Path, process: int = 0, processes: int = 1) -> str:
    """What is wrong with this process's share of a folder, in a few words; empty when nothing is.

    Names and sizes are all compared first, which takes one listing; then the bytes of the share.
    """
    try:
        expected = _expected(folder)
        found = files(folder)
        for name, (size, _) in sorted(expected.items()):
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]} bytes of {size}"
        names = _share(expected, process, processes)
        for name, found_sums in zip(names, _checksums(folder, names), strict=True):
            if found_sums != expected[name]:
                return f"{name} holds other bytes than were written"
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def files(folder: Path) -> dict[str, int]:
    """The size of every file under a folder but the checksums, by its name from there."""
    system, root = fsspec.core.url_to_fs(str(folder))
    system.invalidate_cache()  # other processes write there too
    found = system.find(root, detail=True)
    sizes = {name[len(root) :].lstrip("/"): entry["size"] for name, entry in found.items()}
    return {name: size for name, size in sizes.items() if not name.startswith(FOLDER + "/")}


def _expected(folder: Path) -> dict[str, list[int]]:
    """Bytes and CRC-32 of every file, by all parts of the checksums. ValueError when one is missing or unreadable."""
    parts = sorted((folder / FOLDER).glob("*-of-*.json")) if (folder / FOLDER).exists() else []
    if not parts:
        raise ValueError("its writing was not finished")
    count = int(parts[0].stem.partition("-of-")[2])
    if len(parts) != count:
        raise ValueError(f"its writing was not finished: {len(parts)} of {count} parts of its checksums are there")
    expected = {}
    for part in parts:
        try:
            expected |= json.loads(part.read_bytes())["files"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{FOLDER}/{part.name} is unreadable") from None
    return expected


def _share(names: dict, process: int, processes: int) -> list[str]:
    return sorted(name for name in names if zlib.crc32(name.encode()) % processes == process)


def _checksums(folder: Path, names: list[str]) -> list[list[int]]:
    """Bytes read and CRC-32 of each file."""
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda name: _checksum(folder / name), names))


def _checksum(file: Path) -> list[int]:
    size = checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]
