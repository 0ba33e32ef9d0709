"""``from_hf`` by the keys of a configuration, as transformers reads them, and the way back with ``to_hf``."""

import dataclasses

import numpy as np
import pytest

from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, Plain, Proportional, YaRN
from posjax.rotary.huggingface import from_hf

LISTS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = LongRoPE((1.0,) * 8, (4.0,) * 8, 4096, factor=32.0)
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
ONE_HEAD = {"hidden_size": 64, "num_attention_heads": 1}
MODEL = {"model_type": "llama", "max_position_embeddings": 4096, **SIZES}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 |= {"rope_type": "llama3"}
DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK |= {"mscale": 1.0, "mscale_all_dim": 1.0}
PARAMETERS = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False, "beta_fast": None}
PARAMETERS |= {"beta_slow": 1.0, "original_max_position_embeddings": 4096}
MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "head_dim": 128}
SHARE = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
OLMO3 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
PHI3 = MODEL | {"model_type": "phi3", "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
INNER = {"original_max_position_embeddings": 77, **LISTS}
QWEN3 = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}
# The config of DeepSeek-R1-0528-Qwen3-8B: transformers does not know attn_factor, so the factor is 0.1 ln 4 + 1.
ATTN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.878}
SHORT = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


def version_4(scaling):
    return {**MODEL, "rope_theta": 5e5, "rope_scaling": scaling}


def layers(full, sliding):
    return {"full_attention": full, "sliding_attention": sliding}


NESTED = {
    "head_dim": 256,
    "global_head_dim": 512,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "truncate": False},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "chunked_attention": None,
    },
}
OF_FULL = YaRN(4.0, 64, truncate=False, base=1e6, head_dim=512, partial_rotary_factor=0.5)
HUNYUAN = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
READ = [
    (version_4(None), Plain(5e5, head_dim=16)),
    (version_4({"type": "linear", "factor": 2.0}), Linear(2.0, base=5e5, head_dim=16)),
    (version_4({"rope_type": "dynamic", "factor": 2.0}), DynamicNTK(4096, 2.0, base=5e5, head_dim=16)),
    (version_4({"type": "yarn", "factor": 4.0, "finetuned": True}), YaRN(4.0, 4096, base=5e5, head_dim=16)),
    (version_4(LLAMA3), Llama3(32.0, 2048, base=5e5, head_dim=16)),
    ({"head_dim": 64, "rope_parameters": PARAMETERS}, YaRN(32.0, 4096, truncate=False, base=1.5e5, head_dim=64)),
    (NESTED, layers(OF_FULL, Plain(1e4, head_dim=256)) | {"chunked_attention": None}),
    # The outer original length of Phi-3 wins; the factor follows from the two lengths.
    *((PHI3 | {"rope_scaling": {"type": name, **INNER}}, dataclasses.replace(LONGROPE, head_dim=16))
      for name in ("su", "longrope", "yarn")),
    ({"model_type": "deepseek_v3", "head_dim": 192, "qk_rope_head_dim": 64, "rope_scaling": DEEPSEEK},
     YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0, head_dim=64)),
    ({"model_type": "gemma3_text", "head_dim": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
      "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     layers(Linear(8.0, base=1e6, head_dim=256), Plain(head_dim=256))),
    ({"model_type": "gemma3_text", "head_dim": 256}, layers(Plain(1e6, head_dim=256), Plain(head_dim=256))),
    ({"head_dim": 256, "per_layer_config": {"5": {"head_dim": 512}}, "rope_parameters": {"a": FULL}},
     {"a": Proportional(0.25, base=1e6)}),
    ({"model_type": "modernbert", **SIZES}, layers(Plain(1.6e5, head_dim=16), Plain(head_dim=16))),
    ({"model_type": "olmo3", "head_dim": 128, "rope_theta": 5e5, "rope_scaling": OLMO3},
     layers(YaRN(8.0, 8192, base=5e5, head_dim=128, attention_factor=1.2), Plain(5e5, head_dim=128))),
    ({"model_type": "gpt_neox", **ONE_HEAD}, Plain(head_dim=64, partial_rotary_factor=0.25)),
    ({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}, Plain(500, partial_rotary_factor=0.5)),
    ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64},
     Plain(head_dim=256, partial_rotary_factor=0.25)),
    # Hunyuan's alpha; its third version states the base that follows from it, 11158840.
    ({"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_theta": 1e4, "rope_scaling": HUNYUAN},
     Plain(1e4 * 1000**(128 / 126), head_dim=128)),
    (QWEN3, Plain(head_dim=128)),
    (QWEN3 | {"head_dim": None}, Plain(head_dim=64)),
    (QWEN3 | {"rope_theta": 1e6, "rope_scaling": ATTN}, YaRN(4.0, 32768, base=1e6, head_dim=128)),
    ({"model_type": "my_latent", **MLA, **SHARE}, Plain(head_dim=64)),
    ({"model_type": "my_own", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, Plain(5e5, partial_rotary_factor=0.5)),
    ({"model_type": "falcon", "alibi": False, **ONE_HEAD}, Plain(head_dim=64)),
    # The base: in the inner dictionary, then in the outer one, then the model type's.
    ({"rope_theta": 2.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1.5}}, Plain(1.5)),
    ({"rope_theta": 2.5, "rope_parameters": {"rope_type": "default"}}, Plain(2.5)),
    ({**SHARE, "partial_rotary_factor": 0.25}, Plain(partial_rotary_factor=0.5)),
    # A factor wins over the quotient of the lengths.
    ({"max_position_embeddings": 128, "rope_scaling": SHORT}, YaRN(2.0, 32)),
    ({"max_position_embeddings": 128, "rope_scaling": SHORT | {"factor": None}}, YaRN(4.0, 32)),
    # A head size that is not known stays open.
    ({"hidden_size": 64, "num_attention_heads": None, "rope_theta": 5e5}, Plain(5e5)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "rule"), READ)
def test_a_configuration_has_the_rule_of_transformers_in_any_order_of_its_keys(config, rule):
    assert from_hf(config) == rule
    assert from_hf(dict(reversed(config.items()))) == rule


def test_mscales_are_a_softmax_factor_for_types_that_use_them():
    scaling = {**DEEPSEEK, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    found = from_hf({"model_type": "ministral3", "head_dim": 128, "rope_parameters": scaling})
    assert (found.table_factor, found.softmax_scale) == (1.0, 1.0)
    found = from_hf({"model_type": "mistral4", "head_dim": 128, "rope_parameters": scaling})
    np.testing.assert_allclose(found.softmax_scale, 1.8738542, atol=5e-8)


@pytest.mark.parametrize(
    "rule",
    [
        Plain(5e5, partial_rotary_factor=0.5),
        Proportional(0.25, base=1e6),
        Proportional(1.0, factor=2.0),
        Linear(2.0),
        DynamicNTK(4096, 2.0),
        YaRN(4.0, 4096, mscale=0.7, mscale_all_dim=1.0, truncate=False, beta_fast=16.0),
        YaRN(4.0, 4096, attention_factor=1.1),
        LONGROPE,
        Llama3(base=5e5),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_rule_is_read_again_as_it_is_written(rule):
    assert from_hf(rule.to_hf()) == rule
    assert from_hf({"rope_parameters": rule.to_hf(), "head_dim": 16}) == dataclasses.replace(rule, head_dim=16)
    assert from_hf({"rope_parameters": {"a": rule.to_hf(), "b": None}}) == {"a": rule, "b": None}


def test_a_share_that_is_a_quotient_gives_its_number_of_channels():
    """Widths w of heads d whose share w / d, times d, is below w in float64; also as others read what to_hf writes."""
    pairs = [(size, width) for size in range(2, 513, 2) for width in range(2, size + 1, 2)]
    rounded = [(size, width) for size, width in pairs if int(size * (width / size)) < width]
    assert len(rounded) == 1087
    for size, width in rounded[::5]:
        rule = from_hf({"model_type": "gptj", "n_embd": size, "n_head": 1, "rotary_dim": width})
        assert rule.rotary_dim() == width
        written = rule.to_hf()
        assert int(size * written["partial_rotary_factor"]) == width
        assert from_hf({"head_dim": size, "rope_parameters": written}).rotary_dim() == width


LONG = "x" * 3000


@pytest.mark.parametrize("value", [LONG, {LONG: {LONG: LONG}}, [LONG]], ids=("text", "layer", "list"))
@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling", "partial_rotary_factor", "factor", "rope_type"])
def test_a_message_does_not_repeat_a_long_value(key, value):
    with pytest.raises(ValueError, match=r".") as caught:
        from_hf({**MODEL, "rope_parameters": {**PARAMETERS, key: value}, "rope_scaling": {key: value}})
    assert len(str(caught.value)) < 500
