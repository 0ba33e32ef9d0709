"""Relative biases that read the query, and sinks by token: float64, gradients, and the code of transformers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import posjax as pj
from posjax.bias import Relative, RelativeBias, Shaw
from posjax.sinks import TokenSinks

B, N, HEADS, KV, D, WIDTH = 2, 11, 4, 2, 8, 6
EXTENT, SIZE = 4, 3


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, K, V, X = normal(0, B, N, HEADS, D), normal(1, B, N, KV, D), normal(2, B, N, KV, D), normal(3, B, N, WIDTH)
CAUSAL = np.tri(N, dtype=bool)


def values(states, profiles, two_sided, clipped, positions):
    """One pair of one head at a time."""
    ahead = profiles.shape[1] // 2 if two_sided else 0
    out = np.zeros((*states.shape[:3], states.shape[2]))
    for b, h, i, j in np.ndindex(out.shape):
        column = positions[b][i] - positions[b][j] + ahead
        if clipped:
            column = min(max(column, 0), profiles.shape[1] - 1)
        if 0 <= column < profiles.shape[1]:
            out[b, h, i, j] = np.float64(states[b, h, i]) @ profiles[:, column]
    return out


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("two_sided", [False, True])
def test_values_are_products_with_the_profile_of_the_distance(two_sided, clipped):
    states = normal(4, B, HEADS, N, SIZE)
    profiles = normal(5, SIZE, 2 * EXTENT - 1 if two_sided else EXTENT)
    found = jax.jit(RelativeBias(states, profiles, two_sided, clipped).values)
    whole = np.tile(np.arange(N), (B, 1))
    np.testing.assert_allclose(
        found(jnp.arange(N), jnp.arange(N)), values(states, profiles, two_sided, clipped, whole), atol=1e-5
    )
    rows = np.stack([np.arange(N) + 2**31 - 1 - N, 2 * np.arange(N) - 2**31])
    wanted = values(states, profiles, two_sided, clipped, rows)
    np.testing.assert_allclose(found(*[jnp.asarray(rows, jnp.int32)[:, None]] * 2), wanted, atol=1e-5)


def terms(spec, params):
    """Logits and sinks of the definition in float64, from the tokens ``X`` and the queries ``Q``."""
    profiles = np.float64(params["bias"]["profiles"])
    if isinstance(spec, Shaw):
        states = np.float64(np.moveaxis(Q, 1, 2)) / np.sqrt(D)
    else:
        states = np.einsum("bnd,dhs->bhns", X, np.float64(params["bias"]["w"]))
        if spec.clip is not None:
            states = states * np.float64(params["bias"]["factors"])[None, :, None]
            length = np.linalg.norm(states, axis=-1, keepdims=True)
            states = np.where(length > spec.clip, states / length * spec.clip, states)
    positions = np.tile(np.arange(N), (B, 1))
    sinks = np.einsum("bnd,dh->bhn", X, np.float64(params["sinks"]["w"]))
    return values(states, profiles, False, isinstance(spec, Shaw), positions), sinks


def params_of(scheme):
    """Parameters that are not at their start, where sinks and the factors of a clip do nothing."""
    made = scheme.init(jax.random.key(0), HEADS, D, num_kv_heads=KV, model_dim=WIDTH)
    return jax.tree.map(lambda leaf: leaf + normal(leaf.size, *leaf.shape), made)


def oracle(spec, params, q=Q, k=K, v=V):
    """A sink is a key of zeros with the sink as its bias and a value of zeros."""
    bias, sinks = terms(spec, params)
    bias = np.concatenate([sinks[..., None], bias], axis=-1)
    k, v = (np.concatenate([np.zeros((B, 1, KV, D)), x], axis=1) for x in (k, v))
    return oracles.attention(q, k, v, bias=bias, allowed=np.pad(CAUSAL, ((0, 0), (1, 0)), constant_values=True))[0]


SPECS = {"relative": Relative(EXTENT, size=SIZE, clip=1.0), "shaw": Shaw(EXTENT)}


def attend(spec, params, *, q=Q, x=X, **options):
    scheme = pj.Scheme(bias=spec, sinks=TokenSinks())
    gates = scheme.prepare(params, x)
    return scheme.attend(q, K, V, params=params, gates=(gates, gates), **options)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_attention_with_sinks_by_token_is_that_of_the_definition(name, implementation):
    spec = SPECS[name]
    params = params_of(pj.Scheme(bias=spec, sinks=TokenSinks()))
    found = jax.jit(partial(attend, spec, implementation=implementation))(params)
    np.testing.assert_allclose(found, oracle(spec, params), atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_reach_the_embeddings_and_the_projection(name):
    """Along a random direction of all parameters, by central differences of the float64 oracle."""
    spec = SPECS[name]
    params = params_of(pj.Scheme(bias=spec, sinks=TokenSinks()))
    weights = normal(7, B, N, HEADS, D)
    grads = jax.jit(jax.grad(lambda p: (attend(spec, p, implementation="blockwise") * weights).sum()))(params)
    directions = jax.tree.map(lambda leaf: normal(leaf.size + 1, *leaf.shape), params)
    slope = sum((np.float64(g) * d).sum() for g, d in zip(*map(jax.tree.leaves, (grads, directions)), strict=True))
    ahead, behind = (
        (oracle(spec, jax.tree.map(lambda p, d, s=step: np.float64(p) + s * d, params, directions)) * weights).sum()
        for step in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-3)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_a_scale_multiplies_what_its_spec_says():
    """Inkling's bias only if it is ``scaled``; that of Shaw as the product of query and key."""
    doubled = pj.scales.Constant(2.0)
    inkling = Relative(EXTENT, size=SIZE)
    for spec, times in ((inkling, 1), (dataclasses.replace(inkling, scaled=True), 2), (SPECS["shaw"], 2)):
        params = params_of(pj.Scheme(bias=spec, sinks=TokenSinks()))
        scheme = pj.Scheme(bias=spec, scale=doubled)
        gates = scheme.prepare(params, X)
        found = jax.jit(scheme.attend)(Q, K, V, params=params, gates=(gates, gates))
        bias, _ = terms(spec, params)
        want, _ = oracles.attention(Q, K, V, bias=times * bias, allowed=CAUSAL, scale=2 / np.sqrt(D))
        np.testing.assert_allclose(found, want, atol=2e-5)


def test_memory_of_the_gradient_is_linear():
    """Temporary memory of the compiled gradient at 1,024 and at 2,048 tokens, of one head and one row."""
    scheme = pj.Scheme(bias=Relative(64, size=SIZE))
    params = scheme.init(jax.random.key(0), 1, D, model_dim=WIDTH)

    def temporary(length):
        def loss(params, q, x):
            gates = scheme.prepare(params, x)
            return scheme.attend(q, q, q, params=params, gates=(gates, gates), implementation="blockwise").sum()

        shapes = ((1, length, 1, D), (1, length, WIDTH))
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(params, *arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2 * temporary(1024)


# --- transformers -----------------------------------------------------------------------------------------------------


def numpy(tensor):
    return tensor.detach().numpy()


def filled(module):
    """The module with normal parameters; its short convolutions, which are not part of the method, do nothing."""
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.data = 0 * parameter.data if "conv" in name else torch.randn(parameter.shape, generator=draw)
    return module.eval()


@pytest.mark.wide
@pytest.mark.parity
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_the_attention_of_inkling(layer):
    torch = pytest.importorskip("torch")
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D}
    sizes |= {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV, "swa_head_dim": D}
    sizes |= {"num_hidden_layers": 2, "d_rel": SIZE, "rel_extent": EXTENT, "sliding_window_size": 5}
    config = inkling.InklingTextConfig(**sizes, local_layer_ids=[0], log_scaling_n_floor=3, log_scaling_alpha=0.5)
    config._attn_implementation = "eager"
    module = filled(inkling.InklingAttention(config, layer))
    mask = (CAUSAL & ~np.tri(N, k=-5, dtype=bool)) if layer == 0 else CAUSAL
    with torch.no_grad():
        x = torch.tensor(X)
        hidden = torch.where(torch.tensor(mask), 0.0, -torch.inf)[None, None]
        want = module(x, hidden)[0]
        q, k = (
            norm(p(x).view(B, N, -1, D)) for p, norm in ((module.q_proj, module.q_norm), (module.k_proj, module.k_norm))
        )
        v = module.v_proj(x).view(B, N, KV, D)
    spec = Relative(5 if layer == 0 else EXTENT, size=SIZE, scaled=layer == 1)
    scale = pj.scales.InklingTemperature(3, 0.5) if layer else None
    scheme = pj.Scheme(bias=spec, scale=scale, mask=pj.masks.Window(5) if layer == 0 else None)
    w = numpy(module.r_proj.weight).T.reshape(WIDTH, HEADS, SIZE)
    params = {"bias": {"w": w, "profiles": numpy(module.rel_logits_proj.proj)}}
    gates = scheme.prepare(params, X)
    out = scheme.attend(*map(numpy, (q, k, v)), params=params, gates=(gates, gates), query_scale=1 / D)
    found = np.asarray(out).reshape(B, N, -1) @ numpy(module.o_proj.weight).T
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parity
def test_the_bias_and_the_sinks_of_inkling_2():
    torch = pytest.importorskip("torch")
    inkling = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    config = inkling.Inkling2TextConfig(hidden_size=WIDTH, d_rel=SIZE, rel_l2_clip_threshold=1.5)
    module = filled(inkling.Inkling2RelativePositionBias(config, HEADS, EXTENT, log_scaling=False))
    sink = filled(torch.nn.Linear(WIDTH, HEADS, bias=False))
    distance = torch.arange(N)[:, None] - torch.arange(N)
    with torch.no_grad():
        x = torch.tensor(X)
        bias = module(x, distance, torch.arange(N)[None])
        sinks = sink(x).transpose(1, 2).unsqueeze(-1)
        q, k, v = (torch.tensor(each).transpose(1, 2) for each in (Q, K, V))
        hidden = torch.where(torch.tensor(CAUSAL), 0.0, -torch.inf)[None, None]
        attention = torch.nn.Module()
        attention.num_key_value_groups = HEADS // KV
        settings = {"scaling": D**-0.5, "position_bias": bias, "sinks": sinks}
        want, _ = inkling.eager_attention_forward(attention.eval(), q, k, v, hidden, **settings)
    w = numpy(module.linear.weight).T.reshape(WIDTH, HEADS, SIZE)
    of_bias = {"w": w, "profiles": numpy(module.proj), "factors": numpy(module.norm.scale)}
    params = {"bias": of_bias, "sinks": {"w": numpy(sink.weight).T}}
    found = attend(Relative(EXTENT, size=SIZE, clip=1.5), params)
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parity
def test_the_relative_keys_of_wav2vec2_bert():
    torch = pytest.importorskip("torch")
    bert = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = bert.Wav2Vec2BertConfig(
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=EXTENT - 1,
        right_max_position_embeddings=EXTENT - 1,
    )
    config._attn_implementation = "eager"
    module = filled(bert.Wav2Vec2BertSelfAttention(config))
    with torch.no_grad():
        x = torch.tensor(normal(8, B, N, HEADS * D) / 8)
        want = module(x)[0]
        q, k, v = (p(x).view(B, N, HEADS, D) for p in (module.linear_q, module.linear_k, module.linear_v))
    profiles = numpy(module.distance_embedding.weight)[::-1].T
    scheme = pj.Scheme(bias=Shaw(EXTENT, bidirectional=True))
    out = scheme.attend(*map(numpy, (q, k, v)), params={"bias": {"profiles": jnp.asarray(profiles)}}, causal=False)
    found = np.asarray(out).reshape(B, N, -1) @ numpy(module.linear_out.weight).T + numpy(module.linear_out.bias)
    np.testing.assert_allclose(found, want, atol=2e-4, rtol=1e-4)
