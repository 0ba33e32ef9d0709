"""Where documents come from, and which of them are held out of training."""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from train.config import DataConfig


class Document(NamedTuple):
    """One text. The name decides whether it is held out, and never depends on where the data lies on a machine."""

    name: str
    text: bytes


def documents(config: DataConfig, split: Literal["train", "held_out"]) -> list[Document]:
    """The documents of one split, by name; empty ones are left out.

    A document is held out when the hash of its name, read as a number in [0, 1), is below ``config.held_out``. At
    least one document goes to each side, so two are needed unless ``held_out`` is 0, which holds out none.

    Raises FileNotFoundError for a path that names nothing, and ValueError for unreadable or missing text.
    """
    found = sorted(document for document in _read(config) if document.text)
    if not found:
        raise ValueError(f"data: no text in {_describe(config)}; every document is empty")
    held_out = _held_out([document.name for document in found], config.held_out)
    if split == "held_out" and not held_out:
        raise ValueError("data.held_out is 0, so there are no held-out documents to evaluate on; 0.05 would work")
    return [document for document in found if (document.name in held_out) == (split == "held_out")]


def _held_out(names: list[str], share: float) -> set[str]:
    if not share:
        return set()
    if len(names) < 2:
        raise ValueError(
            f"data: {names[0]!r} is the only document, so none can be held out; split the text into several files, "
            "or set data.held_out=0 to train without evaluation"
        )
    ranked = sorted(names, key=_hash)
    below = sum(_hash(name) < share for name in names)
    return set(ranked[: min(max(below, 1), len(names) - 1)])


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _describe(config: DataConfig) -> str:
    return "Python's standard library" if config.source == "stdlib" else ", ".join(config.paths)


def _read(config: DataConfig) -> Iterator[Document]:
    if config.source == "stdlib":
        yield from standard_library()
        return
    for name, path in _files(config.paths).items():
        yield from _read_file(name, path, config.text_key)


def standard_library() -> Iterator[Document]:
    """The .py files of Python's own standard library.

    Left out are third-party packages, test directories, and two that are not code: the help texts of ``pydoc_data``
    and the tables of ``encodings``, which repeat each other nearly line by line.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
    paths = [path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts)]
    if not paths:
        raise ValueError(f"data.source=stdlib: no .py files under {root}; use data.source=files and data.paths")
    for path in paths:
        yield Document(path.relative_to(root).as_posix(), path.read_bytes())


def _files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """The files that the patterns name, under the part of the path that a pattern leaves open (or the file's name)."""
    files: dict[str, Path] = {}
    seen: set[Path] = set()
    for pattern in patterns:
        found = [Path(path) for path in glob.glob(pattern, recursive=True)]
        found = [path for path in found if path.is_file()]
        if not found:
            folder = f"; for all of a folder write {pattern.rstrip('/')}/**/*.txt" if Path(pattern).is_dir() else ""
            raise FileNotFoundError(f"data.paths: no file matches {pattern!r}{folder}")
        for path in found:
            if path.resolve() in seen:  # under another name it could be trained on and held out too
                continue
            seen.add(path.resolve())
            name = path.relative_to(_fixed_part(pattern)).as_posix()
            if files.setdefault(name, path) is not path:
                raise ValueError(f"data.paths: {files[name]} and {path} are both called {name!r}; use one common glob")
    return files


def _fixed_part(pattern: str) -> Path:
    """The folders of a pattern before its first wildcard; of a plain path, its folder."""
    parts = Path(pattern).parts[:-1]
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:fixed])


def _read_file(name: str, path: Path, text_key: str) -> Iterator[Document]:
    if path.suffix == ".txt":
        yield Document(name, path.read_bytes())
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if line.strip():
                yield Document(f"{name}:{number}", _read_line(line, f"{path}, line {number}", text_key))
    else:
        raise ValueError(f"data.paths: {path} is neither .txt nor .jsonl")


def _read_line(line: bytes, where: str, text_key: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        keys = list(record) if isinstance(record, dict) else []
        near = get_close_matches(text_key, keys, n=1)
        hint = f"; did you mean data.text_key={near[0]}?" if near else ""
        raise ValueError(f"{where}: no text under {text_key!r}, found keys {keys}{hint}")
    # A lone surrogate is legal in JSON but not in UTF-8.
    return record[text_key].encode(errors="replace")
