"""Arrays as bias and mask, composed with typed masks; and queries that must say where they stand."""

import operator
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import masks
from posjax.positions import Range

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, SIZE = 2, 130, 150, 4, 2, 8
# Rows and heads enough that a tile has 64 tokens a side, and both lengths end within one.
MANY = 32
SHAPES = [
    (QUERIES, KEYS),
    (HEADS, QUERIES, KEYS),
    (1, 1, QUERIES, KEYS),
    (BATCH, 1, 1, KEYS),
    (BATCH, HEADS, QUERIES, 1),
]


def normal(number, *shape):
    return np.asarray(jax.random.normal(jax.random.key(number), shape))


def operands(batch=BATCH):
    sizes = ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
    return [normal(n, batch, *size, SIZE) for n, size in enumerate(sizes)]


def oracle(q, k, v, bias=0.0, allowed=True):
    """``softmax(q k / sqrt(d) + bias where allowed) v`` in float64; 0 for a row that sees nothing."""
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = np.where(allowed, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias, -np.inf)
    highest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total > 0, total, 1) @ v).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_that_broadcast(shape, implementation):
    bias, mask = normal(5, *shape), normal(6, *shape) < 0.7
    found = pj.attention(*operands(), bias=bias, mask=mask, implementation=implementation)
    chex.assert_trees_all_close(found, oracle(*operands(), bias, mask).astype(np.float32), atol=2e-6)


@pytest.mark.parametrize("shape", [(1, HEADS, QUERIES, KEYS), (MANY, 1, 1, KEYS)], ids=str)
def test_the_gradient_of_a_bias_has_its_shape_over_many_tiles(shape):
    """Against autodiff of the plain formula."""
    q, k, v = operands(MANY)
    bias, weights = normal(7, *shape), normal(8, MANY, QUERIES, HEADS, SIZE)
    mask = masks.Causal() & (normal(9, MANY, 1, 1, KEYS) < 1.0)

    def loss(bias, implementation):
        places = {"q_positions": Range(KEYS - QUERIES, QUERIES), "mask": mask, "implementation": implementation}
        return (pj.attention(q, k, v, bias=bias, **places) * weights).sum()

    found, wanted = (jax.jit(jax.grad(partial(loss, implementation=name)))(bias) for name in ("blockwise", "dense"))
    chex.assert_shape(found, shape)
    chex.assert_trees_all_close(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_the_backward_of_a_bias_adds_tiles_and_not_arrays():
    """No addition in the loop over tiles is as large as the bias itself."""
    x = [jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)] * 3
    bias = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)

    def loss(q, k, v, bias):
        return pj.attention(q, k, v, bias=bias, implementation="blockwise").sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=3))(*x, bias))
    assert "dynamic_update_slice" in text
    assert not [line for line in text.splitlines() if " add " in line and "f32[1,1,2048,2048]" in line]


CAUSAL = np.tril(np.ones((QUERIES, KEYS), bool), KEYS - QUERIES)
ARRAY = normal(3, QUERIES, KEYS) < 0.5
PLACES = {"q_positions": Range(KEYS - QUERIES, QUERIES)}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("made", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_arrays_and_typed_masks_compose_from_both_sides(join, made, implementation):
    wanted = oracle(*operands(), 0.0, join(CAUSAL, ~ARRAY)).astype(np.float32)
    for mask in (join(masks.Causal(), ~masks.as_mask(made(ARRAY))), join(made(~ARRAY), masks.Causal())):
        found = pj.attention(*operands(), mask=mask, implementation=implementation, **PLACES)
        chex.assert_trees_all_close(found, wanted, atol=2e-6)


def test_a_mask_turned_round():
    ids = np.sort(np.arange(KEYS) // 40)[None].repeat(BATCH, 0).astype(np.int32)
    segments = masks.Segments(ids[:, KEYS - QUERIES :], ids)
    wanted = ids[:, None, KEYS - QUERIES :, None] != ids[:, None, None, :]
    for implementation in ("dense", "blockwise"):
        found = pj.attention(*operands(), mask=~segments & masks.Causal(), implementation=implementation, **PLACES)
        chex.assert_trees_all_close(found, oracle(*operands(), 0.0, wanted & CAUSAL).astype(np.float32), atol=2e-6)
    assert ~masks.Window(3) == masks.Not(masks.Window(3))


def test_a_scheme_and_a_module_take_an_array():
    scheme, shown = pj.scheme("rope"), normal(4, KEYS, KEYS) < 0.8
    _, k, v = operands()
    found = scheme.attend(k, k, v, mask=shown)
    wanted = scheme.attend(k, k, v, mask=masks.ArrayMask(jnp.asarray(shown)[None, None]))
    chex.assert_trees_all_close(found, wanted)
    assert np.abs(np.asarray(found) - np.asarray(scheme.attend(k, k, v))).max() > 1e-2


@pytest.mark.parametrize("use", [bool, lambda m: m and masks.Window(3), lambda m: m or None, lambda m: not m])
def test_a_mask_has_no_truth_value(use):
    with pytest.raises(ValueError, match=r"write & for `and`, \| for `or`"):
        use(masks.Causal())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((QUERIES, KEYS), np.float32)}, "mask must be boolean.*found an array of float32"),
        ({"bias": np.ones((QUERIES, KEYS), bool)}, "bias must be of a floating dtype.*pass it as mask="),
        ({"bias": np.ones((QUERIES, KEYS), int)}, "bias must be of a floating dtype, found int64"),
        ({"mask": np.ones((1,) * 5, bool)}, r"mask must broadcast to \[batch, heads, queries, keys\]"),
        ({"mask": np.ones((QUERIES, KEYS - 1), bool)}, r"mask must broadcast to \[batch, heads, queries, keys\]"),
        ({"bias": np.ones((3, QUERIES, KEYS))}, "bias is bound for 3 heads, but q has 4"),
    ],
)
def test_arrays_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        pj.attention(*operands(), **options)


READS = {
    "alibi": {"bias": pj.bias.ALiBi(symmetric=True)},
    "mask": {"mask": masks.Window(5)},
    "within": {"mask": masks.as_mask(ARRAY) & masks.Causal()},
    "decay": {"decay": np.zeros(SIZE, np.float32)},
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_queries_beside_other_keys_say_where_they_stand(name, queries):
    q, k, v = operands()
    options = READS[name] if queries == QUERIES or name != "within" else {"mask": masks.Causal()}
    shown = rf"q_positions=Range\({KEYS} - {queries}, {queries}\)"
    with pytest.raises(ValueError, match=shown):
        pj.attention(q[:, :queries], k, v, **options)
    pj.attention(q[:, :queries], k, v, **options, q_positions=Range(KEYS - queries, queries))


@pytest.mark.parametrize("name", ["rope", "alibi", "log-n", "nope"])
def test_a_scheme_asks_for_positions_too(name):
    scheme = pj.scheme(name, **({"length": 8} if name == "log-n" else {}))
    q, k, v = operands()
    with pytest.raises(ValueError, match="q_positions must be given"):
        scheme.attend(q, k, v)
    chex.assert_shape(scheme.attend(q, k, v, **PLACES), q.shape)


def test_cross_attention_without_positions_goes_on():
    q, k, v = operands()
    ids = np.zeros((BATCH, QUERIES), np.int32), np.zeros((BATCH, KEYS), np.int32)
    for options in ({}, {"bias": ARRAY.astype(np.float32)}, {"mask": ARRAY}, {"mask": masks.Segments(*ids) & ARRAY}):
        chex.assert_shape(pj.attention(q, k, v, **options), q.shape)
    chex.assert_shape(pj.scheme("nope").attend(q, k, v, causal=False), q.shape)
