"""What the decoder promises for every scheme: packing, padding, shifts, direction, length, other schemes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.own_methods import Strided
from decoders import (
    ALONE,
    COVERING,
    GROUPS,
    LENGTH,
    NAMES,
    VARIANTS,
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
from jax.sharding import PartitionSpec

import posjax as pj
from posjax import masks, rotary, scales
from posjax.nn import Decoder, Residual
from posjax.nn.decoder import _check_shapes as check_shapes
from posjax.positions import Range, from_mask

SHIFT = 1_000_003
# Their first gradient is zero: Performer's random features are not learned, CLEX multiplies "up" by "down", which
# starts at zero, and the last bias of FIRE's network is the same for all keys of a row.
WITHOUT_A_FIRST_GRADIENT = ("'projection'", "'features']['up'", "'bias']['b2'")
NOT_SHIFT_INVARIANT = {
    "sinusoidal",
    "learned",
    "hierarchical",
    "coca-slack",
    "fire",
    "chunked",
    "longformer",
    "self-extend",
    "lm-infinite",
    "streaming",
    "dual-chunk",
    "llama4",
    "performer",
}


@pytest.fixture(scope="module", params=COVERING)
def settings(request):
    return config_of(request.param)


# --- every preset -----------------------------------------------------------------------------------------------------


def test_every_preset_is_alone_or_in_a_group_or_a_variant():
    known = {*ALONE, *" ".join(GROUPS.values()).split(), *VARIANTS.split()}
    assert known ^ set(NAMES) == set(), "tests/decoders.py: GROUPS, or VARIANTS"


def test_preset_builds_and_is_hashable(settings):
    assert hash(settings) == hash(dataclasses.replace(settings))
    assert settings.scheme == dataclasses.replace(settings).scheme
    logits, _ = run(settings, separate())
    chex.assert_shape(logits, (3, LENGTH, VOCAB))
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_preset_trains_every_parameter(settings):
    graph, state = made(settings)
    step = compiled(graph)
    (before, _), gradients = step(state, *separate(), LENGTH)
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


@pytest.mark.parametrize(("names", "in_row"), [(("t5", "alibi"), True), (("t5", "rope"), False)])
def test_features_in_one_layer_are_enough_to_count_within_documents(names, in_row):
    assert pj.Layers(((tuple(map(pj.scheme, names)), 1),)).counts_in_row == in_row


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
        (preset("t5"), True),
        (preset("kerple-log"), True),
        (pj.scheme("alibi", mask=masks.Window(6)), True),
        (pj.scheme("alibi", mask=Strided(4, 3)), False),
        (pj.scheme("alibi", mask=masks.Chunked(6)), False),
        (pj.scheme("fire", threshold=2), False),
    ],
    ids=lambda value: None if isinstance(value, bool) else f"{type(value.bias).__name__}, {value.mask}",
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
    assert {name for name in NAMES if not preset(name).shift_invariant} == NOT_SHIFT_INVARIANT


def test_no_token_looks_ahead(settings):
    tokens, positions, segments = separate()
    logits, _ = run(settings, (tokens, positions, segments))
    changed = tokens.at[2, 9].set((tokens[2, 9] + 1) % VOCAB)
    after, _ = run(settings, (changed, positions, segments))
    np.testing.assert_array_equal(after[2, :9], logits[2, :9])
    # With chunks of six tokens in every layer, a change stays inside its chunk.
    end = 12 if isinstance(getattr(settings.scheme, "mask", None), masks.Chunked) else LENGTH
    assert (np.abs(after[2, 9:end] - logits[2, 9:end]).max(-1) > 1e-5).all()


# Every kind of operand that a scheme gives to attention.
BLOCKWISE = ("learned", "biases", "raw and half-width keys", "logits")


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


# --- both directions --------------------------------------------------------------------------------------------------

BOTH_WAYS = {
    "rope + log n": pj.scheme("rope", scale=scales.LogN(length=4, minimum=1)),
    "alibi": pj.scheme("alibi", symmetric=True),
    "t5": pj.scheme("t5", num_buckets=8, max_distance=12, bidirectional=True),
    "coca-slack + window": pj.scheme("coca-slack", mask=masks.Window(4)),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
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


def test_bidirectional_scale_counts_the_whole_document():
    settings = config(BOTH_WAYS["rope + log n"], causal=False)
    model = nnx.merge(*made(settings))
    tokens = separate()[0]
    assert_same(logits_of(model, tokens[2:]), run(settings, separate())[0][2:])
    assert_same(logits_of(model, tokens[:1, :10]), run(settings, separate())[0][:1, :10])


@pytest.mark.parametrize(("name", "option"), [("alibi", "symmetric=True"), ("t5", "bidirectional=True")])
def test_one_sided_biases_are_refused_in_both_directions(name, option):
    with pytest.raises(ValueError, match=f"causal attention; use .*{option}"):
        config(pj.scheme(name), causal=False)


# --- length, and other schemes over the same parameters ---------------------------------------------------------------


def test_dynamic_ntk_is_plain_up_to_the_original_length_and_reads_length():
    rope = preset("rope")
    model = nnx.merge(*made(config(rope)))
    tokens = separate()[0]
    plain = logits_of(model, tokens)

    def dynamic(original, **options):
        rule = {"name": "dynamic-ntk", "original_length": original}
        return logits_of(model.with_scheme(rope.extend(frequencies=rule)), tokens, **options)

    np.testing.assert_array_equal(dynamic(16), plain)
    np.testing.assert_array_equal(dynamic(8, length=8), plain)
    at_own_length = dynamic(8)
    assert np.abs(at_own_length - plain).max() > 1e-3
    np.testing.assert_array_equal(dynamic(8, length=16), at_own_length)
    np.testing.assert_array_equal(dynamic(16, length=32), dynamic(8, length=16))


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


def test_with_scheme_keeps_the_parameters():
    slack = config(preset("coca-slack"))
    model = nnx.merge(*made(slack))
    strict = model.with_scheme(preset("coca-strict"))
    assert strict.config == config(preset("coca-strict"))
    chex.assert_trees_all_equal(*(nnx.to_pure_dict(nnx.state(each)) for each in (model, strict)))
    assert np.abs(logits_of(strict, separate()[0]) - logits_of(model, separate()[0])).max() > 1e-3
    same = model.with_scheme(slack.scheme)
    np.testing.assert_array_equal(logits_of(same, separate()[0]), logits_of(model, separate()[0]))


@pytest.mark.parametrize("name", ["t5", "coca-strict", "learned"])
def test_with_scheme_refuses_other_parameters(name):
    model = nnx.eval_shape(lambda: Decoder(config(preset("rope")), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="does not fit the parameters"):
        model.with_scheme(preset(name))


def test_with_scheme_also_works_with_layers():
    local, full = pj.scheme("rope", mask=masks.Window(3)), preset("rope")
    layers = pj.Layers((((local, full), 1),))
    model = nnx.merge(*made(config(layers)))
    plain = logits_of(model, separate()[0])
    longer = layers.extend(frequencies=rotary.Linear(2.0))
    assert [s.mask for s in longer.schemes] == [masks.Window(3), None]
    assert np.abs(logits_of(model.with_scheme(longer), separate()[0]) - plain).max() > 1e-3


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, found 4 and 3"),
        ({"model_dim": 30}, "model_dim must be a multiple of num_heads"),
        ({"head_dim": 7}, "head_dim must be a positive even number, found 7"),
        ({"num_layers": 0}, "num_layers must be positive, found 0"),
        ({"activation": "swigul"}, "did you mean 'swiglu'"),
        ({"remat": "dot"}, "did you mean 'dots'"),
        ({"compute_dtype": "float16"}, "compute_dtype: unknown value 'float16'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(preset("rope"), **options)


def test_inputs_that_do_not_fit_are_refused():
    model = nnx.merge(*made(config(preset("rope"))))
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    for message, arguments in {
        "tokens must have 2 axes": {"tokens": tokens[0]},
        "segment_ids must have the shape of tokens": {"tokens": tokens, "segment_ids": tokens[:, :3]},
        r"positions must have shape \(16,\) or \(2, 16\), found \(3,\)": {"tokens": tokens, "positions": Range(0, 3)},
        r"positions must have .* found \(3, 16\)": {"tokens": tokens, "positions": jnp.zeros((3, LENGTH), jnp.int32)},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(**arguments)


# --- parts of the decoder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(3, 4), (1, 4)])
def test_shapes_that_fit(tokens):
    rows = {(4,), (1, 4), tokens}
    for shape in rows:
        check_shapes(np.zeros(tokens, int), np.zeros(shape, int), np.zeros(tokens, int), np.zeros((*shape, 2)))
    check_shapes(np.zeros(tokens, int), Range(7, 4), None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("positions", np.zeros(shape, int)) for shape in ((), (3,), (5,), (2, 4), (3, 3), (3, 1), (3, 4, 1))],
        ("positions", Range(0, 5)),
        *[("coordinates", np.zeros(shape)) for shape in ((), (4,), (3, 2), (2, 4), (3, 4), (2, 4, 2), (1, 3, 4, 2))],
        *[("segment_ids", np.zeros(shape, int)) for shape in ((4,), (1, 4), (2, 4), (3, 3))],
    ],
    ids=lambda value: value if isinstance(value, str) else str(getattr(value, "shape", value)),
)
def test_shapes_that_do_not_fit(name, value):
    arguments = dict.fromkeys(("positions", "segment_ids", "coordinates")) | {name: value}
    with pytest.raises(ValueError, match=f"{name} must have"):
        check_shapes(np.zeros((3, 4), int), **arguments)


def test_rows_without_tokens_are_refused():
    with pytest.raises(ValueError, match=r"tokens must hold at least one token, found shape \(3, 0\)"):
        check_shapes(np.zeros((3, 0), int), None, None, None)


ROW = jnp.zeros((2, 6), jnp.int32)
SEGMENTS = jnp.array([[5, 5, 2, 2, 2, 9], [0, 0, 0, 0, 0, 0]])


def inputs(segment_ids=None, positions=None, length=None, coordinates=None, **options):
    model = nnx.eval_shape(lambda: Decoder(config(preset("rope"), **options), rngs=nnx.Rngs(0)))
    return model._layer_inputs(ROW, positions, segment_ids, length, coordinates)


@pytest.mark.parametrize(
    ("causal", "segments", "visible"),
    [
        (True, None, [1, 2, 3, 4, 5, 6]),
        (False, None, [6] * 6),
        (True, SEGMENTS, [[1, 2, 1, 2, 3, 1], [1, 2, 3, 4, 5, 6]]),
        (False, SEGMENTS, [[2, 2, 3, 3, 3, 1], [6] * 6]),
    ],
)
def test_the_number_of_keys_that_a_token_sees(causal, segments, visible):
    """Its document up to itself, or all of its document in both directions."""
    np.testing.assert_array_equal(inputs(segments, causal=causal).visible, visible)


def test_positions_length_and_coordinates_of_a_row():
    found = inputs()
    assert (found.positions, found.length, found.mask, found.coordinates) == (Range(0, 6), 6, None, None)
    given = jnp.arange(6)[None] + 3
    found = inputs(positions=given, length=99, coordinates=jnp.arange(12.0).reshape(6, 2))
    np.testing.assert_array_equal(found.positions, np.repeat(given, 2, axis=0))
    np.testing.assert_array_equal(found.coordinates, np.arange(12.0).reshape(1, 6, 2).repeat(2, axis=0))
    assert found.length == 99
    assert inputs(positions=jnp.arange(6)).positions.shape == (6,)
    assert inputs(positions=Range(4, 6)).positions == Range(4, 6)


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0])
def test_embeddings_are_scaled_before_positions_are_added(scale):
    """Positions are the first of several coordinates."""
    model = nnx.eval_shape(lambda: Decoder(config(preset("sinusoidal"), embedding_scale=scale), rngs=nnx.Rngs(0)))
    table, tokens = np.random.default_rng(0).normal(size=(VOCAB, 32)).astype(np.float32), np.array([[3, 0, 5]])
    spec, places = preset("sinusoidal").embedding, np.array([[[4.0, 9.0], [2.0, 9.0], [7.0, 9.0]]])
    for positions, coordinates, wanted in (
        (Range(5, 3), None, [5, 6, 7]),
        (Range(0, 3), jnp.asarray(places), [4, 2, 7]),
    ):
        found = model._embedded(jnp.asarray(table), {}, tokens, positions, coordinates)
        np.testing.assert_allclose(found[0], scale * table[tokens[0]] + spec.embed({}, np.array(wanted), 32), atol=1e-5)


def test_only_the_first_layer_has_no_norm_before_it():
    scheme = pj.Layers((((preset("rope"), preset("nope")), 1), ((preset("rope"),), 2)))
    settings = config(scheme, residual=Residual(first_norm=False))
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    assert [[block.attention_norm is None for block in stack] for stack in model.stacks] == [[True, False], [False]]


def test_embedding_and_head_start_at_the_inverse_root_of_the_width():
    model = Decoder(config(preset("rope"), vocab_size=500, num_layers=1, tied_head=False), rngs=nnx.Rngs(0))
    for weights in (model.embed[...], model.head[...]):
        np.testing.assert_allclose([weights.mean(), weights.std()], [0, 32**-0.5], atol=0.005)


@pytest.mark.parametrize(("rows", "vocab"), [(("x",), "y"), (("x", "y"), None)])
def test_logits_on_explicit_axes_are_split_over_the_vocabulary(rows, vocab):
    """Unless the rows are already split over the same axis."""
    settings = config(preset("rope"), tied_head=False, biases=("head",), logit_scale=0.5)
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    hidden, matrix, bias = (draw.normal(size=shape).astype(np.float32) for shape in ((4, 2, 32), (32, VOCAB), (VOCAB,)))
    model.head_bias = nnx.Param(jnp.asarray(bias))
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)):
        model.head = nnx.Param(jax.device_put(matrix, PartitionSpec(None, "y")))
        found = jax.jit(model.logits)(jax.device_put(hidden, PartitionSpec(*rows)))
        assert jax.typeof(found).sharding.spec == PartitionSpec(*rows, *[None] * (2 - len(rows)), vocab)
    np.testing.assert_allclose(found, (hidden @ matrix + bias) / 2, atol=1e-5)
