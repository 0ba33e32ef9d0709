"""User-defined biases and masks: which ones work as they are, and what the errors say about the others."""

import dataclasses
import re
from functools import partial
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention import spread
from attention.own_methods import EachHead, Fading, LearnedRows, Rows, SameGroup, Strided, Weighted, static
from attention.tiles import in_tiles
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posjax as pj
from posjax.attention import own
from posjax.attention.operands import Operands
from posjax.attention.sharded import Placement, attend_on_mesh, context_attention
from posjax.attention.tpu import entry
from posjax.attention.tpu.biases import LinearInKey, form_of
from posjax.bias.base import BiasOfHeads
from posjax.layout import Layout
from posjax.masks import And, Causal, Segments
from posjax.positions import Range

TOKENS, HEADS, SIZE = 40, 4, 8
register = jax.tree_util.register_dataclass
frozen = dataclasses.dataclass(frozen=True)


def qkv(tokens=TOKENS, batch=2, heads=HEADS):
    return np.random.default_rng(0).normal(size=(3, batch, tokens, heads, SIZE)).astype(np.float32)


def rows(heads=HEADS):
    return np.random.default_rng(1).normal(size=(heads, HEADS)).astype(np.float32)


@partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, **options):
    """``attention`` under ``jit``."""
    return pj.attention(q, k, v, **options)


def operands(bias=None, mask=None, tokens=TOKENS, **changes):
    q, k, v = qkv(tokens)
    positions = Range(0, tokens)
    q = np.moveaxis(q, 2, 1)[:, :, None] * np.float32(SIZE**-0.5)
    x = Operands(q, np.moveaxis(k, 2, 1), np.moveaxis(v, 2, 1), bias, mask, positions, positions)
    return dataclasses.replace(x, **changes)


def tiled(bias, mask):
    """``blockwise`` in tiles that do not divide the rows evenly, as ``[batch, tokens, heads, size]``."""
    out = in_tiles(operands(bias, mask), 16, 8).out
    return jnp.moveaxis(out[:, :, 0], 1, 2)


def whole(bias, mask):
    return pj.attention(*qkv(), bias=bias, mask=mask, implementation="dense")


def learned(attend, mask):
    """The output, and the gradient of a loss for the array of a bias."""

    def loss(rows):
        out = attend(Rows(rows), mask)
        return jnp.sin(out).sum(), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(rows())
    return out, gradient


@pytest.mark.parametrize(
    "mask",
    [
        SameGroup(jnp.arange(TOKENS) % 3),
        EachHead((1, 2, 3, 4)),
        Strided() & Segments(np.repeat([[0, 1, -1], [0, 0, 0]], [15, 15, 10], axis=1)),
    ],
    ids=["an array", "a pattern for each head", "beside rows that differ"],
)
def test_a_mask_with_nothing_but_pairs_and_a_bias_with_nothing_but_values(mask):
    """In one tile and in many, against NumPy in float64; gradients of the bias' array in tiles against one tile."""
    mask, at = Causal() & mask, np.arange(TOKENS)
    values = rows()[:, np.minimum(abs(at[:, None] - at), HEADS - 1)]
    allowed = pj.masks.materialise(mask, Range(0, TOKENS), Range(0, TOKENS))
    want, _ = oracles.attention(*qkv(), bias=values, allowed=allowed)
    (dense, d_dense), (tiles, d_tiles) = learned(whole, mask), learned(tiled, mask)
    np.testing.assert_allclose(dense, want, atol=1e-5)
    np.testing.assert_allclose(tiles, want, atol=1e-5)
    assert np.abs(np.asarray(d_dense)).max() > 0.1
    np.testing.assert_allclose(d_tiles, d_dense, atol=1e-5)


WEIGHTS = np.random.default_rng(2).normal(size=(2, 2, HEADS, TOKENS)).astype(np.float32)


def of_weights(attend):
    """The output and the gradients of ``Weighted`` arrays."""

    def loss(asks, weights):
        out = attend(Weighted(asks, weights))
        return jnp.sin(out).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*WEIGHTS)
    return out, gradients


def test_a_bias_that_names_its_axes_is_cut_and_padded_with_its_tokens():
    """40 tokens in tiles of 16 and of 8, against NumPy in float64, and gradients in tiles against one tile."""
    values = WEIGHTS[0][..., :, None] * WEIGHTS[1][..., None, :]
    want, _ = oracles.attention(*qkv(), bias=values, allowed=np.tril(np.ones((TOKENS, TOKENS), bool)))
    found, gradients = of_weights(lambda bias: tiled(bias, Causal()))
    dense, d_dense = of_weights(lambda bias: whole(bias, Causal()))
    np.testing.assert_allclose(found, want, atol=1e-5)
    np.testing.assert_allclose(dense, want, atol=1e-5)
    chex.assert_trees_all_close(gradients, d_dense, atol=1e-5)
    assert min(np.abs(np.asarray(d)).max() for d in d_dense) > 0.1


def test_nested_biases_and_static_fields_need_no_axes():
    values = WEIGHTS[0][..., :, None] * WEIGHTS[1][..., None, :]
    want, _ = oracles.attention(*qkv(), bias=2 * values)
    np.testing.assert_allclose(tiled(Holder(Weighted(*WEIGHTS)), None), want, atol=1e-5)
    slopes = jnp.arange(1.0, HEADS + 1)
    plain = whole(pj.bias.LinearBias(slopes), Causal())
    np.testing.assert_array_equal(whole(Labelled(slopes, label="mine"), Causal()), plain)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_padding_of_rows_does_not_reach_arrays_without_an_axis_of_rows(implementation):
    """There are as many rows as heads, and padding that differs between the rows."""
    shown = np.arange(TOKENS) < np.array([30, 35, 38, TOKENS])[:, None]
    weights = np.random.default_rng(3).normal(size=(2, HEADS, TOKENS)).astype(np.float32)
    projected, mask = qkv(batch=HEADS), pj.masks.padding(jnp.asarray(shown))
    found = pj.attention(*projected, bias=Several(tuple(weights)), mask=mask, implementation=implementation)
    allowed = (shown[:, :, None] & shown[:, None])[:, None]
    want, _ = oracles.attention(*projected, bias=weights.sum(0)[:, None], allowed=allowed)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ring", "all-gather", "ulysses"])
def test_a_bias_that_names_its_axes_is_split_with_its_tokens(strategy):
    """Rows, tokens and heads over two devices each, in zigzag order."""
    q, k, v = qkv()
    mesh = jax.make_mesh((2, 2, 2), ("rows", "tokens", "heads"), axis_types=(AxisType.Auto,) * 3)
    layout = Layout("zigzag", 2)
    placement = Placement(("rows",), "tokens", "heads", strategy, layout)

    def over_mesh(bias):
        def inside(_, projected, per_row):
            return context_attention(
                *projected, placement=placement, mask=Causal(), implementation="blockwise", **per_row
            )

        placed = Weighted(*(layout.apply(x, 2) for x in (bias.asks, bias.weights)))
        out = attend_on_mesh(inside, placement, (), [layout.apply(x, 1) for x in (q, k, v)], {"bias": placed})
        return layout.restore(out, 1)

    with jax.set_mesh(mesh):
        found = jax.device_get(of_weights(over_mesh))
    chex.assert_trees_all_close(found, jax.device_get(of_weights(lambda bias: whole(bias, Causal()))), atol=1e-5)


def test_numpy_arrays_are_looked_up_by_traced_positions():
    arrays = {"mask": SameGroup(np.arange(TOKENS) % 3), "bias": Rows(rows())}
    want = jax.jit(whole)(Rows(rows()), SameGroup(np.arange(TOKENS) % 3))
    np.testing.assert_allclose(jax.jit(lambda: whole(**arrays))(), want, atol=1e-6)


def test_above_one_tile_blockwise_replaces_the_kernels():
    q, k, v = qkv(520, batch=1, heads=1)
    for mask in (SameGroup(np.arange(520) // 50), Strided()):
        traced = jax.eval_shape(jax.grad(lambda v, mask=mask: pj.attention(q, k, v, mask=mask).sum()), v)
        chex.assert_shape(traced, v.shape)


@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        (pj.Scheme(bias=LearnedRows(4), mask=Strided()), "ring"),
        (pj.Scheme(bias=LearnedRows(4), mask=EachHead((1, 2, 3, 4))), "ulysses"),
    ],
    ids=["pairs", "pairs by head"],
)
def test_heads_and_tokens_over_a_mesh(scheme, strategy):
    """The axis of entries is as long as that of heads, so slicing it by mistake would raise no error."""
    placement = spread.placement("2x2x2", strategy, "contiguous")
    spread.check(spread.Case(scheme), "2x2x2", placement, "dense")


def test_rows_and_heads_over_explicit_axes():
    """Each device has some of the heads, and the whole arrays of bias and mask."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"))
    sharding = NamedSharding(mesh, PartitionSpec("rows", None, "heads"))
    slots = {"mask": Causal() & EachHead((1, 2, 3, 4)) & SameGroup(np.arange(TOKENS) // 7)}

    def loss(rows, *projected):
        return jnp.sin(pj.attention(*projected, bias=Rows(rows), **slots)).sum()

    want = jax.jit(jax.grad(loss))(rows(), *qkv())
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss))(rows(), *jax.device_put(tuple(qkv()), sharding))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_heads_by_default_slices_the_values():
    at = np.arange(5)
    whole = Rows(jnp.asarray(rows()))
    some = whole.heads(1, 3).heads(1, 2)
    np.testing.assert_array_equal(some.values(at, at), np.asarray(whole.values(at, at))[2:4])
    scores = np.ones((2, 2, 5, 5), np.float32)
    factor = Fading(jnp.asarray(rows()))
    want = np.asarray(factor.apply(np.ones((2, 4, 5, 5), np.float32), at, at))[:, 2:4]
    np.testing.assert_array_equal(factor.heads(2, 2).apply(scores, at, at), want)
    assert isinstance(some, BiasOfHeads)
    chex.assert_shape(pj.bias.ALiBi().bind(num_heads=4).heads(1, 2).slopes, (2,))


def test_how_many_heads_a_bias_has():
    """A user's array with one head serves any number of heads; a bias of the library has a fixed number."""
    assert own.heads_of(Rows(jnp.asarray(rows()))) == HEADS
    assert own.heads_of(Rows(jnp.asarray(rows(1)))) is None
    assert [own.heads_of(pj.bias.ALiBi().bind(num_heads=n)) for n in (1, 4)] == [1, 4]


def test_a_bias_without_an_axis_of_heads_serves_any_number():
    @register
    @frozen
    class Alike(pj.bias.Bias):
        rate: jax.Array

        def values(self, q_positions, kv_positions):
            return -self.rate * jnp.abs(pj.bias.distance(q_positions, kv_positions))

    q, k, v = qkv()
    got = pj.attention(q, k, v, bias=Alike(jnp.float32(0.5)))
    slopes = pj.bias.LinearBias(jnp.full(HEADS, 0.5), symmetric=True)
    np.testing.assert_allclose(got, attend(q, k, v, bias=slopes), atol=1e-6)
    # Positions that differ between rows bring an axis of rows before that of heads.
    apart = np.arange(TOKENS) + np.array([[0], [7]])
    positions = {"q_positions": apart, "kv_positions": apart}
    np.testing.assert_allclose(attend(q, k, v, bias=Alike(jnp.float32(0.5)), **positions), got, atol=1e-6)


def of_values(function):
    """A bias with an array and these values."""

    @register
    @frozen
    class Mine(pj.bias.Bias):
        array: jax.Array

        def values(self, q_positions, kv_positions):
            return function(self.array, q_positions, kv_positions)

    return Mine(jnp.ones((HEADS, TOKENS, TOKENS)))


def of_pairs(function):
    @register
    @frozen
    class Mine(pj.masks.Mask):
        def pairs(self, i, j):
            return function(i, j)

    return Mine()


@register
@frozen
class Misnamed(Rows):
    axes: ClassVar = {"rows": ("head", None), "columns": (None,)}


@register
@frozen
class Labelled(pj.bias.LinearBias):
    """Adds a static field to a class that names the axes of its arrays."""

    by_distance = False
    label: str = static(default="")


@register
@frozen
class Holder(pj.bias.Bias):
    """Holds another bias, which names its own axes."""

    inner: Weighted

    def values(self, q_positions, kv_positions):
        return 2 * self.inner.values(q_positions, kv_positions)


@register
@frozen
class Several(pj.bias.Bias):
    """A field of several arrays, all of which have these axes."""

    weights: tuple

    axes: ClassVar = {"weights": ("heads", "keys")}

    def values(self, q_positions, kv_positions):
        return sum(self.weights)[:, None]


@jax.tree_util.register_pytree_node_class
class Nameless(pj.bias.Bias):
    axes: ClassVar = {"array": ("heads", "keys")}

    def tree_flatten(self):
        return (jnp.ones((HEADS, TOKENS)),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()

    def values(self, q_positions, kv_positions):
        return jnp.zeros((HEADS, 1, 1))


@register
@frozen
class Longer(pj.bias.LinearBias):
    """Adds an array to a class that names only the axes of its own arrays."""

    by_distance = False
    rates: jax.Array | None = None


@frozen
class Unregistered(pj.masks.Mask):
    def pairs(self, i, j):
        return j <= i


@frozen
class UnregisteredBias(pj.bias.Bias):
    array: jax.Array

    def values(self, q_positions, kv_positions):
        return self.array[:, None, None] * (q_positions[:, None] - kv_positions)


class NoBias(pj.bias.BiasSpec):
    def bind(self, params=None, *, num_heads):
        return jnp.zeros((num_heads, 1, 1))


def difference(i, j):
    return (i[..., :, None] - j[..., None, :]).astype(jnp.float32)


WHOLE = of_values(lambda a, i, j: a)
NOT_REGISTERED = "is not registered with JAX: write @jax.tree_util.register_dataclass above its @dataclasses.dataclass"
REFUSED = {
    "tokens": (WHOLE, "Mine.values must give [batch, heads, queries, keys] = (2, 4, 2, 3)"),
    "tokens, hint": (WHOLE, "found shape (4, 40, 40); name the axes of arrays of tokens in axes"),
    "transposed": (of_values(lambda a, i, j: difference(j, i)), "found shape (3, 2)"),
    "heads": (of_values(lambda a, i, j: jnp.ones((3, 1, 1)) * difference(i, j)), "bound for 3 heads, but q has 4"),
    "whole numbers": (of_values(lambda a, i, j: i[:, None] - j), "Mine.values must be of dtype floating, found int32"),
    "fails": (of_values(lambda a, i, j: a[:, 0] * difference(i, j)), "Mine.values fails on arrays of shape (2,), (3,)"),
    "factor": (Fading(jnp.ones((3, 4))), "bound for 3 heads"),
    "names": (Misnamed(jnp.ones((4, 4))), "Misnamed.axes: found ['head', 'columns']; it must map the names of data"),
    "no names": (
        Longer(jnp.ones(4)),
        "Longer has fields ['rates'] besides those of LinearBias: give it axes",
    ),
    "too long within": (
        Holder(Weighted(*WEIGHTS[..., :9])),
        "Weighted asks must have shape (2, heads, 40), found (2, 4, 9)",
    ),
    "too long together": (Several((rows(),)), "Several weights must have shape (heads, 40), found (4, 4)"),
    "no keys": (Nameless(), "Nameless.axes: found ['array']; it must map the names of data fields"),
    "bias unregistered": (UnregisteredBias(jnp.ones(4)), f"UnregisteredBias {NOT_REGISTERED}"),
    "mask unregistered": (Unregistered(), f"Unregistered {NOT_REGISTERED}"),
    "inner mask unregistered": (And(Causal(), Unregistered()), f"Unregistered {NOT_REGISTERED}"),
    "bind": (NoBias(), "bias: NoBias.bind must return a Bias, found "),
    "mask dtype": (Causal() & of_pairs(lambda i, j: i - j), "Mine.allowed must be of dtype bool, found int32"),
    "mask shape": (of_pairs(lambda i, j: (i >= j)[None]), "Mine.allowed must give [batch, heads, queries, keys]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_raised_before_anything_is_computed(name):
    part, message = REFUSED[name]
    slot = "mask" if isinstance(part, pj.masks.Mask) else "bias"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda: pj.attention(*qkv(), **{slot: part}))


def test_values_without_an_axis_of_rows_are_refused_for_positions_per_row():
    bias = of_values(lambda a, i, j: jnp.ones((HEADS, 1, 1)) * (i[:, None] - j))
    q, k, v = qkv()
    chex.assert_shape(jax.eval_shape(partial(pj.attention, bias=bias), q, k, v), q.shape)
    positions = np.arange(TOKENS) + np.array([[0], [7]])
    with pytest.raises(ValueError, match=r"Mine.values fails on arrays of shape \(2, 1, 2\), \(2, 1, 3\)"):
        pj.attention(q, k, v, bias=bias, q_positions=positions, kv_positions=positions)


def test_an_array_per_row_must_name_its_axes():
    @register
    @frozen
    class PerRow(pj.bias.Bias):
        rates: jax.Array

        def values(self, q_positions, kv_positions):
            return self.rates[:, None, None, None] * difference(q_positions, kv_positions)

    with pytest.raises(ValueError, match=re.escape("= (1, 4, 2, 3), or a shape that broadcasts to it")):
        pj.attention(*qkv(), bias=PerRow(jnp.ones(2)))


@register
@frozen
class Table(pj.masks.Mask):
    """Looks positions up in a constant array."""

    def pairs(self, i, j):
        return jnp.arange(1000)[i] <= j


@register
@frozen
class OneOf(pj.masks.Mask):
    def pairs(self, i, j):
        return jnp.where(i < 5, j < 2, j <= i)


@register
@dataclasses.dataclass
class Changeable(pj.masks.Mask):
    size: int = static(default=3)

    def pairs(self, i, j):
        return i - j < self.size


@register
@frozen
class Reals(pj.masks.OfTokens):
    q: jax.Array
    k: jax.Array

    matches = staticmethod(lambda q, k: q < k)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (Strided(), None),
        (Causal() & Strided(), None),
        (SameGroup(jnp.arange(TOKENS)), "SameGroup must depend only on two positions and Python ints"),
        (Causal() & EachHead((1, 2, 3, 4)), "the mask differs between heads"),
        (Causal() & EachHead((1, 2, 3, 4)).heads(0, 4), "the mask differs between heads"),
        (Table(), "Table uses "),
        (OneOf(), "OneOf uses where of booleans: kernels support only arithmetic and comparisons of integers"),
        (Changeable(), "Changeable is not hashable"),
        (Reals(jnp.ones((2, TOKENS)), jnp.ones((2, TOKENS))), "Reals holds arrays of floating-point numbers"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, pj.masks.Mask) else "",
)
def test_which_masks_the_tpu_kernel_supports(mask, why):
    found = entry.refusal(operands(mask=mask, tokens=TOKENS))
    assert (found is None) if why is None else found.startswith(why)
    assert why is None or found.endswith("use 'blockwise'")


@register
@frozen
class Squared(pj.bias.LinearBias):
    by_distance = False

    def values(self, q_positions, kv_positions):
        return -jnp.square(super().values(q_positions, kv_positions))


@register
@frozen
class Doubled(pj.bias.LinearBias):
    def apply(self, scores, q_positions, kv_positions):
        return scores * 2


@register
@frozen
class Wider(pj.masks.Window):
    def pairs(self, i, j):
        return i - j < 2 * self.size


@register
@frozen
class Steeper(pj.bias.LinearBias):
    def values(self, q_positions, kv_positions):
        return 2 * super().values(q_positions, kv_positions)


def test_a_subclass_of_a_library_class_is_not_treated_as_that_class():
    slopes, at = np.arange(1, HEADS + 1, dtype=np.float32), np.arange(5)
    forms = [form_of(operands(bias=kind(slopes))) for kind in (pj.bias.LinearBias, Squared, Doubled)]
    assert forms == [LinearInKey, None, None]
    some = Squared(slopes).heads(1, 2)
    np.testing.assert_array_equal(some.values(at, at), np.asarray(Squared(slopes).values(at, at))[1:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mask": Wider(3)},
            "Wider overrides pairs but inherits ['bounds', 'kept_keys'], which describe the old pairs: override them",
        ),
        ({"bias": Steeper(jnp.ones(HEADS))}, "Steeper overrides values but inherits ['by_distance'], which describe"),
    ],
)
def test_an_override_must_also_override_what_describes_it(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda: pj.attention(*qkv(), **arguments))


def test_a_scheme_says_which_slot_is_not_hashable():
    with pytest.raises(ValueError, match="mask: Changeable is not hashable"):
        pj.Scheme(mask=Changeable())
    with pytest.raises(ValueError, match=f"^Unregistered {NOT_REGISTERED}"):
        pj.Scheme(mask=Unregistered())

    @register
    @frozen
    class Sized(pj.masks.Mask):
        size: int

    with pytest.raises(ValueError, match="mark sizes as static with"):
        pj.Scheme(mask=Sized(3))
