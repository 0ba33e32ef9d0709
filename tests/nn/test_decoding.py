"""Decoding with a cache is the full forward pass, for every preset, whatever parts and paddings the rows come in."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import COVERING, LENGTH, VOCAB, config, config_of, documents, made, preset, separate
from flax import nnx

import posjax as pj
from posjax import masks, rotary, scales

COLUMNS = 20
PARTS = (5, 5, 5, 1, 1, 1, 1, 1)


def padded_rows():
    """The three documents in rows of 20 columns: padded on the left, on the right, and here and there."""
    tokens = np.random.default_rng(9).integers(0, VOCAB, (3, COLUMNS))
    valid = np.zeros((3, COLUMNS), bool)
    where = (np.arange(10, 20), np.arange(6), np.setdiff1d(np.arange(20), [0, 7, 13, 15]))
    for row, (document, columns) in enumerate(zip(documents(), where, strict=True)):
        tokens[row, columns], valid[row, columns] = document, True
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(valid)


@functools.cache
def stepper(graph):
    """``step(parameters, tokens, valid, cache, length)``, compiled once for each number of tokens."""
    return jax.jit(
        lambda state, tokens, valid, cache, length: nnx.merge(graph, state).decode(
            tokens, cache, valid=valid, length=length
        )
    )


@functools.cache
def forward(graph):
    """The full forward pass, compiled once."""
    return jax.jit(
        lambda state, tokens, positions, segments, length: nnx.merge(graph, state)(
            tokens, positions=positions, segment_ids=segments, length=length
        )
    )


def decoded(settings, length=LENGTH, state=None):
    """Logits of every valid token, document by document, decoded part by part."""
    graph, own = made(settings)
    model = nnx.merge(graph, own)
    tokens, valid = padded_rows()
    cache, found, start = model.init_cache(3, LENGTH, chunk=max(PARTS)), [], 0
    for n, size in enumerate(PARTS):
        part = slice(start, start + size)
        at = length if isinstance(length, int) else length[n]
        logits, cache = stepper(graph)(state or own, tokens[:, part], valid[:, part], cache, at)
        found.append(logits)
        start += size
    chex.assert_shape(logits, (3, 1, VOCAB))
    np.testing.assert_array_equal(cache.used, [10, 6, 16])
    whole = np.concatenate(found, axis=1)
    return [whole[row][np.asarray(valid[row])] for row in range(3)]


def assert_is_full_forward(found, settings, length=LENGTH):
    graph, state = made(settings)
    full = forward(graph)(state, *separate(), length)
    for row, logits in enumerate(found):
        np.testing.assert_allclose(logits, full[row, : len(logits)], atol=1e-4)


@pytest.mark.parametrize("name", COVERING)
def test_decoding_is_the_full_forward_pass(name):
    settings = config_of(name)
    found = decoded(settings)
    assert_is_full_forward(found, settings)


NARROW = (masks.Sinks(2), masks.GlobalFirst(3), masks.Window(1))


@pytest.mark.parametrize(
    "found", [NARROW, *(pytest.param((mask,), marks=pytest.mark.wide) for mask in NARROW)], ids=str
)
def test_masks_that_retain_next_to_nothing_decode_one_token_at_a_time(found):
    settings = config(pj.Layers(((tuple(pj.scheme("rope", mask=mask) for mask in found), 1),)))
    graph, state = made(settings)
    model, tokens, found = nnx.merge(graph, state), separate()[0], []
    cache = model.init_cache(3, LENGTH)
    for column in range(LENGTH):
        logits, cache = stepper(graph)(state, tokens[:, column, None], jnp.ones((3, 1), bool), cache, LENGTH)
        found.append(logits)
    np.testing.assert_allclose(
        np.concatenate(found, 1), jax.jit(lambda s: nnx.merge(graph, s)(tokens))(state), atol=1e-4
    )


# --- schemes that read the length -------------------------------------------------------------------------------------

LENGTH_READERS = {
    "dynamic ntk": pj.scheme("rope", frequencies=rotary.DynamicNTK(4)),
    "dynamic yarn": pj.scheme("rope", frequencies=rotary.DynamicYaRN(4)),
    "dynamic linear": pj.scheme("rope", frequencies=rotary.DynamicLinear(4)),
    "longrope": pj.scheme("rope", frequencies=rotary.LongRoPE((1.0,) * 4, (3.0, 4.0, 5.0, 6.0), 8, factor=2.0)),
    "clex": pj.scheme("rope", frequencies=rotary.CLEX(4)),
    "coca dynamic ntk": pj.scheme("coca-strict", frequencies=rotary.DynamicNTK(4)),
}


# Dynamic YaRN and dynamic linear scaling say the length to the same place as dynamic NTK.
ALIKE = ("dynamic yarn", "dynamic linear")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide) if name in ALIKE else name for name in LENGTH_READERS]
)
def test_a_length_that_is_frozen_is_the_full_forward_pass_and_one_that_grows_is_not(name):
    settings = config(LENGTH_READERS[name])
    frozen = decoded(settings)
    assert_is_full_forward(frozen, settings)
    kinds = {scheme.caches for scheme in settings.layers.schemes}
    assert kinds <= {"raw", "half-width"}
    growing = decoded(settings, length=np.cumsum(PARTS).tolist())
    differences = [np.abs(a - b).max() for a, b in zip(growing, frozen, strict=True)]
    assert max(differences) > 1e-3


# --- what a cache holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "slots", "width"),
    [
        (pj.scheme("rope"), 64, 8),
        (pj.scheme("coca-strict"), 64, 4),
        (pj.scheme("window", size=5), 9, 8),
        (pj.scheme("rope", mask=masks.Window(5) | masks.Sinks(2)), 11, 8),
        (pj.scheme("streaming", sinks=2, recent=6), 12, 8),
        (pj.scheme("chunked", size=6), 10, 8),
        (pj.scheme("window", size=100), 64, 8),
        (pj.scheme("cope", mask=masks.Window(5)), 64, 8),
    ],
    ids=str,
)
def test_a_cache_is_as_small_as_its_scheme_allows(scheme, slots, width):
    model = nnx.merge(*made(config(scheme)))
    cache = model.init_cache(3, 64, chunk=5).stacks[0][0]
    chex.assert_shape(cache.k, (2, 3, slots, 2, width))
    chex.assert_shape(cache.v, (2, 3, slots, 2, 8))


def test_linear_attention_keeps_one_state_for_all_keys():
    model = nnx.merge(*made(config(preset("linear-elu"))))
    sizes = [[leaf.shape for leaf in jax.tree.leaves(model.init_cache(3, n).stacks)] for n in (10, 10_000)]
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
    where = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, LENGTH, 3)), jnp.int32)

    @jax.jit
    def run():
        cache, found = model.init_cache(3, LENGTH, chunk=8), []
        for part in (slice(0, 8), slice(8, 16)):
            logits, cache = model.decode(tokens[:, part], cache, length=LENGTH, coordinates=where[:, part])
            found.append(logits)
        return model(tokens, coordinates=where), model(tokens), jnp.concatenate(found, 1)

    full, plain, found = run()
    assert np.abs(full - plain).max() > 1e-3
    np.testing.assert_allclose(found, full, atol=1e-4)


def test_what_is_refused():
    model = nnx.merge(*made(config(preset("rope"))))
    with pytest.raises(ValueError, match=r"made for 1 tokens at a time, found 3; give init_cache\(chunk=\)"):
        model.decode(jnp.zeros((2, 3), jnp.int32), model.init_cache(2, 8), length=8)
    with pytest.raises(ValueError, match="capacity must be positive and whole, found 0"):
        model.init_cache(2, 0)
    both_ways = nnx.merge(*made(config(preset("rope"), causal=False)))
    with pytest.raises(ValueError, match=r"bidirectional model .* cannot decode"):
        both_ways.decode(jnp.zeros((2, 1), jnp.int32), both_ways.init_cache(2, 8), length=8)
    raw = nnx.merge(*made(config(pj.scheme("coca-strict", scale=scales.LogN(8)))))
    where = jnp.zeros((2, 1, 1), jnp.int32)
    with pytest.raises(ValueError, match="caches half-width keys"):
        raw.decode(jnp.zeros((2, 1), jnp.int32), raw.init_cache(2, 8), length=8, coordinates=where)
