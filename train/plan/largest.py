"""The arrays that take most of a program's memory, read from the compiler's own report of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from train.plan.hlo import arrays

_REPORT = "*memory-usage-report.txt"
_LINE = re.compile(r"^\s*[\d.]+\w*\(\s*\d+%\);\s*([\d.]+)([KMGT]?)i?B?;[^;]*;[^;]*;(.*)$")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Allocation(NamedTuple):
    """Memory that several arrays use, one after the other."""

    bytes: float
    array: str  # the largest of these arrays, ``bf16[16,32,8192,8192]``


def ask_for_report(folder: Path) -> None:
    """Asks the compiler, before JAX is loaded, for its report in this folder; flags in the user's ``XLA_FLAGS`` win."""
    wanted = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{wanted} {os.environ.get('XLA_FLAGS', '')}".strip()


def largest(folder: Path, count: int = 5) -> list[Allocation]:
    """The largest allocations in HBM; empty if the folder has no report of the compiler, or one in an unknown form."""
    reports = sorted(folder.glob(_REPORT), key=lambda path: path.stat().st_size)
    return read(reports[-1].read_text(encoding="utf-8"))[:count] if reports else []


def read(report: str) -> list[Allocation]:
    """The allocations of the report's first part, which is about HBM, in its order: by falling size."""
    first = report.partition("\n\n")[0]
    found = filter(None, map(_LINE.match, first.splitlines()))
    allocations = [Allocation(float(line[1]) * _UNITS[line[2]], _largest_array(line[3])) for line in found]
    return [allocation for allocation in allocations if allocation.array]


def _largest_array(text: str) -> str:
    """The largest of several arrays, written ``bf16[16,32]``; empty if there is none."""
    found = max(arrays(text), key=lambda array: array.bytes, default=None)
    return f"{found.dtype}[{','.join(map(str, found.shape))}]" if found else ""
