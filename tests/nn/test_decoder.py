"""What the decoder promises for every scheme: packing, padding, shifts, decoding, direction, length, other schemes."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.own_methods import Strided
from decoders import (
    ALONE,
    GROUPS,
    LENGTH,
    NAMES,
    VOCAB,
    assert_same,
    compiled,
    config,
    config_of,
    documents,
    layout,
    logits_of,
    made,
    preset,
    run,
    separate,
)
from flax import nnx

import posjax as pj
from posjax import masks, rotary, scales
from posjax.nn import Decoder
from posjax.positions import Range, from_mask

pytestmark = pytest.mark.slow

SHIFT = 1_000_003
# Their first gradient is zero: Performer's random features are not learned, CLEX multiplies "up" by "down", which
# starts at zero, and the last bias of FIRE's network is the same for all keys of a row.
WITHOUT_A_FIRST_GRADIENT = ("'projection'", "'features']['up'", "'bias']['b2'")
NOT_SHIFT_INVARIANT = (
    "sinusoidal learned hierarchical coca-slack fire chunked longformer self-extend lm-infinite streaming dual-chunk "
    "fope llama4 performer"
)
BY_DEFAULT = ("rope", "learned", *GROUPS)


@pytest.fixture(
    scope="module",
    params=[*BY_DEFAULT, *(pytest.param(n, marks=pytest.mark.wide) for n in (*ALONE, *NAMES) if n not in BY_DEFAULT)],
)
def settings(request):
    return config_of(request.param)


# --- every preset -----------------------------------------------------------------------------------------------------


def test_preset_trains_every_parameter(settings):
    graph, state = made(settings)
    step = compiled(graph)
    (before, logits), gradients = step(state, *separate(), LENGTH)
    assert hash(settings) == hash(dataclasses.replace(settings))
    chex.assert_shape(logits, (3, LENGTH, VOCAB))
    chex.assert_type(logits, jnp.float32)
    assert np.isfinite(logits).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(gradients)):
        leaf = np.asarray(leaf)
        assert np.isfinite(leaf).all(), path
        if any(name in jax.tree_util.keystr(path) for name in WITHOUT_A_FIRST_GRADIENT):
            continue
        layers = leaf if "stacks" in jax.tree_util.keystr(path) else leaf[None]
        assert all(np.abs(layer).max() > 1e-7 for layer in layers), path
    moved = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.03) * np.asarray(g), state, gradients)
    (after, _), _ = step(moved, *separate(), LENGTH)
    assert after < before


def test_packed_documents_equal_separate_ones(settings):
    a, b, c = documents()
    packed, gradients = run(settings, layout([a, b], [c], []))
    wanted, wanted_gradients = run(settings, separate())
    assert_same(packed[0, :10], wanted[0, :10])
    assert_same(packed[0, 10:], wanted[1, :6])
    assert_same(packed[1], wanted[2])
    assert_same(gradients, wanted_gradients)


@pytest.mark.parametrize(
    ("scheme", "in_row"),
    [
        (pj.Layers((((preset("t5"), pj.scheme("alibi", mask=masks.Window(6))), 1),)), True),
        (pj.Layers((((preset("t5"), preset("rope")), 1),)), False),
        (pj.scheme("alibi", mask=Strided(4, 3)), False),
        (pj.scheme("fire", threshold=2), False),
    ],
    ids=["t5 and alibi", "t5 and rope", "strides", "fire"],
)
def test_positions_of_packed_documents_may_be_left_out(scheme, in_row):
    """A bias then counts positions in the row, unless a mask or a bias needs the positions in a document."""
    a, b, c = documents()
    tokens, positions, segments = layout([a, b], [c], [])
    settings = config(scheme)
    assert settings.layers.counts_in_row == in_row
    model = jax.jit(Decoder(settings, rngs=nnx.Rngs(1)).__call__)
    given, found = (model(tokens, positions=where, segment_ids=segments) for where in (positions, None))
    assert_same(found[segments >= 0], given[segments >= 0])


def test_left_padding_changes_nothing_for_real_tokens(settings):
    a, b, c = documents()
    tokens, _, segments = layout([a], [b], [c], left=True)
    padded, gradients = run(settings, (tokens, from_mask(segments >= 0), segments))
    wanted, wanted_gradients = run(settings, separate())
    for index, size in enumerate((10, 6, 16)):
        assert_same(padded[index, LENGTH - size :], wanted[index, :size])
    assert_same(gradients, wanted_gradients)


def test_shifting_all_positions_changes_logits_unless_the_scheme_is_shift_invariant(settings):
    tokens, positions, segments = separate()
    logits, _ = run(settings, (tokens, positions, segments))
    shifted, _ = run(settings, (tokens, positions + SHIFT, segments))
    same = np.allclose(shifted, logits, atol=1e-4)
    assert same == settings.scheme.shift_invariant


def test_which_presets_say_that_they_are_shift_invariant():
    assert {name for name in NAMES if not preset(name).shift_invariant} == {*NOT_SHIFT_INVARIANT.split()}


def test_no_token_looks_ahead(settings):
    tokens, positions, segments = separate()
    logits, _ = run(settings, (tokens, positions, segments))
    changed = tokens.at[2, 9].set((tokens[2, 9] + 1) % VOCAB)
    after, _ = run(settings, (changed, positions, segments))
    np.testing.assert_array_equal(after[2, :9], logits[2, :9])
    # With chunks of six tokens in every layer, a change stays inside its chunk.
    end = 12 if isinstance(getattr(settings.scheme, "mask", None), masks.Chunked) else LENGTH
    assert (np.abs(after[2, 9:end] - logits[2, 9:end]).max(-1) > 1e-5).all()


# Other kinds of operands that a scheme gives to attention are in the wide grid.
BLOCKWISE = ("raw and half-width keys",)


@pytest.mark.parametrize(
    "name",
    [*BLOCKWISE, *(pytest.param(n, marks=pytest.mark.wide) for n in (*ALONE, *GROUPS, *NAMES) if n not in BLOCKWISE)],
)
def test_blockwise_and_default_arguments_equal_dense_and_explicit_ones(name):
    settings = config_of(name)
    graph, _ = made(dataclasses.replace(settings, implementation="blockwise"))
    tokens = separate()[0]
    found = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(made(settings)[1])
    rows = (tokens, np.tile(np.arange(LENGTH, dtype=np.int32), (3, 1)), np.zeros((3, LENGTH), np.int32))
    assert_same(np.asarray(found), run(settings, rows)[0])


# --- decoding ---------------------------------------------------------------------------------------------------------

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
    """``run(parameters, rows, lengths)`` -> logits by parts, and tokens per row."""

    def run(state, rows, lengths):
        model = nnx.merge(graph, state)
        cache, found, column, part = model.init_cache(3, LENGTH, chunk=max(size for _, size in parts)), [], 0, 0
        for number, size in parts:
            columns = [row[:, column : column + number * size] for row in rows]
            logits, cache = decode_parts(model, cache, lengths[part : part + number], number, *columns)
            found.append(logits)
            column, part = column + number * size, part + number
        return jnp.concatenate(found, axis=1), cache.used

    return jax.jit(run)


def decoded(settings, parts, lengths=None):
    """Logits of every document's valid tokens, decoded part by part."""
    graph, state = made(settings)
    lengths = np.full(sum(number for number, _ in PARTS[parts]), LENGTH) if lengths is None else lengths
    rows = padded_rows()
    logits, used = jax.device_get(program(graph, PARTS[parts])(state, rows, lengths))
    chex.assert_shape(logits, (3, COLUMNS, VOCAB))
    np.testing.assert_array_equal(used, [10, 6, 16])
    return [logits[row][rows[1][row]] for row in range(3)]


def assert_is_full_forward(found, full):
    for logits, row in zip(found, full, strict=True):
        np.testing.assert_allclose(logits, row[: len(logits)], atol=1e-4)


@pytest.mark.parametrize(
    "parts", ["fives", *(pytest.param(p, marks=pytest.mark.wide) for p in ("ones", "fives and ones"))]
)
def test_decoding_is_the_full_forward_pass(settings, parts):
    assert_is_full_forward(decoded(settings, parts), run(settings, separate())[0])


NARROW = (masks.FirstTokens(2), masks.GlobalFirst(3), masks.Window(1))


def test_masks_that_retain_next_to_nothing_decode_one_token_at_a_time():
    settings = config(pj.Layers(((tuple(pj.scheme("rope", mask=mask) for mask in NARROW), 1),)), scan_layers=False)
    full = logits_of(nnx.merge(*made(settings)), separate()[0])
    assert_is_full_forward(decoded(settings, "ones"), full)


# --- both directions --------------------------------------------------------------------------------------------------

BOTH_WAYS = {
    "rope + log n": pj.scheme("rope", scale=scales.LogN(length=4, minimum=1)),
    "t5": pj.scheme("t5", num_buckets=8, max_distance=12, bidirectional=True),
    "coca-slack + window": pj.scheme("coca-slack", mask=masks.Window(4)),
}


@pytest.mark.parametrize("name", ["rope + log n", pytest.param("t5", marks=pytest.mark.wide), "coca-slack + window"])
def test_bidirectional_packed_equals_separate_and_sees_both_sides(name):
    settings = config(BOTH_WAYS[name], causal=False)
    a, b, c = documents()
    packed, gradients = run(settings, layout([a, b], [c], []))
    tokens, positions, segments = separate()
    wanted, wanted_gradients = run(settings, (tokens, positions, segments))
    assert_same(packed[0], np.concatenate([wanted[0, :10], wanted[1, :6]]))
    assert_same(gradients, wanted_gradients)
    changed = tokens.at[2, 3].set((tokens[2, 3] + 1) % VOCAB)
    after, _ = run(settings, (changed, positions, segments))
    assert (np.abs(after[2, :6] - wanted[2, :6]).max(-1) > 1e-5).all()


def test_a_bidirectional_scale_counts_the_whole_row():
    settings = config(BOTH_WAYS["rope + log n"], causal=False)
    model, (tokens, *_) = nnx.merge(*made(settings)), separate()
    assert_same(logits_of(model, tokens[2:]), run(settings, separate())[0][2:])


# --- length, and other schemes over the same parameters ---------------------------------------------------------------


def test_dynamic_ntk_is_plain_up_to_the_original_length_and_reads_length():
    rope = preset("rope")
    model, tokens = nnx.merge(*made(config(rope))), separate()[0]
    dynamic = model.with_scheme(rope.extend(frequencies={"name": "dynamic-ntk", "original_length": 8}))
    plain, at_own_length = logits_of(model, tokens), logits_of(dynamic, tokens)
    np.testing.assert_array_equal(logits_of(dynamic, tokens, length=8), plain)
    np.testing.assert_array_equal(logits_of(dynamic, tokens, length=16), at_own_length)
    assert np.abs(at_own_length - plain).max() > 1e-3


def test_dynamic_ntk_takes_a_length_for_every_packed_document():
    scheme = preset("coca-strict").extend(frequencies={"name": "dynamic-ntk", "original_length": 4})
    settings = config(scheme)
    a, b, c = documents()
    size = jnp.asarray([10] * 10 + [6] * 6, jnp.int32)
    whole = jnp.full(LENGTH, LENGTH, jnp.int32)
    packed, gradients = run(settings, layout([a, b], [c], []), jnp.stack([size, whole, whole]))
    sizes = jnp.broadcast_to(jnp.asarray([[10], [6], [16]], jnp.int32), (3, LENGTH))
    wanted, wanted_gradients = run(settings, separate(), sizes)
    assert np.abs(wanted[0, :10] - run(settings, separate(), jnp.full_like(sizes, LENGTH))[0][0, :10]).max() > 1e-3
    assert_same(packed[0], np.concatenate([wanted[0, :10], wanted[1, :6]]))
    assert_same(gradients, wanted_gradients)


LOCAL = pj.scheme("rope", mask=masks.Window(3))
BOTH = pj.Layers((((LOCAL, preset("rope")), 1),))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(preset("coca-slack"), preset("coca-strict"), marks=pytest.mark.wide),
        (BOTH, BOTH.extend(frequencies=rotary.Linear(2.0))),
    ],
    ids=["one scheme", "layers"],
)
def test_with_scheme_keeps_the_parameters(before, after):
    model = nnx.merge(*made(config(before)))
    changed = model.with_scheme(after)
    assert changed.config == config(after)
    chex.assert_trees_all_equal(*(nnx.to_pure_dict(nnx.state(each)) for each in (model, changed)))
    assert np.abs(logits_of(changed, separate()[0]) - logits_of(model, separate()[0])).max() > 1e-3


# --- positions --------------------------------------------------------------------------------------------------------


def test_positions_may_be_given_once_for_all_rows():
    model, tokens = nnx.merge(*made(config(preset("fire")))), separate()[0]
    places = jnp.arange(5, 5 + LENGTH)
    given = (jnp.tile(places, (3, 1)), places, places[None], Range(5, LENGTH))
    wanted, *found = jax.jit(lambda: [model(tokens, positions=each) for each in given])()
    assert np.abs(wanted - logits_of(model, tokens)).max() > 1e-4
    for logits in found:
        assert_same(logits, wanted)


def test_an_embedding_takes_its_positions_from_the_first_of_several_coordinates():
    model, tokens = nnx.merge(*made(config(preset("sinusoidal")))), separate()[0]
    places = np.stack([3 + 2 * np.arange(LENGTH), np.arange(LENGTH)], axis=-1)[None].repeat(3, 0)
    run = jax.jit(lambda: (model(tokens, coordinates=places), model(tokens, positions=places[..., 0])))
    assert_same(*run())


# --- decoding with schemes that read the length ----------------------------------------------------------------------

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
FIRST = ("longrope", "coca dynamic ntk")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.wide) for name in LENGTH_READERS]
)
def test_a_frozen_length_gives_the_full_forward_pass_and_a_growing_length_does_not(name):
    settings = config(LENGTH_READERS[name])
    frozen, growing = (decoded(settings, "fives", lengths=n) for n in (None, np.arange(5, 25, 5)))
    assert_is_full_forward(frozen, logits_of(nnx.merge(*made(settings)), separate()[0]))
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
    chex.assert_shape(cache.k, (2, 3, 2, slots, width))
    chex.assert_shape(cache.v, (2, 3, 2, slots, 8))


def test_linear_attention_keeps_one_state_for_all_keys():
    settings = config(preset("linear-elu"))
    sizes = [[leaf.shape for leaf in jax.tree.leaves(cache_shapes(settings, 3, n).stacks)] for n in (10, 10_000)]
    assert sizes[0] == sizes[1]


def test_rows_beyond_the_capacity_are_nan_and_others_are_not():
    graph, state = made(config(preset("rope"), num_layers=1))
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


# --- coordinates in decoding ------------------------------------------------------------------------------------------


def test_new_tokens_may_have_coordinates():
    settings = config(preset("mrope"), num_layers=1)
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
