"""Mutation testing: makes small changes in lines that compute, and checks that the test suite notices them.

    PYTHONPATH=.:tests pytest -p lines --lines=LINES
    python tests/mutants.py LINES REPORT [--seed 0] [--count 100] [--workers 1]

A mutant is one change of one expression: a different operator, comparison or function, a number one larger, or a
removed sign. The first command records in the folder LINES which test files run which lines (`tests/lines.py`). Each
mutant is applied in a copy of the repository. Then the test files that run its line are run there, first those that run
the least code; the first failure kills the mutant. If no test runs the line in its own process, the whole suite is run.
REPORT is a file of JSON lines, one for each mutant; an interrupted run resumes from it. Changes that no test can
notice, because the program behaves the same, are in ``EQUIVALENT`` with the reason and are not drawn.

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

# (file, line without leading and trailing spaces, new expression): why no test can notice the change.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "posjax/rotary/generators.py",
        "diagonal = omega[..., None] * np.eye(omega.shape[-1])",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "posjax/linear/kernels.py",
        "unit = x * jax.lax.rsqrt(jnp.where(squared > 0, squared, 1))",
        "2",
    ): "a vector of zeros stays zero, whatever it is multiplied by",
    (
        "posjax/masks/by_token.py",
        "return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))",
        "1",
    ): "all valid tokens have the same id, and any id that is not negative will do",
    (
        "posjax/attention/api.py",
        "fewer = queries < keys",
        "(queries <= keys)",
    ): "if there are as many queries as keys, no error is raised and the message is not used",
    (
        "posjax/training_positions.py",
        "return jnp.sort(jax.lax.top_k(words, count)[1].astype(jnp.int32), axis=-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "posjax/attention/checks.py",
        "return int(ahead[np.argmax(np.any(seen, axis=tuple(range(np.ndim(seen) - 1))))])",
        "2",
    ): "there is only one query, so its axis need not be reduced",
    (
        "posjax/masks/by_position.py",
        "return np.reshape(np.asarray(self.dilation, np.int32), (1, -1, 1, 1))",
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "posjax/attention/tpu/terms.py",
        "vector = jnp.zeros_like(sums, shape=(sums.shape[0], size))",
        "(jnp.ones_like(sums, shape=(sums.shape[0], size)))",
    ): "the function is linear, so its transpose is the same at every point",
    (
        "posjax/rotary/base.py",
        "for _ in range(6):",
        "7",
    ): "a seventh step of Newton's method only skips a little more of an interval that is negative anyway",
    (
        "posjax/attention/tpu/forward.py",
        "if kind.masked or len(found) > 1:",
        "(len(found) >= 1)",
    ): "with neither a mask nor remapped pairs, the pattern changes nothing",
    (
        "posjax/rotary/generators.py",
        'check_even("the size of the generators", matrices.shape[1])',
        "2",
    ): "the matrices are square",
    (
        "posjax/layout.py",
        "first, last = x.reshape(2, self.shards, -1, *x.shape[1:])",
        "2",
    ): "of the 1 in x.shape[1:]: -1 then includes the omitted axis, and the caller restores the shape",
    (
        "train/model/extension.py",
        'if {"factor", "original_length"} <= given.keys():',
        "({'factor', 'original_length'} < given.keys())",
    ): "the mapping also has the key 'name', so the two sets are never equal",
    (
        "posjax/attention/tpu/backward_dma.py",
        "wait = partial(for_pairs, row.pairs, choice, lambda _, to: row.stored(0, 0, to, third).wait())",
        "1",
    ): "waiting for a copy uses only its size, not its source",
    (
        "train/monitor/meter.py",
        '(getattr(device, "slice_index", 0), tuple(getattr(device, "coords", None) or (device.id,)))',
        "1",
    ): "either all devices have a slice_index or none has, so any default gives the same groups",
    (
        "posjax/rotary/base.py",
        "negative = np.flatnonzero(_sums(inverse_frequencies, start, stop) < 0)",
        "(_sums(inverse_frequencies, start, stop) <= 0)",
    ): "no sum of cosines is exactly 0",
    (
        "posjax/nn/huggingface/load.py",
        "model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))",
        "1",
    ): "of the seed: only the shapes of the parameters are used",
    (
        "posjax/nn/decoder.py",
        "graph, wanted = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))",
        "1",
    ): "of the seed: only the shapes of the parameters are used",
    (
        "posjax/attention/online.py",
        "total = jnp.where(seen, self.total, 1)",
        "2",
    ): "for a row that sees nothing, the sum that is divided is 0, and the logarithm is not used",
    (
        "posjax/attention/api.py",
        "finite = jnp.where(seen, lse, 0)",
        "1",
    ): "for a row that sees nothing, neither this number nor anything computed from it is used",
    (
        "posjax/rotary/base.py",
        "columns = math.isqrt(stop - start) + 1",
        "2",
    ): "the sums are the same for any number of columns",
    (
        "posjax/rotary/longrope.py",
        "return _Individual(tuple(steps.tolist()), a.first if random.random() < 0.5 else b.first)",
        "(random.random() <= 0.5)",
    ): "a random number is exactly 0.5 only once in 2^53",
    (
        "posjax/scales.py",
        "for _ in range(6):",
        "7",
    ): "after 6 steps the root is exact up to rounding",
    (
        "posjax/rotary/generators.py",
        "weights = np.random.default_rng(0).uniform(1, 2, len(matrices))",
        "1",
    ): "of the seed: any random mixture finds the planes",
    (
        "posjax/attention/tiles.py",
        "order = xp.argsort(xp.where(grid == 0, kinds + 1, grid), axis=-1, stable=True)",
        "2",
    ): "any number above all kinds puts empty tiles last",
    (
        "posjax/attention/tpu/forward_dma.py",
        "return [buffers, sums, pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((copies, 2))]",
        "3",
    ): "of the size in SMEM: one more number is never used",
    (
        "posjax/diagnostics/rotation.py",
        "return np.abs(_phasors(rule, distances, head_dim, options).cumsum(-1)).mean(-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "train/model/sharding.py",
        'LENGTH_AXES = {"positions": -1, "coordinates": -2}',
        "(1)",
    ): "positions have two axes, so axes 1 and -1 are the same",
    (
        "posjax/diagnostics/anomaly.py",
        "query = 2 * jnp.square(q) + 0j",
        "3",
    ): "the places where a score rises are counted, and they do not depend on its scale",
    (
        "posjax/rotary/grids.py",
        "return self.unit * inverse_powers(self.base, width).reshape(-1, self.num_axes).T.ravel()",
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "train/model/flops.py",
        "q = jnp.zeros((1, few, heads, scheme.query_size(size)))",
        "2",
    ): "of the batch: only the size of the features is used",
    (
        "posjax/attention/tpu/biases.py",
        "return self.origins(row, 0)[1] - terms.column(row.of_head(row.x.bias.outer)[...])",
        "1",
    ): "of the 0 in (row, 0): only the origin of the keys is used, which does not depend on the block of queries",
    (
        "posjax/rotary/base.py",
        "farthest = np.argsort(sums[negative] / negative.astype(np.float64) ** 2)[:_WITNESSES]",
        "3",
    ): "any infeasible distances lead to the same base; the choice only saves steps",
    (
        "posjax/attention/tpu/blocks.py",
        "unit = 128 if tokens <= 1024 else 512",
        "(tokens < 1024)",
    ): "for 1,024 tokens both units give the same blocks",
    (
        "train/model/flops.py",
        "heads, size, few = decoder.num_heads, decoder.head_dim, 8",
        "9",
    ): "of the length: only the size of the features is used",
    (
        "train/model/flops.py",
        "q = jnp.zeros((1, few, heads, scheme.query_size(size)))",
        "(jnp.ones((1, few, heads, scheme.query_size(size))))",
    ): "only the size of the features is used",
    (
        "train/model/flops.py",
        'return scheme.maps.query(made.get("features", {}), q, Range(0, few), head_dim=size, length=few)',
        "1",
    ): "of the position: only the size of the features is used",
    (
        "train/model/flops.py",
        "return jax.eval_shape(phi, jax.random.key(0)).shape[-1]",
        "1",
    ): "of the seed: only the size of the features is used",
    (
        "posjax/_checks.py",
        "near = get_close_matches(str(value), close, n=1)",
        "2",
    ): "only the first, the nearest, is used",
    (
        "train/report/numbers.py",
        'return (row.get("window_tokens") or 0) // row["length"]',
        "1",
    ): "windows have more than one token",
    (
        "train/report/numbers.py",
        'return max(row.get("last_tokens") or 0 for row in rows) // last_length(rows)',
        "1",
    ): "the last tokens of a window are more than one",
    (
        "train/model/mesh.py",
        "named = math.prod(size for size in sizes.values() if size > 0)",
        "1",
    ): "leaving out factors of 1 changes no product",
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
