"""The TPU kernels in interpret mode: forward against NumPy, every gradient against ``dense``, both in float64.

The interpreter fills memory that was never written with NaN, runs every copy as late as its semaphore allows, and
reports races and semaphores that do not return to zero; here both fail the test.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from refusals import refused

from posjax import masks
from posjax._lowered import match_varying
from posjax._shapes import grouped
from posjax.attention.api import result_of
from posjax.attention.call import Call, RemappedPair
from posjax.attention.dense import dense
from posjax.attention.formulas import LOG2E
from posjax.attention.platform import computed, everywhere
from posjax.attention.tiles import Blocks
from posjax.attention.tpu import entry
from posjax.attention.tpu.backend import TPU
from posjax.attention.tpu.blocks import TARGETS
from posjax.bias import FIRE, T5, ALiBi, FoX, Kerple
from posjax.masks import Beyond, Causal, Chunked, ChunksApart, Dilated, FirstTokens, Segments, Window
from posjax.positions import Range, as_array, from_segments

TOKENS = 300
"""Three tiles of 128 along each axis, the last one not full."""

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SMALL, LARGE = Blocks(128, 128, 128), Blocks(256, 256, 128)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: lengths, heads, slots, and the largest blocks of both kernels."""

    name: str
    bias: object = None
    mask: object = None
    softcap: float | None = None
    sinks: bool = False
    remap: tuple = ()
    queries: int = TOKENS
    keys: int = TOKENS
    q_positions: object = None
    kv_positions: object = None
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    size: int = 32
    value_size: int = 48
    dtype: object = jnp.float32
    blocks: Blocks = SMALL
    bounded: bool = False
    chip: str = "TPU v5 lite"
    loose_bound: bool = False  # the bound of the second block of queries is far above their logits
    cores: int = 1  # with two, heads run in random order, and the state of one must not reach another


def with_extra_features(name: str, **slots) -> Case:
    """A case on a chip where biases of keys and bounds of queries are extra features of a head of 128."""
    return Case(name, mask=Causal(), size=128, dtype=jnp.bfloat16, chip="TPU v6 lite", **slots)


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
    Case(
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
    Case(
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
    Case("packed alibi, sinks", LEARNED, Causal() & Segments(IDS), sinks=True, bounded=True, heads=1, **IN_ROWS),
    Case("fox on two cores", FoX(), Causal(), cores=2, kv_heads=2, kv_positions=jnp.arange(200), **FEW),
    Case("capped t5 in a band", T5_NEAR, Causal() & Window(60), 3.0, True, q_positions=Range(20, TOKENS), batch=1),
    Case("decoding at the last positions of int32", T5_BOTH, q_positions=END, kv_positions=LAST, queries=3, batch=1),
    Case("slight alibi over all of int32", SLIGHT, Causal(), q_positions=EVERYWHERE, kv_positions=EVERYWHERE, batch=1),
    with_extra_features("a bound too high, far", remap=(Beyond(256),), kv_positions=ONE_TILE, **TOO_HIGH),
    with_extra_features("t5 under a bound among the features", bias=T5_NEAR, bounded=True, batch=1),
    with_extra_features("several parts under a bound among the features", bias=LEARNED, bounded=True, blocks=LARGE),
    Case("symmetric alibi from a traced start, capped", SYMMETRIC, None, 4.0, q_positions=Range(jnp.int32(90), TOKENS)),
    Case("a bound that is too high", mask=Causal(), bias=LEARNED, **TOO_HIGH),
    Case("far, packed", mask=Causal() & Segments(IDS), remap=(Beyond(70),), **IN_ROWS),
    Case("two branches with alibi", LEARNED, Causal(), remap=(ChunksApart(70, 1, 1), ChunksApart(70, 2)), batch=1),
    Case("far in several parts", mask=Causal() & Chunked(200), remap=(Beyond(70),), blocks=LARGE, **FAR_APART),
    Case("bfloat16 far", dtype=jnp.bfloat16, remap=(Beyond(140),), mask=Causal(), softcap=5.0),
    Case("two-sided t5 in a band ahead", bias=T5_BOTH, kv_positions=Range(300, TOKENS), batch=1),
    Case("one key head", heads=4, mask=Causal(), bias=FoX(), blocks=LARGE),
    *(Case(f"size {n}", size=n, value_size=n, mask=Causal(), bias=T5_NEAR, **FEW) for n in (16, 64, 80, 96, 128)),
    *(Case(f"size {n}", size=n, value_size=n // 2, mask=Causal(), remap=(Beyond(140),), **FEW) for n in (192, 256)),
    Case("few queries", queries=9, q_positions=Range(TOKENS - 9, 9), mask=Causal(), bias=Kerple("power")),
    Case("lambda", mask=Causal() & (Window(40) | FirstTokens(4)), remap=(Beyond(90) & Window(200),), sinks=True),
    Case("shuffled", mask=Causal(), bias=LEARNED, q_positions=SHUFFLED, kv_positions=SHUFFLED),
    Case("traced keys", mask=Causal() & Window(90), bias=T5_NEAR, kv_positions=Range(jnp.int32(40), TOKENS)),
    Case("far away", mask=Causal(), bias=LEARNED, q_positions=FAR_AWAY, kv_positions=FAR_AWAY),
    Case("nothing at all", mask=Causal(), bias=Kerple(), kv_positions=Range(1000, TOKENS)),
    Case("three heads on two cores", bias=LEARNED, mask=Causal() & Window(100), heads=3, kv_heads=3, batch=1, cores=2),
]


@pytest.fixture(autouse=True)
def _no_races(capsys):
    pltpu.reset_tpu_interpret_mode_state()
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed
    assert "non-zero count" not in printed


def inputs(case: Case) -> dict:
    """Everything that has a gradient, by name. Queries are float32; scaled, they are exact in the dtype of the case."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.standard_normal((case.batch, *shape)).astype(np.float32).astype(case.dtype)

    scaled = normal(case.queries, case.heads, case.size) * 2.0 ** -round(np.log2(case.size) / 2)
    values = {
        "q": scaled.astype(np.float32) * np.float32(case.size**0.5 / LOG2E),
        "k": normal(case.keys, case.kv_heads, case.size),
        "v": normal(case.keys, case.kv_heads, case.value_size),
    }
    if case.loose_bound:
        values["q"][:, :128] *= 2**-6
        values["q"][:, 256:] *= 2**-6
        values["k"][:, 290] *= 64
    for n in range(len(case.remap)):
        values[f"q{n}"] = np.float32(2.0 ** (1 - n)) * values["q"][..., ::-1]
        values[f"k{n}"] = (0.7 * values["k"].astype(np.float32) ** 2).astype(case.dtype)
    if case.sinks:
        values["sinks"] = np.linspace(-1, 2, case.heads, dtype=np.float32)
    if isinstance(case.bias, FoX):
        for name, length in (("q_gates", case.queries), ("kv_gates", case.keys)):
            steps = rng.uniform(size=(case.batch, case.heads, length)).astype(np.float32)
            values[name] = np.cumsum(-0.05 * steps, axis=-1, dtype=np.float32)
    elif case.bias is not None and (params := case.bias.init(jax.random.key(7), case.heads)):
        times = 30 if isinstance(case.bias, T5) else 1
        values["bias"] = jax.tree.map(lambda x: np.float32(times) * np.asarray(x), params)
    return values


def bound(case: Case, values: dict):
    gates = {name: values[name] for name in ("q_gates", "kv_gates") if name in values}
    return case.bias and case.bias.bind(values.get("bias"), num_heads=case.heads, **gates)


def places(case: Case) -> dict:
    """Everything that has no gradient: masks and positions. Their arrays are traced."""
    q_positions = Range(0, case.queries) if case.q_positions is None else case.q_positions
    kv_positions = Range(0, case.keys) if case.kv_positions is None else case.kv_positions
    return {"mask": case.mask, "where": case.remap, "q_positions": q_positions, "kv_positions": kv_positions}


def call(case: Case, backend, values: dict, placed: dict) -> tuple:
    """Output and log-sum-exp, sinks included, ``[batch, tokens, heads, ...]``."""
    scale, slots = case.size**-0.5, dict(placed)
    where = slots.pop("where")
    arguments = Call(
        grouped(scale * values["q"], case.kv_heads),
        jnp.moveaxis(values["k"], 1, 2),
        jnp.moveaxis(values["v"], 1, 2),
        bias=bound(case, values),
        remap=tuple(
            RemappedPair(grouped(scale * values[f"q{n}"], case.kv_heads), jnp.moveaxis(values[f"k{n}"], 1, 2), mask)
            for n, mask in enumerate(where)
        ),
        softcap=case.softcap,
        **slots,
    )
    return result_of(backend(arguments), values.get("sinks"), True)


def kernel(case: Case):
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


def loss_of(result: tuple):
    """A scalar that depends on every output and every finite log-sum-exp."""
    out, lse = result
    weights = jnp.asarray(np.random.default_rng(3).standard_normal(out.shape), out.dtype)
    return (out * weights).sum(dtype=lse.dtype) + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum()


def outputs_and_gradients(case: Case, backend, values: dict):
    """Output, log-sum-exp and the gradients of every input, from one compiled program."""

    def run(values, placed):
        return loss_of(found := call(case, backend, values, placed)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(values, places(case))
    return *found, gradients


def pairs(case: Case, values: dict, placed: dict) -> tuple:
    """The values of bias, mask and branches for every pair of tokens."""
    at = placed["q_positions"], placed["kv_positions"]
    tokens = [p if p.ndim == 1 else p[:, None] for p in map(as_array, at)]
    where = [masks.materialise(mask, *at) for mask in placed["where"]]
    return (
        bound(case, values).values(*tokens) if case.bias else None,
        None if placed["mask"] is None else masks.materialise(placed["mask"], *at),
        [w if w.ndim == 4 else w[None, None] for w in where],
    )


def oracle(case: Case, values: dict) -> tuple:
    bias, allowed, where = jax.device_get(jax.jit(partial(pairs, case))(values, places(case)))
    return oracles.attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        allowed=allowed,
        softcap=case.softcap,
        sinks=values.get("sinks"),
        remap=[(values[f"q{n}"], values[f"k{n}"], w) for n, w in enumerate(where)],
    )


def as_float64(values: dict) -> dict:
    return jax.tree.map(lambda x: x.astype(np.float64), values)


def close(got, want, tolerance: float) -> None:
    """Every leaf, relative to its own largest number."""

    def check(path, got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want)
        assert np.isfinite(got).all(), jax.tree_util.keystr(path)
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)} is off by {error:.1e} of its largest number"

    jax.tree_util.tree_map_with_path(check, got, want)


def check_case(case: Case, unread=()) -> None:
    """Forward against the oracle, every gradient against ``dense``; the kernel finds NaN in what it must not read.

    ``unread`` names arrays of the keys and slices of their tokens.
    """
    values = inputs(case)
    poisoned = {name: values[name].copy() for name, _ in unread}
    for name, tokens in unread:
        poisoned[name][:, tokens] = np.nan
    out, lse, gradients = outputs_and_gradients(case, kernel(case), values | poisoned)
    with jax.enable_x64(True):
        want_out, want_lse = oracle(case, as_float64(values))
        _, _, want = outputs_and_gradients(case, dense, as_float64(values))
    coarse = case.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    blind = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.asarray(out, np.float64)[blind], 0)
    np.testing.assert_array_equal(np.asarray(gradients["q"], np.float64)[blind], 0)
    close(np.where(blind, 0, lse), np.where(blind, 0, want_lse), 2e-6)
    close(out, want_out, 1e-2 if coarse else 2e-6)
    close(gradients, want, 2e-2 if coarse else 2e-5)
    assert jax.tree.map(jnp.result_type, gradients) == jax.tree.map(jnp.result_type, values)


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.wide) for case in WIDE], ids=lambda case: case.name
)
def test_forward_and_every_gradient(case):
    check_case(case)


def test_parts_of_a_longer_sequence_under_vmap_merge_with_exact_gradients():
    """Keys in two parts, merged by their log-sum-exps; more than half of the queries see nothing of the second."""
    case, half = Case("parts", bias=LEARNED, mask=Causal(), queries=128, keys=160, batch=1, heads=1), 80
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
    check_case(case, [(name, slice(128 * n, 128 * n + 128)) for name, found in tiles.items() for n in found])


def test_inside_shard_map_with_its_checks():
    """Rows of the batch on two devices; the gradient of what both share, the slopes, is summed over them."""
    case = Case("sharded", bias=LEARNED, mask=Causal(), queries=100, keys=100)
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
    case = Case("rising", bias=LEARNED, mask=Causal(), batch=1, queries=128, keys=256, q_positions=Range(128, 128))
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
    case = Case("refused", **change)
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
