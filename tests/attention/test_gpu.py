"""The GPU kernels in Mosaic's interpreter: forward against NumPy, every gradient against ``dense``, both in float64.

The interpreter runs warpgroups, copies and barriers on a CPU, and reports races.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.kernels import TOKENS, Case, check_case
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from posjax.attention import attention
from posjax.attention.call import Call
from posjax.attention.gpu.backend import GPU, Options
from posjax.attention.platform import computed, everywhere
from posjax.bias import T5, ALiBi, ArrayBias, FoX, Kerple
from posjax.masks import Beyond, Causal, Chunked, ChunksApart, FirstTokens, Prefix, Segments, Window
from posjax.positions import Range, from_segments

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need a newer jax")

IDS = np.sort(np.random.default_rng(0).integers(-1, 4, (2, TOKENS))).astype(np.int32)
IDS[1, 100:] = 9
PACKED = from_segments(IDS)
IN_ROWS = {"q_positions": PACKED, "kv_positions": PACKED}
SHUFFLED = jnp.asarray(np.random.default_rng(2).permutation(TOKENS), jnp.int32)
EVERYWHERE = jnp.asarray(np.linspace(-(2**31), 2**31 - 1, TOKENS).astype(np.int32))
LEARNED, SYMMETRIC = ALiBi(learned=True), ALiBi(symmetric=True, learned=True)
SLIGHT = ALiBi(learned=True, steepest=2e-9)
T5_NEAR, T5_BOTH = T5(num_buckets=8, max_distance=40), T5(num_buckets=8, max_distance=40, bidirectional=True)
FAR_AWAY, LAST, END = Range(2**30, TOKENS), Range(2**31 - TOKENS, TOKENS), Range(2**31 - 3, 3)
FEW = {"queries": 200, "keys": 200, "batch": 1}
DECODE = {"queries": 5, "keys": 1200, "q_positions": Range(1195, 5), "batch": 1}
NARROW = {"dtype": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A spec of an array bias, with a number for each pair of tokens."""

    batch: int
    heads: int

    def init(self, key, num_heads: int) -> dict:
        return {"array": jax.random.normal(key, (self.batch, self.heads, TOKENS, TOKENS))}

    def bind(self, params, *, num_heads: int) -> ArrayBias:
        return ArrayBias(params["array"])


CASES = [
    Case("packed alibi, sinks", LEARNED, Causal() & Segments(IDS), sinks=True, **IN_ROWS, **NARROW),
    Case(
        "capped t5, far tiles", T5_NEAR, Causal() & Window(200), 3.0, queries=128, q_positions=Range(172, 128), **NARROW
    ),
    Case("fox, two branches", FoX(), Causal(), remap=(Beyond(90) & Window(200), Beyond(200)), batch=1, **NARROW),
]

WIDE = [
    Case("float16", mask=Causal(), dtype=jnp.float16, **FEW),
    Case("two-sided t5", T5_BOTH, keys=500, q_positions=Range(170, TOKENS), **NARROW),
    Case("kerple", Kerple(), Causal(), heads=4, **NARROW),
    Case("kerple power, nothing seen", Kerple("power"), Causal(), kv_positions=Range(1000, TOKENS), **NARROW),
    Case("symmetric alibi, capped", SYMMETRIC, None, 4.0, q_positions=Range(jnp.int32(90), TOKENS), **NARROW),
    Case("chunks", mask=Causal() & Chunked(200), kv_heads=2, sinks=True, **NARROW),
    Case("prefix", LEARNED, Causal() | Prefix(60), **NARROW),
    Case("lambda", mask=Causal() & (Window(40) | FirstTokens(4)), remap=(Beyond(90) & Window(200),), **NARROW),
    Case("dual chunks", LEARNED, Causal(), remap=(ChunksApart(70, 1, 1), ChunksApart(70, 2)), batch=1, **NARROW),
    Case("far, packed", mask=Causal() & Segments(IDS), remap=(Beyond(70),), **IN_ROWS, **NARROW),
    Case("far, capped", mask=Causal(), remap=(Beyond(140),), softcap=5.0, **NARROW),
    Case("fox, grouped", FoX(), Causal(), heads=4, kv_positions=jnp.arange(200), **FEW, **NARROW),
    Case("shuffled", LEARNED, Causal(), q_positions=SHUFFLED, kv_positions=SHUFFLED, **NARROW),
    Case("slight alibi", SLIGHT, Causal(), q_positions=EVERYWHERE, kv_positions=EVERYWHERE, batch=1, **NARROW),
    Case("far away", LEARNED, Causal(), q_positions=FAR_AWAY, kv_positions=FAR_AWAY, **NARROW),
    Case("traced keys", T5_NEAR, Causal() & Window(90), kv_positions=Range(jnp.int32(40), TOKENS), **NARROW),
    Case("end of int32", T5_BOTH, q_positions=END, kv_positions=LAST, queries=3, batch=1, **NARROW),
    *(
        Case(f"size {n}", T5_NEAR, Causal(), size=n, value_size=n, **FEW, **NARROW)
        for n in (16, 64, 80, 96, 128, 192, 256)
    ),
    Case("fox, size 256", FoX(), Causal(), heads=4, kv_heads=2, size=256, value_size=256, **FEW, **NARROW),
    Case("few queries, many keys", T5_NEAR, Causal() & Window(900), sinks=True, **DECODE, **NARROW),
    Case("few queries, remapped", LEARNED, Causal(), remap=(Beyond(700),), **DECODE, **NARROW),
    Case("an array, packed", Pairs(1, 2), Causal() & Segments(IDS), **IN_ROWS, **NARROW),
    Case("an array of rows, capped, far", Pairs(2, 1), Causal(), 5.0, remap=(Beyond(140),), **NARROW),
    Case("wider values", LEARNED, Causal(), size=64, value_size=128, **FEW, **NARROW),
    Case("narrower values", LEARNED, Causal(), size=192, value_size=128, **FEW, **NARROW),
]


def kernel(case: Case):
    """The GPU backend, interpreted; queries are scaled and rounded here."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    backend = everywhere(GPU(Options(plgpu.InterpretGPUParams(detect_races=True))))

    def run(x: Call):
        return computed(backend, x.with_queries(lambda q: q.astype(case.dtype)))

    return run


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.wide) for case in WIDE], ids=lambda case: case.name
)
def test_forward_and_every_gradient(case, capsys):
    check_case(case, kernel(case))
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.wide
def test_tiles_that_the_mask_empties_and_keys_of_other_branches_are_never_read(capsys):
    """Keys 144 to 511 are seen: tile 1 by the remapped features alone, tile 2 by both, tile 3 by the near ones.

    NaN elsewhere leaves no trace, forward or backward.
    """
    place = {"queries": 128, "keys": 640, "q_positions": Range(384, 128), "batch": 1}
    case = Case("unread", LEARNED, Causal() & Window(240), remap=(Beyond(128),), **place, **NARROW)
    tiles = {"k": (0, 1, 4), "v": (0, 4), "k0": (0, 3, 4)}
    unread = [(name, slice(128 * n, 128 * n + 128)) for name, numbers in tiles.items() for n in numbers]
    check_case(case, kernel(case), unread)
    assert "RACE DETECTED" not in capsys.readouterr().out


def device(kind: str, count: int = 1) -> AbstractMesh:
    """A mesh of GPUs that this machine need not have."""
    return AbstractMesh((count,), ("all",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, 1, "gpu"))


def lowered(function, kind: str, size: int = 64, dtype=jnp.bfloat16) -> str:
    """The program of a call of 1,024 tokens for a GPU."""
    q = jax.ShapeDtypeStruct((1, 1024, 2, size), dtype)
    with jax.sharding.use_abstract_mesh(device(kind)):
        return jax.jit(function).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()


def alibi(*features):
    return attention(*features, bias=ALiBi(), mask=Causal())


def gradient(q, k, v):
    return jax.grad(lambda *x: alibi(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)


def test_an_h100_runs_the_kernel_by_default():
    assert lowered(gradient, "NVIDIA H100 80GB HBM3").count("mosaic_gpu_v2") == 3


@pytest.mark.parametrize(
    ("named", "kind", "settings"),
    [
        ("9.0", "NVIDIA A100-SXM4-80GB", {}),
        ("float32", "NVIDIA H100 80GB HBM3", {"dtype": jnp.float32}),
        ("288", "NVIDIA H100 80GB HBM3", {"size": 288}),
    ],
)
def test_a_call_that_falls_to_loops_on_a_gpu_says_why(named, kind, settings):
    with pytest.warns(UserWarning, match=named):
        assert "mosaic_gpu_v2" not in lowered(alibi, kind, **settings)


def on_two_devices(q, k, v):
    return jax.shard_map(gradient, in_specs=P("all"), out_specs=P("all"))(q, k, v)


def forward_over_reverse(q, k, v):
    return jax.jvp(lambda q: gradient(q, k, v), (q,), (q,))


@pytest.mark.parametrize(
    ("function", "rows", "kernels"),
    [(jax.vmap(gradient), (3, 1), 3), (on_two_devices, (2,), 3), (forward_over_reverse, (1,), 3)],
    ids=["vmap", "shard_map", "forward over reverse"],
)
def test_transformed_calls_are_lowered_to_the_kernels(function, rows, kernels):
    x = jax.ShapeDtypeStruct((*rows, 1024, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(device("NVIDIA H100 80GB HBM3", rows[0] if rows == (2,) else 1)):
        text = jax.jit(function).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= kernels
