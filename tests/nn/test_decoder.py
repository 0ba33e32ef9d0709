"""The decoder with every scheme: what it promises, against itself, NumPy in float64, and Hugging Face."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import posjax as pj
from posjax import masks, rotary, scales
from posjax.nn import Decoder, DecoderConfig, logical_axes
from posjax.positions import Range, from_mask, from_segments

VOCAB, LENGTH = 24, 16
SHIFT = 1_000_003
OPTIONS = {"learned": {"max_length": LENGTH}, "t5": {"num_buckets": 8, "max_distance": 12}}
NAMES = pj.scheme_names()
NOT_SHIFT_INVARIANT = {"sinusoidal", "learned", "coca-slack"}


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    """Dozens of programs run once each: compiling them with full effort is most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def preset(name):
    return pj.scheme(name, **OPTIONS.get(name, {}))


def config(scheme, **options):
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 24}
    return DecoderConfig(**(sizes | options), scheme=scheme)


@functools.cache
def made(settings):
    """Graph and parameters of a decoder; every shape has one set of parameters, whatever else differs."""
    return nnx.split(Decoder(settings, rngs=nnx.Rngs(1)))


@functools.cache
def compiled(graph):
    """``run(parameters, tokens, positions, segments, length)`` -> ((loss, logits), gradients), compiled once."""

    def loss(state, tokens, positions, segments, length):
        logits = nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments, length=length)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens * 7 % VOCAB)[..., None], axis=-1)[..., 0]
        valid = segments >= 0
        return -jnp.sum(jnp.where(valid, chosen, 0.0)) / valid.sum(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(settings, rows, length=LENGTH):
    graph, state = made(settings)
    (_, logits), gradients = compiled(graph)(state, *rows, length)
    return np.asarray(logits), nnx.to_pure_dict(gradients)


def documents():
    tokens = np.random.default_rng(0).integers(0, VOCAB, 32)
    return tokens[:10], tokens[10:16], tokens[16:]


def layout(*rows, left=False):
    """Tokens, positions and segment ids of rows of documents, filled with junk that nothing may see."""
    tokens = np.random.default_rng(len(rows) + left).integers(0, VOCAB, (len(rows), LENGTH))
    segments = np.full((len(rows), LENGTH), -1)
    for index, row in enumerate(rows):
        at = LENGTH - sum(map(len, row)) if left else 0
        for number, document in enumerate(row):
            tokens[index, at : at + len(document)] = document
            segments[index, at : at + len(document)] = number
            at += len(document)
    tokens, segments = jnp.asarray(tokens, jnp.int32), jnp.asarray(segments, jnp.int32)
    return tokens, from_segments(segments), segments


def separate():
    a, b, c = documents()
    return layout([a], [b], [c])


def assert_same(found, wanted, tolerance=2e-5):
    chex.assert_trees_all_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module", params=NAMES)
def settings(request):
    return config(preset(request.param))


# --- every preset -----------------------------------------------------------------------------------------------------


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
        assert np.isfinite(leaf).all(), path
        layers = leaf if "stacks" in jax.tree_util.keystr(path) else leaf[None]
        assert all(np.abs(layer).max() > 1e-7 for layer in layers), path
    moved = jax.tree.map(lambda p, g: p - 0.03 * g, state, gradients)
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


def test_left_padding_changes_nothing_for_real_tokens(settings):
    a, b, c = documents()
    tokens, _, segments = layout([a], [b], [c], left=True)
    padded, gradients = run(settings, (tokens, from_mask(segments >= 0), segments))
    wanted, wanted_gradients = run(settings, separate())
    for index, size in enumerate((10, 6, 16)):
        assert_same(padded[index, LENGTH - size :], wanted[index, :size])
    assert_same(gradients, wanted_gradients)


def test_shift_of_all_positions_changes_what_the_scheme_says(settings):
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
    assert (np.abs(after[2, 9:] - logits[2, 9:]).max(-1) > 1e-5).all()


def test_blockwise_and_default_arguments_equal_dense_and_explicit_ones(settings):
    graph, _ = made(dataclasses.replace(settings, implementation="blockwise"))
    tokens = separate()[0]
    found = jax.jit(lambda state: nnx.merge(graph, state)(tokens))(made(settings)[1])
    rows = (tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), jnp.zeros_like(tokens))
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


@pytest.mark.parametrize(("name", "option"), [("alibi", "symmetric=True"), ("t5", "bidirectional=True")])
def test_one_sided_biases_are_refused_in_both_directions(name, option):
    with pytest.raises(ValueError, match=f"causal attention; use .*{option}"):
        config(pj.scheme(name), causal=False)


# --- the stack --------------------------------------------------------------------------------------------------------

T5 = preset("t5")
PATTERNS = pj.Layers((((dataclasses.replace(T5, mask=masks.Window(3)),), 2), ((T5,), 1)))


@pytest.mark.parametrize(("scan", "remat"), [(False, "none"), (True, "full"), (False, "dots")], ids=str)
def test_scan_and_remat_change_nothing(scan, remat):
    plain = config(PATTERNS, num_layers=3)
    other = dataclasses.replace(plain, scan_layers=scan, remat=remat)
    chex.assert_trees_all_equal(*(nnx.to_pure_dict(made(each)[1]) for each in (plain, other)))
    assert_same(run(other, separate()), run(plain, separate()), 1e-5)


def test_remat_recomputes():
    def saved(remat):
        graph, state = made(config(preset("rope"), remat=remat))
        tokens = jnp.zeros((1, LENGTH), jnp.int32)
        _, residuals = jax.eval_shape(lambda s: jax.vjp(lambda s: nnx.merge(graph, s)(tokens), s), state)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    assert saved("full") < saved("dots") < saved("none")


def rms(x, gain):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def numpy_block(x, p, kind):
    """One block of the decoder in float64: "local" is RoPE in a window of three, "global" is ALiBi."""
    i = np.arange(x.shape[1])
    distance = i[:, None] - i
    h = rms(x, p["attention_norm"]["gain"])
    q, k, v = (np.einsum("bte,ehd->bthd", h, p["attention"][name]) for name in "qkv")
    if kind == "local":
        q, k, bias, allowed = rotate(q, i), rotate(k, i), None, (distance >= 0) & (distance < 3)
    else:
        bias, allowed = -(2.0 ** -np.array([2, 4, 6, 8]))[:, None, None] * distance, distance >= 0
    out, _ = oracles.attention(q, k, v, bias=bias, allowed=allowed)
    x = x + np.einsum("bthd,hde->bte", out, p["attention"]["o"])
    return x + gelu(rms(x, p["mlp_norm"]["gain"]) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def test_pattern_and_remainder_are_the_schemes_layer_by_layer():
    local, whole = pj.scheme("rope", mask=masks.Window(3)), pj.scheme("alibi")
    layers = pj.Layers((((local, whole), 2), ((local,), 1)))
    settings = config(layers, num_layers=5, activation="gelu", tied_head=False)
    logits, _ = run(settings, separate())
    tokens = np.asarray(separate()[0])

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(made(settings)[1]))
    x = p["embed"][tokens] * np.sqrt(32)
    for pattern, repeat, index, kind in [(0, 0, 0, "local"), (0, 0, 1, "global"), (0, 1, 0, "local"),
                                         (0, 1, 1, "global"), (1, 0, 0, "local")]:  # fmt: skip
        x = numpy_block(x, jax.tree.map(lambda leaf, n=repeat: leaf[n], p["stacks"][pattern][index]), kind)
    wanted = rms(x, p["norm"]["gain"]) @ p["head"]
    for row, size in enumerate((10, 6, 16)):
        assert_same(logits[row, :size], wanted[row, :size], 1e-5)


def test_number_of_layers_must_add_up():
    with pytest.raises(ValueError, match="names 3 layers, but num_layers is 4"):
        config(PATTERNS, num_layers=4)
    with pytest.raises(ValueError, match="same embedding"):
        pj.Layers((((preset("sinusoidal"), preset("rope")), 1),))
    with pytest.raises(ValueError, match=r"expected posjax\.Scheme, found 'rope'"):
        config("rope")


# --- parameters -------------------------------------------------------------------------------------------------------


def shapes(settings):
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    return jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model)))


def test_parameter_shapes():
    found = shapes(config(preset("rope"), tied_head=False))
    block = {
        "attention": {"q": (2, 32, 4, 8), "k": (2, 32, 2, 8), "v": (2, 32, 2, 8), "o": (2, 4, 8, 32)},
        "attention_norm": {"gain": (2, 32)},
        "mlp": {"up": (2, 32, 24), "gate": (2, 32, 24), "down": (2, 24, 32)},
        "mlp_norm": {"gain": (2, 32)},
    }
    outside = {"embed": (VOCAB, 32), "head": (32, VOCAB), "norm": {"gain": (32,)}}
    assert found == outside | {"stacks": {0: {0: block}}}


def test_what_changes_parameter_shapes():
    tied, gelu_model = shapes(config(preset("rope"))), shapes(config(preset("rope"), activation="gelu"))
    assert "head" not in tied
    assert set(gelu_model["stacks"][0][0]["mlp"]) == {"up", "down"}
    projections = shapes(config(preset("coca-tied")))["stacks"][0][0]["attention"]
    assert (projections["q"], projections["k"], projections["v"]) == ((2, 32, 4, 4), (2, 32, 2, 4), (2, 32, 2, 8))
    norm = shapes(config(pj.scheme("rope", norm=scales.QKNorm())))["stacks"][0][0]["attention"]["learned"]["norm"]
    assert norm == {"q": (2, 8), "k": (2, 8)}


def test_default_widths():
    wide = DecoderConfig(VOCAB, 1, 96, 4)
    assert (wide.head_dim, wide.num_kv_heads, wide.mlp_dim) == (24, 4, 256)
    assert DecoderConfig(VOCAB, 1, 96, 4, activation="gelu").mlp_dim == 384


@pytest.mark.parametrize(
    ("name", "made_of"),
    [("t5", {"table": (8, 4)}), ("kerple-log", {"a": (4,), "p": (4,)}), ("kerple-power", {"a": (4,), "p": (4,)})],
)
def test_shared_biases_are_one_parameter_outside_the_stacks(name, made_of):
    shared = preset(name)
    windowed = dataclasses.replace(shared, mask=masks.Window(3))
    for scheme in (shared, pj.Layers((((windowed, shared), 1),))):
        found = shapes(config(scheme))
        assert found["shared"] == {0: {"bias": made_of}}
        assert "learned" not in found["stacks"][0][0]["attention"]


def test_biases_of_a_layer_are_in_the_stacks():
    found = shapes(config(pj.scheme("alibi", learned=True)))
    assert "shared" not in found
    assert found["stacks"][0][0]["attention"]["learned"] == {"bias": {"slopes": (2, 4)}}


def test_tied_head_is_the_embedding():
    tied, free = config(preset("rope")), config(preset("rope"), tied_head=False)
    graph, state = made(free)
    parameters = nnx.to_pure_dict(state)
    model = nnx.merge(graph, state)
    same = nnx.to_pure_dict(made(tied)[1])
    nnx.update(model, same | {"head": same["embed"].T})
    tokens, positions, segments = separate()
    assert_same(np.asarray(model(tokens, positions=positions, segment_ids=segments)), run(tied, separate())[0], 1e-5)
    assert parameters["head"].shape == (32, VOCAB)


def test_grouped_queries_are_repeated_keys_and_values():
    few, many = config(preset("coca-slack")), config(preset("coca-slack"), num_kv_heads=4)
    parameters = nnx.to_pure_dict(made(few)[1])
    attention = parameters["stacks"][0][0]["attention"]
    for name in "kv":
        attention[name] = jnp.repeat(attention[name], 2, axis=2)
    model = nnx.merge(*made(many))
    nnx.update(model, parameters)
    tokens, positions, segments = separate()
    assert_same(np.asarray(model(tokens, positions=positions, segment_ids=segments)), run(few, separate())[0])


def test_bfloat16_is_close_and_keeps_float32_outside():
    plain = config(preset("coca-strict"))
    narrow = dataclasses.replace(plain, compute_dtype="bfloat16")
    chex.assert_trees_all_equal_dtypes(nnx.to_pure_dict(made(narrow)[1]), nnx.to_pure_dict(made(plain)[1]))
    (logits, gradients), (wanted, _) = run(narrow, separate()), run(plain, separate())
    assert logits.dtype == np.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    # 8 bits of mantissa through two layers; logits are of order one.
    assert 1e-4 < np.abs(logits - wanted).max() < 0.1


# --- length, and other schemes over the same parameters ---------------------------------------------------------------


def logits_of(model, tokens, **options):
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s: nnx.merge(graph, s)(tokens, **options))(state))


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
    assert_same(packed[0], np.concatenate([wanted[0, :10], wanted[1, :6]]))
    assert_same(gradients, wanted_gradients)


def test_with_scheme_is_over_the_same_parameters():
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
    local, whole = pj.scheme("rope", mask=masks.Window(3)), preset("rope")
    layers = pj.Layers((((local, whole), 1),))
    model = nnx.merge(*made(config(layers)))
    plain = logits_of(model, separate()[0])
    longer = layers.extend(frequencies=rotary.Linear(2.0))
    assert [s.mask for s in longer.schemes] == [masks.Window(3), None]
    assert np.abs(logits_of(model.with_scheme(longer), separate()[0]) - plain).max() > 1e-3


# --- sharding ---------------------------------------------------------------------------------------------------------


def test_every_parameter_has_a_name_for_every_axis():
    for name in NAMES:
        model = nnx.eval_shape(lambda name=name: Decoder(config(preset(name), tied_head=False), rngs=nnx.Rngs(0)))
        axes, sizes = logical_axes(model), nnx.to_pure_dict(nnx.state(model))
        jax.tree.map(lambda leaf, names: chex.assert_rank(leaf, len(names)), sizes, axes)
    for settings in (config(PATTERNS, num_layers=3), config(pj.scheme("alibi", learned=True))):
        model = nnx.eval_shape(lambda settings=settings: Decoder(settings, rngs=nnx.Rngs(0)))
        for path, names in jax.tree_util.tree_leaves_with_path(
            logical_axes(model), is_leaf=lambda node: isinstance(node, tuple)
        ):
            assert ("layers" in names) == ("stacks" in jax.tree_util.keystr(path)), path
            assert None not in names or "bias" in jax.tree_util.keystr(path), path


def test_sharded_parameters_give_the_same_logits():
    rules = {"heads": "model", "mlp": "model", "vocab": "model", "embed": "data", "kv_heads": "data"}
    settings = config(preset("t5"), tied_head=False)
    graph, state = made(settings)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))

    def place(leaf, names):
        free = list(dict.fromkeys(rules.get(name) for name in names))
        spec = PartitionSpec(*(rules.get(n) if rules.get(n) in free and not free.remove(rules.get(n)) else None
                               for n in names))  # fmt: skip
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    parameters = jax.tree.map(place, nnx.to_pure_dict(state), logical_axes(nnx.merge(graph, state)))
    assert parameters["stacks"][0][0]["mlp"]["up"].addressable_shards[0].data.shape == (2, 16, 6)
    model = nnx.merge(graph, state)
    nnx.update(model, parameters)
    tokens, positions, segments = (
        jax.device_put(x[:2], NamedSharding(mesh, PartitionSpec("data"))) for x in separate()
    )
    sharded = jax.jit(lambda s: nnx.merge(graph, s)(tokens, positions=positions, segment_ids=segments))
    assert_same(np.asarray(sharded(nnx.state(model))), run(settings, separate())[0][:2], 1e-5)


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


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def llama_parameters(llama):
    """The weights of a ``LlamaForCausalLM`` in the shapes of a ``Decoder`` of one pattern."""
    size, width = llama.config.head_dim, llama.config.hidden_size
    blocks = []
    for layer in llama.model.layers:
        project, mlp = layer.self_attn, layer.mlp
        blocks.append(
            {
                "attention": {
                    name: getattr(project, f"{name}_proj").weight.detach().numpy().T.reshape(width, -1, size)
                    for name in "qkv"
                }
                | {"o": project.o_proj.weight.detach().numpy().T.reshape(-1, size, width)},
                "attention_norm": {"gain": layer.input_layernorm.weight.detach().numpy()},
                "mlp": {
                    name: getattr(mlp, f"{name}_proj").weight.detach().numpy().T for name in ("up", "gate", "down")
                },
                "mlp_norm": {"gain": layer.post_attention_layernorm.weight.detach().numpy()},
            }
        )
    return {
        "embed": llama.model.embed_tokens.weight.detach().numpy() / np.sqrt(width),
        "head": llama.lm_head.weight.detach().numpy().T,
        "norm": {"gain": llama.model.norm.weight.detach().numpy()},
        "stacks": {0: {0: jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}},
    }


@pytest.mark.parity
@pytest.mark.parametrize("rule", [rotary.Plain(500.0), rotary.Llama3(8.0, 16, base=500.0)], ids=["default", "llama3"])
def test_logits_of_hugging_face_llama(rule):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            rope_parameters=rule.to_hf(),
            initializer_range=0.2,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for gain in (module.weight for module in llama.modules() if "RMSNorm" in type(module).__name__):
            gain.uniform_(0.5, 1.5)
    settings = config(pj.Scheme(features=rotary.Rotary(rule)), tied_head=False)
    model = nnx.merge(*made(settings))
    nnx.update(model, llama_parameters(llama))
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 48))
    with torch.no_grad():
        wanted = llama(torch.tensor(tokens)).logits.numpy()
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(logits_of(model, jnp.asarray(tokens)), wanted, atol=1e-4)
