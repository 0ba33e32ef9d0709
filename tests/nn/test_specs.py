"""The options of a decoder against NumPy in float64: norms, residuals, MLPs, biases, scales and soft caps."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import absolute, masks, rotary, scales
from posjax.nn import Decoder, DecoderConfig, LayerNorm, Norm, Residual, RMSNorm, logical_axes
from posjax.nn.capture import capture
from posjax.nn.specs import ACTIVATIONS, BIASES

VOCAB, LENGTH, WIDTH, SIZE = 20, 10, 16, 6
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, LENGTH))
ROPE = pj.scheme("rope")
LOCAL = pj.scheme("rope", mask=masks.Window(3))
LAYER = Norm("layer", 0.05, bias=True)

# Every value of every option at least once. Options that act at the same place are combined.
CASES = {
    "before": {
        "norm": Norm(eps=0.05),
        "activation": "swiglu",
        "biases": BIASES,
        "attention_gate": "elementwise",
        "tied_head": False,
        "embedding_scale": 1.0,
        "query_scale": 0.7,
        "logit_scale": 0.25,
    },
    "after": {
        "norm": Norm(eps=0.05, unit_offset=True),
        "residual": Residual("after"),
        "activation": "geglu",
        "projection_norm": True,
        "attention_softcap": 0.8,
        "logit_softcap": 1.5,
        "logit_scale": 2.0,
    },
    "both": {
        "norm": LAYER,
        "residual": Residual("both", scale=0.3),
        "activation": "geglu-exact",
        "embedding_norm": True,
        "biases": ("output",),
        "attention_gate": "head",
        "query_scale": 0.2,
        "attention_softcap": 0.5,
    },
    "parallel": {
        "norm": Norm("layer", 0.1),
        "residual": Residual(parallel=True, scale=1.5),
        "activation": "reglu",
        "scheme": pj.scheme("rope", scale=scales.LogN(4, minimum=2)),
    },
    "parallel, both": {
        "norm": dataclasses.replace(LAYER, unit_offset=True),
        "residual": Residual("both", parallel=True),
        "activation": "gelu",
        "biases": ("mlp",),
    },
    "parallel, after": {"norm": LAYER, "residual": Residual("after", parallel=True), "activation": "gelu-exact"},
    "no gain": {"norm": Norm("layer", 0.05, gain=False), "activation": "relu-squared", "clip_qkv": 0.7},
    "learned": {"norm": LAYER, "activation": "xielu", "head_norms": True, "num_layers": 1},
    "values": {
        "norm": Norm(eps=0.05),
        "residual": Residual("both", learned_scale=True),
        "biases": ("qkv",),
        "keys_as_values": (True, False),
        "value_norm": True,
        "head_dim": (SIZE, 8),
        "num_kv_heads": (1, 2),
        "query_scale": 1.0,
    },
    "shared": {
        "norm": LAYER,
        "residual": Residual(parallel=True, shared_norm=True),
        "activation": "silu",
        "biases": ("qkv", "head"),
        "embedding_scale": 3.0,
        "scheme": pj.Scheme(features=rotary.Rotary(), embedding=absolute.Sinusoidal()),
    },
    "shared, both": {
        "residual": Residual("both", parallel=True, shared_norm=True, scale=0.5),
        "activation": "relu",
        "projection_norm": True,
        "biases": ("qkv",),
        "embedding_norm": True,
    },
    "no first": {
        "norm": LAYER,
        "residual": Residual(first_norm=False),
        "activation": "swiglu-clamped",
        "embedding_norm": True,
        "num_layers": 3,
    },
    # The first layer is a stack of its own, before the rest of the first pattern and the second pattern.
    "no first, layers": {
        "residual": Residual("both", first_norm=False),
        "scheme": pj.Layers((((LOCAL, ROPE), 2), ((LOCAL,), 1))),
        "num_layers": 5,
        "biases": ("mlp", "output"),
    },
}


# Cases whose gradients are computed by default: all places of norms and biases, and every remaining test of gradients.
TRAINED = ("before", "after", "both", "shared, both", "no first")


def config(**options):
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "model_dim": WIDTH, "num_heads": 4, "num_kv_heads": 2}
    return DecoderConfig(**{**sizes, "head_dim": SIZE, "mlp_dim": 12, "scheme": ROPE} | options)


@functools.cache
def made(name):
    """Config, graph and parameters. All parameters are random, also gains and biases."""
    settings = config(**CASES[name])
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(1)
    return settings, graph, jax.tree.map(lambda leaf: np.float32(draw.normal(0, 0.4, leaf.shape)), state)


def label_loss(logits):
    label = jax.nn.one_hot(TOKENS * 7 % VOCAB, VOCAB)
    return (jax.nn.logsumexp(logits, axis=-1) - (logits * label).sum(-1)).mean()


def gradients_of(graph):
    """``run(parameters, tokens)`` -> gradients and logits."""

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)
        return label_loss(logits), logits

    return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def found(name):
    """Logits and gradients."""
    _, graph, state = made(name)
    gradients, logits = jax.device_get(gradients_of(graph)(state, TOKENS))
    return logits, gradients


@functools.cache
def logits_of(name):
    """Logits, for the cases of ``TRAINED`` by the program of the gradients."""
    if name in TRAINED:
        return found(name)[0]
    _, graph, state = made(name)
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(TOKENS))(state))


# --- NumPy ------------------------------------------------------------------------------------------------------------

erf = np.vectorize(math.erf)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def relu(x):
    return np.maximum(x, 0)


def clamped(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def xielu(x, alpha_p, alpha_n):
    """Equation of arXiv 2411.13010, section 3, with beta 1/2."""
    p, n = np.log1p(np.exp(alpha_p)), 0.5 + np.log1p(np.exp(alpha_n))
    return np.where(x > 0, p * x**2, n * (np.exp(np.minimum(x, 0)) - 1 - x)) + x / 2


HIDDEN = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "swiglu-clamped": clamped,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu-exact": lambda gate, up: exact_gelu(gate) * up,
    "reglu": lambda gate, up: relu(gate) * up,
    "silu": silu,
    "gelu": gelu,
    "gelu-exact": exact_gelu,
    "relu": relu,
    "relu-squared": lambda x: relu(x) ** 2,
    "xielu": xielu,
}


def norm(x, p, spec, axes=(-1,)):
    x = x if spec.kind == "rms" else x - x.mean(axes, keepdims=True)
    x = x / np.sqrt((x * x).mean(axes, keepdims=True) + spec.eps)
    return x * (p.get("gain", 1) + spec.unit_offset) + p.get("bias", 0)


def rotate(x):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    )


def projected(x, p, c):
    """Queries, keys and values, before they are rotated."""
    names = "qkv" if "v" in p else "qkk"
    q, k, v = (np.einsum("bte,ehd->bthd", x, p[name]) + p.get(f"{name}_bias", 0) for name in names)
    v = v / np.sqrt((v * v).mean(-1, keepdims=True) + c.norm.eps) if c.value_norm else v
    if c.projection_norm or c.head_norms:
        axes = (-1,) if c.head_norms else (-2, -1)
        q, k = (norm(y, p[f"{name}_norm"], c.norm, axes) for name, y in (("q", q), ("k", k)))
    return (q, k, v) if c.clip_qkv is None else tuple(np.clip(y, -c.clip_qkv, c.clip_qkv) for y in (q, k, v))


def attention(x, p, c, scheme):
    q, k, v = projected(x, p, c)
    if scheme.scale is not None:
        visible = np.maximum(1 + np.arange(LENGTH), scheme.scale.minimum)
        q = q * (np.log(visible) / np.log(scheme.scale.length))[:, None, None]
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    allowed = (distance >= 0) & (distance < (LENGTH if scheme.mask is None else 3))
    scale = SIZE**-0.5 if c.query_scale is None else c.query_scale
    out, _ = oracles.attention(rotate(q), rotate(k), v, allowed=allowed, scale=scale, softcap=c.attention_softcap)
    if c.attention_gate is not None:
        weight, gate_bias = p["gate"]["weight"], p["gate"].get("bias", 0)
        logits = np.tensordot(x, weight, 1) + gate_bias
        gate = 1 / (1 + np.exp(-logits))
        out = out * (gate if weight.ndim == 3 else gate[..., None])
    return np.einsum("bthd,hde->bte", out, p["o"]) + p.get("o_bias", 0)


def mlp(x, p, c):
    parts = [x @ p[name] + p.get(f"{name}_bias", 0) for name in ("gate", "up") if name in p]
    return HIDDEN[c.activation](*parts, **p.get("activation", {})) @ p["down"] + p.get("down_bias", 0)


def norms_of(c, first):
    """The names of a layer's norms; ``first`` is true for the first layer."""
    before = {"attention_norm", "mlp_norm"} if c.residual.norm != "after" else set()
    after = {"attention_after", "mlp_after"} if c.residual.norm != "before" else set()
    absent = {"mlp_norm"} if c.residual.shared_norm else set()
    absent |= {"attention_norm"} if first and not c.residual.first_norm else set()
    return (before | after) - absent


def block(x, p, c, scheme, first):
    """One layer. Norms without a gain have no parameters."""
    p = p if c.norm.gain else {name: {} for name in norms_of(c, first)} | p
    scale = {"scale"} if c.residual.learned_scale else set()
    assert set(p) == norms_of(c, first) | {"attention", "mlp"} | scale

    def n(name, x):
        return norm(x, p[name], c.norm) if name in p else x

    h = n("attention_norm", x)
    after_attention = x + c.residual.scale * n("attention_after", attention(h, p["attention"], c, scheme))
    read = x if c.residual.parallel else after_attention
    read = h if c.residual.shared_norm else n("mlp_norm", read)
    return p.get("scale", 1) * (after_attention + c.residual.scale * n("mlp_after", mlp(read, p["mlp"], c)))


def layers_of(p, c):
    """For every layer its scheme, its parameters and its input; at the end ``None``, ``None`` and the last output."""
    x = p["embed"][TOKENS] * c.embedding_scale
    if c.layers.embedding is not None:
        angle = np.arange(LENGTH)[:, None] * 10_000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
        x = x + np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(LENGTH, WIDTH)
    x = norm(x, p["embedding_norm"], c.norm) if c.embedding_norm else x
    first = True
    for number, (layers, repeats) in enumerate(c.patterns):
        for repeat in range(repeats):
            for n, scheme in enumerate(layer.scheme for layer in layers):
                own = jax.tree.map(lambda leaf, r=repeat: leaf[r], p["stacks"][number][n])
                yield scheme, own, x
                x, first = block(x, own, c, scheme, first), False
    yield None, None, x


def numpy_decoder(p, c):
    """Logits."""
    *_, (_, _, x) = layers_of(p, c)
    z = c.logit_scale * (norm(x, p.get("norm", {}), c.norm) @ p.get("head", p["embed"].T) + p.get("head_bias", 0))
    return z if c.logit_softcap is None else c.logit_softcap * np.tanh(z / c.logit_softcap)


def float64(state):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))


@functools.cache
def wanted(name):
    settings, _, state = made(name)
    return numpy_decoder(float64(state), settings)


def assert_close(got, want):
    chex.assert_shape(got, want.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


# --- the model --------------------------------------------------------------------------------------------------------


def test_the_cases_have_every_option():
    used = [config(**options) for options in CASES.values()]
    assert {c.activation for c in used} == set(ACTIVATIONS)
    assert {name for c in used for name in c.biases} == set(BIASES)
    assert {(c.norm.kind, c.norm.bias) for c in used} == {("rms", False), ("layer", False), ("layer", True)}
    forms = {(c.residual.norm, c.residual.parallel) for c in used}
    assert forms == {(place, parallel) for place in ("before", "after", "both") for parallel in (False, True)}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_numpy(name):
    chex.assert_type(logits_of(name), jnp.float32)
    assert_close(logits_of(name), wanted(name))


def cases(*default):
    return [name if name in default else pytest.param(name, marks=pytest.mark.wide) for name in CASES]


@pytest.mark.parametrize("name", cases(*TRAINED))
def test_every_parameter_has_a_gradient(name):
    """In every layer, and for most elements. ReLU and tokens that do not occur leave some gradients zero."""
    for path, leaf in jax.tree.leaves_with_path(found(name)[1]):
        assert np.isfinite(leaf).all(), path
        layers = leaf.reshape(len(leaf) if "stacks" in jax.tree_util.keystr(path) else 1, -1)
        assert ((layers != 0).mean(-1) > 0.4).all(), path


# Decoding shares the code of norms, MLPs and biases with the forward pass.
@pytest.mark.parametrize("name", cases("both", "shared, both", "no first, layers"))
def test_decoding_is_the_full_forward_pass(name):
    _, graph, state = made(name)

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)

        def step(cache, part):
            logits, cache = model.decode(part, cache, length=LENGTH)
            return cache, logits

        parts = tokens.reshape(4, 2, -1).swapaxes(0, 1)
        logits = jax.lax.scan(step, model.init_cache(4, LENGTH, chunk=LENGTH // 2), parts)[1]
        return logits.swapaxes(0, 1).reshape(4, LENGTH, VOCAB)

    assert_close(run(state, TOKENS), wanted(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("both", {"remat": "offload"}),
        ("after", {"remat": "attention", "scan_layers": False}),
        ("no first", {"remat": "dots"}),
        pytest.param("no first, layers", {"remat": "dots"}, marks=pytest.mark.wide),
        pytest.param("shared, both", {"remat": "full", "scan_layers": False}, marks=pytest.mark.wide),
    ],
)
def test_scan_and_remat_change_nothing(name, changes):
    settings, _, state = made(name)
    model = nnx.eval_shape(lambda: Decoder(dataclasses.replace(settings, **changes), rngs=nnx.Rngs(0)))
    graph, other = nnx.split(model)
    chex.assert_trees_all_equal_shapes(nnx.to_pure_dict(other), nnx.to_pure_dict(state))
    gradients, logits = gradients_of(graph)(state, TOKENS)
    meshes.same((logits, gradients), found(name))


@pytest.mark.parametrize(("name", "dtype"), [("before", jnp.float32), ("after", jnp.bfloat16)])
def test_activations_in_bfloat16(name, dtype):
    """With parameters in float32, or in the dtype of a released model. bfloat16 has 8 bits; logits are of order one."""
    settings, _, state = made(name)
    narrow = dataclasses.replace(settings, compute_dtype="bfloat16")
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(narrow, rngs=nnx.Rngs(0))))[0]
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    gradients, logits = jax.device_get(gradients_of(graph)(state, TOKENS))
    chex.assert_type(logits, jnp.float32)
    chex.assert_type(jax.tree.leaves(gradients), dtype)
    error = np.abs(logits - wanted(name)).max() / np.abs(wanted(name)).max()
    assert 1e-4 < error < 0.1


# --- meshes -----------------------------------------------------------------------------------------------------------

TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def placed(name, mesh):
    """The parameters split over a mesh, by the names of their axes."""
    _, graph, state = made(name)
    names = jax.tree.leaves(logical_axes(nnx.merge(graph, state)), is_leaf=lambda node: isinstance(node, tuple))
    leaves, structure = jax.tree.flatten(state)
    specs = [P(*map((TENSOR | {"embed": "data"}).get, own)) for own in names]
    return structure.unflatten([meshes.put(mesh, *pair) for pair in zip(leaves, specs, strict=True)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("before", "explicit", marks=pytest.mark.wide),
        ("after", "explicit"),
        ("shared, both", "mixed"),
        pytest.param("both", "mixed", marks=pytest.mark.wide),
    ],
)
def test_logits_and_gradients_over_a_mesh(name, kind):
    mesh = meshes.mesh(kind)
    state = placed(name, mesh)
    biases = [leaf for path, leaf in jax.tree.leaves_with_path(state) if "k_bias" in jax.tree_util.keystr(path)]
    for bias in biases:
        assert bias.addressable_shards[0].data.shape == (2, 1, SIZE)
    with jax.set_mesh(mesh):
        gradients, logits = gradients_of(made(name)[1])(state, meshes.put(mesh, TOKENS, P("data", None)))
    meshes.same((logits, gradients), found(name), tolerance=5e-5)


# --- capturing --------------------------------------------------------------------------------------------------------


def read_by_attention(name):
    """For every layer its scheme, and its queries and keys before rotation."""
    settings, _, state = made(name)
    *layers, _ = layers_of(float64(state), settings)
    for scheme, p, x in layers:
        h = norm(x, p["attention_norm"], settings.norm) if "attention_norm" in p else x
        yield scheme, *projected(h, p["attention"], settings)[:2]


@pytest.mark.parametrize("name", ["after", "shared, both", "no first, layers"])
def test_captured_queries_and_keys_are_those_of_numpy(name):
    settings, graph, state = made(name)
    seen = list(capture(nnx.merge(graph, state), TOKENS))
    assert len(seen) == settings.num_layers
    for layer, (scheme, q, k) in zip(seen, read_by_attention(name), strict=True):
        assert (layer.scheme, layer.options) == (scheme, settings.logit_options)
        assert_close(np.asarray(layer.q), q)
        assert_close(np.asarray(layer.k), k)


def test_captured_parameters_include_those_that_layers_share():
    settings = config(scheme=pj.Layers((((ROPE, pj.scheme("t5", num_buckets=8)), 1),)))
    seen = nnx.eval_shape(lambda: [each.params for each in capture(Decoder(settings, rngs=nnx.Rngs(0)), TOKENS)])
    assert [list(params) for params in seen] == [[], ["bias"]]


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [Norm(eps=0.5, unit_offset=True), Norm("layer"), LAYER, Norm(eps=0.5, gain=False)], ids=str
)
def test_a_norm_alone_starts_without_effect_of_its_gain_and_bias(spec):
    """The gain multiplies by 1 and the bias adds 0, also with a unit offset."""
    x = np.random.default_rng(0).normal(2, 3, (3, WIDTH))
    module = (RMSNorm if spec.kind == "rms" else LayerNorm)(WIDTH, spec=spec)
    got = module(jnp.asarray(x, jnp.float32))
    assert_close(np.asarray(got), norm(x, {"gain": 1.0 - spec.unit_offset}, spec))
    assert (getattr(module, "bias", None) is not None) == spec.bias
    chex.assert_type(module(jnp.asarray(x, jnp.bfloat16)), jnp.bfloat16)
