"""The layer recipes against tiny models of Hugging Face: the attention of every layer, with random weights.

Each model runs as a whole, so masks, rotary tables and layer types are its own. Hooks record the inputs and outputs of
its attention modules. Sequences are longer than every window and chunk.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import masks, rotary, scales
from posjax.rotary import permute_projection
from posjax.scheme import uniform

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOKENS, WIDTH, HEADS, KV, SIZE = 24, 24, 4, 2, 16
SIZES = {
    "vocab_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA4 = EXPERTS | {"intermediate_size_mlp": 8, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4}
OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
SCOUT = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}


def plain(base):
    return {"rope_type": "default", "rope_theta": base}


# Name: (model, number of layers, configuration as released except for windows, options of the preset).
MODELS = {
    "qwen3": ("Qwen3", 2, {"rope_parameters": plain(1e6)}, {}),
    "gemma3": (
        "Gemma3Text",
        8,
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 21,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": plain(1e4),
            },
        },
        {"window": 5, "factor": 8.0},
    ),
    "gpt-oss": (
        "GptOss",
        3,
        EXPERTS
        | {"sliding_window": 5, "rope_parameters": OSS_YARN | {"rope_theta": 150_000.0}}
        | {"max_position_embeddings": 131_072},
        {"window": 5},
    ),
    "smollm3": ("SmolLM3", 5, {"rope_parameters": plain(5e6)}, {}),
    "llama4": (
        "Llama4Text",
        5,
        LLAMA4 | {"rope_parameters": plain(5e5)},
        {"chunk": 7, "floor_scale": 5, "attn_scale": 0.4},
    ),
    "llama4 scout": (
        "Llama4Text",
        4,
        LLAMA4 | {"rope_parameters": SCOUT | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
        {"chunk": 7, "floor_scale": 5, "attn_scale": 0.4, "factor": 16.0, "original_length": 64},
    ),
    "llama4 maverick": (
        "Llama4Text",
        4,
        LLAMA4 | {"rope_parameters": plain(5e5), "use_qk_norm": False},
        {"chunk": 7, "floor_scale": 5, "attn_scale": 0.4, "qk_norm": False},
    ),
    "rnope-swa": (
        "Cohere2",
        5,
        {"sliding_window": 5, "rope_parameters": plain(5e4)},
        {"window": 5, "base": 5e4},
    ),
}

# Models without a preset: schemes built from this library's slots, one for each layer.
COMPOSED = {
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": SIZE,
            "attn_logit_softcapping": 1.5,
            "rope_parameters": plain(1e4),
        },
        (pj.scheme("rope", mask=masks.Window(5)), pj.scheme("rope")),
        {"softcap": 1.5},
    ),
    "ministral3": (
        "Ministral3",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
        (
            pj.Scheme(
                features=rotary.Rotary(rotary.YaRN(16.0, 4, base=1e6, attention_factor=1.0)),
                scale=scales.MinistralTemperature(4, 0.3),
            ),
        ),
        {},
    ),
    "glm4": (
        "Glm4",
        {"rope_parameters": plain(1e4) | {"partial_rotary_factor": 0.5}},
        (pj.Scheme(features=rotary.Rotary(rotary.Plain(partial_rotary_factor=0.5), pairing="interleaved")),),
        {},
    ),
}


def attentions(kind, layers, options):
    """Every layer's attention module of a random model, with its input and its output."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | {"num_hidden_layers": layers} | options))
    model = getattr(transformers, f"{kind}Model")(config).eval()
    modules, seen = [layer.self_attn for layer in model.layers], []
    for module in modules:
        module.register_forward_hook(
            lambda _, args, kwargs, out: seen.append((kwargs["hidden_states"], out[0])), with_kwargs=True
        )
        for name, parameter in module.named_parameters():
            torch.nn.init.uniform_(parameter, *((0.5, 1.5) if name.endswith("norm.weight") else (-0.3, 0.3)))
    with torch.no_grad():
        model(inputs_embeds=torch.randn(2, TOKENS, WIDTH))
    return [(module, *(x.detach().numpy() for x in pair)) for module, pair in zip(modules, seen, strict=True)]


def linear(layer, x):
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    return x @ layer.weight.detach().numpy().T + bias


def learned(module, gemma):
    """A module's gains and sinks, in the form of ``Scheme.init``."""
    found = {}
    if hasattr(module, "q_norm"):
        # Gemma's gains are 1 + weight. The gain of the queries also includes Gemma's own scale of the logits.
        found["norm"] = {name: getattr(module, f"{name}_norm").weight.detach().numpy() + gemma for name in "qk"}
        found["norm"]["q"] *= module.scaling * SIZE**0.5
    if hasattr(module, "sinks"):
        found["sinks"] = {"sinks": module.sinks.detach().numpy()}
    return jax.tree.map(jnp.asarray, found)


def ours(scheme, module, x, params, interleaved=False, **options):
    """The scheme's attention between the module's own projections."""
    q, k, v = (linear(getattr(module, f"{name}_proj"), x).reshape(*x.shape[:2], -1, SIZE) for name in "qkv")
    if interleaved:
        q, k = (permute_projection(each, "interleaved", "half") for each in (q, k))
    out = attend(scheme, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), params, options.get("softcap"))
    return linear(module.o_proj, np.asarray(out).reshape(*x.shape[:2], -1))


@jax.jit(static_argnums=(0, 5))
def attend(scheme, q, k, v, params, softcap=None):
    return scheme.attend(q, k, v, params=params, softcap=softcap)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_attends_as_in_hugging_face(name):
    kind, layers, options, preset_options = MODELS[name]
    preset = name.split()[0]
    recipe = pj.scheme(preset, **preset_options, **({} if preset == "qwen3" else {"num_layers": layers}))
    theirs = attentions(kind, layers, options)
    for scheme, (module, x, wanted) in zip(uniform(recipe, layers).schemes, theirs, strict=True):
        params = learned(module, gemma=kind == "Gemma3Text")
        shapes = jax.tree.map(jnp.shape, scheme.init(jax.random.key(0), HEADS, SIZE, num_kv_heads=KV))
        assert jax.tree.map(jnp.shape, params) == shapes
        assert scheme.norm is None or scheme.norm.eps == module.config.rms_norm_eps
        assert np.abs(wanted).max() > 0.1
        # Command A's models pair neighbouring channels: the same channels in another order.
        found = ours(scheme, module, x, params, interleaved=kind == "Cohere2")
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", COMPOSED)
def test_other_models_are_schemes_of_the_same_slots(name):
    kind, options, schemes, extra = COMPOSED[name]
    theirs = attentions(kind, len(schemes), options)
    for scheme, (module, x, wanted) in zip(schemes, theirs, strict=True):
        found = ours(scheme, module, x, {}, **extra)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "depths"),
    [
        ("gemma3", "Gemma3Text", (18, 26, 34, 48, 62)),
        ("gpt-oss", "GptOss", (24, 36)),
        ("smollm3", "SmolLM3", (36,)),
        ("llama4", "Llama4Text", (48,)),
        ("rnope-swa", "Cohere2", (32, 64)),
    ],
)
def test_layers_of_the_released_depths(name, kind, depths):
    for depth in depths:
        config = getattr(transformers, f"{kind}Config")(num_hidden_layers=depth)
        schemes = pj.scheme(name, num_layers=depth).schemes
        assert [scheme.mask is None for scheme in schemes] == [each == "full_attention" for each in config.layer_types]
        rotated = getattr(config, "no_rope_layers", [each != "full_attention" for each in config.layer_types])
        all_rotate = name in ("gemma3", "gpt-oss")
        assert [scheme.rotates for scheme in schemes] == [all_rotate or bool(each) for each in rotated]


def test_defaults_of_the_released_configurations():
    oss, llama4 = transformers.GptOssConfig(), transformers.Llama4TextConfig()
    local, full = pj.scheme("gpt-oss", num_layers=2).schemes
    assert local.mask.size == oss.sliding_window
    rule = local.features.frequencies
    assert rule == full.features.frequencies
    assert rule.to_hf() == oss.rope_parameters
    *local, full = pj.scheme("llama4", num_layers=4).schemes
    assert {each.mask.size for each in local} == {llama4.attention_chunk_size}
    assert (full.scale.floor_scale, full.scale.attn_scale) == (llama4.floor_scale, llama4.attn_scale)
    assert local[0].features.frequencies.base == llama4.rope_parameters["rope_theta"]
