"""``python -m train.workshop.gpu RESULTS.jsonl SECONDS``: attention on a GPU in a quarter of an hour.

First the numbers of every form of attention, each against ``dense`` in float32; then times, in milliseconds, beside
cuDNN's causal attention, which knows neither biases nor documents. Each result is written as soon as it is known, and
results that the file has already are not measured again, so that a run may be cut off and continued. No measurement
begins after ``SECONDS``. Programs are compiled in several threads while others run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention import attention
from posjax.bias import T5, ALiBi, FoX, Kerple
from posjax.masks import Beyond, Causal, Segments, Window
from posjax.remap import Branch
from train.runtime.machine import versions

DOCUMENT = 1500
"""Tokens of a document in packed rows."""
BIASES = {"alibi": ALiBi(), "slopes": ALiBi(learned=True), "t5": T5(), "kerple": Kerple()}
FORMS = ("causal", *BIASES, "fox", "window", "packed", "capped", "rerope")
CUDNN = "cudnn causal"
"""What others are compared with."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of batch 1."""

    form: str
    length: int
    size: int
    heads: int = 16
    kv_heads: int = 16

    def arguments(self, key: int = 0) -> tuple:
        """Queries, keys and values, the parameters of the bias, and gates."""
        keys = jax.random.split(jax.random.key(key), 3)
        heads = self.heads, self.kv_heads, self.kv_heads
        qkv = [
            jax.random.normal(k, (1, self.length, n, self.size), jnp.bfloat16) for k, n in zip(keys, heads, strict=True)
        ]
        params = BIASES[self.form].init(keys[0], self.heads) if self.form in BIASES else {}
        gates = -jnp.cumsum(jnp.full((1, self.heads, self.length), 0.01), -1)
        return *qkv, params, gates

    def output(self, q, k, v, params, gates, implementation: str = "gpu") -> jax.Array:
        """The output of attention."""
        mask, bias, remap = Causal(), None, []
        if self.form == "window":
            mask &= Window(1024)
        elif self.form == "packed":
            mask &= Segments(jnp.arange(self.length)[None] // DOCUMENT)
        elif self.form == "fox":
            bias = FoX().bind(num_heads=self.heads, q_gates=gates, kv_gates=gates)
        elif self.form == "rerope":
            remap = [Branch(q[..., ::-1], k[..., ::-1], Beyond(1024))]
        elif self.form in BIASES:
            bias = BIASES[self.form].bind(params, num_heads=self.heads)
        softcap = 30.0 if self.form == "capped" else None
        implementation = "cudnn" if self.form == CUDNN else implementation
        return attention(q, k, v, bias=bias, mask=mask, softcap=softcap, remap=remap, implementation=implementation)


def gradients(shape: Shape, implementation: str = "gpu") -> Callable:
    """The output and the gradients of all arguments, for a fixed cotangent."""

    def run(*arguments):
        out, transpose = jax.vjp(lambda *x: shape.output(*x, implementation), *arguments)
        return out, transpose(jnp.ones_like(out) * 0.5)

    return run


def errors(shape: Shape) -> dict[str, float]:
    """For the output and every gradient, the norm of the difference from ``dense`` in float32 over its norm."""
    arguments = shape.arguments()
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), arguments)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(gradients(shape, "dense"))(*exact)
    results = jax.jit(gradients(shape))(*arguments)

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    (out, found), (wanted_out, wanted) = results, wanted
    names = ("q", "k", "v", "params", "gates")
    of_gradients = {}
    for name, *pair in zip(names, found, wanted, strict=True):
        leaves = zip(*map(jax.tree.leaves, pair), strict=True)
        of_gradients[name] = max((error(*each) for each in leaves), default=0.0)
    return {"out": error(out, wanted_out)} | of_gradients


def milliseconds(compiled: Callable, arguments: tuple) -> float:
    """The least mean of three rows of calls, which are queued and waited for once."""
    jax.block_until_ready(compiled(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    repeats = max(3, min(100, int(0.2 / (time.perf_counter() - start))))
    means = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            results = compiled(*arguments)
        jax.block_until_ready(results)
        means.append((time.perf_counter() - start) / repeats * 1e3)
    return min(means)


@dataclasses.dataclass
class Results:
    """The results in a file, by what was measured."""

    path: Path
    until: float

    def __post_init__(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {json.loads(line)["what"] for line in lines}

    def wants(self, what: str) -> bool:
        """Whether something is to be measured."""
        return what not in self.known and time.monotonic() < self.until

    def add(self, what: str, measure: Callable[[], dict]) -> None:
        """Measures something, and writes the result, or why there is none."""
        if not self.wants(what):
            return
        try:
            found = measure()
        except Exception as error:  # whatever a compiler or a device raises is a result
            found = {"problem": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        line = json.dumps({"what": what} | found)
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def check_numbers(results: Results, length: int) -> None:
    """The errors of every form, with grouped heads, at heads of 64 and of 128."""
    shapes = [Shape(form, length, size, heads=8, kv_heads=2) for size in (64, 128) for form in FORMS]
    for shape in shapes:
        results.add(f"errors {shape}", lambda shape=shape: errors(shape))


def time_forms(results: Results, lengths: tuple[int, ...], threads: int = 8) -> None:
    """Times of every form beside cuDNN's causal attention: forward, and forward and backward."""
    jobs = [
        (f"{direction} {shape}", shape, function)
        for length in lengths
        for size in (64, 128)
        for form in (CUDNN, *FORMS)
        for shape in [Shape(form, length, size)]
        for direction, function in (("forward", shape.output), ("forward + backward", gradients(shape)))
    ]
    jobs = [job for job in jobs if results.wants(job[0])]

    def compiled(shape: Shape, function: Callable):
        return jax.jit(function).lower(*jax.eval_shape(shape.arguments)).compile()

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(compiled, shape, function) for _, shape, function in jobs]
        for (what, shape, _), program in zip(jobs, waiting, strict=True):

            def measure(shape=shape, program=program):
                return {"ms": milliseconds(program.result(), shape.arguments())}

            results.add(what, measure)
        pool.shutdown(cancel_futures=True)


def main(path: str, seconds: str) -> None:
    """Measures everything that the file lacks."""
    results = Results(Path(path), time.monotonic() + float(seconds))
    results.add("machine", lambda: {"device": jax.devices()[0].device_kind, "versions": versions(("jax", "jaxlib"))})
    check_numbers(results, 2048)
    time_forms(results, (16384, 4096, 65536))


if __name__ == "__main__":
    main(*sys.argv[1:])
