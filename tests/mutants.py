"""Mutation testing, by hand: makes small changes in lines that compute, and finds a test that notices each.

    python tests/mutants.py draw MUTANTS.json [--seed 0] [--count 100]
    python tests/mutants.py judge MUTANTS.json REPORT.jsonl [--workers 1]

A mutant is one change of one expression: a different operator, comparison or function, a number one larger, or a
removed sign. The first command draws mutants and writes each down with its line, so that the same ones can be judged
again after tests or other code have changed. The second first runs the suite once, in a copy of the repository, to
learn which tests evaluate the drawn expressions. Then it applies one mutant after the other and runs those tests; the
first failure kills the mutant. REPORT has a JSON line for each mutant; an interrupted run resumes from it. Some mutants
change nothing that anybody could notice.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]

# All of posjax, and the parts of the trainer that compute numbers.
COMPUTING = (
    "posjax/**/*.py",
    "train/loop/*.py",
    "train/model/*.py",
    "train/data/packing.py",
    "train/data/pipeline.py",
    "train/evaluate/**/*.py",
    "train/lab/formal_languages/generators.py",
    "train/monitor/meter.py",
    "train/compare/study/study.py",
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
    text: str  # the lines of the module
    now: str
    instead: str

    def applied(self, module: str, instead: str = "") -> str:
        """The module's text with the change, or with another expression."""
        lines = module.splitlines(keepends=True)
        head = lines[self.line - 1].encode()[: self.begin].decode()
        tail = lines[self.last - 1].encode()[self.end :].decode()
        return "".join(lines[: self.line - 1]) + head + (instead or self.instead) + tail + "".join(lines[self.last :])

    def found(self, module: str) -> "Mutant | None":
        """The mutant where its lines stand now; None if the module has them no more, or several times."""
        begin = module.find(self.text)
        if begin < 0 or module.find(self.text, begin + 1) >= 0:
            return self if module.splitlines()[self.line - 1 : self.last] == self.text.splitlines() else None
        line = module.count("\n", 0, begin) + 1
        return replace(self, line=line, last=line + self.last - self.line)


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


def mutants(path: str, module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    lines = module.splitlines(keepends=True)

    def mutant(node: ast.AST, instead: str) -> Mutant:
        text = "".join(lines[node.lineno - 1 : node.end_lineno])
        place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        return Mutant(path, *place, text, ast.unparse(node), instead)

    return [mutant(node, instead) for node in computing(ast.parse(module)) for instead in changes(node)]


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """``count`` mutants of different lines. Every line that computes is equally likely, whatever its file."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted({path for pattern in COMPUTING for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        for mutant in mutants(name, path.read_text(encoding="utf-8")):
            lines.setdefault((name, mutant.line), []).append(mutant)
    choose = random.Random(seed)
    return [choose.choice(lines[line]) for line in choose.sample(sorted(lines), count)]


NOTE = """
import os

seen = set()


def note(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (number, test) not in seen:
        seen.add((number, test))
        with open({folder!r} + f"/{{os.getpid()}}", "a") as file:
            print(number, test, file=file)
"""
"""The module that notes which test evaluates which expression; a test's processes inherit its name."""


def evaluating(root: Path, chosen: Sequence[Mutant], seconds: float) -> list[list[str]]:
    """For each mutant the tests that evaluate its expression, those that evaluate fewest of the others first."""
    with tempfile.TemporaryDirectory() as place:
        copy, notes = copied(root, Path(place) / "copy"), Path(place) / "notes"
        notes.mkdir()
        (copy / "noted.py").write_text(NOTE.format(folder=str(notes)))
        # From the last to the first, and inner before outer, so that the places of the others stay right.
        for number, mutant in sorted(enumerate(chosen), key=lambda pair: (-pair[1].line, -pair[1].begin)):
            file = copy / mutant.path
            module = file.read_text(encoding="utf-8")
            noted = f"(__import__('noted').note({number}) or ({mutant.now}))"
            file.write_text(mutant.applied(module, noted), encoding="utf-8")
        failing(copy, [], seconds, stop=False)
        pairs = {tuple(line.split(" ", 1)) for file in notes.iterdir() for line in file.read_text().splitlines()}
    found: dict[int, list[str]] = {number: [] for number in range(len(chosen))}
    for number, test in pairs:
        found[int(number)].append(test)
    breadth = {test: sum(test in tests for tests in found.values()) for _, test in pairs}
    return [sorted(tests, key=lambda test: (breadth[test], test)) for tests in found.values()]


def judged(copy: Path, mutant: Mutant, tests: Sequence[str]) -> dict:
    """The result for a mutant: the test that killed it, or None if all tests passed, or none evaluates it."""
    file = copy / mutant.path
    original, start = file.read_text(encoding="utf-8"), time.perf_counter()
    file.write_text(mutant.applied(original), encoding="utf-8")
    try:
        killer = failing(copy, ["-n", "0", *tests], SECONDS) if tests else None
    finally:
        file.write_text(original, encoding="utf-8")
    return {**asdict(mutant), "killed_by": killer, "tests": len(tests), "seconds": round(time.perf_counter() - start)}


def failing(copy: Path, arguments: Sequence[str], seconds: float, stop: bool = True) -> str | None:
    """The first test that fails; "time" if they take too long, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", *(["-x"] if stop else []), "-p", "no:cacheprovider", *arguments]
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


def judge(file: Path, report: Path, workers: int) -> None:
    """Judges the drawn mutants that the report has not, and writes a line for each."""
    done = [Mutant(**{name: line[name] for name in Mutant.__dataclass_fields__}) for line in read(report)]
    chosen = []
    for values in json.loads(file.read_text()):
        mutant = Mutant(**values).found((ROOT / values["path"]).read_text(encoding="utf-8"))
        if mutant is None:
            print(f"{values['path']}:{values['line']}: the line is gone")
        elif mutant not in done:
            chosen.append(mutant)
    tests = evaluating(ROOT, chosen, 4 * SECONDS)
    with ExitStack() as stack, report.open("a") as lines:
        copies = Queue()
        for _ in range(workers):
            copies.put(copied(ROOT, Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def verdict(pair: tuple[Mutant, Sequence[str]]) -> dict:
            copy = copies.get()
            try:
                return judged(copy, *pair)
            finally:
                copies.put(copy)

        for found in ThreadPool(workers).imap_unordered(verdict, zip(chosen, tests, strict=True)):
            print(json.dumps(found), file=lines, flush=True)
            print(described(found), flush=True)
    alive = [line for line in read(report) if line["killed_by"] is None]
    print(f"{len(alive)} of {len(read(report))} are alive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="draw mutants and write them to a file")
    draw.add_argument("mutants", type=Path)
    draw.add_argument("--seed", type=int, default=0)
    draw.add_argument("--count", type=int, default=100)
    judging = commands.add_parser("judge", help="find a test that notices each of them")
    judging.add_argument("mutants", type=Path)
    judging.add_argument("report", type=Path)
    judging.add_argument("--workers", type=int, default=1, help="mutants judged at the same time")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        chosen = [asdict(mutant) for mutant in drawn(ROOT, arguments.seed, arguments.count)]
        arguments.mutants.write_text(json.dumps(chosen, indent=1) + "\n")
    else:
        judge(arguments.mutants, arguments.report, arguments.workers)


if __name__ == "__main__":
    main()
