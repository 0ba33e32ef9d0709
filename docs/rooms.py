"""The map of the rooms: which folder or module of a package imports which, read from the import statements."""

import ast
from collections.abc import Mapping
from pathlib import Path

from figures import as_svg
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
Graph = Mapping[str, frozenset[str]]


def imports(package: str) -> Graph:
    """The rooms that each room of a package imports, by room. Private modules and the root are left out."""
    files = sorted((ROOT / package).rglob("*.py"))
    found: dict[str, set[str]] = {}
    for file in files:
        room = _room(file.relative_to(ROOT / package).parts[0])
        if room:
            found.setdefault(room, set()).update(_imported(file, package) - {room})
    return {room: frozenset(others & found.keys()) for room, others in found.items()}


def _room(part: str) -> str:
    """The name of a folder or file as a room; empty for private ones and for `__init__`."""
    name = part.removesuffix(".py")
    return "" if name.startswith("_") else name


def _imported(file: Path, package: str) -> set[str]:
    """The rooms that a file imports, at its top or inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {_room(name.split(".")[1]) for name in names if name.startswith(f"{package}.")}
    return found - {""}


def floors(graph: Graph) -> list[list[str]]:
    """The rooms by floor, lowest first: a room is one floor above the highest one that it imports.

    Raises ValueError for rooms that import each other in a circle.
    """
    floor: dict[str, int] = {}
    while len(floor) < len(graph):
        ready = [room for room, below in graph.items() if room not in floor and below <= floor.keys()]
        if not ready:
            raise ValueError(f"these rooms import each other: {sorted(graph.keys() - floor.keys())}")
        floor |= {room: 1 + max((floor[other] for other in graph[room]), default=-1) for room in ready}
    return [sorted(room for room, level in floor.items() if level == n) for n in range(1 + max(floor.values()))]


def steps(graph: Graph) -> list[tuple[str, str]]:
    """The imports that do not follow from a chain of other imports."""
    reach: dict[str, frozenset[str]] = {}
    for level in floors(graph):
        for room in level:
            reach[room] = graph[room].union(*(reach[other] for other in graph[room]))
    return [
        (room, other)
        for room, below in graph.items()
        for other in sorted(below)
        if not any(other in reach[between] for between in below)
    ]


def draw(package: str) -> str:
    """The map as SVG: the lowest floor at the bottom, and an arrow for each import of `steps`."""
    graph = imports(package)
    levels = floors(graph)
    made = Figure(figsize=(7.5, 0.75 * len(levels)))
    axes = made.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(-0.5, len(levels) - 0.5)
    places = _places(levels)
    for room, other in steps(graph):
        arrow = {"arrowstyle": "->", "color": "0.7", "shrinkA": 9, "shrinkB": 9}
        axes.annotate("", places[other], places[room], arrowprops=arrow)
    for room, place in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
        axes.annotate(room, place, ha="center", va="center", bbox=box)
    return as_svg(made)


def _places(levels: list[list[str]]) -> dict[str, tuple[float, float]]:
    """The position of each room in the drawing: its floor is the height; rooms of a floor are side by side, centred."""
    widest = max(map(len, levels))
    return {
        room: (0.5 + (n - (len(level) - 1) / 2) / widest, height)
        for height, level in enumerate(levels)
        for n, room in enumerate(level)
    }
