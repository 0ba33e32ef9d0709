"""Experts of a layer in one tensor, as transformers has them in memory, as tensors of single experts."""

import math
import re
from collections.abc import Mapping

from posjax.nn.huggingface.files import Entry, TensorFolder

_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


def split_experts(folder: TensorFolder, ends: Mapping[str, str]) -> None:
    """Gives the experts of stacked tensors entries of their own.

    ``gate_up_proj [experts, 2 hidden, width]`` has the rows of the gate first; ``down_proj`` is
    ``[experts, width, hidden]``.

    Args:
        folder: the tensors of the files.
        ends: the ends of the new names after the number of the expert, by ``"gate"``, ``"up"`` and ``"down"``.
    """
    entries = {}
    for name, entry in folder.entries.items():
        found = _STACKED.match(name)
        if found is None or len(entry.shape) != 3:
            entries[name] = entry
            continue
        parts = ("gate", "up") if found[2] == "gate_up_proj" else ("down",)
        rows = entry.shape[1] // len(parts)
        names = [f"{found[1]}{n}{ends[part]}" for n in range(entry.shape[0]) for part in parts]
        entries |= dict(zip(names, _pieces(entry, (rows, entry.shape[2])), strict=True))
    folder.entries = entries


def _pieces(entry: Entry, shape: tuple[int, int]) -> list[Entry]:
    """A tensor in pieces of a shape, one after the other."""
    size = math.prod(shape) * entry.dtype.itemsize
    count = math.prod(entry.shape) // math.prod(shape) if math.prod(shape) else 0
    return [entry._replace(start=entry.start + n * size, shape=shape) for n in range(count)]
