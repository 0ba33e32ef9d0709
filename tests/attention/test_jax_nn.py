"""The grid of jax's own attention tests, against ``jax.nn.dot_product_attention`` and NumPy in float64.

Two differences are intended. A query that sees no key gives 0 here and the mean of all values in jax, so these rows are
only compared with 0. And jax accepts ``[length, heads, size]`` without an axis of rows, which these tests add.
"""

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention.tiles import of_tiles

import posjax as pj
from posjax.attention.platform import BACKENDS
from posjax.masks import Band, Beyond, Causal, Segments, Window

ROWS, TOKENS, HEADS, SIZE = 2, 52, 4, 8
AT = np.arange(TOKENS)
BEHIND = AT[:, None] - AT


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that cut the rows into several parts, of which the last are shorter."""
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(16, 20))


class Case(NamedTuple):
    """Arguments of jax, the equivalent mask here, and the pairs that both allow."""

    given: dict
    mask: Any
    allowed: np.ndarray
    bias: bool = False


def before_end(tokens: np.ndarray, lengths) -> np.ndarray:
    """Whether each token of every row is before the end of that row."""
    return tokens < np.asarray(lengths)[:, None]


Q_LENGTHS, KV_LENGTHS = [TOKENS // 2, TOKENS // 4], [TOKENS // 4, TOKENS // 2]
QUERIES, KEYS = before_end(AT, Q_LENGTHS), before_end(AT, KV_LENGTHS)
PRESENT = QUERIES[:, None, :, None] & KEYS[:, None, None, :]
OF_QUERIES, OF_KEYS = {"query_seq_lengths": np.array(Q_LENGTHS)}, {"key_value_seq_lengths": np.array(KV_LENGTHS)}
PADDED = OF_QUERIES | OF_KEYS
NUMBERED = Segments(*(np.where(valid, 0, -1).astype(np.int32) for valid in (QUERIES, KEYS)))
ZEROS = np.zeros((ROWS, TOKENS), np.int32)
LOWER = np.tril(np.ones((1, 1, TOKENS, TOKENS), bool))
SOME = np.random.default_rng(0).random((1, 1, TOKENS, TOKENS)) < 0.3
SOME[..., 7, :] = False
EVERY = np.ones((1, 1, 1, 1), bool)

CAUSAL, BEFORE = {"is_causal": True}, (BEHIND >= 0) & (BEHIND <= 3)
CASES = {
    "bias": Case({}, None, EVERY, bias=True),
    "bias and causal": Case(CAUSAL, Causal(), LOWER, bias=True),
    "boolean": Case({"mask": SOME}, SOME, SOME),
    "padding of keys": Case(OF_KEYS, Segments(ZEROS, NUMBERED.kv_ids), KEYS[:, None, None]),
    "padding of queries": Case(OF_QUERIES, Segments(NUMBERED.q_ids, ZEROS), QUERIES[:, None, :, None]),
    "causal and padding": Case(PADDED | CAUSAL, Causal() & NUMBERED, LOWER & PRESENT),
    "custom and padding as an array": Case(PADDED | {"mask": SOME}, SOME & PRESENT, SOME & PRESENT),
    "window before": Case({"local_window_size": (3, 0)}, Causal() & Window(4), BEFORE),
    "window of both sides": Case({"local_window_size": (3, 2)}, Band(6), (BEHIND >= -2) & (BEHIND <= 3)),
    # Any two numbers: at most ``left`` behind; and behind, or at most ``right`` ahead.
    "any window": Case(
        {"local_window_size": (2, 9)},
        ~Beyond(3) & (Causal() | Window(10)),
        (BEHIND >= -9) & (BEHIND <= 2),
    ),
}


def drawn(dtype=jnp.float32, group=1, rows=ROWS, tokens=TOKENS, heads=HEADS) -> dict:
    """Queries, keys, values, and a bias ``[1, heads, queries, keys]``."""
    rng = np.random.default_rng(0)
    shapes = {name: (rows, tokens, heads // (1 if name == "q" else group), SIZE) for name in "qkv"}
    shapes["bias"] = (1, heads, tokens, tokens)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def without_bias(values: dict) -> dict:
    return {name: x for name, x in values.items() if name != "bias"}


def with_gradients(attend, values: dict, weights) -> tuple:
    """Output, and the gradient of its weighted sum for every value."""
    out, transpose = jax.vjp(lambda values: attend(**values), values)
    return out, transpose(weights.astype(out.dtype))[0]


def ours(q, k, v, bias=None, **options):
    return pj.attention(q, k, v, bias=bias, **options)


def theirs(q, k, v, bias=None, **options):
    return jax.nn.dot_product_attention(q, k, v, bias, **options, implementation="xla")


@jax.jit
def theirs_causal(values: dict, weights):
    return with_gradients(partial(theirs, is_causal=True), values, weights)


@jax.jit
def in_tiles(values: dict, mask, weights):
    return with_gradients(partial(ours, mask=mask, implementation="blockwise"), values, weights)


WIDE = ("bias", "boolean", "padding of keys", "window before", "window of both sides")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide) if name in WIDE else name for name in CASES]
)
def test_masks_and_biases(name):
    """Forward and all gradients. Rows that see nothing have no weight: they give 0 here, in jax the mean of values.

    Queries that jax treats as padding (``query_seq_lengths``) give 0 in both.
    """
    given, mask, allowed, bias = CASES[name]
    values = drawn() if bias else without_bias(drawn())
    seen = np.broadcast_to(allowed, (ROWS, 1, TOKENS, TOKENS)).any(-1)[:, 0]
    weights = np.cos(values["q"]) * seen[..., None, None]
    oracle, _ = oracles.attention(**values, allowed=allowed)

    @jax.jit
    def all_three(values):
        ways = (
            partial(theirs, **given),
            *(partial(ours, mask=mask, implementation=way) for way in ("dense", "blockwise")),
        )
        return [with_gradients(attend, values, weights) for attend in ways]

    (want, d_want), *found = jax.device_get(all_three(values))
    np.testing.assert_allclose(np.where(seen[..., None, None], want, 0), oracle, atol=2e-6)
    for out, d_values in found:
        np.testing.assert_allclose(out, oracle, atol=2e-6)
        np.testing.assert_array_equal(out[~seen], 0)
        chex.assert_trees_all_equal_shapes_and_dtypes(d_values, values)
        chex.assert_trees_all_close(d_values, d_want, atol=2e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.wide)])
def test_half_precisions(dtype):
    """Two query heads for a key head, a bias and a causal mask, against the same numbers in float32.

    jax itself does not run float16 on a CPU.
    """
    values = drawn(dtype, group=2)
    in_float32 = jax.tree.map(lambda x: x.astype(np.float32), values)
    weights = np.cos(in_float32["q"])
    repeated = in_float32 | {name: np.repeat(in_float32[name], 2, axis=2) for name in "kv"}
    want, d_want = jax.device_get(theirs_causal(repeated, weights))
    d_want |= {name: d_want[name].reshape(*in_float32[name].shape[:3], 2, SIZE).sum(3) for name in "kv"}
    oracle, _ = oracles.attention(**in_float32, allowed=LOWER)
    np.testing.assert_allclose(want, oracle, atol=2e-6)
    step = float(jnp.finfo(dtype).eps)
    dense = jax.jit(partial(with_gradients, partial(ours, mask=Causal(), implementation="dense")))(values, weights)
    for out, d_values in jax.device_get((dense, in_tiles(values, Causal(), weights))):
        chex.assert_type(jax.tree.leaves((out, d_values)), dtype)
        np.testing.assert_allclose(out.astype(np.float32), oracle, atol=2 * step)
        chex.assert_trees_all_close(jax.tree.map(lambda x: x.astype(np.float32), d_values), d_want, atol=8 * step)
