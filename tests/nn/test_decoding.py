"""Decoding with a cache equals the full forward pass, for every preset and for any parts and padding of the rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import (
    ALONE,
    GROUPS,
    LENGTH,
    NAMES,
    VOCAB,
    config,
    config_of,
    documents,
    made,
    preset,
    separate,
)
from flax import nnx

import posjax as pj
from posjax import masks, rotary, scales
from posjax.nn import Decoder
from posjax.nn.modules import LayerInputs

COLUMNS = 20
PARTS = {"fives": ((4, 5),), "ones": ((20, 1),), "fives and ones": ((3, 5), (5, 1))}
"""How 20 columns are decoded: pairs of a number of parts and the columns of each."""


def padded_rows():
    """The three documents in rows of 20 columns, with padding on the left, on the right, and in several places."""
    tokens = np.random.default_rng(9).integers(0, VOCAB, (3, COLUMNS), np.int32)
    valid = np.zeros((3, COLUMNS), bool)
    where = (np.arange(10, 20), np.arange(6), np.setdiff1d(np.arange(20), [0, 7, 13, 15]))
    for row, (document, columns) in enumerate(zip(documents(), where, strict=True)):
        tokens[row, columns], valid[row, columns] = document, True
    return tokens, valid


def decode_parts(model, cache, lengths, number, *columns):
    """Decodes columns in ``number`` equal parts, each at its length, by one program; returns logits and cache."""

    def step(cache, part):
        length, tokens, valid = part
        logits, cache = model.decode(tokens, cache, length=length, valid=valid)
        return cache, logits

    parts = [column.reshape(len(column), number, -1).swapaxes(0, 1) for column in columns]
    cache, logits = jax.lax.scan(step, cache, (lengths, *parts))
    return logits.swapaxes(0, 1).reshape(*columns[0].shape, VOCAB), cache


@functools.cache
def program(graph, parts):
    """``run(parameters, rows, lengths, separate rows)`` -> logits by parts, tokens per row, and full forward logits."""

    def run(state, rows, lengths, whole):
        model = nnx.merge(graph, state)
        cache, found, column, part = model.init_cache(3, LENGTH, chunk=max(size for _, size in parts)), [], 0, 0
        for number, size in parts:
            columns = [row[:, column : column + number * size] for row in rows]
            logits, cache = decode_parts(model, cache, lengths[part : part + number], number, *columns)
            found.append(logits)
            column, part = column + number * size, part + number
        tokens, positions, segments = whole
        full = model(tokens, positions=positions, segment_ids=segments, length=LENGTH)
        return jnp.concatenate(found, axis=1), cache.used, full

    return jax.jit(run)


def decoded(settings, parts, lengths=None):
    """Logits of every document's valid tokens: decoded part by part, and from the full forward pass."""
    graph, state = made(settings)
    lengths = np.full(sum(number for number, _ in PARTS[parts]), LENGTH) if lengths is None else lengths
    rows = padded_rows()
    logits, used, full = jax.device_get(program(graph, PARTS[parts])(state, rows, lengths, separate()))
    chex.assert_shape(logits, (3, COLUMNS, VOCAB))
    np.testing.assert_array_equal(used, [10, 6, 16])
    return [logits[row][rows[1][row]] for row in range(3)], [full[row, :size] for row, size in enumerate(used)]


def assert_is_full_forward(found, full):
    for logits, wanted in zip(found, full, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


CASES = [(name, "fives and ones") for name in ("rope", "sinusoidal", "learned", "hierarchical")]
CASES += [(name, "fives") for name in ("hwfa", "llama4", *GROUPS)]
WIDE = [(name, "fives and ones") for name in (*ALONE, *GROUPS, *NAMES)]
WIDE += [(name, "ones") for name in (*ALONE, *GROUPS)]


@pytest.mark.parametrize(
    ("name", "parts"), CASES + [pytest.param(*case, marks=pytest.mark.wide) for case in WIDE if case not in CASES]
)
def test_decoding_is_the_full_forward_pass(name, parts):
    assert_is_full_forward(*decoded(config_of(name), parts))


NARROW = (masks.FirstTokens(2), masks.GlobalFirst(3), masks.Window(1))


@pytest.mark.parametrize(
    "found", [NARROW, *(pytest.param((mask,), marks=pytest.mark.wide) for mask in NARROW)], ids=str
)
def test_masks_that_retain_next_to_nothing_decode_one_token_at_a_time(found):
    layers = pj.Layers(((tuple(pj.scheme("rope", mask=mask) for mask in found), 1),))
    assert_is_full_forward(*decoded(config(layers, scan_layers=False), "ones"))


# --- schemes that read the length -------------------------------------------------------------------------------------

LENGTH_READERS = {
    "dynamic ntk": pj.scheme("rope", frequencies=rotary.DynamicNTK(4)),
    "dynamic yarn": pj.scheme("rope", frequencies=rotary.DynamicYaRN(4)),
    "dynamic linear": pj.scheme("rope", frequencies=rotary.DynamicLinear(4)),
    "longrope": pj.scheme("rope", frequencies=rotary.LongRoPE((1.0,) * 4, (3.0, 4.0, 5.0, 6.0), 8, factor=2.0)),
    "clex": pj.scheme("rope", frequencies=rotary.CLEX(4)),
    "coca dynamic ntk": pj.scheme("coca-strict", frequencies=rotary.DynamicNTK(4)),
    "coca in some planes, dynamic ntk": pj.scheme("coca-planes", planes=(1, 3), frequencies=rotary.DynamicNTK(4)),
}


# Dynamic YaRN and dynamic linear scaling use the length in the same code as dynamic NTK.
ALIKE = ("dynamic yarn", "dynamic linear")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide) if name in ALIKE else name for name in LENGTH_READERS]
)
def test_a_frozen_length_gives_the_full_forward_pass_and_a_growing_length_does_not(name):
    settings = config(LENGTH_READERS[name])
    frozen, full = decoded(settings, "fives")
    assert_is_full_forward(frozen, full)
    kinds = {scheme.caches for scheme in settings.layers.schemes}
    assert kinds <= {"raw", "half-width"}
    growing, _ = decoded(settings, "fives", lengths=np.arange(5, 25, 5))
    differences = [np.abs(a - b).max() for a, b in zip(growing, frozen, strict=True)]
    assert max(differences) > 1e-3


# --- what a cache holds -----------------------------------------------------------------------------------------------


def cache_shapes(settings, *sizes, **options):
    """The shapes of an empty cache."""
    return jax.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)).init_cache(*sizes, **options))


@pytest.mark.parametrize(
    ("scheme", "slots", "width"),
    [
        (pj.scheme("rope"), 64, 8),
        (pj.scheme("coca-strict"), 64, 4),
        (pj.scheme("window", size=5), 9, 8),
        (pj.scheme("rope", mask=masks.Window(5) | masks.FirstTokens(2)), 11, 8),
        (pj.scheme("streaming", first=2, recent=6), 12, 8),
        (pj.scheme("chunked", size=6), 10, 8),
        (pj.scheme("window", size=100), 64, 8),
        (pj.scheme("cope", mask=masks.Window(5)), 64, 8),
    ],
    ids=str,
)
def test_a_cache_is_as_small_as_its_scheme_allows(scheme, slots, width):
    cache = cache_shapes(config(scheme), 3, 64, chunk=5).stacks[0][0]
    chex.assert_shape(cache.k, (2, 3, slots, 2, width))
    chex.assert_shape(cache.v, (2, 3, slots, 2, 8))


def test_linear_attention_keeps_one_state_for_all_keys():
    settings = config(preset("linear-elu"))
    sizes = [[leaf.shape for leaf in jax.tree.leaves(cache_shapes(settings, 3, n).stacks)] for n in (10, 10_000)]
    assert sizes[0] == sizes[1]


def test_a_cache_may_be_longer_than_its_rows():
    settings = config(preset("rope"))
    graph, state = made(settings)
    tokens = separate()[0]
    model = nnx.merge(graph, state)

    @jax.jit
    def run():
        whole, _ = model.decode(tokens, model.init_cache(3, 40, chunk=LENGTH), length=LENGTH)
        return whole, model(tokens)

    np.testing.assert_allclose(*run(), atol=1e-4)


def test_rows_beyond_the_capacity_are_nan_and_others_are_not():
    model = nnx.merge(*made(config(preset("rope"))))
    valid = jnp.asarray([[True] * 3, [False] * 3])
    first, cache = model.decode(jnp.zeros((2, 3), jnp.int32), model.init_cache(2, 4, chunk=4), length=4)
    assert np.isfinite(first).all()
    second, _ = model.decode(jnp.zeros((2, 3), jnp.int32), cache, length=4, valid=valid)
    assert np.isnan(second[0]).all()
    assert np.isfinite(second[1]).all()


# --- positions, coordinates, refusals ---------------------------------------------------------------------------------


def test_positions_and_coordinates_of_new_tokens():
    settings = config(preset("mrope"))
    model = nnx.merge(*made(settings))
    tokens = separate()[0]
    draw = np.random.default_rng(0)

    @jax.jit
    def run(where):
        cache, found = model.init_cache(3, LENGTH, chunk=8), []
        for part in (slice(0, 8), slice(8, 16)):
            logits, cache = model.decode(tokens[:, part], cache, length=LENGTH, coordinates=where[:, part])
            found.append(logits)
        return jnp.concatenate(found, 1), model(tokens, coordinates=where)

    places = [draw.integers(0, 9, (3, LENGTH, 3), np.int32) for _ in range(2)]
    (found, full), (_, others) = map(run, places)
    assert np.abs(full - others).max() > 1e-3
    np.testing.assert_allclose(found, full, atol=1e-4)


def test_a_block_decodes_without_being_told_that_no_token_is_padding():
    """FoX reads the tokens, so padding would matter to it."""
    block = nnx.merge(*made(config(preset("fox")))).stacks[0][0]
    block = jax.tree.map(lambda leaf: leaf[0], block)
    x, index = np.random.default_rng(0).normal(size=(2, 6, 32)).astype(np.float32), jnp.arange(6)[None].repeat(2, 0)
    inputs = LayerInputs(index, None, index + 1, 6, {})
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    cache = block.attention.scheme.init_cache(2, 6, **heads, chunk=6)
    np.testing.assert_allclose(block.decode(x, cache, inputs)[0], block(x, inputs), atol=1e-5)


def test_bad_calls_are_refused():
    one, three = np.zeros((2, 1), np.int32), np.zeros((2, 3), np.int32)

    def decode(settings, tokens, **options):
        """Computes shapes only, which is enough for the errors."""

        def run():
            model = Decoder(settings, rngs=nnx.Rngs(0))
            return model.decode(tokens, model.init_cache(2, 8), length=8, **options)

        jax.eval_shape(run)

    with pytest.raises(
        ValueError, match=r"made for 1 tokens at a time, found 3; pass the length of the longest .*init_cache\(chunk=\)"
    ):
        decode(config(preset("rope")), three)
    with pytest.raises(ValueError, match="capacity must be positive and whole, found 0"):
        cache_shapes(config(preset("rope")), 2, 0)
    with pytest.raises(ValueError, match=r"bidirectional model .* cannot decode"):
        decode(config(preset("rope"), causal=False), one)
    with pytest.raises(ValueError, match="caches half-width keys"):
        decode(config(pj.scheme("coca-strict", scale=scales.LogN(8))), one, coordinates=np.zeros((2, 1, 1), np.int32))
