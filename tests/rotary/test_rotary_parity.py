"""Against Hugging Face's own functions, for every rope type; runs where torch and transformers are installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax._angles import Frequencies, angles
from posjax.rotary import apply_rotary, from_hf, rotary_table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HALF = 16
LISTS = {"short_factor": (1 + 0.05 * np.arange(HALF)).tolist(), "long_factor": (1 + np.arange(HALF) ** 1.5).tolist()}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 256},
    "yarn, no rounding": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, mscales": {"factor": 40.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, attention factor": {"factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.25},
    "yarn, betas": {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 8.0, "beta_slow": 2.0},
    "longrope": {"original_max_position_embeddings": 1024, **LISTS},
    "longrope, factor": {"original_max_position_embeddings": 1024, "factor": 8.0, **LISTS},
    "llama3": LLAMA3,
    "llama3, one threshold": LLAMA3 | {"high_freq_factor": 1.0},
    "proportional": {"partial_rotary_factor": 0.3},
    "proportional, factor": {"partial_rotary_factor": 0.5, "factor": 4.0},
}


def config(name, base=500_000.0, **changes):
    parameters = {"rope_type": name.split(",")[0], "rope_theta": base, **SCALINGS[name], **changes}
    return transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=2 * HALF,
        max_position_embeddings=4096,
        rope_parameters=parameters,
    )


def reference(hf, name, length):
    """(inverse frequencies, attention factor) of Hugging Face."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    init = ROPE_INIT_FUNCTIONS.get(name.split(",")[0])
    values, factor = (
        init(hf, "cpu", seq_len=length) if init else Phi3RotaryEmbedding.compute_default_rope_parameters(hf)
    )
    return values.numpy(), factor


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [None, 1024, 1025, 4096, 4097, 20_000])
def test_frequencies_of_every_type(name, length):
    hf = config(name)
    rule = from_hf(hf.to_dict())
    expected, expected_factor = reference(hf, name, length)
    found, factor = rule.at_length(length)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert abs(factor - expected_factor) < 1e-12
    if length is not None and rule.reads_length:
        np.testing.assert_allclose(jax.jit(lambda n: rule.at_length(n)[0].value)(length), expected, rtol=2e-6)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name.split(",")[0] not in ("proportional", "longrope")])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_frequencies_of_partial_rotary(name, share):
    hf = config(name, partial_rotary_factor=share)
    expected, _ = reference(hf, name, 5000)
    found = from_hf(hf.to_dict() | {"model_type": "stablelm"})
    np.testing.assert_allclose(found.at_length(5000)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_to_hf_is_understood(name):
    hf = config(name)
    rule = from_hf(hf.to_dict())
    again = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=2 * HALF,
        max_position_embeddings=4096,
        rope_parameters=rule.to_hf(),
    )
    for length in (1024, 20_000):
        np.testing.assert_array_equal(reference(again, name, length)[0], reference(hf, name, length)[0])
        assert reference(again, name, length)[1] == reference(hf, name, length)[1]


@pytest.mark.parametrize("name", [name for name in SCALINGS if name.split(",")[0] not in ("proportional", "longrope")])
def test_version_4_settings(name):
    """The same settings in the older container."""
    old = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    scaling = {"type": name.split(",")[0], **SCALINGS[name]} if SCALINGS[name] else None
    assert from_hf({**old, "rope_theta": 500_000.0, "rope_scaling": scaling}) == from_hf(config(name).to_dict())


def test_hf_angles_bit_for_bit():
    """Given the same float32 frequencies, the hf mode computes the same float32 angles."""
    values, _ = reference(config("llama3"), "llama3", None)
    positions = np.array([0, 1, 257, 4095, 131_071, 1_000_003], np.int32)
    expected = torch.tensor(positions)[:, None].float() * torch.tensor(values)
    for precision, frequencies in (("hf", Frequencies(values)), ("exact", Frequencies(jnp.asarray(values)))):
        np.testing.assert_array_equal(angles(jnp.asarray(positions), frequencies, precision), expected.numpy())


@pytest.mark.parametrize("precision", ["exact", "hf"])
@pytest.mark.parametrize("name", ["default", "yarn", "llama3", "linear"])
def test_half_rotation_of_llama(name, precision):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    hf = config(name, base=10_000.0)
    x = np.random.default_rng(0).standard_normal((2, 64, 3, 2 * HALF)).astype(np.float32)
    positions = np.stack([np.arange(64), 1900 + np.arange(64)])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.tensor(x), torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    frequencies, factor = from_hf(hf.to_dict()).at_length()
    table = rotary_table(positions, frequencies, attention_factor=factor, precision=precision)
    np.testing.assert_allclose(apply_rotary(x, table), expected.numpy(), atol=1e-3)
    near = rotary_table(positions[:1], frequencies, attention_factor=factor, precision=precision)
    np.testing.assert_allclose(near.cos, cos[:1, :, :HALF].numpy(), atol=1e-5)
    np.testing.assert_allclose(apply_rotary(x[:1], near), expected[:1].numpy(), atol=5e-5)


def test_interleaved_rotation_of_gptj_llama4_and_deepseek():
    """DeepSeek takes interleaved input but gives half-split output: the same scores, another layout."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    from posjax.rotary import inverse_frequencies, permute_projection

    x = np.random.default_rng(1).standard_normal((1, 32, 3, 2 * HALF)).astype(np.float32)
    tensor, table = torch.tensor(x), rotary_table(np.arange(32), inverse_frequencies(2 * HALF))
    cos, sin = (torch.tensor(np.array(part))[None] for part in table)
    found = apply_rotary(x, table, pairing="interleaved")
    np.testing.assert_allclose(found, apply_rotary_pos_emb(tensor, sin, cos).numpy(), atol=1e-6)
    np.testing.assert_allclose(found, apply_rotary_emb(tensor, tensor, torch.complex(cos, sin))[0].numpy(), atol=1e-6)
    doubled = (torch.cat([part, part], dim=-1) for part in (cos, sin))
    deepseek = apply_rotary_pos_emb_interleave(tensor, tensor, *doubled, unsqueeze_dim=2)[0]
    np.testing.assert_allclose(permute_projection(found, "interleaved", "half"), deepseek.numpy(), atol=1e-6)


@pytest.mark.parametrize("module", ["phi3", "gpt_neox", "glm4"])
def test_partial_rotation(module):
    """The first half of each head rotates; glm4 pairs neighbours, the others halves."""
    import importlib

    from posjax.rotary import inverse_frequencies

    theirs = importlib.import_module(f"transformers.models.{module}.modeling_{module}").apply_rotary_pos_emb
    x = np.random.default_rng(2).standard_normal((1, 32, 3, 2 * HALF)).astype(np.float32)
    table = rotary_table(np.arange(32), inverse_frequencies(2 * HALF, partial_rotary_factor=0.5))
    doubled = (torch.tensor(np.concatenate([part, part], axis=-1))[None] for part in table)
    expected = theirs(torch.tensor(x), torch.tensor(x), *doubled, unsqueeze_dim=2)[0].numpy()
    found = apply_rotary(x, table, pairing="interleaved" if module == "glm4" else "half")
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_configurations_of_models():
    """Rules read from the defaults of model classes agree with what those models compute."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    oss = transformers.GptOssConfig()
    rule, module = from_hf(oss.to_dict()), GptOssRotaryEmbedding(oss)
    np.testing.assert_allclose(rule.at_length()[0], module.inv_freq.numpy(), rtol=1e-6)
    assert abs(rule.table_factor - module.attention_scaling) < 1e-12
    phi = transformers.Phi3Config(
        hidden_size=256, num_attention_heads=8, max_position_embeddings=131_072, original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **LISTS},
    )  # fmt: skip
    rule, module = from_hf(phi.to_dict()), Phi3RotaryEmbedding(phi)
    np.testing.assert_allclose(rule.at_length()[0], module.inv_freq.numpy(), rtol=1e-6)
    assert abs(rule.table_factor - module.attention_scaling) < 1e-12
    assert abs(rule.table_factor - 1.1902381) < 5e-8


def test_gemma3_layer_types():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    gemma = transformers.Gemma3TextConfig(
        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    module = Gemma3RotaryEmbedding(gemma)
    rules = from_hf(gemma.to_dict())
    assert set(rules) == {"full_attention", "sliding_attention"}
    for name, rule in rules.items():
        np.testing.assert_allclose(rule.at_length()[0], getattr(module, f"{name}_inv_freq").numpy(), rtol=1e-6)
    old = {"model_type": "gemma3_text", "head_dim": gemma.head_dim, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert from_hf({**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}) == rules


def test_deepseek_softmax_scale():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    hf = transformers.DeepseekV3Config(
        hidden_size=64, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=8, max_position_embeddings=163_840,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    )  # fmt: skip
    attention = DeepseekV3Attention(hf, 0)
    rule = from_hf(hf.to_dict())
    assert rule.head_dim == hf.qk_rope_head_dim
    np.testing.assert_allclose(attention.scaling, rule.softmax_scale / np.sqrt(attention.qk_head_dim), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaConfig", {}),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
        ("GptOssConfig", {}),
        ("Gemma3TextConfig", {}),
        ("ModernBertConfig", {}),
        ("GPTNeoXConfig", {}),
        ("DeepseekV3Config", {}),
    ],
)
def test_config_objects_are_read_as_their_dictionaries(name, options):
    settings = getattr(transformers, name)(**options)
    found = from_hf(settings)
    assert found == from_hf(settings.to_dict())
    rules = found if isinstance(found, dict) else {"": found}
    given = settings.to_dict()["rope_parameters"]
    for layer, rule in rules.items():
        assert rule.base == (given[layer] if layer else given)["rope_theta"]


def test_a_multimodal_config_is_refused_and_its_text_config_is_read():
    settings = transformers.Gemma3Config()
    with pytest.raises(ValueError, match=r"or config.text_config of an object"):
        from_hf(settings)
    assert set(from_hf(settings.text_config)) == {"full_attention", "sliding_attention"}
