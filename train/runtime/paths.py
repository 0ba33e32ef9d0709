"""Paths: folders of this machine, and addresses of object stores such as ``gs://bucket/runs``; files written there.

The hosts of a pod share no disk, so what a run reads and writes may be at any address that fsspec knows. Checkpoints
may be in local folders and ``gs://`` only, because TensorStore writes their arrays.
"""

import os
import uuid
from pathlib import Path
from urllib.parse import unquote

CHECKPOINT_SCHEMES = ("gs",)
ROOT = Path(__file__).resolve().parents[2]
"""The root folder of the checkout."""


def python_path() -> str:
    """``PYTHONPATH`` for a process that imports this checkout."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def path(text: str | os.PathLike) -> Path:
    """The folder or file at `text`: a `Path` on this machine, also for ``file://`` or ``local://``, else a `UPath`.

    A `UPath` has the methods of a `Path`. Raises ValueError for a kind of address that is unknown, or whose package is
    not installed.
    """
    scheme, separator, rest = str(text).partition("://")
    if not separator:
        return Path(text)
    if scheme in ("file", "local"):
        return Path(unquote(rest))
    import fsspec  # imported here, so that a local run or an error in a config need not wait for them
    from upath import UPath

    try:
        fsspec.get_filesystem_class(scheme)
        return UPath(text)
    except ValueError:
        raise ValueError(f"{text}: unknown kind of address {scheme}://; gs:// and local folders would work") from None
    except ImportError as error:
        raise ValueError(f"{text}: {error}") from None


def is_local(location: Path) -> bool:
    """Whether a path is on this machine, or on a disk mounted there."""
    return isinstance(location, Path)


def is_store_error(error: BaseException) -> bool:
    """Whether an error is of the packages for Google's store, for example on missing access; it is not an OSError."""
    return type(error).__module__.partition(".")[0] in ("gcsfs", "google", "aiohttp")


def look_anew(location: Path) -> None:
    """Drops cached listings of an object store: gcsfs keeps them, and does not see what others write."""
    if not is_local(location):
        location.fs.invalidate_cache()


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if it does not exist (in an object store an empty folder does not exist).

    In an object store the listing is current, with what other processes wrote.
    """
    look_anew(folder)
    return sorted(location.name for location in folder.iterdir()) if folder.exists() else []


def check_output(output: str) -> None:
    """Raises ValueError for a value of the key `output` under which runs cannot be saved."""
    try:
        check_checkpoints(path(output))
    except ValueError as error:
        raise ValueError(f"output: {error}") from None


def check_checkpoints(location: Path) -> None:
    """Raises ValueError for a location where no checkpoint can be written."""
    scheme = getattr(location, "protocol", "")
    if not is_local(location) and scheme not in CHECKPOINT_SCHEMES:
        raise ValueError(
            f"{location}: checkpoints cannot be written to {scheme}://, which TensorStore does not write; a local "
            f"folder or {'://, '.join(CHECKPOINT_SCHEMES)}:// would work"
        )


def write_file(location: Path, text: str) -> None:
    """Writes a file atomically, at any address, even if several processes write the same file."""
    if not is_local(location):
        location.write_text(text, encoding="utf-8")  # an object store never shows a partial object
        return
    part = location.with_name(f".{location.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, location)
    finally:
        part.unlink(missing_ok=True)
