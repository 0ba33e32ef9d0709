"""Mutation testing: makes small changes in lines that compute, and checks that the test suite notices them.

    PYTHONPATH=.:tests pytest -p lines --lines=LINES
    python tests/mutants.py LINES REPORT [--seed 0] [--count 100] [--workers 1]

A mutant is one change of one expression: a different operator, comparison or function, a number one larger, or a
removed sign. The first command records in the folder LINES which test files run which lines (`tests/lines.py`). Each
mutant is applied in a copy of the repository. Then the test files that run its line are run there, first those that run
the least code; the first failure kills the mutant. If no test runs the line in its own process, the whole suite is run.
REPORT is a file of JSON lines, one for each mutant; an interrupted run resumes from it. Changes that no test can
notice, because the program behaves the same, are in `tests/equivalents.py` with the reason and are not drawn.

Two existing tools do not fit. mutmut replaces every function by one that chooses a mutant, which breaks ``jit`` and
frozen dataclasses. cosmic-ray runs one command for all mutants, and changes annotations too.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue

from equivalents import EQUIVALENT

ROOT = Path(__file__).resolve().parents[1]

# All of posjax, and the parts of the trainer that compute numbers.
COMPUTING = (
    "posjax/**/*.py",
    "train/loop/*.py",
    "train/model/*.py",
    "train/data/packing.py",
    "train/data/pipeline.py",
    "train/evaluate/**/*.py",
    "train/languages/generators.py",
    "train/monitor/meter.py",
    "train/compare/study/measure.py",
    "train/report/numbers.py",
)

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip

_PAIRS = (
    ("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("floor", "ceil"), ("sin", "cos"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("all", "any"), ("sum", "mean"), ("log", "log1p"), ("exp", "expm1"),
    ("logical_and", "logical_or"),
)  # fmt: skip
FUNCTIONS = dict(_PAIRS) | {after: before for before, after in _PAIRS}

SECONDS = 1800


@dataclass(frozen=True)
class Mutant:
    """A change of one expression on lines `line` to `last`, from column `begin` to `end`, all as in ``ast``."""

    path: str
    line: int
    last: int
    begin: int
    end: int
    now: str
    instead: str

    def applied(self, text: str) -> str:
        """The module's text with the change."""
        lines = text.splitlines(keepends=True)
        head = lines[self.line - 1].encode()[: self.begin].decode()
        tail = lines[self.last - 1].encode()[self.end :].decode()
        return "".join(lines[: self.line - 1]) + head + self.instead + tail + "".join(lines[self.last :])


def changes(node: ast.AST) -> Iterator[str]:
    """The source code of everything that may replace an expression."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _of_text(node):
            yield _unparsed(ast.BinOp(node.left, OPERATORS[type(op)](), node.right))
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            yield _unparsed(ast.Compare(node.left, [OPERATORS[type(op)]()], node.comparators))
        case ast.BoolOp(op=op):
            yield _unparsed(ast.BoolOp(OPERATORS[type(op)](), node.values))
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield _unparsed(node.operand)
        case ast.Constant(value=value) if type(value) in (int, float):
            yield repr(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield _unparsed(ast.Call(ast.Name(FUNCTIONS[name]), node.args, node.keywords))
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in FUNCTIONS:
            yield _unparsed(ast.Call(ast.Attribute(of, FUNCTIONS[name]), node.args, node.keywords))


def _of_text(node: ast.BinOp) -> bool:
    """Whether text is concatenated or formatted, which is not arithmetic."""
    return any(isinstance(part, ast.JoinedStr | ast.Constant) and not _is_number(part) for part in ast.walk(node))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, bool)


def _unparsed(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"


def computing(tree: ast.AST) -> Iterator[ast.AST]:
    """The expressions of functions that compute: no annotations, decorators, defaults, messages or errors."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from _inside(statement)
        else:
            yield from computing(node)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from computing(ast.Module([node], []))
        return
    yield node
    left_out = {id(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
    for child in ast.iter_child_nodes(node):
        if id(child) not in left_out:
            yield from _inside(child)


def mutants(path: str, text: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    found = [
        Mutant(path, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset, ast.unparse(node), instead)
        for node in computing(ast.parse(text))
        for instead in changes(node)
    ]
    return [mutant for mutant in found if (path, _line(text, mutant), mutant.instead) not in EQUIVALENT]


def _line(text: str, mutant: Mutant) -> str:
    return text.splitlines()[mutant.line - 1].strip()


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """``count`` mutants of different lines. Every line that computes is equally likely, whatever its file."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted({path for pattern in COMPUTING for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        for mutant in mutants(name, path.read_text(encoding="utf-8")):
            lines.setdefault((name, mutant.line), []).append(mutant)
    choose = random.Random(seed)
    return [choose.choice(lines[line]) for line in choose.sample(sorted(lines), count)]


class Runs:
    """Which test files run which lines, as `tests/lines.py` recorded it."""

    def __init__(self, folder: Path):
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._breadth: Counter[str] = Counter()
        for file in folder.glob("*.json"):
            record = json.loads(file.read_text())
            for path, lines in record["lines"].items():
                self._breadth[record["test"]] += len(lines)
                for line in lines:
                    self._tests[path][line].add(record["test"])

    def of(self, mutant: Mutant) -> list[str]:
        """The test files that run a mutant's line, or the nearest recorded one before it; the smallest first.

        The nearest line is needed because Python reports only some lines of a statement that spans several.
        """
        recorded = self._tests.get(mutant.path, {})
        tests = recorded.get(max((line for line in recorded if line <= mutant.line), default=0), set())
        return sorted(tests, key=lambda test: (self._breadth[test], test))


def judged(copy: Path, mutant: Mutant, tests: Sequence[str]) -> dict:
    """The result for a mutant: the test that killed it, or None if all tests passed."""
    file = copy / mutant.path
    original, start = file.read_text(encoding="utf-8"), time.perf_counter()
    file.write_text(mutant.applied(original), encoding="utf-8")
    try:
        killer = failing(copy, ["-n", "0", *tests] if tests else [], SECONDS)
    finally:
        file.write_text(original, encoding="utf-8")
    return {**asdict(mutant), "killed_by": killer, "seconds": round(time.perf_counter() - start)}


def failing(copy: Path, arguments: Sequence[str], seconds: float) -> str | None:
    """The first test that fails; "time" if they take too long, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def copied(root: Path, place: Path) -> Path:
    """Copies the tracked files, as they are now, to ``place`` and returns it."""
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, place / name)
    return place


def described(line: dict) -> str:
    """The result for a mutant, as a line to read."""
    return f"{line['path']}:{line['line']}: {line['now']} -> {line['instead']}: {line['killed_by'] or 'ALIVE'}"


def read(file: Path) -> list[dict]:
    """The lines of a report; none if it does not exist yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", type=Path, help="what tests/lines.py wrote")
    parser.add_argument("report", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="mutants judged at the same time")
    arguments = parser.parse_args()
    runs = Runs(arguments.lines)
    done = [Mutant(**{name: line[name] for name in Mutant.__dataclass_fields__}) for line in read(arguments.report)]
    remaining = [mutant for mutant in drawn(ROOT, arguments.seed, arguments.count) if mutant not in done]
    with ExitStack() as stack, arguments.report.open("a") as report:
        copies = Queue()
        for _ in range(arguments.workers):
            copies.put(copied(ROOT, Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def judge(mutant: Mutant) -> dict:
            copy = copies.get()
            try:
                return judged(copy, mutant, runs.of(mutant))
            finally:
                copies.put(copy)

        for verdict in ThreadPool(arguments.workers).imap_unordered(judge, remaining):
            print(json.dumps(verdict), file=report, flush=True)
            print(described(verdict), flush=True)
    alive = [line for line in read(arguments.report) if line["killed_by"] is None]
    print(f"{len(alive)} of {arguments.count} are alive")


if __name__ == "__main__":
    main()
