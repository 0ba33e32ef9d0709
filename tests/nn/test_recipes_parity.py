"""The layer recipes against Hugging Face: the layers of released depths, and the attention of models without a family.

Each model runs as a whole, so masks, rotary tables and layer types are its own. Hooks record the inputs and outputs of
its attention modules. Sequences are longer than every window and chunk.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import rotary, scales
from posjax.nn.huggingface import read_config
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
LLAMA4 = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 8}
LLAMA4 |= {"attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4}
SCOUT = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
OURS = {"chunk": 7, "floor_scale": 5, "attn_scale": 0.4}


def plain(base, **others):
    return {"rope_type": "default", "rope_theta": base, **others}


MINISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4}
MINISTRAL |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
# Name: (model, configuration, our schemes).
MODELS = {
    "llama4 scout": (
        "Llama4Text",
        LLAMA4 | {"rope_parameters": SCOUT | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
        pj.scheme("llama4", num_layers=5, factor=16.0, original_length=64, **OURS),
    ),
    "llama4 maverick": (
        "Llama4Text",
        LLAMA4 | {"rope_parameters": plain(5e5), "use_qk_norm": False},
        pj.scheme("llama4", num_layers=4, qk_norm=False, **OURS),
    ),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": MINISTRAL},
        pj.Scheme(
            features=rotary.Rotary(rotary.YaRN(16.0, 4, base=1e6, attention_factor=1.0)),
            scale=scales.MinistralTemperature(4, 0.3),
        ),
    ),
    "glm4": (
        "Glm4",
        {"rope_parameters": plain(1e4, partial_rotary_factor=0.5)},
        pj.Scheme(features=rotary.Rotary(rotary.Plain(partial_rotary_factor=0.5), pairing="interleaved")),
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
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
    with torch.no_grad():
        model(inputs_embeds=torch.randn(2, TOKENS, WIDTH))
    return [(module, *(x.detach().numpy() for x in pair)) for module, pair in zip(modules, seen, strict=True)]


def linear(layer, x):
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    return x @ layer.weight.detach().numpy().T + bias


@jax.jit(static_argnums=0)
def attend(scheme, q, k, v):
    return scheme.attend(q, k, v, params={})


@pytest.mark.parametrize(
    "name", ["llama4 scout", "ministral3", "glm4", pytest.param("llama4 maverick", marks=pytest.mark.wide)]
)
def test_every_layer_attends_as_in_hugging_face(name):
    kind, options, recipe = MODELS[name]
    schemes = getattr(recipe, "schemes", [recipe])
    for scheme, (module, x, wanted) in zip(schemes, attentions(kind, len(schemes), options), strict=True):
        q, k, v = (linear(getattr(module, f"{part}_proj"), x).reshape(*x.shape[:2], -1, SIZE) for part in "qkv")
        out = np.asarray(attend(scheme, *map(jnp.asarray, (q, k, v))))
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(linear(module.o_proj, out.reshape(*x.shape[:2], -1)), wanted, atol=1e-5)


def parts(schemes):
    """What the layers of a pattern differ in."""
    return [(scheme.mask, scheme.sinks, scheme.features and scheme.features.frequencies) for scheme in schemes]


@pytest.mark.parametrize(
    ("name", "kind", "depths", "options", "theirs"),
    [
        ("qwen3", "Qwen3", (28, 64), {}, {"rope_parameters": plain(1e6)}),
        ("gemma3", "Gemma3Text", (18, 26, 34, 48, 62), {"window": 4096}, {}),
        ("gpt-oss", "GptOss", (24, 36), {}, {}),
        ("smollm3", "SmolLM3", (36,), {}, {"rope_parameters": plain(5e6)}),
        ("rnope-swa", "Cohere2", (32, 64), {}, {}),
    ],
)
def test_layers_of_the_released_depths(name, kind, depths, options, theirs):
    """`test_families.py` compares the models that these configurations describe with Hugging Face's."""
    for depth in depths:
        config = read_config(getattr(transformers, f"{kind}Config")(num_hidden_layers=depth, **theirs).to_dict())
        recipe = pj.scheme(name, **options, **({} if name == "qwen3" else {"num_layers": depth}))
        assert parts(uniform(recipe, depth).schemes) == parts(config.layers.schemes)
        assert [s.norm is None for s in uniform(recipe, depth).kinds] == [s.norm is None for s in config.layers.kinds]


def test_defaults_of_llama_4():
    theirs = transformers.Llama4TextConfig()
    *local, full = pj.scheme("llama4", num_layers=4).schemes
    assert {each.mask.size for each in local} == {theirs.attention_chunk_size}
    assert (full.scale.floor_scale, full.scale.attn_scale) == (theirs.floor_scale, theirs.attn_scale)
    assert local[0].features.frequencies.base == theirs.rope_parameters["rope_theta"]
    kinds = transformers.Llama4TextConfig(num_hidden_layers=48).layer_types
    assert [s.mask is None for s in pj.scheme("llama4", num_layers=48).schemes] == [
        k == "full_attention" for k in kinds
    ]
