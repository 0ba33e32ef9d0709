"""Where metrics are written: JSON lines, TensorBoard, Weights & Biases."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from train.config import Config, to_dict
from train.runtime.paths import is_local, names_in, path
from train.runtime.rows import read_rows


class _Object:
    """A file in an object store, which cannot append: every `flush` writes the whole file."""

    def __init__(self, location: Path, content: bytes = b""):
        self._location, self.content = location, bytearray(content)

    def write(self, data: bytes) -> None:
        self.content += data

    def flush(self) -> None:
        self._location.write_bytes(bytes(self.content))

    def close(self) -> None:
        self.flush()


class MetricsLog:
    """One JSON object per line, each with a ``step``. When opened again, it continues after its last complete line.

    A resumed run repeats the steps since its checkpoint; steps that are already in the file are not written again.
    ``metrics.jsonl`` holds all lines in a local directory, but only the first ones in an object store; see
    `read_metrics`.
    """

    def __init__(self, directory: Path):
        self._directory, location = directory, _parts(directory)[-1]
        content = location.read_bytes() if location.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.last: dict[str, Any] = _last_line(whole, location)
        self._file = location.open("ab") if is_local(location) else _Object(location, whole)
        if is_local(location):
            self._file.truncate(len(whole))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line, unless the file already has this step or a later one."""
        if step > self.last["step"]:
            if isinstance(self._file, _Object) and len(self._file.content) >= _PART:
                number = len(_parts(self._directory))
                self._file = _Object(self._directory / "metrics" / f"{number}.jsonl")
            self.last = {"step": step, **values}
            self._file.write(json.dumps(self.last).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _last_line(whole: bytes, location: Path) -> dict[str, Any]:
    try:
        last = json.loads(whole.splitlines()[-1]) if whole else {"step": 0}
        return {**last, "step": int(last["step"])}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{location}: its last line holds no metrics; take the line out to resume the run") from None


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; empty if there are none. An incomplete last line, left by an interruption, is
    dropped.

    An object store cannot append to an object. So there a run writes ``metrics.jsonl`` only until it has 64 KiB, then
    ``metrics/1.jsonl``, and so on: only the newest part is rewritten.
    """
    return [row for location in _parts(directory) if location.exists() for row in read_rows(location)]


_PART = 1 << 16  # size in bytes from which a part is no longer extended


def _parts(directory: Path) -> list[Path]:
    """The files of all parts that have lines, in order; always with the first, even if it does not exist."""
    count = 0 if is_local(directory) else len(names_in(directory / "metrics"))
    return [directory / "metrics.jsonl", *(directory / "metrics" / f"{n}.jsonl" for n in range(1, count + 1))]


class _Objects:
    """How tensorboardX opens files of an object store."""

    def open(self, address: str) -> _Object:
        return _Object(path(address))

    def directory_check(self, _: str) -> None:
        """Does nothing: an object store needs no folders."""


class TensorBoardLog:
    """Scalars in TensorBoard's event files, which TensorBoard reads as one run however many there are."""

    def __init__(self, directory: Path):
        # tensorboardX takes about a second to import, so only a run that writes imports it.
        from tensorboardX import SummaryWriter
        from tensorboardX.record_writer import register_writer_factory

        if not is_local(directory):
            register_writer_factory(directory.protocol, _Objects())
        # In an object store each flush writes the whole object, so flushes are rarer there.
        seconds = 10 if is_local(directory) else 60
        # File names contain the time in seconds; a run that resumes in the same second must not overwrite its file.
        self._writer = SummaryWriter(str(directory), flush_secs=seconds, filename_suffix=f".{time.time_ns()}")

    def write(self, step: int, **values: Any) -> None:
        """Adds the numbers of a step."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still in the queue."""
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases, which resumes when the same run directory does."""

    def __init__(self, config: Config, directory: Path):
        import wandb

        local = is_local(directory)
        name = str(directory.absolute() if local else directory)
        self._run = wandb.init(
            project=config.monitor.wandb,
            name=config.name,
            id=hashlib.sha256(name.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(directory) if local else None,
            config=to_dict(config),
        )

    def write(self, step: int, **values: Any) -> None:
        """Adds the numbers of a step."""
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The values that are numbers, without None and text."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
