"""Every backend over one grid: forward and every gradient, in float64, against NumPy and against each other."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import posjax
from posjax import masks
from posjax.attention import attention
from posjax.attention.api import BACKENDS, _group
from posjax.attention.blockwise import Blocks, blockwise
from posjax.attention.operands import Operands
from posjax.bias import T5, ALiBi, Kerple
from posjax.far import Branch
from posjax.masks import Causal, Chunked, Prefix, Segments, Sinks, Window
from posjax.positions import Range, as_array, from_segments

BATCH, SIZE, VALUE_SIZE = 2, 8, 6
RATES = np.linspace(0.01, 0.3, SIZE)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["distance"])
@dataclasses.dataclass(frozen=True)
class Beyond(masks.Mask):
    """Pairs whose key is at least ``distance`` behind the query."""

    distance: int

    def pairs(self, i, j):
        return i - j >= self.distance

    def bounds(self, i_low, i_high, j_low, j_high):
        return i_high - j_low >= self.distance, i_low - j_high >= self.distance


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: lengths, heads, slots; the blocks make several uneven tiles along both axes."""

    name: str
    queries: int = 13
    keys: int = 13
    heads: int = 4
    kv_heads: int = 2
    bias: object = None
    mask: object = None
    softcap: float | None = None
    sinks: bool = False
    far: tuple = ()
    decay: bool = False
    q_positions: object = None
    kv_positions: object = None
    blocks: tuple = (4, 6)


IDS = np.array([[0] * 3 + [1] * 7 + [-1] * 3, [-1] * 2 + [4] * 6 + [5] * 5], np.int32)
SHUFFLED = np.random.default_rng(0).permutation(13).astype(np.int32)
PACKED = from_segments(IDS)
FAR_AWAY = Range(2**30, 13)
LEARNED, SYMMETRIC = ALiBi(learned=True), ALiBi(symmetric=True, learned=True)
T5_NEAR, T5_BOTH = T5(num_buckets=6, max_distance=9), T5(num_buckets=8, max_distance=9, bidirectional=True)
TWO_BRANCHES = (Beyond(4) & Window(8), Beyond(8))
OF_ROWS = {"q_positions": PACKED, "kv_positions": PACKED}

CASES = [
    Case("cross with one key head", queries=5, keys=11, kv_heads=1),
    Case(
        "even tiles of a window, one head per key",
        queries=12,
        keys=12,
        heads=2,
        mask=Causal() & Window(3),
        blocks=(4, 4),
    ),
    Case("long queries with sinks", queries=11, keys=3, q_positions=Range(0, 11), mask=Causal(), sinks=True),
    Case("symmetric alibi in a band", bias=SYMMETRIC, mask=Window(4)),
    Case("learned alibi and lambda", bias=LEARNED, mask=Causal() & (Window(3) | Sinks(2))),
    Case("two-sided t5 in one tile", bias=T5_BOTH, blocks=(13, 13)),
    Case("kerple log in chunks", bias=Kerple("log"), mask=Causal() & Chunked(5)),
    Case("kerple power and a prefix", bias=Kerple("power"), mask=Causal() | Prefix(6)),
    Case("soft cap", softcap=0.8, mask=Causal(), bias=T5_NEAR),
    Case("segments", mask=Segments(IDS), bias=LEARNED),
    Case("packed", mask=Causal() & Segments(IDS), bias=T5_NEAR, **OF_ROWS, sinks=True),
    Case("nothing seen", mask=Causal() & Segments(IDS), kv_positions=Range(6, 13), sinks=True, softcap=2.0),
    Case(
        "decode far away",
        queries=2,
        q_positions=Range(2**30 + 11, 2),
        kv_positions=FAR_AWAY,
        mask=Causal(),
        bias=ALiBi(),
    ),
    Case("shuffled", q_positions=SHUFFLED, kv_positions=SHUFFLED, mask=Causal(), bias=Kerple()),
    Case("far", far=(Beyond(4),), mask=Causal(), bias=LEARNED, softcap=3.0),
    Case("two branches of both sides", far=TWO_BRANCHES, sinks=True),
    Case("far in packed rows", far=(Beyond(3),), mask=Causal() & Segments(IDS), **OF_ROWS),
    Case("decay", decay=True, mask=Causal(), bias=T5_NEAR),
    Case("decay in packed rows", decay=True, mask=Causal() & Segments(IDS), **OF_ROWS),
]

WIDE = [
    Case("plain"),
    Case("one tile", blocks=(13, 13)),
    Case("even tiles", queries=12, keys=12, blocks=(4, 4)),
    Case("one head per key", heads=2, mask=Causal()),
    Case("one key head", kv_heads=1, mask=Causal()),
    Case("cross", queries=5, keys=11),
    Case("long queries", queries=11, keys=3, q_positions=Range(0, 11), mask=Causal()),
    Case("causal", mask=Causal()),
    Case("window", mask=Causal() & Window(3)),
    Case("band", mask=Window(4)),
    Case("lambda", mask=Causal() & (Window(3) | Sinks(2))),
    Case("chunked", mask=Causal() & Chunked(5)),
    Case("prefix", mask=Causal() | Prefix(6)),
    Case("alibi", bias=ALiBi(), mask=Causal()),
    Case("learned alibi", bias=LEARNED, mask=Causal()),
    Case("symmetric alibi", bias=SYMMETRIC),
    Case("t5", bias=T5_NEAR, mask=Causal()),
    Case("two-sided t5", bias=T5_BOTH),
    Case("kerple log", bias=Kerple("log"), mask=Causal()),
    Case("kerple power", bias=Kerple("power"), mask=Causal()),
    Case("sinks", sinks=True, mask=Causal()),
    Case("decode", queries=2, keys=13, q_positions=Range(11, 2), mask=Causal(), bias=ALiBi()),
    Case("far of both sides", far=(Beyond(4),), sinks=True),
    Case("two branches", far=TWO_BRANCHES, mask=Causal() & (Window(10) | Sinks(2))),
    Case("far away", q_positions=FAR_AWAY, kv_positions=FAR_AWAY, mask=Causal(), bias=ALiBi()),
]
cases = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)], ids=lambda case: case.name
)
backends = pytest.mark.parametrize("backend", BACKENDS)


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


def called(name: str) -> Case:
    return next(case for case in (*CASES, *WIDE) if case.name == name)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


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
    for n in range(len(case.far)):
        values[f"q{n}"], values[f"k{n}"] = (1.3 + n) * values["q"][..., ::-1], 0.7 * values["k"] ** 2
    if case.sinks:
        values["sinks"] = normal(case.heads)
    if case.bias is not None and (params := case.bias.init(jax.random.key(7), case.heads)):
        times = 30 if isinstance(case.bias, T5) else 1
        values["bias"] = jax.tree.map(lambda x: times * np.asarray(x, dtype), params)
    return values


def call(case: Case, values: dict, implementation: str, **options):
    """``attention`` with the case's slots; the small tiles are put in by ``small_tiles``."""
    bias = case.bias.bind(values.get("bias"), num_heads=case.heads) if case.bias else None
    return attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        mask=case.mask,
        sinks=values.get("sinks"),
        softcap=case.softcap,
        far=[Branch(values[f"q{n}"], values[f"k{n}"], where) for n, where in enumerate(case.far)],
        decay=RATES if case.decay else None,
        q_positions=case.q_positions,
        kv_positions=case.kv_positions,
        implementation=implementation,
        return_residuals=True,
        **options,
    )


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes the blockwise backend use the tiles of a case."""

    def use(case: Case):
        monkeypatch.setitem(BACKENDS, "blockwise", partial(blockwise, blocks=Blocks(*case.blocks)))

    return use


def pairs_of(case: Case, values: dict, placed: dict) -> tuple:
    """What bias, mask and branches say of every pair of tokens."""
    at = placed["q_positions"], placed["kv_positions"]
    tokens = [p if p.ndim == 1 else p[:, None] for p in map(as_array, at)]
    bias = case.bias and case.bias.bind(values.get("bias"), num_heads=case.heads)
    where = [masks.materialise(mask, *at) for mask in placed["far"]]
    return (
        None if bias is None else bias.values(*tokens),
        None if placed["mask"] is None else masks.materialise(placed["mask"], *at),
        [w if w.ndim == 4 else w[None, None] for w in where],
    )


def oracle(case: Case, values: dict):
    """Output and log-sum-exp, and the keys that no query sees, ``[batch, keys]``."""
    q_positions = Range(0, case.queries) if case.q_positions is None else case.q_positions
    kv_positions = Range(0, case.keys) if case.kv_positions is None else case.kv_positions
    placed = {"q_positions": q_positions, "kv_positions": kv_positions, "mask": case.mask, "far": case.far}
    bias, allowed, where = jax.device_get(jax.jit(partial(pairs_of, case))(values, placed))
    out, lse = oracles.attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        allowed=allowed,
        softcap=case.softcap,
        sinks=values.get("sinks"),
        far=[(values[f"q{n}"], values[f"k{n}"], w) for n, w in enumerate(where)],
        decay=decays(as_array(q_positions), as_array(kv_positions)) if case.decay else None,
    )
    seen = np.broadcast_to(True if allowed is None else allowed, (BATCH, case.heads, case.queries, case.keys))
    return out, lse, ~seen.any((1, 2))


def decays(q_positions, kv_positions):
    """``exp(-a (i - j))`` as ``[batch or 1, 1, q, k, size]``; every row of a batch in packed rows has its own."""
    distance = np.asarray(q_positions)[..., :, None] - np.asarray(kv_positions)[..., None, :]
    return np.exp(-RATES * distance[..., None]).reshape(-1, 1, *distance.shape[-2:], SIZE)


def loss(case: Case, implementation: str, values: dict):
    """A number that every output and every finite log-sum-exp takes part in."""
    return _loss_of(call(case, values, implementation))[0]


def _loss_of(result):
    out, lse = result
    finite = jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse))
    return (out * weights_of(out.shape).astype(out.dtype)).sum() + finite.sum(), result


def weights_of(shape) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def gradients(case: Case, backend: str, values: dict) -> dict:
    """The gradients of the loss, from one compiled program."""
    return jax.jit(jax.grad(partial(loss, case, backend)))(values)


def outputs_and_gradients(case: Case, backend: str, values: dict):
    """Output, log-sum-exp and the gradients of every input, from one compiled program."""

    def run(values):
        out, transpose, lse = jax.vjp(lambda v: _loss_of(call(case, v, backend)), values, has_aux=True)
        return *lse, transpose(jnp.ones_like(out))[0]

    return jax.jit(run)(values)


@cases
def test_every_backend_is_the_oracle_forward_and_backward(case, small_tiles):
    """Rows that see nothing give zero and have zero gradients, as have keys that nothing sees."""
    small_tiles(case)
    values = inputs(case)
    want_out, want_lse, unseen = oracle(case, values)
    blind = np.isneginf(want_lse)
    found = {}
    for backend in BACKENDS:
        out, lse, found[backend] = jax.device_get(outputs_and_gradients(case, backend, values))
        chex.assert_shape(out, (BATCH, case.queries, case.heads, VALUE_SIZE))
        chex.assert_shape(lse, (BATCH, case.queries, case.heads))
        chex.assert_type([out, lse], np.float64)
        np.testing.assert_allclose(out, want_out, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, atol=1e-12)
        for nothing in (out[blind], found[backend]["q"][blind], found[backend]["k"][unseen]):
            np.testing.assert_array_equal(nothing, 0)
    want = found.pop("dense")
    chex.assert_tree_all_finite(want)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(want)), "a gradient that is zero shows nothing"
    for got in found.values():
        chex.assert_trees_all_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ["packed", "soft cap", wide("symmetric alibi")])
def test_dense_gradients_are_finite_differences_of_the_oracle(name):
    case = called(name)
    values = inputs(case)
    gradient = jax.device_get(gradients(case, "dense", values))

    def numpy_loss(values):
        out, lse, _ = oracle(case, values)
        return (out * weights_of(out.shape)).sum() + np.sin(lse[np.isfinite(lse)]).sum()

    rng = np.random.default_rng(5)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), values)
    step = 1e-5
    ahead, behind = (jax.tree.map(lambda x, d, s=s: x + s * d, values, direction) for s in (step, -step))
    slope = (numpy_loss(ahead) - numpy_loss(behind)) / (2 * step)
    inner = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
    np.testing.assert_allclose(inner, slope, rtol=1e-6)


@pytest.mark.wide
@backends
def test_rows_that_see_nothing_give_zero_and_zero_gradients(backend, small_tiles):
    case = dataclasses.replace(called("packed"), sinks=False)
    small_tiles(case)
    values = inputs(case)
    out, lse, gradient = jax.device_get(outputs_and_gradients(case, backend, values))
    blind = IDS < 0
    assert blind.any()
    np.testing.assert_array_equal(out[blind], 0)
    assert np.isneginf(lse[blind]).all()
    chex.assert_tree_all_finite(gradient)
    np.testing.assert_array_equal(gradient["q"][blind], 0)
    np.testing.assert_array_equal(gradient["k"][blind], 0)


@backends
@pytest.mark.parametrize("dtype", [wide(jnp.float32), jnp.bfloat16])
def test_lower_precisions(backend, dtype, small_tiles):
    case = called("alibi")
    small_tiles(case)
    values = jax.tree.map(lambda x: x.astype(dtype), inputs(case))
    out, lse, gradient = jax.device_get(outputs_and_gradients(case, backend, values))
    chex.assert_type([out, lse], [dtype, jnp.float32])
    want, *_ = oracle(case, jax.tree.map(lambda x: x.astype(np.float64), values))
    np.testing.assert_allclose(out.astype(np.float64), want, atol=2e-6 if dtype == jnp.float32 else 2e-2)
    chex.assert_trees_all_equal_dtypes(gradient, values)


@pytest.mark.parametrize("name", ["learned alibi", "packed", wide("plain"), wide("kerple log")])
def test_under_vmap(name, small_tiles):
    case = called(name)
    small_tiles(case)
    many = jax.tree.map(lambda x: np.stack([x, 0.5 * x, 2 * x]), inputs(case))
    got = jax.jit(jax.vmap(jax.grad(partial(loss, case, "blockwise"))))(many)
    dense = jax.jit(jax.grad(partial(loss, case, "dense")))
    want = [dense(jax.tree.map(lambda x, n=n: x[n], many)) for n in range(3)]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: np.stack(x), *want), atol=1e-12, rtol=1e-10)


def sharded_loss(case: Case, backend: str, values: dict):
    """The loss over a batch split over 8 devices, with the parameters of the bias the same on all."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    placed = {name: P("data") if name in "qkv" else P() for name in values}

    @partial(jax.shard_map, mesh=mesh, in_specs=(placed,), out_specs=P())
    def local(values):
        return jax.lax.psum(loss(case, backend, values), "data")

    return local(values)


@pytest.mark.parametrize(
    ("bias", "backend"),
    [
        (LEARNED, "blockwise"),
        (T5_NEAR, "dense"),
        (Kerple(), "blockwise"),
        wide(LEARNED, "dense"),
        wide(T5_NEAR, "blockwise"),
        wide(Kerple(), "dense"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_bias_gradients_inside_shard_map_with_its_checks(backend, bias, small_tiles):
    case = Case("sharded", bias=bias, mask=Causal(), sinks=True)
    small_tiles(case)
    values = inputs(case)
    values |= {name: np.concatenate([values[name] * (1 + n) for n in range(4)]) for name in "qkv"}
    got = jax.jit(jax.grad(partial(sharded_loss, case, backend)))(values)
    parts = [values | {name: values[name][n : n + 1] for name in "qkv"} for n in range(8)]
    dense = jax.jit(jax.grad(partial(loss, case, "dense")))
    got, want = jax.device_get((got, [dense(part) for part in parts]))
    for name in "qkv":
        chex.assert_trees_all_close(got[name], np.concatenate([w[name] for w in want]), atol=1e-12, rtol=1e-10)
    for name in ("bias", "sinks"):
        total = jax.tree.map(lambda *x: sum(x), *[w[name] for w in want])
        chex.assert_trees_all_close(got[name], total, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize(
    ("slots", "backend"),
    [
        ({"decay": True}, "blockwise"),
        ({"far": (Beyond(4),)}, "blockwise"),
        ({"far": (Beyond(4),)}, "dense"),
        wide({"decay": True}, "dense"),
    ],
    ids=["decay-blockwise", "far-blockwise", "far-dense", "decay-dense"],
)
def test_decay_and_branches_inside_shard_map_with_its_checks(slots, backend, small_tiles):
    case = Case("sharded", mask=Causal(), **slots)
    small_tiles(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    run = jax.shard_map(lambda v: call(case, v, backend)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    @jax.jit
    def both(values):
        whole = jax.grad(lambda v: (call(case, v, "dense")[0] ** 2).sum())
        return jax.grad(lambda v: (run(v) ** 2).sum())(values), whole(values)

    got, want = both(inputs(case))
    chex.assert_trees_all_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("backend", ["blockwise", wide("dense")])
def test_segments_that_differ_per_device_inside_shard_map(backend, small_tiles):
    case = called("packed")
    small_tiles(case)
    values = inputs(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    placed = {name: P("data") if name in "qkv" else P() for name in values}

    @partial(jax.shard_map, mesh=mesh, in_specs=(placed, P("data")), out_specs=P("data"))
    def local(values, ids):
        where = from_segments(ids)
        mine = dataclasses.replace(case, mask=Causal() & Segments(ids), q_positions=where, kv_positions=where)
        return call(mine, values, backend)[0]

    gradient = jax.jit(jax.grad(lambda v: (local(v, IDS) ** 2).sum()))(values)
    want = jax.jit(jax.grad(lambda v: (call(case, v, "dense")[0] ** 2).sum()))(values)
    chex.assert_trees_all_close(gradient, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("backend", ["blockwise", wide("dense")])
def test_under_pmap(backend, small_tiles):
    case = Case("pmap", bias=LEARNED, mask=Causal())
    small_tiles(case)
    values = inputs(case)
    many = jax.tree.map(lambda x: np.stack([x * (1 + n) for n in range(8)]), values)
    got = jax.pmap(jax.grad(partial(loss, case, backend)))(many)
    want = gradients(case, "dense", jax.tree.map(lambda x: x[3], many))
    chex.assert_trees_all_close(jax.tree.map(lambda x: np.asarray(x)[3], got), want, atol=1e-11, rtol=1e-9)


def test_parts_of_a_longer_sequence_merge_with_exact_gradients():
    """Keys in two halves, merged by their log-sum-exps: the gradient through the residuals must be exact."""
    case = Case("halves", queries=12, keys=12, bias=ALiBi(learned=True), mask=Causal())
    values = inputs(case)

    def merged(values):
        bias = case.bias.bind(values["bias"], num_heads=4)
        parts = [
            attention(
                values["q"],
                values["k"][:, start : start + 6],
                values["v"][:, start : start + 6],
                bias=bias,
                mask=Causal(),
                q_positions=Range(0, 12),
                kv_positions=Range(start, 6),
                implementation="blockwise",
                return_residuals=True,
            )
            for start in (0, 6)
        ]
        total = jnp.logaddexp(parts[0][1], parts[1][1])
        return sum((out * jnp.exp(lse - total)[..., None]) for out, lse in parts)

    got = jax.jit(jax.grad(lambda v: (merged(v) ** 3).sum()))(values)
    want = jax.jit(jax.grad(lambda v: (call(case, v, "dense")[0] ** 3).sum()))(values)
    chex.assert_trees_all_close(got, want, atol=1e-12, rtol=1e-10)


def test_a_traced_offset_is_one_program_for_all_steps():
    case = Case("decode", queries=1, keys=13, bias=ALiBi(), mask=Causal())
    values = inputs(case)

    @jax.jit
    def step(start):
        moved = dataclasses.replace(case, q_positions=Range(start, 1))
        return call(moved, values, "blockwise")[0]

    for start in (0, 5, 12):
        moved = dataclasses.replace(case, q_positions=Range(start, 1))
        want = jax.jit(partial(call, moved, implementation="dense"))(values)[0]
        chex.assert_trees_all_close(step(jnp.int32(start)), want, atol=1e-12)


def test_empty_tiles_are_not_visited():
    """Forbidden tiles full of NaN leave no trace, forward or backward: nothing was multiplied by them."""
    values = inputs(Case("window", queries=64, keys=64))
    poison = {name: values[name].copy() for name in "kv"}
    for array in poison.values():
        array[:, :16] = np.nan
    sees_none = slice(24, None)

    def run(q, k, v):
        operands = Operands(
            _group(q, 2),
            jnp.moveaxis(k, 1, 2),
            jnp.moveaxis(v, 1, 2),
            None,
            Causal() & Window(8),
            Range(0, 64),
            Range(0, 64),
        )
        return blockwise(operands, Blocks(8, 8))[0][..., sees_none, :]

    @jax.jit
    def both_ways(*arrays):
        out, transpose = jax.vjp(run, *arrays)
        return out, *transpose(jnp.ones_like(out))

    out, d_q, d_k, d_v = jax.device_get(both_ways(values["q"], poison["k"], poison["v"]))
    chex.assert_tree_all_finite([out, d_q[:, sees_none], d_k[:, 32:], d_v[:, 32:]])


def test_tiles_on_one_side_of_a_boundary_compute_one_pair_of_features():
    """NaN in far keys that are never far, and in near keys of tiles that are all far, leaves no trace."""
    values = inputs(Case("far", queries=64, keys=64, far=(Beyond(32),)))
    q, v = values["q"], values["v"]
    always_near, long_far = slice(40, None), slice(40, None)

    def run(q, k, v, q_far, k_far):
        far = (Branch(_group(q_far, 2), jnp.moveaxis(k_far, 1, 2), Beyond(32)),)
        pair = _group(q, 2), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
        return blockwise(Operands(*pair, None, Causal(), Range(0, 64), Range(0, 64), far), Blocks(8, 8))[0]

    @jax.jit
    def both_ways(*arrays):
        out, transpose = jax.vjp(run, *arrays)
        return out, transpose(jnp.ones_like(out))

    poisoned, near = values["k0"].copy(), values["k"].copy()
    poisoned[:, always_near] = near[:, :8] = np.nan
    chex.assert_tree_all_finite(both_ways(q, values["k"], v, values["q0"], poisoned))
    out, _ = jax.device_get(both_ways(q, near, v, values["q0"], values["k0"]))
    chex.assert_tree_all_finite(out[..., long_far, :])
    assert np.isnan(out[..., :32, :]).any(), "there the near keys are needed"


def test_by_itself_attention_takes_memory_linear_in_the_length():
    """The compiler's own plan for forward and backward at 4096 tokens: far below one n x n array of 64 MiB."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)] * 3

    def run(q, k, v):
        return attention(q, k, v, bias=ALiBi(), mask=Causal()).sum()

    plan = jax.jit(jax.grad(run, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 16 * 2**20


@pytest.mark.parametrize("packed", [False, True])
def test_with_its_own_tiles_beyond_one_tile(packed):
    length = 600
    values = inputs(Case("long", queries=length, keys=length, heads=2, kv_heads=1), np.float32)
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, length))).astype(np.int32)
    mask = Causal() & Segments(ids) if packed else Causal() & (Window(200) | Sinks(4))

    def run(values, implementation=None):
        return attention(*values, bias=ALiBi(), mask=mask, implementation=implementation)

    arguments = values["q"], values["k"], values["v"]

    @partial(jax.jit, static_argnums=1)
    def both_ways(values, implementation):
        out, transpose = jax.vjp(partial(run, implementation=implementation), values)
        return out, transpose(jnp.ones_like(out))

    (want, slopes), (got, found) = (both_ways(arguments, name) for name in ("dense", None))
    chex.assert_trees_all_close(got, want, atol=1e-5)
    chex.assert_trees_all_close(found, slopes, atol=1e-4)
    assert not np.array_equal(got, want), "the two were computed differently"


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, wide(np.int8), wide(np.uint32)])
def test_positions_of_any_integer_dtype(dtype):
    case = Case("narrow", queries=100, keys=100, bias=ALiBi(symmetric=True), mask=Window(9), blocks=(16, 32))
    where = np.arange(100).astype(dtype)
    case, plain = dataclasses.replace(case, q_positions=where, kv_positions=where), case
    values = inputs(case)

    @jax.jit
    def run(values):
        return call(plain, values, "dense"), [call(case, values, backend) for backend in BACKENDS]

    want, found = run(values)
    for got in found:
        chex.assert_trees_all_close(got, want, atol=1e-12)


def test_the_last_positions_of_int32_need_no_room_beyond_them(small_tiles):
    end = Range(2**31 - 13, 13)
    case = Case("end", bias=ALiBi(), mask=Causal() & Window(5), q_positions=end, kv_positions=end)
    small_tiles(case)
    values = inputs(case)
    got, want = (jax.jit(partial(call, case, implementation=name))(values) for name in ("blockwise", "dense"))
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_gqa_is_repeated_keys():
    values = inputs(Case("gqa", mask=Causal()))
    repeated = values | {name: np.repeat(values[name], 2, axis=2) for name in "kv"}
    run = jax.jit(partial(attention, mask=Causal()))
    got, want = (run(x["q"], x["k"], x["v"]) for x in (values, repeated))
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_scale_per_query_and_head():
    values = inputs(Case("scale"))
    q, k, v = values["q"], values["k"], values["v"]
    scale = np.random.default_rng(0).uniform(size=(13, 4))
    got, plain = jax.jit(lambda *x: [attention(*x, scale=s) for s in (scale, 0.3)])(q, k, v)
    want, _ = oracles.attention(q * scale[..., None], k, v, scale=1.0)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(plain, oracles.attention(q, k, v, scale=0.3)[0], atol=1e-12)


def test_a_sink_is_a_zero_key_and_value_with_its_logit():
    """SoftMax-plus-one: a sink logit of 0 is one more key with logit 0 and value 0."""
    values = inputs(Case("plus one"))
    q, k, v = values["q"], values["k"], values["v"]
    zero = np.zeros_like(k[:, :1])
    more = np.concatenate([k, zero], 1), np.concatenate([v, zero[..., :VALUE_SIZE]], 1)
    got, want = jax.jit(lambda: (attention(q, k, v, sinks=np.zeros(4)), attention(q, *more)))()
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_agrees_with_jax_nn():
    values = inputs(Case("jax"), np.float32)
    q, k = values["q"], values["k"]
    v = np.pad(values["v"], ((0, 0),) * 3 + ((0, SIZE - VALUE_SIZE),))

    @jax.jit
    def run(*x):
        bias = ALiBi().bind(num_heads=4).values(jnp.arange(13), jnp.arange(13))[None]
        found = [attention(*x, bias=ALiBi(), mask=Causal(), implementation=backend) for backend in BACKENDS]
        return jax.nn.dot_product_attention(*x, bias=bias, is_causal=True), found

    want, found = run(q, k, v)
    for got in found:
        chex.assert_trees_all_close(got, want, atol=1e-6)


def bad(**changes):
    values = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
    values |= {name: shape for name, shape in changes.items() if name in values}
    options = {name: value for name, value in changes.items() if name not in values}
    return lambda: attention(*(jnp.zeros(shape, jnp.float32) for shape in values.values()), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (bad(q=(5, 4, 8)), r"q must have 4 axes \[batch, length, heads, size\], found shape \(5, 4, 8\)"),
        (bad(k=(3, 7, 2, 8), v=(3, 7, 2, 8)), r"k must have the batch of q, 2"),
        (bad(v=(2, 6, 2, 8)), r"v must have the batch, length and heads of k, \(2, 7, 2\)"),
        (bad(k=(2, 7, 2, 9)), "k must have the head size of q, 8"),
        (bad(k=(2, 7, 3, 8), v=(2, 7, 3, 8)), "multiple of those of k, found 4 and 3"),
        (bad(k=(2, 0, 2, 8), v=(2, 0, 2, 8)), "k must hold at least one token"),
        (bad(mask=True), "mask must be a posjax.masks.Mask or a boolean array, found True"),
        (bad(bias=3.0), "bias must be a posjax bias, the spec of one, or an array, found float"),
        (bad(bias=T5()), "params must hold 'table'"),
        (bad(bias=ALiBi().bind(num_heads=2)), "bias is bound for 2 heads, but q has 4"),
        (bad(softcap="30"), "softcap must be positive, found '30'"),
        (bad(mask=Segments(IDS)), r"Segments q_ids must have shape \(2, 5\), found \(2, 13\)"),
        (bad(mask=Segments(jnp.zeros((2, 5)), jnp.zeros((2, 7)))), "Segments q_ids must be integers"),
        (bad(softcap=-1.0), "softcap must be positive, found -1.0"),
        (bad(sinks=jnp.zeros(2)), r"sinks must have shape \(4,\)"),
        (bad(scale=jnp.zeros(3)), r"scale must broadcast to \[batch, queries, heads\]"),
        (bad(q_positions=jnp.arange(7)), r"q_positions must have shape \(5,\) or \(2, 5\), found \(7,\)"),
        (bad(kv_positions=Range(0, 5)), "kv_positions must cover 7 tokens, found a Range of 5"),
        (bad(q_positions=jnp.zeros(5)), "q_positions must be integers"),
        (bad(implementation="blokwise"), "did you mean 'blockwise'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_are_refused():
    x = jnp.zeros((1, 2, 1, 4), jnp.int32)
    with pytest.raises(ValueError, match="q must be of a floating dtype, found int32"):
        attention(x, x, x)


def test_public_name():
    assert posjax.attention is attention
