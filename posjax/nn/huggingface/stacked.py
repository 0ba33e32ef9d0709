"""Experts of a layer in one tensor, as transformers has them in memory, as tensors of single experts."""

import re
from collections.abc import Mapping

from posjax.nn.huggingface.files import Entry, TensorFolder

_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


def split_experts(folder: TensorFolder, ends: Mapping[str, str], width: int) -> None:
    """Gives the experts of stacked tensors entries of their own.

    ``gate_up_proj [experts, 2 hidden, width]`` has the rows of the gate first; ``down_proj`` is
    ``[experts, width, hidden]``. In some releases (Qwen3-VL) both are transposed.

    Args:
        folder: the tensors of the files.
        ends: the ends of the new names after the number of the expert, by ``"gate"``, ``"up"`` and ``"down"``.
        width: that of the model. By it a layout is told from the other; one of the two tensors always tells.
    """
    stacked = {name: found for name, entry in folder.entries.items() if (found := _found(name, entry))}
    outer = {"gate_up_proj": 2, "down_proj": 1}
    swapped = any(folder.entries[name].shape[outer[found[2]]] != width for name, found in stacked.items())
    entries = {}
    for name, entry in folder.entries.items():
        if name not in stacked:
            entries[name] = entry
            continue
        start, kind = stacked[name].groups()
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        names = [f"{start}{n}{ends[part]}" for n in range(entry.shape[0]) for part in parts]
        entries |= dict(zip(names, _pieces(entry, len(parts), swapped), strict=True))
    folder.entries = entries


def _found(name: str, entry: Entry) -> re.Match | None:
    return _STACKED.match(name) if len(entry.shape) == 3 else None


def _pieces(entry: Entry, parts: int, swapped: bool) -> list[Entry]:
    """The matrices of all experts, each in so many parts by its rows; with ``swapped`` by its columns, transposed."""
    count, rows, columns = entry.shape
    size = entry.dtype.itemsize
    shape, strides, step = (rows // parts, columns), None, rows // parts * columns * size
    if swapped:
        shape, strides, step = (columns // parts, rows), (size, columns * size), columns // parts * size
    starts = [entry.start + n * rows * columns * size + part * step for n in range(count) for part in range(parts)]
    return [entry._replace(start=start, shape=shape, strides=strides) for start in starts]
