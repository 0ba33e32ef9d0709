"""Padding may hold any values: they reach no output and no gradient."""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention.tiles import of_tiles
from decoders import NAMES, attending, preset

import posjax as pj
from posjax import bias, masks
from posjax.attention.platform import BACKENDS
from posjax.masks import Beyond, Causal, Segments, Window
from posjax.remap import Branch

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 16, 4, 2, 8
IDS = np.asarray([[0] * 6 + [1] * 6 + [-1] * 4, [-1] * 3 + [0] * 13], np.int32)
HIDDEN = IDS < 0


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(4, 8))


def normal(seed: int, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def poisoned(x):
    """The array with NaN and infinity wherever a token is padding."""
    junk = np.where(np.arange(x.shape[-1]) % 2 == 0, np.float32(np.nan), np.float32(np.inf))
    return np.where(HIDDEN.reshape(*HIDDEN.shape, *[1] * (x.ndim - 2)), junk, x)


def assert_padding_has_no_effect(function, tokens: tuple, *learned):
    """``function(tokens, *learned)`` and its gradients are the same for any values in the padding of the tokens."""

    def loss(tokens, *learned):
        out = function(*tokens, *learned)
        return jnp.sin(out).sum(), out

    run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(1 + len(learned))), has_aux=True))
    clean, dirty = (run(x, *learned) for x in (tokens, tuple(map(poisoned, tokens))))
    chex.assert_tree_all_finite(dirty)
    chex.assert_trees_all_close(dirty, clean, atol=1e-6, rtol=1e-6)
    (_, out), (gradients, *_) = dirty
    for x in (out, *gradients):
        np.testing.assert_array_equal(np.asarray(x)[HIDDEN], 0)
    return out


def projections():
    return normal(1, BATCH, LENGTH, HEADS, SIZE), *(normal(n, BATCH, LENGTH, KV_HEADS, SIZE) for n in (2, 3))


CASES = {
    "inside other masks": {
        "mask": (Window(5) | masks.FirstTokens(1)) & (Causal() & masks.padding(jnp.asarray(~HIDDEN)))
    },
    "an array over pairs": {"mask": Segments(IDS), "bias": normal(7, BATCH, HEADS, LENGTH, LENGTH)},
    "soft cap and bias": {"mask": Causal() & Segments(IDS), "softcap": 2.0, "bias": bias.ALiBi()},
    "decay": {"mask": Causal() & Segments(IDS), "decay": np.linspace(0, 0.2, SIZE, dtype=np.float32)},
    "cope": {
        "mask": Causal() & Segments(IDS),
        "bias": bias.CoPE(4).bind({"table": normal(9, 4, SIZE)}, num_heads=HEADS),
    },
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("inside other masks", "blockwise"),
        ("an array over pairs", "blockwise"),
        ("soft cap and bias", "dense"),
        ("decay", "blockwise"),
        ("cope", "dense"),
    ],
)
def test_padding_reaches_no_output_and_no_gradient(name, backend):
    case = CASES[name]
    out = assert_padding_has_no_effect(partial(pj.attention, implementation=backend, **case), projections())
    if not {"decay", "softcap"} & set(case) and name != "cope":
        allowed = np.asarray(masks.materialise(case["mask"], np.arange(LENGTH), np.arange(LENGTH)))
        want, _ = oracles.attention(*projections(), bias=case.get("bias"), allowed=allowed)
        np.testing.assert_allclose(out, want, atol=1e-5)


def test_finite_padding_is_hidden_without_a_pass_over_the_tokens():
    """The results are the same, and fewer operations replace numbers."""

    def run(finite, q, k, v):
        return pj.attention(q, k, v, mask=Causal() & Segments(IDS, finite=finite), implementation="dense")

    arrays = projections()

    def gradients(finite):
        return jax.jit(jax.value_and_grad(lambda *x: run(finite, *x).sum(), (0, 1, 2)))(*arrays)

    chex.assert_trees_all_close(gradients(True), gradients(False), rtol=1e-6)
    replaced = {
        finite: str(jax.make_jaxpr(partial(run, finite))(*arrays)).count("= select_n") for finite in (True, False)
    }
    assert replaced[True] < replaced[False]


def test_which_tokens_are_padding():
    first, second = Segments(jnp.asarray([[-1, 0, 0]])), Segments(jnp.asarray([[0, 0, -2]]))
    q, k = masks.padding_of((first & Causal()) & (second & Window(2)))
    np.testing.assert_array_equal(q, [[True, False, True]])
    np.testing.assert_array_equal(k, q)
    for mask in (None, Causal(), first | Causal(), ~first, ~first & Causal()):
        assert masks.padding_of(mask) is None, "a token that another mask may show is no padding"


@pytest.mark.parametrize("backend", ["blockwise", pytest.param("dense", marks=pytest.mark.wide)])
def test_scales_far_branches_and_sinks(backend):
    """A learned temperature per token comes from hidden states, which may hold any values at padding."""

    def run(q, k, v, remapped_q, remapped_k, scale, sinks):
        options = {"remap": Branch(remapped_q, remapped_k, Beyond(3)), "sinks": sinks, "implementation": backend}
        scale = jnp.broadcast_to(scale[..., :1], (BATCH, LENGTH, HEADS))
        return pj.attention(q, k, v, mask=Causal() & Segments(IDS), scale=scale, **options)

    q, k, v = projections()
    tokens = (q, k, v, q[..., ::-1], np.square(k), normal(4, BATCH, LENGTH, 2))
    assert_padding_has_no_effect(run, tokens, normal(5, HEADS))


COVERING = ("coca-strict", "performer")


def initial(scheme, size):
    """Initial parameters of the scheme."""

    @jax.jit
    def init(key):
        own = scheme.init(key, HEADS, size, num_kv_heads=KV_HEADS, model_dim=8)
        return own | scheme.init_shared(jax.random.fold_in(key, 1), HEADS, size)

    return init(jax.random.key(0))


def check_scheme(scheme, backend):
    size = 8
    params = initial(scheme, size)

    def run(q, k, v, x, params):
        gates = scheme.prepare(params, x, valid=jnp.asarray(~HIDDEN))
        given = {} if gates is None else {"gates": (gates, gates)}
        return scheme.attend(q, k, v, params=params, mask=Segments(IDS), implementation=backend, **given)

    q = normal(1, BATCH, LENGTH, HEADS, scheme.query_size(size))
    k = normal(2, BATCH, LENGTH, KV_HEADS, scheme.key_size(size))
    v, x = normal(3, BATCH, LENGTH, KV_HEADS, size), normal(4, BATCH, LENGTH, 8)
    assert_padding_has_no_effect(run, (q, k, v, x), params)


EVERY = [pytest.param(*case, marks=pytest.mark.wide) for case in itertools.product(NAMES, BACKENDS)]


@pytest.mark.parametrize(("name", "backend"), [*((name, "dense") for name in COVERING), *EVERY])
def test_schemes(name, backend):
    for scheme in attending(name):
        check_scheme(scheme, backend)


@pytest.mark.parametrize("form", ["chunked", "bidirectional"])
def test_linear_attention(form):
    def run(phi, psi, v):
        out = getattr(pj.linear, form)(jnp.abs(phi), jnp.abs(psi), v, segment_ids=IDS)
        return out[0] if isinstance(out, tuple) else out

    assert_padding_has_no_effect(run, projections())


def test_coca_attention():
    table = pj.rotary_table(pj.positions.Range(0, LENGTH), pj.rotary.inverse_frequencies(SIZE))
    q, k, v = projections()
    run = partial(pj.coca_attention, table=table, mask=Causal() & Segments(IDS))
    assert_padding_has_no_effect(run, (q, k[..., : SIZE // 2], v))


@pytest.mark.parametrize("name", ["fox", "linear-elu"])
def test_decoding(name):
    """Tokens that ``valid`` marks as padding change neither the outputs of the others nor the cache."""
    scheme, size = preset(name), 8
    params = initial(scheme, size)
    valid, index = jnp.asarray(~HIDDEN), jnp.asarray(np.cumsum(~HIDDEN, axis=1) - 1, jnp.int32)
    q = normal(1, BATCH, LENGTH, HEADS, scheme.query_size(size))
    k = normal(2, BATCH, LENGTH, KV_HEADS, scheme.key_size(size))
    v, x = normal(3, BATCH, LENGTH, KV_HEADS, size), normal(4, BATCH, LENGTH, 8)

    @jax.jit
    def run(q, k, v, x):
        cache = scheme.init_cache(BATCH, LENGTH, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=size, chunk=LENGTH)
        gates = scheme.prepare(params, x, valid=valid)
        given = {} if gates is None else {"gates": gates}
        out, cache = scheme.decode(q, k, v, cache, params=params, index=index, valid=valid, length=LENGTH, **given)
        return out, cache

    dirty, clean = run(*map(poisoned, (q, k, v, x))), run(q, k, v, x)
    chex.assert_tree_all_finite(dirty[0])
    chex.assert_trees_all_close(dirty, clean, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(dirty[0])[HIDDEN], 0)
