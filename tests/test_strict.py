"""JAX's strict flags: no rank and no dtype is promoted implicitly, no intermediate result is NaN, and x64 may be on.

JAX raises on promotion while it traces, so those tests compile nothing. The tests for NaN run a program and check the
result of every operation.
"""

import contextlib
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LENGTH, NAMES, attending, config, preset, separate
from flax import nnx
from jax.experimental import checkify

import posjax as pj
from posjax import bias, masks
from posjax.masks import Beyond, Causal, Dilated, FirstTokens, Globals, Segments, Window
from posjax.nn import Decoder
from posjax.positions import Range, from_segments

BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
IDS = np.asarray([[0] * 6 + [1] * 6 + [-1] * 4, [-1] * 3 + [0] * 13], np.int32)
FLAGS = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
}
DTYPES = (jnp.float32, jnp.bfloat16)
BACKENDS = ("dense", "blockwise")


@contextlib.contextmanager
def strict(*names):
    with contextlib.ExitStack() as flags:
        for name in names or FLAGS:
            flags.enter_context(FLAGS[name]())
        yield


def normal(*shape, dtype=jnp.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def projections(dtype, scheme=None):
    widths = (SIZE, SIZE) if scheme is None else (scheme.query_size(SIZE), scheme.key_size(SIZE))
    q, k = (normal(BATCH, LENGTH, h, w, dtype=dtype) for h, w in zip((HEADS, KV_HEADS), widths, strict=True))
    return q, k, normal(BATCH, LENGTH, KV_HEADS, SIZE, dtype=dtype)


def results_and_gradients(function, *arguments):
    """The outputs, and the gradients of a number to which every output and finite log-sum-exp contributes."""

    def loss(arguments):
        out = function(*arguments)
        parts = (jnp.where(jnp.isneginf(x), 0, x).astype(jnp.float32) for x in jax.tree.leaves(out))
        return sum(jnp.sin(x).sum() for x in parts), out

    found, out = jax.grad(loss, allow_int=True, has_aux=True)(arguments)
    return out, found


def gradients(function, *arguments):
    return results_and_gradients(function, *arguments)[1]


def find_nan(function, *arguments):
    """Fails if any operation behind the results and gradients gives NaN, or a gradient is not finite."""
    run = checkify.checkify(partial(gradients, function), errors=checkify.nan_checks)
    error, found = jax.jit(run)(*arguments)
    error.throw()
    chex.assert_tree_all_finite(found)


def plain(**options):
    return lambda dtype: ((lambda params: options), {})


def learned(name, *shape, **options):
    return lambda dtype: ((lambda params: options | params), {name: normal(*shape)})


PACKED, AT = Causal() & Segments(IDS), np.asarray(from_segments(IDS))
RATES = np.linspace(0, 0.2, SIZE, dtype=np.float32)
CASES = {
    "plain": plain(),
    "packed": plain(mask=PACKED, bias=bias.ALiBi(), softcap=3.0),
    "rows that see nothing": plain(mask=Beyond(9) & Segments(IDS), softcap=3.0, sinks=np.zeros(HEADS, np.float32)),
    "dilated heads": plain(mask=Dilated(3, (1, 2, 3, 4)) & masks.padding(IDS >= 0)),
    "longformer": plain(mask=(Window(3) | Globals(IDS == 0) | FirstTokens(2)) & Segments(IDS)),
    "traced window": learned("softcap", mask=Causal() & Window(np.int32(3))),
    "sinks": learned("sinks", HEADS, mask=PACKED),
    "scale of rows": learned("scale", BATCH, LENGTH, 1, mask=PACKED),
    "decay": plain(mask=Causal(), decay=RATES),
    "decay in rows": plain(mask=PACKED, decay=RATES, q_positions=AT, kv_positions=AT),
    "array bias": learned("bias", HEADS, LENGTH, LENGTH, mask=IDS[:, None, None] >= 0),
}


def attended(name, backend, dtype):
    """``(function, arguments)`` of a case."""
    options, params = CASES[name](dtype)

    def run(q, k, v, params):
        return pj.attention(q, k, v, implementation=backend, return_residuals=True, **options(params))

    return run, *projections(dtype), params


def traced(name, backend, dtype):
    """Shapes of the arguments of a case, its results and its gradients; nothing is compiled."""

    def run():
        function, *arguments = attended(name, backend, dtype)
        return tuple(arguments), *results_and_gradients(function, *arguments)

    return jax.eval_shape(run)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.wide)])
def test_attention_promotes_nothing(name, dtype):
    for backend in BACKENDS:
        with strict("ranks", "dtypes"):
            arguments, _, found = traced(name, backend, dtype)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, arguments)


@pytest.mark.parametrize("name", ["packed", "decay"])
def test_in_x64_float64_stays_float64(name):
    for backend in BACKENDS:
        with strict("ranks", "dtypes", "x64"):
            _, results, _ = traced(name, backend, jnp.float64)
        chex.assert_type(results, jnp.float64)


def check_scheme(scheme, backend, dtype, positions):
    params = scheme.init(jax.random.key(0), HEADS, SIZE, num_kv_heads=KV_HEADS, model_dim=8)
    params |= scheme.init_shared(jax.random.key(1), HEADS, SIZE)

    def run(q, k, v, x, params):
        gates = scheme.prepare(params, x, valid=jnp.asarray(IDS >= 0))
        options = {} if gates is None else {"gates": (gates, gates)}
        options |= {"q_positions": positions, "kv_positions": positions}
        return scheme.attend(q, k, v, params=params, mask=Segments(jnp.asarray(IDS)), implementation=backend, **options)

    return gradients(run, *projections(dtype, scheme), normal(BATCH, LENGTH, 8, dtype=dtype), params)


WAYS = [
    (flags, dtype, backend, positions)
    for flags in (("ranks",), ("dtypes",), ("ranks", "dtypes", "x64"))
    for dtype in (*DTYPES, *([jnp.float64] if "x64" in flags else []))
    for backend, positions in (("dense", AT), ("blockwise", Range(0, LENGTH)))
]
COVERING = "t5 kerple-log fire scale-invariant clex mixed pope coca-slack ssmax llama4 fox cope dual-chunk performer"
COVERING += " leaky-rerope hierarchical qwen3"
SOME = [(name, [WAYS[n % len(WAYS)], WAYS[6 + n % 4]]) for n, name in enumerate(COVERING.split())]


@pytest.mark.parametrize(
    ("name", "ways"), [*SOME, *(pytest.param(name, WAYS, marks=pytest.mark.wide) for name in NAMES)]
)
def test_presets_promote_nothing(name, ways):
    for scheme in attending(name):
        for flags, dtype, backend, positions in ways:
            with strict(*flags):
                jax.eval_shape(lambda s=scheme, b=backend, d=dtype, p=positions: check_scheme(s, b, d, p))


@pytest.mark.parametrize(
    ("name", "stored", "compute"), [("hierarchical", jnp.float32, "bfloat16"), ("qwen3", jnp.bfloat16, "float32")]
)
def test_decoders_promote_nothing(name, stored, compute):
    settings = config(preset(name), compute_dtype=compute)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(1))))
    state = jax.tree.map(lambda x: x.update(dtype=stored), state)
    tokens, positions, segments = separate()

    def logits(state):
        return nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments, length=LENGTH)

    with strict("ranks", "dtypes"):
        jax.eval_shape(lambda state: jax.grad(lambda s: logits(s).sum())(state), state)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("rows that see nothing", "dense"), ("rows that see nothing", "blockwise"), ("decay in rows", "blockwise")],
)
def test_no_intermediate_result_is_nan(name, backend):
    """Every operation is checked, so a NaN that is masked later is found too."""
    function, *arguments = attended(name, backend, jnp.float32)
    find_nan(function, *arguments)


@pytest.mark.parametrize("name", [n if n == "fox" else pytest.param(n, marks=pytest.mark.wide) for n in NAMES])
def test_no_preset_makes_an_intermediate_nan(name):
    for scheme in attending(name):
        for backend in BACKENDS:
            with jax.debug_nans(True):
                check_scheme(scheme, backend, jnp.float32, Range(0, LENGTH))
