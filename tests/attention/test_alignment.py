"""Fewer or more queries than keys: where positions matter, those of the queries must be given."""

from functools import partial

import jax
import numpy as np
import pytest

import posjax as pj
from posjax.attention.coca import coca_attention
from posjax.attention.sharded import Placement, context_attention
from posjax.masks import Beyond, Causal, Segments, Window
from posjax.positions import Range
from posjax.remap import Branch

ROWS, KEYS, HEADS, SIZE = 2, 12, 2, 8
SHOWN = np.random.default_rng(0).random((ROWS, 1, 12, KEYS)) < 0.7
IDS = np.repeat([[0, 1], [2, -1]], 6, axis=1).astype(np.int32)


def qkv(queries):
    """The last queries of a row, and all its keys and values."""
    q, k, v = np.random.default_rng(1).normal(size=(3, ROWS, KEYS, HEADS, SIZE)).astype(np.float32)
    return q[:, KEYS - queries :], k, v


def branch(q, k):
    return Branch(2 * q, k, Beyond(4))


NEEDS_POSITIONS = {
    "typed mask": lambda q, k: {"mask": Causal()},
    "mask turned round": lambda q, k: {"mask": ~Window(3)},
    "typed mask and an array": lambda q, k: {"mask": Window(20) & np.ones((1, KEYS), bool)},
    "spec of a bias": lambda q, k: {"bias": pj.bias.ALiBi(symmetric=True)},
    "bias": lambda q, k: {"bias": pj.bias.ALiBi().bind(num_heads=HEADS), "mask": Causal()},
    "remap": lambda q, k: {"remap": branch(q, k)},
    "decay": lambda q, k: {"decay": np.full(SIZE, 0.01), "mask": Causal()},
}
NEEDS_NO_POSITIONS = {
    "nothing": lambda queries: {},
    "an array bias": lambda queries: {"bias": SHOWN[..., :queries, :].astype(np.float32)},
    "an array mask": lambda queries: {"mask": SHOWN[..., :queries, :]},
    "arrays composed": lambda queries: {"mask": ~(SHOWN[..., :queries, :] & Segments(IDS[:, -queries:], IDS))},
    "segments": lambda queries: {"mask": Segments(IDS[:, -queries:], IDS)},
    "scale and soft cap": lambda queries: {
        "scale": np.full((queries, 1), 0.3, np.float32),
        "softcap": 2.0,
        "sinks": np.ones(HEADS, np.float32),
    },
}


def refused(queries):
    suggestion = rf"q_positions=Range\({KEYS} - {queries}, {queries}\), with posjax.positions.Range"
    return pytest.raises(
        ValueError, match=f"q_positions must be given for {queries} queries and {KEYS} keys.*{suggestion}"
    )


def assert_last(attend, *counts):
    """Asserts that the last queries, with their positions, give the last outputs of a whole row."""

    @jax.jit
    def run(q, k, v):
        last = {n: attend(q[:, KEYS - n :], k, v, q_positions=Range(KEYS - n, n)) for n in counts}
        return attend(q, k, v), last

    whole, last = jax.device_get(run(*qkv(KEYS)))
    for queries, found in last.items():
        np.testing.assert_allclose(found, whole[:, -queries:], atol=1e-5)


@pytest.mark.parametrize("name", NEEDS_POSITIONS)
def test_attention_requires_positions_of_the_queries(name):
    """With the positions that the message suggests, the outputs are the last ones of a whole row."""

    def attend(q, k, v, **where):
        return pj.attention(q, k, v, **NEEDS_POSITIONS[name](q, k), **where, implementation="dense")

    for queries in (1, 5):
        q, k, v = qkv(queries)
        options = NEEDS_POSITIONS[name](q, k)
        with refused(queries):
            pj.attention(q, k, v, **options)
        with refused(queries):
            pj.attention(q, k, v, **options, kv_positions=Range(0, KEYS))
    assert_last(attend, 1, 5)


def test_more_queries_than_keys_require_positions_too():
    q, k, v = qkv(KEYS)
    with pytest.raises(ValueError, match=r"12 queries and 4 keys.*start at 0 write q_positions=Range\(0, 12\)"):
        pj.attention(q, k[:, :4], v[:, :4], mask=Causal())


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", NEEDS_NO_POSITIONS)
def test_cross_attention_without_positions_needs_none(name, queries):
    """If positions are given, they change nothing."""
    q, k, v = qkv(queries)
    attend = jax.jit(partial(pj.attention, **NEEDS_NO_POSITIONS[name](queries), implementation="dense"))
    moved = attend(q, k, v, q_positions=Range(7, queries), kv_positions=np.arange(KEYS)[::-1])
    np.testing.assert_array_equal(attend(q, k, v), moved)


def test_as_many_queries_as_keys_have_the_same_positions():
    q, k, v = qkv(KEYS)
    given = pj.attention(q, k, v, mask=Causal(), q_positions=Range(0, KEYS), kv_positions=Range(0, KEYS))
    np.testing.assert_array_equal(pj.attention(q, k, v, mask=Causal()), given)


def test_context_attention_requires_positions_too():
    """Inside ``shard_map``, ``context_attention`` replaces ``attention``."""
    q, k, v = qkv(1)
    with refused(1):
        context_attention(q, k, v, mask=Causal(), placement=Placement())


SCHEMES = {
    "rotary features": pj.scheme("rope"),
    "bias": pj.Scheme(bias=pj.bias.T5(8, 12, bidirectional=True)),
    "mask": pj.Scheme(mask=Window(5)),
    "remap": pj.Scheme(features=pj.rotary.Rotary(), remap=pj.remap.ReRoPE(4)),
    "decay": pj.Scheme(features=pj.rotary.XPos()),
    "log-n": pj.Scheme(scale=pj.scales.LogN(4)),
    "CoPE": pj.Scheme(bias=pj.bias.CoPE(4)),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_require_positions_of_the_queries(name):
    scheme = SCHEMES[name]
    params = scheme.init(jax.random.key(1), HEADS, SIZE) | scheme.init_shared(jax.random.key(2), HEADS, SIZE)
    attend = partial(scheme.attend, params=params, implementation="dense")
    for queries in (1, 5):
        q, k, v = qkv(queries)
        with refused(queries):
            jax.jit(attend)(q, k, v)
        if name not in ("CoPE", "decay"):
            with refused(queries):
                scheme.attend(q, k, v, params=params, causal=False)
    assert_last(attend, 1, 5)


@pytest.mark.parametrize("options", [{}, {"mask": SHOWN[..., :3, :]}, {"mask": Segments(IDS[:, -3:], IDS)}])
def test_schemes_without_positions_cross_attend(options):
    """Only if they are not causal and have no typed mask: both read positions."""
    q, k, v = qkv(3)
    got = pj.Scheme(norm=pj.norms.QKNorm()).attend(q, k, v, params=NORM, causal=False, **options)
    assert got.shape == q.shape
    with refused(3):
        pj.Scheme().attend(q, k, v, **options)
    with refused(3):
        pj.Scheme().attend(q, k, v, causal=False, mask=Causal())


NORM = pj.Scheme(norm=pj.norms.QKNorm()).init(jax.random.key(0), HEADS, SIZE)


def test_coca_requires_positions_only_for_bias_and_mask():
    """The rotation is in the tables, which the caller aligns."""
    q, k, v = qkv(1)
    t = k[..., : SIZE // 2]
    frequencies = pj.rotary.inverse_frequencies(SIZE)
    tables = {
        "table": pj.rotary_table(Range(KEYS - 1, 1), frequencies),
        "kv_table": pj.rotary_table(Range(0, KEYS), frequencies),
    }
    last = jax.jit(coca_attention)(q, t, v, **tables)
    with refused(1):
        coca_attention(q, t, v, **tables, mask=Causal())
    with refused(1):
        coca_attention(q, t, v, **tables, bias=pj.bias.ALiBi(symmetric=True))
    placed = jax.jit(coca_attention)(q, t, v, **tables, mask=Causal(), q_positions=Range(KEYS - 1, 1))
    np.testing.assert_allclose(placed, last, atol=1e-6)
