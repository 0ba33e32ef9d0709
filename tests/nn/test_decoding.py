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
from posjax import masks, rotary
from posjax.nn import Decoder

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


def test_masks_that_retain_next_to_nothing_decode_one_token_at_a_time():
    layers = pj.Layers(((tuple(pj.scheme("rope", mask=mask) for mask in NARROW), 1),))
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


# The others use the length in the same code.
FIRST = ("longrope", "clex", "coca dynamic ntk")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.wide) for name in LENGTH_READERS]
)
def test_a_frozen_length_gives_the_full_forward_pass_and_a_growing_length_does_not(name):
    settings = config(LENGTH_READERS[name])
    frozen, full = decoded(settings, "fives")
    assert_is_full_forward(frozen, full)
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


def test_rows_beyond_the_capacity_are_nan_and_others_are_not():
    graph, state = made(config(preset("rope")))
    tokens, valid = jnp.zeros((2, 3), jnp.int32), jnp.asarray([[True] * 3, [False] * 3])

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        first, cache = model.decode(tokens, model.init_cache(2, 4, chunk=4), length=4)
        return first, model.decode(tokens, cache, length=4, valid=valid)[0]

    first, second = run(state)
    assert np.isfinite(first).all()
    assert np.isnan(second[0]).all()
    assert np.isfinite(second[1]).all()


# --- coordinates ------------------------------------------------------------------------------------------------------


def test_new_tokens_may_have_coordinates():
    settings = config(preset("mrope"))
    model = nnx.merge(*made(settings))
    tokens = separate()[0]
    draw = np.random.default_rng(0)

    @jax.jit
    def run(where):
        cache, found = model.init_cache(3, 2 * LENGTH, chunk=8), []  # longer than its rows
        for part in (slice(0, 8), slice(8, 16)):
            logits, cache = model.decode(tokens[:, part], cache, length=LENGTH, coordinates=where[:, part])
            found.append(logits)
        return jnp.concatenate(found, 1), model(tokens, coordinates=where)

    places = [draw.integers(0, 9, (3, LENGTH, 3), np.int32) for _ in range(2)]
    (found, full), (_, others) = map(run, places)
    assert np.abs(full - others).max() > 1e-3
    np.testing.assert_allclose(found, full, atol=1e-4)
