import dataclasses

import numpy as np
import pytest

from posjax.rotary import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKAware,
    NTKByParts,
    Plain,
    Proportional,
    YaRN,
    from_hf,
)

LISTS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE = LongRoPE((1.0,) * 8, (4.0,) * 8, 4096, factor=32.0)
MODEL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, Plain(5e5)),
        ({"type": "linear", "factor": 2.0}, Linear(2.0, base=5e5)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(4096, 2.0, base=5e5)),
        ({"type": "yarn", "factor": 4.0}, YaRN(4.0, 4096, base=5e5)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True},
            YaRN(4.0, 32, base=5e5),
        ),
        (
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 2048},
            Llama3(32.0, 2048, base=5e5),
        ),
        (
            {"type": "longrope", "factor": 2.0, **LISTS},
            LongRoPE(LISTS["short_factor"], LISTS["long_factor"], 4096, factor=2.0, base=5e5),
        ),
        ({"type": "mrope", "mrope_section": [4, 2, 2]}, Plain(5e5)),
    ],
)  # fmt: skip
def test_version_4(scaling, expected):
    found = from_hf({**MODEL, "rope_theta": 5e5, "rope_scaling": scaling})
    assert found == dataclasses.replace(expected, head_dim=16)


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads"])
def test_a_missing_head_size_stays_open(missing):
    config = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}
    assert from_hf(config) == Plain(5e5, head_dim=16)
    assert from_hf({**config, missing: None}) == Plain(5e5)


def test_version_5_flat():
    parameters = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False, "beta_fast": None,
                  "beta_slow": 1.0, "original_max_position_embeddings": 4096}  # fmt: skip
    found = from_hf({"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "rope_parameters": parameters})
    assert found == YaRN(32.0, 4096, truncate=False, base=150_000.0, head_dim=64)


def test_version_5_per_layer_type():
    """Each layer type reads truncate from its own dictionary; None is a layer type without rope."""
    found = from_hf(
        {
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
    )
    assert found == {
        "full_attention": YaRN(4.0, 64, truncate=False, base=1e6, head_dim=512, partial_rotary_factor=0.5),
        "sliding_attention": Plain(1e4, head_dim=256),
        "chunked_attention": None,
    }


def test_gemma():
    old = from_hf({"model_type": "gemma3_text", "head_dim": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0}})  # fmt: skip
    assert old == {"full_attention": Linear(8.0, base=1e6, head_dim=256), "sliding_attention": Plain(head_dim=256)}
    bare = from_hf({"model_type": "gemma3_text", "head_dim": 256})
    assert bare == {"full_attention": Plain(1e6, head_dim=256), "sliding_attention": Plain(1e4, head_dim=256)}
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    four = from_hf({"head_dim": 256, "global_head_dim": 512, "rope_parameters": {"full_attention": full}})
    assert four == {"full_attention": Proportional(0.25, base=1e6, head_dim=512)}
    sizes_differ = {"head_dim": 256, "per_layer_config": {"5": {"head_dim": 512}}, "rope_parameters": {"a": full}}
    assert from_hf(sizes_differ) == {"a": Proportional(0.25, base=1e6)}


def test_modernbert():
    assert from_hf({"model_type": "modernbert", "hidden_size": 64, "num_attention_heads": 4}) == {
        "full_attention": Plain(160_000.0, head_dim=16),
        "sliding_attention": Plain(head_dim=16),
    }


@pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
def test_phi3(name):
    """The outer original length overrides the inner one; the factor follows from the two lengths."""
    config = {**MODEL, "model_type": "phi3", "max_position_embeddings": 131_072, "rope_theta": 10_000.0,
              "original_max_position_embeddings": 4096}  # fmt: skip
    scaling = {"type": name, "original_max_position_embeddings": 77, **LISTS}
    found = from_hf({**config, "rope_scaling": scaling})
    assert found == dataclasses.replace(LONGROPE, head_dim=16)
    np.testing.assert_allclose(found.table_factor, 1.1902381, atol=5e-8)


def test_deepseek():
    config = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
              "qk_rope_head_dim": 64, "head_dim": 192, "max_position_embeddings": 163_840, "rope_theta": 10_000,
              "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                               "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
    found = from_hf(config)
    assert found == YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0, head_dim=64)
    assert found.at_length()[1] == 1.0
    np.testing.assert_allclose(found.softmax_scale, 1.8738542, atol=5e-8)


def test_ministral3_has_mscales_but_no_softmax_factor():
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
               "mscale_all_dim": 1.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}  # fmt: skip
    found = from_hf({"model_type": "ministral3", "head_dim": 128, "rope_parameters": scaling})
    assert (found.table_factor, found.softmax_scale) == (1.0, 1.0)
    assert from_hf({"model_type": "mistral4", "head_dim": 128, "rope_parameters": scaling}).softmax_scale > 1.5


def test_older_partial_rotary_keys():
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 1}
    assert from_hf(neox) == Plain(head_dim=64, partial_rotary_factor=0.25)
    assert from_hf({**neox, "rotary_pct": 0.5, "rotary_emb_base": 500}) == Plain(
        500, head_dim=64, partial_rotary_factor=0.5
    )
    gptj = from_hf({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64})
    assert gptj.rotary_dim() == 64


def test_precedence_of_the_base():
    inner = {"rope_type": "default", "rope_theta": 1.5}
    assert from_hf({"rope_theta": 2.5, "rope_parameters": inner}).base == 1.5
    assert from_hf({"rope_theta": 2.5, "rope_parameters": {"rope_type": "default"}}).base == 2.5
    assert from_hf({"model_type": "llama4_text"}).base == 5e5
    assert from_hf({"model_type": "gpt_oss"}).base == 1.5e5
    assert from_hf({"model_type": "llama"}).base == 1e4
    assert from_hf(
        {"rope_parameters": {**inner, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}
    ) == Plain(1.5, partial_rotary_factor=0.5)


MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "head_dim": 128}
OLMO3 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
         "attention_factor": 1.2079441541679836}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "glm", "head_dim": 128, "rope_theta": 1e4}, Plain(head_dim=128, partial_rotary_factor=0.5)),
        ({"model_type": "stablelm", "hidden_size": 64, "num_attention_heads": 1},
         Plain(head_dim=64, partial_rotary_factor=0.25)),
        ({"model_type": "cohere"}, Plain(5e5)),
        ({"model_type": "gpt_oss"}, YaRN(32.0, 4096, truncate=False, base=1.5e5, head_dim=64)),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}, Plain(head_dim=128)),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": None}, Plain(head_dim=64)),
        ({"model_type": "mistral4", **MLA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         Plain(head_dim=64)),
        ({"model_type": "my_latent", **MLA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         Plain(head_dim=64)),
        ({"model_type": "modernbert", "head_dim": 16, "rope_theta": 1.6e5},
         {"full_attention": Plain(1.6e5, head_dim=16), "sliding_attention": Plain(head_dim=16)}),
        ({"model_type": "llama", "head_dim": 64, "rotary_pct": 1.0, "swa_rope_theta": 1e4}, Plain(head_dim=64)),
        ({"model_type": "my_own", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
         Plain(5e5, partial_rotary_factor=0.5)),
        ({"model_type": "falcon", "alibi": False, "hidden_size": 64, "num_attention_heads": 1}, Plain(head_dim=64)),
        ({"model_type": "gemma4_text"}, {"full_attention": Proportional(0.25, base=1e6, head_dim=512),
                                         "sliding_attention": Plain(head_dim=256)}),
        ({"model_type": "olmo3", "head_dim": 128, "rope_theta": 5e5, "rope_scaling": OLMO3},
         {"full_attention": YaRN(8.0, 8192, base=5e5, head_dim=128, attention_factor=1.2079441541679836),
          "sliding_attention": Plain(5e5, head_dim=128)}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_model_type_says_what_the_configuration_leaves_out(config, expected):
    """The values of these types are those of their configurations in transformers."""
    assert from_hf(config) == expected
    assert from_hf(dict(reversed(config.items()))) == expected


def test_attn_factor_is_not_read():
    """The config of DeepSeek-R1-0528-Qwen3-8B: transformers does not know the key, so the factor is 0.1 ln 4 + 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419}  # fmt: skip
    rule = from_hf({"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6, "rope_scaling": yarn})
    assert rule == YaRN(4.0, 32768, base=1e6, head_dim=128)
    np.testing.assert_allclose(rule.table_factor, 1.1386294361119891, rtol=1e-15)


def test_explicit_factor_wins_over_the_lengths():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    config = {"max_position_embeddings": 128}
    assert from_hf({**config, "rope_scaling": scaling}).factor == 2.0
    assert from_hf({**config, "rope_scaling": {**scaling, "factor": None}}).factor == 4.0


@pytest.mark.parametrize(
    "rule",
    [
        Plain(5e5),
        Plain(partial_rotary_factor=0.5),
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
def test_round_trip(rule):
    assert from_hf(rule.to_hf()) == rule
    assert from_hf({"rope_parameters": rule.to_hf(), "head_dim": 16}) == dataclasses.replace(rule, head_dim=16)
    assert from_hf({"rope_parameters": {"a": rule.to_hf(), "b": None}}) == {"a": rule, "b": None}


def test_rules_without_a_type_round_trip_in_value():
    for rule in (NTKAware(4.0, head_dim=16), NTKByParts(4.0, 32, head_dim=16)):
        back = from_hf({"rope_parameters": rule.to_hf(), "head_dim": 16})
        np.testing.assert_array_equal(back.at_length()[0], rule.at_length()[0])
        assert back.table_factor == rule.table_factor


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_type": "yarm"}, "rope_type: unknown value 'yarm'; did you mean 'yarn'"),
        ({"rope_type": "axial"}, "rope_type: unknown value 'axial'"),
        ({"rope_type": ["yarn"]}, "rope_type: unknown value"),
        ({"rope_type": "linear"}, "'linear' needs the key 'factor', found"),
        ({"rope_type": "linear", "factor": None}, "'linear' needs the key 'factor'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "'yarn' needs the key 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, "needs the key .low_freq_f"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, "needs the key 'short_factor'"),
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' needs 'original_max_position_embeddings'"),
        ({"rope_type": "dynamic", "factor": 4.0}, "'dynamic' needs 'original_max_position_embeddings'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be a number of at least 1, found 0.5"),
        ({"rope_type": "linear", "factor": "8"}, "factor must be a number of at least 1, found '8'"),
        ({"rope_type": "default", "rope_theta": None}, "rope_theta is None: give the base"),
        ({**MODEL, "rope_theta": None}, "rope_theta is None: give the base"),
        ({"rope_type": "linear", "factor": 2.0, "facto": 3.0}, "key: unknown value 'facto'; did you mean 'factor'"),
        ({"rope_type": "default", "factor": 2.0}, "'default': key: unknown value 'factor'"),
        ({**MODEL, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "must have 8 numbers"),
        ({**MODEL, "rope_scaling": {"type": "su", **LISTS, "factor": 0.1}}, "factor must be a number of at least 1"),
        ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 8}, "LongRoPE needs factor"),
        ({"rope_scaling": 3}, "rope parameters must be a dictionary, found 3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarm"}}}, "^full_attention: rope_type: unknown value"),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "factor": 2.0}}, "mixes layer types with settings"),
        ({"text_config": MODEL}, r"pass config\['text_config'\]"),
        ({"model_type": "gptj", "rotary_dim": 64}, "rotary_dim needs the head size"),
        ({**MODEL, "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}},
         "original_max_position_embeddings 8 contradicts max_position_embeddings 4096"),
        ({}, "config says nothing of rope: give its base"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "config says nothing of rope: give its base"),
        ({"model_type": "my_own", "hidden_size": 64}, "'my_own' is not known: give its base"),
        ({"model_type": "my_own", "rope_scaling": {"type": "linear", "factor": 2.0}}, "'my_own' is not known: give"),
        ({**MODEL, "rotary_emb_base": 1e6}, "rotary_emb_base 1000000.0: transformers reads rope_theta for llama"),
        ({**MODEL, "rotary_pct": 0.25}, "rotary_pct 0.25: transformers reads"),
        ({**MODEL, "rope_local_base_freq": 1e5}, "rope_local_base_freq 100000.0: transformers reads"),
        ({"model_type": "minimax", "head_dim": 128, "rotary_dim": 64}, "rotary_dim 64: transformers reads"),
        ({"model_type": "step3p5", "head_dim": 128, "partial_rotary_factors": [0.5, 1.0]}, "layers that differ"),
        ({**MODEL, "rope_thetta": 5e5}, "unknown key 'rope_thetta'; did you mean 'rope_theta'"),
        ({**MODEL, "rope_scalling": {"type": "linear", "factor": 2.0}}, "did you mean 'rope_scaling'"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4}, "'gpt2' has no rotary positions"),
        ({"model_type": "bloom", "rope_theta": 1e4}, "'bloom' has no rotary positions"),
        ({"model_type": "falcon", "alibi": True}, "alibi True: 'falcon' has no rotary positions then"),
        ({"model_type": "granitemoehybrid"}, "position_embedding_type None: .* only with 'rope'"),
        ({"model_type": "efficientloftr", "rope_theta": 1e4}, "positions have two axes"),
        ({**MODEL, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 for llama, which rot"),
        ({**MODEL, "rope_parameters": {"partial_rotary_factor": 0.5}}, "must be 1 for llama, .*; found 0.5"),
        ({"model_type": "bamba", "partial_rotary_factor": 1.0}, "1.0: transformers reads rope_parameters for bamba"),
        ({"model_type": "gpt_neox", "rope_theta": 5e5}, "rope_theta 500000.0: transformers reads rotary_emb_base"),
        ({"model_type": "olmo3", "rope_parameters": OLMO3}, "olmo3 has separate rope_parameters for the layer types"),
        ({"model_type": "llama", "rope_parameters": {"a": {"rope_theta": 1e4}}}, "llama has one rule for all layers"),
        ({"model_type": "laguna", "rope_parameters": {"a": {"rope_type": "default"}}}, "a: rope_theta is missing"),
        ({"model_type": "my_own", "rope_parameters": {"a": {"rope_type": "default"}}}, "a: rope_theta is missing"),
        ({"model_type": "glm", "head_dim": 128, "partial_rotary_factor": None}, "partial_rotary_factor is None"),
        ({"model_type": "deepseek_v3", **MLA, "partial_rotary_factor": 0.25}, "contradicts qk_rope_head_dim 64"),
        ({"model_type": "zamba2", "use_mem_rope": True, "hidden_size": 64, "num_attention_heads": 1},
         "attention_head_dim is missing"),
    ],
)  # fmt: skip
def test_bad_configurations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        from_hf(config)


class Settings:
    """A configuration as an object, as other libraries have it."""

    def __init__(self, values):
        self.values = values

    def to_dict(self):
        return self.values


def test_a_config_object_is_read_by_its_dictionary():
    config = {**MODEL, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf(Settings(config)) == from_hf(config)
    inner = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert from_hf(Settings(inner)) == YaRN(4.0, 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "found NoneType"),
        ("llama", "found str"),
        (Settings, "found type"),
        (Settings([1]), r"found Settings whose to_dict\(\) gives \[1\]"),
        (Settings({"text_config": MODEL}), r"pass config\['text_config'\], or config.text_config of an object"),
    ],
)
def test_values_that_are_not_configurations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        from_hf(config)


LONG = "x" * 3000
MLA_MODEL = {"model_type": "deepseek_v3", **MLA}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def refusal(config):
    """The message with which a configuration is refused, empty if it is read."""
    try:
        from_hf(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [LONG, {LONG: 3}, {LONG: {LONG: LONG}}, [LONG]], ids=("text", "key", "layer", "list"))
def test_a_message_does_not_repeat_a_long_value(value):
    found = []
    for key in (*MODEL, *YARN, "rope_parameters", "rope_scaling", "partial_rotary_factor", LONG):
        configs = ({**MODEL, "rope_parameters": YARN | {key: value}}, {**MODEL, key: value})
        configs += ({"rope_theta": 1e4, key: value}, {"model_type": "gemma3_text", "rope_scaling": {key: value}})
        found += [refusal(config) for config in (*configs, {**MLA_MODEL, key: value})]
    assert sum(map(bool, found)) > 25
    assert max(map(len, found)) < 500
