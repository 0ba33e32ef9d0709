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
from decoders import LENGTH, NAMES, config, preset, separate
from flax import nnx
from jax.experimental import checkify

import posjax as pj
from posjax import bias, masks
from posjax.bias import CoPE, FoX, accumulate
from posjax.masks import Beyond, Causal, Dilated, FirstTokens, Globals, Segments, Window
from posjax.nn import Decoder
from posjax.positions import Range, from_segments
from posjax.remap import Branch

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


SPECS = {
    "alibi": bias.ALiBi(learned=True),
    "two slopes": bias.ALiBi(symmetric=True, learned=True, direction="slopes"),
    "offset": bias.ALiBi(symmetric=True, direction="offset"),
    "t5": bias.T5(),
    "two-sided t5": bias.T5(bidirectional=True),
    "kerple": bias.Kerple(),
    "weighted kerple": bias.Kerple("weighted-power"),
    "fire": bias.FIRE(),
    "sandwich": bias.Sandwich(),
    "scale-invariant": bias.ScaleInvariant(),
}


def of_bias(spec, dtype):
    params = spec.init(jax.random.key(0), HEADS)
    return (lambda p: {"bias": spec.bind(p, num_heads=HEADS), "mask": Causal()}), params


def of_fox(dtype):
    spec, x = FoX(), normal(BATCH, LENGTH, 8, dtype=dtype)

    def options(params):
        gates = accumulate(spec.prepare(params, x))
        return {"bias": spec.bind(num_heads=HEADS, q_gates=gates, kv_gates=gates), "mask": Causal()}

    return options, spec.init(jax.random.key(0), HEADS, 8)


def of_cope(dtype):
    return (lambda p: {"bias": CoPE(6).bind(p, num_heads=HEADS), "mask": Causal()}), CoPE(6).init(None, HEADS, SIZE)


def of_positions_of_both_kinds(dtype):
    spec, params = bias.FIRE(), bias.FIRE().init(jax.random.key(0), HEADS)
    options = {"mask": PACKED & Window(4), "q_positions": AT, "kv_positions": Range(0, LENGTH)}
    return (lambda params: options | {"bias": spec.bind(params, num_heads=HEADS)}), params


def plain(**options):
    return lambda dtype: ((lambda params: options), {})


def learned(name, *shape, **options):
    return lambda dtype: ((lambda params: options | params), {name: normal(*shape)})


PACKED, AT = Causal() & Segments(IDS), np.asarray(from_segments(IDS))
CASES = {name: lambda dtype, spec=spec: of_bias(spec, dtype) for name, spec in SPECS.items()} | {
    "fox": of_fox,
    "cope": of_cope,
    "plain": plain(),
    "packed": plain(mask=PACKED, bias=bias.ALiBi(), softcap=3.0),
    "rows that see nothing": plain(mask=Beyond(9) & Segments(IDS), softcap=3.0, sinks=np.zeros(HEADS, np.float32)),
    "lambda": plain(mask=Causal() & (Window(3) | FirstTokens(2))),
    "dilated heads": plain(mask=Dilated(3, (1, 2, 3, 4)) & masks.padding(IDS >= 0)),
    "longformer": plain(mask=(Window(3) | Globals(IDS == 0)) & Segments(IDS)),
    "traced window": learned("softcap", mask=Causal() & Window(np.int32(3))),
    "sinks": learned("sinks", HEADS, mask=PACKED),
    "scale of heads": learned("scale", HEADS, mask=PACKED),
    "scale of rows": learned("scale", BATCH, LENGTH, 1, mask=PACKED),
    "scalar scale": learned("scale", mask=PACKED),
    "positions of rows": plain(mask=PACKED, q_positions=AT, kv_positions=AT, bias=bias.Sandwich()),
    "positions of both kinds": of_positions_of_both_kinds,
    "decay": plain(mask=Causal(), decay=np.linspace(0, 0.2, SIZE, dtype=np.float32)),
    "decay in rows": plain(
        mask=PACKED, decay=np.linspace(0, 0.2, SIZE, dtype=np.float32), q_positions=AT, kv_positions=AT
    ),
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


RANKS, KINDS, ALL = ("ranks",), ("dtypes",), ("ranks", "dtypes", "x64")


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (RANKS, "decay"),
        (KINDS, "t5"),
        (ALL, "packed"),
        (ALL, "t5"),
        (ALL, "decay"),
        wide(RANKS, "packed"),
        wide(RANKS, "t5"),
        wide(KINDS, "packed"),
        wide(KINDS, "decay"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_each_flag_alone_and_all_in_x64(flags, name):
    dtype = jnp.float64 if "x64" in flags else jnp.bfloat16
    for backend in BACKENDS:
        with strict(*flags):
            _, (out, lse), _ = traced(name, backend, dtype)
        assert (out.dtype, lse.dtype) == (dtype, jnp.float64 if "x64" in flags else jnp.float32)


def schemes_of(name):
    found = preset(name)
    return dict.fromkeys(found.schemes) if isinstance(found, pj.Layers) else (found,)


def check_scheme(scheme, backend, dtype, positions):
    params = scheme.init(jax.random.key(0), HEADS, SIZE, num_kv_heads=KV_HEADS, model_dim=8)
    params |= scheme.init_shared(jax.random.key(1), HEADS, SIZE)

    def run(q, k, v, x, params):
        gates = scheme.prepare(params, x, valid=jnp.asarray(IDS >= 0))
        options = {} if gates is None else {"gates": (gates, gates)}
        options |= {"q_positions": positions, "kv_positions": positions}
        return scheme.attend(q, k, v, params=params, mask=Segments(jnp.asarray(IDS)), implementation=backend, **options)

    return gradients(run, *projections(dtype, scheme), normal(BATCH, LENGTH, 8, dtype=dtype), params)


COVERING = ("clex", "mixed", "pope", "coca-slack", "ssmax", "qwen3", "llama4", "fox", "cope", "dual-chunk", "performer")
COVERING += ("leaky-rerope",)


@pytest.mark.parametrize("name", [n if n in COVERING else pytest.param(n, marks=pytest.mark.wide) for n in NAMES])
def test_every_preset_promotes_nothing(name):
    for scheme in schemes_of(name):
        with strict("ranks", "dtypes"):
            jax.eval_shape(lambda s=scheme: check_scheme(s, "dense", jnp.bfloat16, AT))


WAYS = [
    (flags, dtype, backend)
    for flags in (("ranks",), ("dtypes",), ("ranks", "dtypes"), ("ranks", "dtypes", "x64"))
    for dtype in (*DTYPES, *([jnp.float64] if "x64" in flags else []))
    for backend in BACKENDS
]


def check_in(ways, name):
    for scheme in schemes_of(name):
        for flags, dtype, backend in ways:
            with strict(*flags):
                jax.eval_shape(lambda s=scheme, b=backend, d=dtype: check_scheme(s, b, d, Range(0, LENGTH)))


ALONE = [(flags, jnp.bfloat16, "blockwise") for flags in (RANKS, KINDS)]
TOGETHER = [way for way in WAYS if "x64" in way[0]]
COVERING_WAYS = {
    "fox": ALONE + TOGETHER,
    # Every dtype once, with alternating backends.
    "coca-slack": [ALONE[0], TOGETHER[0], TOGETHER[3], TOGETHER[4]],
    "pope": [ALONE[1], TOGETHER[1], TOGETHER[2], TOGETHER[5]],
}


@pytest.mark.parametrize("name", COVERING_WAYS)
def test_presets_in_a_covering_of_ways(name):
    """All flags together with every dtype and backend; each flag alone where dtypes mix: bfloat16 and blockwise."""
    check_in(COVERING_WAYS[name], name)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_every_preset_in_every_way(name):
    check_in(WAYS, name)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["hierarchical", "qwen3"])
def test_decoders_promote_nothing(name, stored, compute):
    settings = config(preset(name), compute_dtype=compute)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(1))))
    state = jax.tree.map(lambda x: x.update(dtype=stored), state)
    tokens, positions, segments = separate()

    def logits(state):
        return nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments, length=LENGTH)

    with strict("ranks", "dtypes"):
        jax.eval_shape(lambda state: jax.grad(lambda s: logits(s).sum())(state), state)


def tables_and_whole_biases():
    frequencies = pj.rotary.inverse_frequencies(SIZE)
    for positions in (Range(0, LENGTH), AT):
        table = pj.rotary_table(positions, frequencies)
        for pairing in ("half", "interleaved"):
            for dtype in (*DTYPES, jnp.float64):
                x = normal(BATCH, LENGTH, HEADS, SIZE, dtype=dtype)
                assert pj.apply_rotary(x, table, pairing=pairing).dtype == dtype
        q, k, v = projections(jnp.bfloat16)
        for variant in ("strict", "slack", "relative"):
            out = pj.coca_attention(q, k[..., : SIZE // 2], v, table=table, variant=variant, mask=Causal())
            assert out.dtype == jnp.bfloat16
        assert pj.alibi_bias(HEADS, positions, Range(0, LENGTH), symmetric=True).dtype == jnp.float32


def test_tables_and_whole_biases_promote_nothing():
    with strict():
        jax.eval_shape(tables_and_whole_biases)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("rows that see nothing", "dense"),
        ("rows that see nothing", "blockwise"),
        ("fox", "blockwise"),
        pytest.param("fox", "dense", marks=pytest.mark.wide),
        # Its padding rows see nothing either.
        pytest.param("packed", "dense", marks=pytest.mark.wide),
        pytest.param("packed", "blockwise", marks=pytest.mark.wide),
    ],
)
def test_no_intermediate_result_is_nan(name, backend):
    """Every operation is checked, so a NaN that is masked later is found too."""
    function, *arguments = attended(name, backend, jnp.float32)
    find_nan(function, *arguments)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_no_preset_makes_an_intermediate_nan(name):
    for scheme in schemes_of(name):
        for backend in BACKENDS:
            with jax.debug_nans(True):
                check_scheme(scheme, backend, jnp.float32, Range(0, LENGTH))


def test_far_branches_make_no_nan():
    q, k, v = projections(jnp.float32)

    def run(q, k, v):
        remap = Branch(q[..., ::-1], k * k, Beyond(4))
        return pj.attention(q, k, v, mask=PACKED, remap=remap, implementation="blockwise", return_residuals=True)

    with strict("ranks", "dtypes"):
        find_nan(run, q, k, v)
