"""Multi-head latent attention against float64 in NumPy, in decoding, on meshes, and what it refuses."""

import dataclasses
from functools import cache

import chex
import decoders
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import nn, rotary
from posjax.attention.sharded import Placement
from posjax.diagnostics import measure
from posjax.layout import Layout
from posjax.nn import Decoder, DecoderConfig, Latent, LatentAttention, Norm
from posjax.scheme import Scheme

# Three tokens at once are expanded, one or two are absorbed.
LATENT = Latent(rank=12, rotated=8, unrotated=2, value=4, query_rank=10, norm=Norm(eps=1e-3))
YARN = rotary.YaRN(4.0, 8, mscale=0.7, mscale_all_dim=1.2)


def config(scheme, **options):
    return decoders.config(scheme, num_kv_heads=None, latent=LATENT, **options)


# --- the formula ------------------------------------------------------------------------------------------------------


def rms(x, gain):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-3) * gain


def turned(x, cos, sin, pairing):
    """Channels of one token, rotated pair by pair."""
    half, out = x.shape[-1] // 2, np.array(x)
    for t in range(half):
        a, b = (t, t + half) if pairing == "half" else (2 * t, 2 * t + 1)
        out[..., a] = x[..., a] * cos[..., t] - x[..., b] * sin[..., t]
        out[..., b] = x[..., a] * sin[..., t] + x[..., b] * cos[..., t]
    return out


def by_hand(p, x, cos, sin, pairing, scale):
    """Causal attention of one row ``[tokens, width]``, head by head, with expanded keys and values."""
    a = x if "query_latent" not in p else rms(x @ p["query_latent"] + p["query_latent_bias"], p["query_norm"]["gain"])
    c = rms(x @ p["latent"] + p["latent_bias"], p["latent_norm"]["gain"])
    r = turned(x @ p["k_rotated"] + p["k_rotated_bias"], cos, sin, pairing)
    out = p["o_bias"]
    for h in range(p["q"].shape[1]):
        q = np.concatenate([turned(a @ p["q_rotated"][:, h], cos, sin, pairing), a @ p["q"][:, h]], axis=-1)
        k = np.concatenate([r, c @ p["k"][:, h]], axis=-1)
        z = np.where(np.tri(len(x), dtype=bool), scale * q @ k.T, -np.inf)
        z = np.exp(z - z.max(-1, keepdims=True))
        out = out + z / z.sum(-1, keepdims=True) @ (c @ p["v"][:, h]) @ p["o"][h]
    return out


def random_attention(settings):
    """Graph and random parameters; biases are not zero and gains are around one."""
    draw = np.random.default_rng(0)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: LatentAttention(settings.of_layer(0), rngs=nnx.Rngs(0))))

    def random(path, leaf):
        return np.float32(("gain" in jax.tree_util.keystr(path)) + draw.normal(0, 0.4, leaf.shape))

    return graph, jax.tree.map_with_path(random, shapes)


@pytest.mark.parametrize(
    ("pairing", "query_rank", "rule"),
    [("interleaved", 10, YARN), ("half", None, rotary.Plain(500.0))],
    ids=["deepseek", "plain"],
)
def test_the_formula_in_float64(pairing, query_rank, rule):
    """YaRN as DeepSeek has it: a factor of the tables from both mscales, and one of the logits."""
    scheme = Scheme(features=rotary.Rotary(rule, pairing=pairing))
    latent = dataclasses.replace(LATENT, query_rank=query_rank)
    graph, state = random_attention(dataclasses.replace(config(scheme, biases=("qkv", "output")), latent=latent))
    x = np.random.default_rng(1).normal(size=(2, 9, 32))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))
    angles = np.arange(9)[:, None] * rule.inverse_frequencies(8)
    size, scale = 1.0, 10**-0.5
    if rule is YARN:
        size = (0.07 * np.log(4) + 1) / (0.12 * np.log(4) + 1)
        scale = scale * (0.12 * np.log(4) + 1) ** 2
    cos, sin = size * np.cos(angles), size * np.sin(angles)
    found = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, np.float32(x))
    wanted = np.stack([by_hand(p, row, cos, sin, pairing, scale) for row in x])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


# --- decoding ---------------------------------------------------------------------------------------------------------

REFUSED = "vo-rope xpos mixed pope coca-planes cope coca-strict coca-tied coca-slack coca-relative key-norm cosine"
REFUSED += " learned-cosine qwen3 gemma3 llama4 linear-elu linear-exp linear-taylor linear-limit linear-cosine"
REFUSED += " performer fope rope-pp path shaw qwen3-next gated-delta"
POSSIBLE = [name for name in pj.scheme_names() if name not in REFUSED.split()]
YARNED = Scheme(features=rotary.Rotary(YARN, pairing="interleaved"))
EXTENSIONS = {
    "yarn": YARNED,
    "rerope": YARNED.extend(remap=pj.remap.ReRoPE(4)),
    "leaky": YARNED.extend(remap=pj.remap.LeakyReRoPE(4, 2.0)),
    "self-extend": YARNED.extend(remap=pj.remap.SelfExtend(2, 4)),
    "dual-chunk": YARNED.extend(remap=pj.remap.DualChunk(8)),
    "streaming": YARNED.extend(remap=pj.remap.StreamingLLM(2, 5)),
    "lm-infinite": YARNED.extend(remap=pj.remap.LMInfinite(6, 2)),
    "linear": YARNED.extend(frequencies=rotary.Linear(2.0)),
    "ntk": YARNED.extend(frequencies=rotary.NTKAware(2.0)),
    "dynamic": YARNED.extend(frequencies=rotary.DynamicNTK(8, factor=2.0)),
    "log-n": YARNED.extend(scale=pj.scales.ClippedLogN(8)),
    "window": YARNED.extend(mask=pj.masks.Window(5)),
}
"""What ``compare`` measures over a released model."""
KINDS = EXTENSIONS["yarn"], EXTENSIONS["rerope"], pj.scheme("fox")


def in_layers(*schemes):
    return config(pj.Layers(((schemes, 1),)), scan_layers=False)


@cache
def both_ways(settings):
    """Logits of a full forward pass, and of decoding in chunks and single tokens."""
    graph, state = decoders.made(settings)
    tokens = np.random.default_rng(0).integers(0, decoders.VOCAB, (3, decoders.LENGTH))

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        cache, found = model.init_cache(3, decoders.LENGTH, chunk=5), []
        for start, end in ((0, 5), (5, 10), (10, 11), (11, 14), (14, 16)):
            logits, cache = model.decode(tokens[:, start:end], cache, length=decoders.LENGTH)
            found.append(logits)
        return model(tokens), jnp.concatenate(found, axis=1)

    return jax.device_get(run(state))


def assert_decodes(settings):
    wanted, found = both_ways(settings)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6 * np.abs(wanted).max())


def test_decoding_is_the_forward_pass():
    assert_decodes(in_layers(*KINDS))


@pytest.mark.wide
@pytest.mark.parametrize("name", POSSIBLE)
def test_decoding_with_every_method_is_the_forward_pass(name):
    assert_decodes(config(decoders.preset(name)))


@pytest.mark.wide
@pytest.mark.parametrize("name", EXTENSIONS)
def test_decoding_with_every_extension_is_the_forward_pass(name):
    assert_decodes(config(EXTENSIONS[name]))


def test_padding_of_prompts_changes_nothing():
    """Rows of one prompt, padded on the left or in between, give the same last logits."""
    graph, state = decoders.made(in_layers(*KINDS))
    tokens = np.random.default_rng(0).integers(0, decoders.VOCAB, 5)
    rows, valid = np.zeros((3, 7), int), np.zeros((3, 7), bool)
    for n, at in enumerate(([0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [0, 2, 3, 5, 6])):
        rows[n, at], valid[n, at] = tokens, True

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        _, cache = model.decode(rows, model.init_cache(3, 16, chunk=7), length=16, valid=valid)
        return model.decode(np.ones((3, 1), int), cache, length=16)[0]

    first, *others = np.asarray(run(state))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-5 * np.abs(first).max())


def test_a_cache_holds_the_latent_and_the_rotated_key_alone():
    """576 numbers a token in DeepSeek V3, whatever the number of heads."""
    latent = Latent(rank=512, rotated=64, unrotated=128, value=128, query_rank=1536)
    sizes = {"vocab_size": 8, "num_layers": 3, "model_dim": 64, "num_heads": 128}
    model = DecoderConfig(**sizes, latent=latent, scheme=pj.scheme("rope"), compute_dtype="bfloat16")
    shapes = jax.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)).init_cache(2, 100))
    numbers = [leaf for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in numbers} == {jnp.dtype("bfloat16")}
    assert sum(leaf.size for leaf in numbers) == 3 * 2 * 100 * 576


# --- meshes -----------------------------------------------------------------------------------------------------------

SPLIT = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", "embed": "data", "rank": "data"}
RING = Placement(("data",), "context", "tensor", "ring", Layout("zigzag", 2))


@cache
def gradients_of(placement=Placement()):  # noqa: B008
    graph = decoders.made(dataclasses.replace(in_layers(*KINDS), placement=placement))[0]

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)
        return jnp.square(logits).mean(), logits

    return jax.jit(jax.grad(loss, has_aux=True))


def split(state, mesh):
    model = nnx.merge(decoders.made(in_layers(*KINDS))[0], state)
    names = jax.tree.leaves(nn.logical_axes(model), is_leaf=lambda node: isinstance(node, tuple))
    leaves, structure = jax.tree.flatten(state)
    specs = [P(*(SPLIT.get(axis) for axis in own)) for own in names]
    return structure.unflatten([meshes.put(mesh, *pair) for pair in zip(leaves, specs, strict=True)])


@cache
def on_one_device():
    tokens = np.random.default_rng(0).integers(0, decoders.VOCAB, (4, decoders.LENGTH))
    state = decoders.made(in_layers(*KINDS))[1]
    return tokens, jax.device_get(gradients_of()(state, tokens))


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_step_over_a_mesh(kind):
    (tokens, wanted), mesh = on_one_device(), meshes.mesh(kind)
    with jax.set_mesh(mesh):
        state = split(jax.device_get(decoders.made(in_layers(*KINDS))[1]), mesh)
        found = gradients_of()(state, meshes.put(mesh, tokens, P("data", None)))
    meshes.same(found, wanted, tolerance=5e-5)


@pytest.mark.wide
def test_a_step_with_split_rows():
    tokens, wanted = on_one_device()
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    state = jax.device_get(decoders.made(in_layers(*KINDS))[1])
    with jax.set_mesh(mesh):
        gradients, logits = jax.device_get(gradients_of(RING)(state, RING.layout.apply(tokens)))
    order = np.asarray(RING.layout.apply(np.arange(decoders.LENGTH)))
    meshes.same((gradients, logits[:, np.argsort(order)]), wanted, tolerance=5e-5)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_decoding_over_a_mesh(kind):
    """Heads are split over an axis, and every device has the latents of its rows."""
    graph, state = decoders.made(in_layers(*KINDS))
    (tokens, (_, wanted)), mesh = on_one_device(), meshes.mesh(kind)

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        first, cache = model.decode(tokens[:, :5], model.init_cache(4, 16, chunk=5), length=16)
        second, cache = model.decode(tokens[:, 5:6], cache, length=16)
        return first, second

    with jax.set_mesh(mesh):
        found = run(split(jax.device_get(state), mesh), meshes.put(mesh, tokens, P("data", None)))
    meshes.same(np.concatenate(found, axis=1), wanted[:, :6], tolerance=5e-5)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED.split())
def test_methods_over_whole_heads_are_refused(name):
    """And all others are possible: the tests above decode with them."""
    with pytest.raises(ValueError, match="latent attention") as caught:
        config(decoders.preset(name))
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_diagnostics_read_the_rotated_part():
    graph, state = decoders.made(config(YARNED))
    tokens = np.random.default_rng(0).integers(0, decoders.VOCAB, (2, 12))
    found = measure(nnx.merge(graph, state), tokens)
    chex.assert_shape(found.radians, (2, 4))
    assert np.isfinite(found.entropy).all()
