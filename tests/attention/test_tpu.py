"""The TPU kernels in interpret mode: forward against NumPy, every gradient against ``dense``, both in float64.

The interpreter fills memory that was never written with NaN, runs every copy as late as its semaphore allows, and
reports races and semaphores that do not return to zero; here both fail the test.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.kernels import (
    TOKENS,
    Case,
    as_float64,
    call,
    check_case,
    close,
    inputs,
    loss_of,
    oracle,
    places,
)
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from refusals import refused

from posjax._lowered import match_varying
from posjax.attention.call import Call
from posjax.attention.dense import dense
from posjax.attention.formulas import LOG2E
from posjax.attention.platform import computed, everywhere
from posjax.attention.tiles import Blocks
from posjax.attention.tpu import entry
from posjax.attention.tpu.backend import TPU
from posjax.attention.tpu.blocks import TARGETS
from posjax.bias import FIRE, T5, ALiBi, FoX, Kerple
from posjax.masks import Beyond, Causal, Chunked, ChunksApart, Dilated, FirstTokens, Segments, Window
from posjax.positions import Range, from_segments

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SMALL, LARGE = Blocks(128, 128, 128), Blocks(256, 256, 128)


@dataclasses.dataclass(frozen=True)
class TPUCase(Case):
    """A call, and the largest blocks of both kernels."""

    blocks: Blocks = SMALL
    bounded: bool = False
    chip: str = "TPU v5 lite"
    loose_bound: bool = False  # the bound of the second block of queries is far above their logits
    cores: int = 1  # with two, heads run in random order, and the state of one must not reach another
    factor: float = LOG2E


def with_extra_features(name: str, **slots) -> TPUCase:
    """A case on a chip where biases of keys and bounds of queries are extra features of a head of 128."""
    return TPUCase(name, mask=Causal(), size=128, dtype=jnp.bfloat16, chip="TPU v6 lite", **slots)


# Segments of several lengths that split tiles, different in each row, after some padding.
IDS = np.sort(np.random.default_rng(0).integers(-1, 4, (2, TOKENS))).astype(np.int32)
# The second row has one segment from token 100 on, so that some of its tiles are whole.
IDS[1, 100:] = 9
PACKED = from_segments(IDS)
SHUFFLED = jnp.asarray(np.random.default_rng(2).permutation(TOKENS), jnp.int32)
FAR_AWAY, LAST, END = Range(2**30, TOKENS), Range(2**31 - TOKENS, TOKENS), Range(2**31 - 3, 3)
ONE_TILE = jnp.arange(TOKENS) + 1000 * (jnp.arange(TOKENS) >= 128)  # a causal mask hides the other tiles
EVERYWHERE = jnp.asarray(np.linspace(-(2**31), 2**31 - 1, TOKENS).astype(np.int32))
LEARNED, SYMMETRIC = ALiBi(learned=True), ALiBi(symmetric=True, learned=True)
SLIGHT = ALiBi(learned=True, steepest=2e-9)
T5_NEAR, T5_BOTH = T5(num_buckets=8, max_distance=40), T5(num_buckets=8, max_distance=40, bidirectional=True)

FEW, TOO_HIGH = {"queries": 200, "keys": 200, "batch": 1}, {"bounded": True, "loose_bound": True, "batch": 1}
IN_ROWS = {"q_positions": PACKED, "kv_positions": PACKED}
FAR_APART = {"q_positions": Range(jnp.int32(0), TOKENS), "kv_positions": Range(280, 200), "keys": 200}
CASES = [
    TPUCase(
        "two-sided t5 in tiles behind, near and ahead, under a soft cap",
        bias=T5_BOTH,
        softcap=3.0,
        q_positions=Range(170, 128),
        queries=128,
        keys=768,
        bounded=True,
        batch=1,
        heads=1,
    ),
    TPUCase(
        "several parts, chunked, from a traced start, rows of tiles that see nothing, on two cores",
        mask=Causal() & Chunked(200),
        sinks=True,
        batch=1,
        kv_heads=2,
        cores=2,
        blocks=LARGE,
        **FAR_APART,
    ),
    with_extra_features("alibi, a bound too high", bias=LEARNED, **TOO_HIGH),
]

WIDE = [
    TPUCase("packed alibi, sinks", LEARNED, Causal() & Segments(IDS), sinks=True, bounded=True, heads=1, **IN_ROWS),
    TPUCase("fox on two cores", FoX(), Causal(), cores=2, kv_heads=2, kv_positions=jnp.arange(200), **FEW),
    TPUCase("capped t5 in a band", T5_NEAR, Causal() & Window(60), 3.0, True, q_positions=Range(20, TOKENS), batch=1),
    TPUCase("decoding at the last positions of int32", T5_BOTH, q_positions=END, kv_positions=LAST, queries=3, batch=1),
    TPUCase(
        "slight alibi over all of int32", SLIGHT, Causal(), q_positions=EVERYWHERE, kv_positions=EVERYWHERE, batch=1
    ),
    with_extra_features("a bound too high, far", remap=(Beyond(256),), kv_positions=ONE_TILE, **TOO_HIGH),
    with_extra_features("t5 under a bound among the features", bias=T5_NEAR, bounded=True, batch=1),
    with_extra_features("several parts under a bound among the features", bias=LEARNED, bounded=True, blocks=LARGE),
    TPUCase(
        "symmetric alibi from a traced start, capped", SYMMETRIC, None, 4.0, q_positions=Range(jnp.int32(90), TOKENS)
    ),
    TPUCase("a bound that is too high", mask=Causal(), bias=LEARNED, **TOO_HIGH),
    TPUCase("far, packed", mask=Causal() & Segments(IDS), remap=(Beyond(70),), **IN_ROWS),
    TPUCase("two branches with alibi", LEARNED, Causal(), remap=(ChunksApart(70, 1, 1), ChunksApart(70, 2)), batch=1),
    TPUCase("far in several parts", mask=Causal() & Chunked(200), remap=(Beyond(70),), blocks=LARGE, **FAR_APART),
    TPUCase("bfloat16 far", dtype=jnp.bfloat16, remap=(Beyond(140),), mask=Causal(), softcap=5.0),
    TPUCase("two-sided t5 in a band ahead", bias=T5_BOTH, kv_positions=Range(300, TOKENS), batch=1),
    TPUCase("one key head", heads=4, mask=Causal(), bias=FoX(), blocks=LARGE),
    *(TPUCase(f"size {n}", size=n, value_size=n, mask=Causal(), bias=T5_NEAR, **FEW) for n in (16, 64, 80, 96, 128)),
    *(TPUCase(f"size {n}", size=n, value_size=n // 2, mask=Causal(), remap=(Beyond(140),), **FEW) for n in (192, 256)),
    TPUCase("few queries", queries=9, q_positions=Range(TOKENS - 9, 9), mask=Causal(), bias=Kerple("power")),
    TPUCase("lambda", mask=Causal() & (Window(40) | FirstTokens(4)), remap=(Beyond(90) & Window(200),), sinks=True),
    TPUCase("shuffled", mask=Causal(), bias=LEARNED, q_positions=SHUFFLED, kv_positions=SHUFFLED),
    TPUCase("traced keys", mask=Causal() & Window(90), bias=T5_NEAR, kv_positions=Range(jnp.int32(40), TOKENS)),
    TPUCase("far away", mask=Causal(), bias=LEARNED, q_positions=FAR_AWAY, kv_positions=FAR_AWAY),
    TPUCase("nothing at all", mask=Causal(), bias=Kerple(), kv_positions=Range(1000, TOKENS)),
    TPUCase(
        "three heads on two cores", bias=LEARNED, mask=Causal() & Window(100), heads=3, kv_heads=3, batch=1, cores=2
    ),
]


@pytest.fixture(autouse=True)
def _no_races(capsys):
    pltpu.reset_tpu_interpret_mode_state()
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed
    assert "non-zero count" not in printed


def values_of(case: TPUCase) -> dict:
    """The inputs of a case."""
    values = inputs(case)
    if case.loose_bound:
        values["q"][:, :128] *= 2**-6
        values["q"][:, 256:] *= 2**-6
        values["k"][:, 290] *= 64
    return values


def kernel(case: TPUCase):
    """The TPU backend. It multiplies queries by ``log2 e``, except bfloat16 ones, which are scaled and rounded here."""
    interpret = INTERPRET
    if case.cores > 1:
        interpret = dataclasses.replace(INTERPRET, num_cores_or_threads=case.cores, random_seed=4)
    options = entry.Options(
        blocks=(case.blocks, case.blocks), bounded=case.bounded, on=TARGETS[case.chip], interpret=interpret
    )

    def narrow(q):
        return (q * LOG2E).astype(case.dtype)

    def run(x: Call) -> tuple:
        if case.dtype != np.float32:
            x = dataclasses.replace(x.with_queries(narrow), scale=1 / LOG2E)
        return computed(everywhere(TPU(options)), x)

    return run


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.wide) for case in WIDE], ids=lambda case: case.name
)
def test_forward_and_every_gradient(case):
    check_case(case, kernel(case), values=values_of(case))


def test_parts_of_a_longer_sequence_under_vmap_merge_with_exact_gradients():
    """Keys in two parts, merged by their log-sum-exps; more than half of the queries see nothing of the second."""
    case, half = TPUCase("parts", bias=LEARNED, mask=Causal(), queries=128, keys=160, batch=1, heads=1), 80
    values = inputs(case)

    def merged(values):
        def part(k, v, start):
            cut = dataclasses.replace(case, keys=half, kv_positions=Range(start, half))
            return call(cut, kernel(case), values | {"k": k, "v": v}, places(cut))

        k, v = (jnp.stack(jnp.split(values[name], 2, axis=1)) for name in "kv")
        out, lse = jax.vmap(part)(k, v, jnp.array([0, half]))
        total = jnp.logaddexp(*lse)
        return loss_of(((out * jnp.exp(lse - total)[..., None]).sum(0), total))

    with jax.enable_x64(True):
        whole = jax.value_and_grad(lambda values: loss_of(call(case, dense, values, places(case))))
        want = jax.jit(whole)(as_float64(values))
    close(jax.jit(jax.value_and_grad(merged))(values), want, 2e-5)


def test_tiles_that_the_mask_empties_and_keys_of_other_branches_are_never_read():
    """Keys 144 to 511 are seen: tile 1 by the remapped features alone, tile 2 by both, tile 3 by the near ones.

    NaN elsewhere leaves no trace, forward or backward.
    """
    case = with_extra_features(
        "alibi and remapped pairs among the features",
        bias=LEARNED,
        remap=(Beyond(128),),
        queries=128,
        keys=640,
        q_positions=Range(384, 128),
        batch=1,
    )
    case = dataclasses.replace(case, mask=Causal() & Window(240))
    tiles = {"k": (0, 1, 4), "v": (0, 4), "k0": (0, 3, 4)}
    check_case(
        case, kernel(case), [(name, slice(128 * n, 128 * n + 128)) for name, found in tiles.items() for n in found]
    )


def test_inside_shard_map_with_its_checks():
    """Rows of the batch on two devices; the gradient of what both share, the slopes, is summed over them."""
    case = TPUCase("sharded", bias=LEARNED, mask=Causal(), queries=100, keys=100)
    values = inputs(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    placed = {name: P("data") if name in "qkv" else P() for name in values}

    @partial(jax.shard_map, mesh=mesh, in_specs=(placed,), out_specs=P())
    def local(values):
        found = call(case, lambda x: kernel(case)(match_varying(x)), values, places(case))
        return jax.lax.psum(loss_of(found), "data")

    found = jax.eval_shape(jax.grad(local), values)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, values)


def test_a_bias_that_rises_with_distance_does_not_overflow_under_a_bound():
    """The slope is negative, so the farthest key has a logit of 150, above what a bound without the bias allows."""
    case = TPUCase("rising", bias=LEARNED, mask=Causal(), batch=1, queries=128, keys=256, q_positions=Range(128, 128))
    case = dataclasses.replace(case, bounded=True, heads=1)
    values = inputs(case) | {"bias": {"slopes": np.float32([-0.6])}}
    out, lse = jax.jit(lambda values: call(case, kernel(case), values, places(case)))(values)
    with jax.enable_x64(True):
        want = oracle(case, as_float64(values))
    close((out, lse), want, 2e-6)


def test_float32_is_multiplied_at_the_highest_precision():
    """At the default one, a TPU would round the factors to bfloat16."""
    x = jnp.ones((1, 1, 1, 128, 128))
    arguments, kernels = Call(x, x[0], x[0], None, None, Range(0, 128), Range(0, 128)), TPU(entry.Options())

    def run(arguments):
        rows = kernels.forward(arguments)
        return kernels.backward(arguments, kernels.per_query_of(arguments, rows, rows), of_bias=False)

    products = str(jax.make_jaxpr(run)(arguments)).split("dot_general[")[1:]
    assert len(products) == 7  # forward two, backward five
    for product in products:
        assert "HIGHEST" in product.split("preferred_element_type")[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"dtype": jnp.float16}),
        ("InterpolatedBias", {"bias": FIRE()}),
        ("positions", {"bias": T5_NEAR, "q_positions": SHUFFLED}),
        ("positions", {"bias": ALiBi(), "softcap": 3.0, "q_positions": SHUFFLED}),
        ("ForgetBias", {"bias": FoX(), "softcap": 3.0}),
        ("ForgetBias", {"bias": FoX(symmetric=True)}),
        ("mask", {"mask": Dilated(30, (1, 2, 1, 2))}),
        ("q_positions", {"bias": T5_NEAR, "q_positions": LAST, "kv_positions": Range(-1, TOKENS)}),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(name, change):
    case = TPUCase("refused", **change)
    for word in ("implementation", name):
        refused(word, lambda: call(case, kernel(case), inputs(case), places(case)))


def test_a_bias_by_distance_is_taken_up_to_the_last_int32_and_up_to_half_of_fast_memory():
    """Sums by distance take 64 bytes for a query or key: 409,600 tokens take 50 MiB, half of a chip's 100."""

    def why(tokens, q_start=0, kv_start=0):
        q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 64), jnp.bfloat16) for shape in ((1, tokens), (tokens,)))
        bias = T5(num_buckets=8, max_distance=40).bind({"table": np.zeros((8, 1))}, num_heads=1)
        return entry.refusal(Call(q, kv, kv, bias, None, Range(q_start, tokens), Range(kv_start, tokens)))

    assert why(128, 2**31 - 129) is None
    assert "int32" in why(128, 2**31 - 128)
    assert why(409_600, jnp.int32(0)) is None
    assert "fast memory" in why(409_601, jnp.int32(0))
