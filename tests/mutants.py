"""Draws small faults into lines that compute, and asks the suite to find them.

    PYTHONPATH=.:tests pytest -p lines --lines LINES
    python tests/mutants.py LINES REPORT [--seed 0] [--count 100] [--workers 1]

A mutant is one change of one expression: another operator, comparison or function, a number one larger, a sign left
out. The first command notes in the folder LINES which test files run which lines (`tests/lines.py`). Of every mutant,
in a copy of the repository, the test files that run its line are asked, those that run the least code first; at the
first failure it is killed. If no test of this process runs the line, the whole suite is asked. REPORT is a file of JSON
lines, one for each mutant, and is resumed. Changes that no test could find, because the program means the same, are in
``EQUIVALENT`` with the reason, and others are drawn in their place.

mutmut rewrites every function into a chooser of mutants, which ``jit`` and frozen dataclasses do not survive, and
cosmic-ray runs one command for all mutants and changes annotations too; so the draw is our own.
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

ROOT = Path(__file__).resolve().parents[1]

# posjax whole, and of the trainer what computes numbers.
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

# (file, line without spaces around it, what stands there instead): why no test can tell them apart.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "posjax/rotary/generators.py",
        "diagonal = omega[..., None] * np.eye(omega.shape[-1])",
        "(1)",
    ): "there are two axes",
    (
        "posjax/linear/kernels.py",
        "unit = x * jax.lax.rsqrt(jnp.where(squared > 0, squared, 1))",
        "2",
    ): "a vector of zeros stays zero, whatever it is multiplied by",
    (
        "posjax/masks/by_token.py",
        "return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))",
        "1",
    ): "any id that is not negative is one document",
    (
        "posjax/attention/api.py",
        "fewer = queries < keys",
        "(queries <= keys)",
    ): "where they are as many, nothing is refused and nothing said",
    (
        "posjax/training_positions.py",
        "return jnp.sort(jax.lax.top_k(words, count)[1].astype(jnp.int32), axis=-1)",
        "(1)",
    ): "there are two axes",
    (
        "posjax/attention/checks.py",
        "return int(ahead[np.argmax(np.any(seen, axis=tuple(range(np.ndim(seen) - 1))))])",
        "2",
    ): "there is one query, so its axis may stay",
    (
        "posjax/masks/by_position.py",
        "return np.reshape(np.asarray(self.dilation, np.int32), (1, -1, 1, 1))",
        "2",
    ): "of -1: NumPy fills in any negative size",
    (
        "posjax/attention/tpu/terms.py",
        "vector = jnp.zeros_like(sums, shape=(sums.shape[0], size))",
        "(jnp.ones_like(sums, shape=(sums.shape[0], size)))",
    ): "a linear function has one transpose, wherever it is taken",
    (
        "posjax/rotary/base.py",
        "for _ in range(6):",
        "7",
    ): "another step of Newton's method only skips more of what is negative anyway",
    (
        "posjax/attention/tpu/forward.py",
        "if kind.masked or len(found) > 1:",
        "(len(found) >= 1)",
    ): "with neither a mask nor remapped pairs, the pattern finds nothing to do",
    (
        "posjax/rotary/generators.py",
        'check_even("the size of the generators", matrices.shape[1])',
        "2",
    ): "the matrices are square",
    (
        "posjax/layout.py",
        "first, last = x.reshape(2, self.shards, -1, *x.shape[1:])",
        "2",
    ): "for x.shape[1:]: -1 takes in the axis that is left out, and the caller gives the whole its shape back",
    (
        "train/model/extension.py",
        'if {"factor", "original_length"} <= given.keys():',
        "({'factor', 'original_length'} < given.keys())",
    ): "the mapping has a name too",
    (
        "posjax/attention/tpu/backward_dma.py",
        "wait = partial(for_pairs, row.pairs, choice, lambda _, to: row.stored(0, 0, to, third).wait())",
        "1",
    ): "to wait for a copy needs its size alone, whatever its source is",
    (
        "train/monitor/meter.py",
        '(getattr(device, "slice_index", 0), tuple(getattr(device, "coords", None) or (device.id,)))',
        "1",
    ): "either all devices have a slice or none",
    (
        "posjax/rotary/base.py",
        "negative = np.flatnonzero(_sums(inverse_frequencies, start, stop) < 0)",
        "(_sums(inverse_frequencies, start, stop) <= 0)",
    ): "no sum of cosines is 0 to the last bit",
    (
        "posjax/nn/huggingface/load.py",
        "model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))",
        "1",
    ): "of what is drawn, shapes alone are used",
    (
        "posjax/nn/decoder.py",
        "graph, wanted = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))",
        "1",
    ): "of what is drawn, shapes alone are used",
    (
        "posjax/attention/online.py",
        "total = jnp.where(seen, self.total, 1)",
        "2",
    ): "of a row that sees nothing, the divided sum is 0 and the logarithm is not taken",
    (
        "posjax/attention/api.py",
        "finite = jnp.where(seen, lse, 0)",
        "1",
    ): "of a row that sees nothing, neither it nor what follows from it is taken",
    (
        "posjax/rotary/base.py",
        "columns = math.isqrt(stop - start) + 1",
        "2",
    ): "the sums are the same for any number of columns",
    (
        "posjax/rotary/longrope.py",
        "return _Individual(tuple(steps.tolist()), a.first if random.random() < 0.5 else b.first)",
        "(random.random() <= 0.5)",
    ): "a drawn number is a half once in 2^53",
    (
        "posjax/scales.py",
        "for _ in range(6):",
        "7",
    ): "the root is found by then to rounding",
    (
        "posjax/rotary/generators.py",
        "weights = np.random.default_rng(0).uniform(1, 2, len(matrices))",
        "1",
    ): "of the seed: any mixture finds the planes",
    (
        "posjax/attention/tiles.py",
        "order = xp.argsort(xp.where(grid == 0, kinds + 1, grid), axis=-1, stable=True)",
        "2",
    ): "any number above all kinds puts empty tiles last",
    (
        "posjax/attention/tpu/forward_dma.py",
        "return [buffers, sums, pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((copies, 2))]",
        "3",
    ): "of the numbers in SMEM: one more is never used",
    (
        "posjax/diagnostics/rotation.py",
        "return np.abs(_phasors(rule, distances, head_dim, options).cumsum(-1)).mean(-1)",
        "(1)",
    ): "there are two axes",
    (
        "train/model/sharding.py",
        'LENGTH_AXES = {"positions": -1, "coordinates": -2}',
        "(1)",
    ): "positions have two axes",
    (
        "posjax/diagnostics/anomaly.py",
        "query = 2 * jnp.square(q) + 0j",
        "3",
    ): "it is counted where a score rises, whatever its scale",
}

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
    """The sources of what may stand in the place of an expression."""
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
    """Whether text is joined or filled in, which is no arithmetic."""
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
    """``count`` mutants, each of another line; every line that computes is as likely, whatever its file."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted({path for pattern in COMPUTING for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        for mutant in mutants(name, path.read_text(encoding="utf-8")):
            lines.setdefault((name, mutant.line), []).append(mutant)
    choose = random.Random(seed)
    return [choose.choice(lines[line]) for line in choose.sample(sorted(lines), count)]


class Runs:
    """Which test files run which lines, from what `tests/lines.py` wrote."""

    def __init__(self, folder: Path):
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._breadth: Counter[str] = Counter()
        for file in folder.glob("*.json"):
            noted = json.loads(file.read_text())
            for path, lines in noted["lines"].items():
                self._breadth[noted["test"]] += len(lines)
                for line in lines:
                    self._tests[path][line].add(noted["test"])

    def of(self, mutant: Mutant) -> list[str]:
        """The test files that run a mutant's line, or the nearest noted one before it: those of the least code first.

        Python notes some lines of a statement alone.
        """
        noted = self._tests.get(mutant.path, {})
        tests = noted.get(max((line for line in noted if line <= mutant.line), default=0), set())
        return sorted(tests, key=lambda test: (self._breadth[test], test))


def judged(copy: Path, mutant: Mutant, tests: Sequence[str]) -> dict:
    """What became of a mutant: killed by which of the test files, or alive after all of them."""
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
    told = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return told[1] if told else f"pytest ended with {done.returncode}"


def copied(root: Path, place: Path) -> Path:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, place / name)
    return place


def described(line: dict) -> str:
    """What became of a mutant, for a reader."""
    return f"{line['path']}:{line['line']}: {line['now']} -> {line['instead']}: {line['killed_by'] or 'ALIVE'}"


def read(file: Path) -> list[dict]:
    """The lines of a report; none before it is begun."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", type=Path, help="what tests/lines.py wrote")
    parser.add_argument("report", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="mutants judged at the same time")
    asked = parser.parse_args()
    runs = Runs(asked.lines)
    done = [Mutant(**{name: line[name] for name in Mutant.__dataclass_fields__}) for line in read(asked.report)]
    left = [mutant for mutant in drawn(ROOT, asked.seed, asked.count) if mutant not in done]
    with ExitStack() as stack, asked.report.open("a") as lines:
        copies = Queue()
        for _ in range(asked.workers):
            copies.put(copied(ROOT, Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def judge(mutant: Mutant) -> dict:
            copy = copies.get()
            try:
                return judged(copy, mutant, runs.of(mutant))
            finally:
                copies.put(copy)

        for verdict in ThreadPool(asked.workers).imap_unordered(judge, left):
            print(json.dumps(verdict), file=lines, flush=True)
            print(described(verdict), flush=True)
    alive = [line for line in read(asked.report) if line["killed_by"] is None]
    print(f"{len(alive)} of {asked.count} are alive")


if __name__ == "__main__":
    main()
