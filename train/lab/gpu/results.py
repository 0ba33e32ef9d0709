"""The file of results: what is known is not measured again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from posjax._checks import check
from train.lab.gpu.jobs import Job, Shape

_FIXED = ("device", "jax", "jaxlib", "torch", "tokamax")
"""What must be the same for all results of a file."""


class Results:
    """The results in a file: one JSON object a line, the machine first, each written as soon as it is known.

    A problem is a result too: who wants to try again deletes its line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.machine: dict[str, str] = {}
        self.found: dict[Job, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            values = json.loads(line)
            if "machine" in values:
                self.machine |= values["machine"]
                return
            job = Job(values.pop("what"), values.pop("library"), Shape(**values.pop("shape")))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path}, line {number}: not a result of this bench; delete the line") from None
        self.found[job] = values

    def claim(self, machine: dict[str, str]) -> None:
        """Writes on which machine results are measured from now on.

        Raises ValueError if the file has results of another device, or of other versions. A library that was not
        installed before may be added.
        """
        for name in _FIXED:
            known = self.machine.get(name)
            found = machine.get(name, known)
            check(
                known in (None, found),
                f"name: {self.path} has results of {name} {known}, found {found}; another name would work, as in "
                "name=gpu-2",
            )
        if machine.keys() - self.machine.keys():
            self._write({"machine": machine})
        self.machine |= machine

    def add(self, job: Job, result: dict[str, Any]) -> None:
        """Writes a result: numbers, or a problem."""
        self._write(dataclasses.asdict(job) | result)
        self.found[job] = result

    def _write(self, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
