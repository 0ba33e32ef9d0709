"""Cases of one attention call: settings, inputs, and the results that tests compare."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from attention.tiles import of_tiles

from posjax.attention import attention
from posjax.attention.platform import BACKENDS
from posjax.bias import T5, ALiBi, Kerple
from posjax.masks import Beyond, Causal, Chunked, FirstTokens, Prefix, Segments, Window
from posjax.positions import Range, from_segments
from posjax.remap import Branch

BATCH, SIZE, VALUE_SIZE = 2, 8, 6
RATES = np.linspace(0.01, 0.3, SIZE)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: lengths, heads, slots, and blocks that give several tiles of unequal size along both axes."""

    name: str
    queries: int = 13
    keys: int = 13
    heads: int = 4
    kv_heads: int = 2
    bias: object = None
    mask: object = None
    softcap: float | None = None
    sinks: bool = False
    remap: tuple = ()
    decay: bool = False
    q_positions: object = None
    kv_positions: object = None
    blocks: tuple = (4, 6)


IDS = np.array([[0] * 3 + [1] * 7 + [-1] * 3, [-1] * 2 + [4] * 6 + [5] * 5], np.int32)
SHUFFLED = np.random.default_rng(0).permutation(13).astype(np.int32)
PACKED = from_segments(IDS)
FAR_AWAY, LAST_TWO = Range(2**30, 13), Range(2**30 + 11, 2)
LEARNED, SYMMETRIC = ALiBi(learned=True), ALiBi(symmetric=True, learned=True)
T5_NEAR, T5_BOTH = T5(num_buckets=6, max_distance=9), T5(num_buckets=8, max_distance=9, bidirectional=True)
TWO_BRANCHES = (Beyond(4) & Window(8), Beyond(8))
OF_ROWS = {"q_positions": PACKED, "kv_positions": PACKED}

CASES = [
    Case("cross with one key head", queries=5, keys=11, kv_heads=1),
    Case("learned alibi and lambda", bias=LEARNED, mask=Causal() & (Window(3) | FirstTokens(2))),
    Case("two-sided t5 in one tile", bias=T5_BOTH, blocks=(13, 13)),
    Case("kerple power and a prefix", bias=Kerple("power"), mask=Causal() | Prefix(6)),
    Case("soft cap in chunks", softcap=0.8, mask=Causal() & Chunked(5), bias=T5_NEAR),
    Case("packed", mask=Causal() & Segments(IDS), bias=T5_NEAR, **OF_ROWS, sinks=True),
    Case("nothing seen", mask=Causal() & Segments(IDS), kv_positions=Range(6, 13), sinks=True, softcap=2.0),
    Case("decode far away", queries=2, q_positions=LAST_TWO, kv_positions=FAR_AWAY, mask=Causal(), bias=ALiBi()),
    Case("two branches of both sides", remap=TWO_BRANCHES, sinks=True),
    Case("decay in packed rows", decay=True, mask=Causal() & Segments(IDS), **OF_ROWS, bias=T5_NEAR),
]

WIDE = [
    Case("long queries with sinks", queries=11, keys=3, q_positions=Range(0, 11), mask=Causal(), sinks=True),
    Case("even tiles of a window", queries=12, keys=12, heads=2, mask=Causal() & Window(3), blocks=(4, 4)),
    Case("symmetric alibi in a band of segments", bias=SYMMETRIC, mask=Window(4) & Segments(IDS)),
    Case("shuffled", q_positions=SHUFFLED, kv_positions=SHUFFLED, mask=Causal(), bias=Kerple()),
    Case("far in packed rows", remap=(Beyond(3),), mask=Causal() & Segments(IDS), **OF_ROWS, bias=LEARNED, softcap=3.0),
    Case("soft cap without a mask", softcap=0.8, bias=T5_BOTH),
    Case("symmetric alibi in a band", bias=SYMMETRIC, mask=Window(4)),
    Case("kerple log in chunks", bias=Kerple("log"), mask=Causal() & Chunked(5), blocks=(13, 13)),
    Case("segments", mask=Segments(IDS), bias=LEARNED),
    Case("far without a bias in packed rows", remap=(Beyond(3),), mask=Causal() & Segments(IDS), **OF_ROWS),
    Case("two branches and a lambda", remap=TWO_BRANCHES, mask=Causal() & (Window(10) | FirstTokens(2))),
    Case("far away", q_positions=FAR_AWAY, kv_positions=FAR_AWAY, mask=Causal(), bias=ALiBi()),
]


def called(name: str) -> Case:
    return next(case for case in (*CASES, *WIDE) if case.name == name)


def inputs(case: Case, dtype=np.float64) -> dict:
    """Everything that has a gradient, by name."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    values = {
        "q": normal(BATCH, case.queries, case.heads, SIZE),
        "k": normal(BATCH, case.keys, case.kv_heads, SIZE),
        "v": normal(BATCH, case.keys, case.kv_heads, VALUE_SIZE),
    }
    for n in range(len(case.remap)):
        values[f"q{n}"], values[f"k{n}"] = (1.3 + n) * values["q"][..., ::-1], 0.7 * values["k"] ** 2
    if case.sinks:
        values["sinks"] = normal(case.heads)
    if case.bias is not None and (params := case.bias.init(jax.random.key(7), case.heads)):
        times = 30 if isinstance(case.bias, T5) else 1
        values["bias"] = jax.tree.map(lambda x: times * np.asarray(x, dtype), params)
    return values


def call(case: Case, values: dict, implementation: str, **options):
    """``attention`` with the case's slots; ``use_tiles`` sets the sizes of tiles."""
    bias = case.bias.bind(values.get("bias"), num_heads=case.heads) if case.bias else None
    return attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        mask=case.mask,
        sinks=values.get("sinks"),
        softcap=case.softcap,
        remap=[Branch(values[f"q{n}"], values[f"k{n}"], where) for n, where in enumerate(case.remap)],
        decay=RATES if case.decay else None,
        q_positions=case.q_positions,
        kv_positions=case.kv_positions,
        implementation=implementation,
        return_residuals=True,
        **options,
    )


def use_tiles(monkeypatch, case: Case) -> None:
    """Makes the blockwise backend use the tiles of a case."""
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(*case.blocks))


def loss(case: Case, implementation: str, values: dict):
    """A scalar that depends on every output and every finite log-sum-exp."""
    return loss_of(call(case, values, implementation))[0]


def loss_of(result):
    out, lse = result
    finite = jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse))
    return (out * weights_of(out.shape).astype(out.dtype)).sum() + finite.sum(), result


def weights_of(shape) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def results(case: Case, backend: str, values: dict):
    """Output, log-sum-exp and the gradients of every input."""
    number, transpose, found = jax.vjp(lambda v: loss_of(call(case, v, backend)), values, has_aux=True)
    return *found, transpose(jnp.ones_like(number))[0]
