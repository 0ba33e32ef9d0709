"""Where metrics are written: JSON lines, TensorBoard, Weights & Biases."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

from train.config import Config, to_dict


class Log(Protocol):
    """Takes the numbers of a step; those that are not known are None."""

    def write(self, step: int, **values: Any) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """One JSON object a line, each with a ``step``. Opened again, it goes on after its last whole line.

    A resumed run repeats the steps since its checkpoint; those that stand there already are not written twice.
    """

    def __init__(self, path: Path):
        kept = path.read_bytes() if path.exists() else b""
        whole = kept[: kept.rfind(b"\n") + 1]
        self.last: dict[str, Any] = json.loads(whole.splitlines()[-1]) if whole else {"step": 0}
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line, unless one of this step or a later one stands there."""
        if step > self.last["step"]:
            self.last = {"step": step, **values}
            self._file.write(json.dumps(self.last).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Nothing is written behind it."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class TensorBoardLog:
    """Scalars in TensorBoard's event files, which TensorBoard reads as one run however many there are."""

    def __init__(self, directory: Path):
        # tensorboardX needs half a second to import, so only a run that writes imports it.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, **values: Any) -> None:
        """Adds the numbers of a step."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still in its queue."""
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases, which goes on when the same run directory does."""

    def __init__(self, config: Config, directory: Path):
        check_wandb(config.monitor.wandb)
        import wandb

        own = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=config.monitor.wandb,
            name=config.name,
            id=own,
            resume="allow",
            dir=str(directory),
            config=to_dict(config),
        )

    def write(self, step: int, **values: Any) -> None:
        """Adds the numbers of a step."""
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def check_wandb(project: str) -> None:
    """Raises ValueError for a project where wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"monitor.wandb={project}: the package is not installed: pip install wandb, or leave the key empty"
        )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The values that are numbers and known."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
