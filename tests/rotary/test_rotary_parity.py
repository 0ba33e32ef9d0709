"""Against Hugging Face's own functions, for every rope type; runs where torch and transformers are installed."""

import importlib

import jax
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import apply_rotary, from_hf, inverse_frequencies, permute_projection, rotary_table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HALF = 16
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
LISTS = {"short_factor": (1 + 0.05 * np.arange(HALF)).tolist(), "long_factor": (1 + np.arange(HALF) ** 1.5).tolist()}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 256},
    "yarn, no rounding": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, mscales": {"factor": 40.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, attention factor": YARN | {"attention_factor": 1.25},
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, equal betas": YARN | {"beta_fast": 1.0, "beta_slow": 1.0},  # Kimi K2
    "longrope": {"original_max_position_embeddings": 1024, **LISTS},
    "longrope, factor": {"original_max_position_embeddings": 1024, "factor": 8.0, **LISTS},
    "llama3": LLAMA3,
    "llama3, one threshold": LLAMA3 | {"high_freq_factor": 1.0},
    "proportional": {"partial_rotary_factor": 0.3},
    "proportional, factor": {"partial_rotary_factor": 0.5, "factor": 4.0},
}
WHOLE_HEADS = [name for name in SCALINGS if name.split(",")[0] not in ("proportional", "longrope")]


def config(name, base=500_000.0, **changes):
    parameters = {"rope_type": name.split(",")[0], "rope_theta": base, **SCALINGS[name], **changes}
    return transformers.LlamaConfig(head_dim=2 * HALF, rope_parameters=parameters, **SIZES)


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
def test_frequencies_of_every_type_and_the_way_back(name):
    hf = config(name)
    rule = from_hf(hf.to_dict())
    again = transformers.LlamaConfig(head_dim=2 * HALF, rope_parameters=rule.to_hf(), **SIZES)
    traced = jax.jit(lambda n: rule.at_length(n)[0].value)
    for length in (None, 1024, 1025, 4097, 20_000) if rule.reads_length else (None,):
        expected, expected_factor = reference(hf, name, length)
        found, factor = rule.at_length(length)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert abs(factor - expected_factor) < 1e-12
        if length is not None:
            np.testing.assert_allclose(traced(length), expected, rtol=2e-6)
        np.testing.assert_array_equal(reference(again, name, length)[0], expected)
        assert reference(again, name, length)[1] == expected_factor


@pytest.mark.parametrize(("name", "share"), [(name, (0.25, 0.5, 0.75)[n % 3]) for n, name in enumerate(WHOLE_HEADS)])
def test_partial_rotary_and_the_settings_of_version_4(name, share):
    expected, _ = reference(config(name, partial_rotary_factor=share), name, 5000)
    scaling = {"type": name.split(",")[0], **SCALINGS[name]} if SCALINGS[name] else None
    old = {"model_type": "stablelm", "rope_theta": 500_000.0, "rope_scaling": scaling, "partial_rotary_factor": share}
    np.testing.assert_allclose(from_hf({**SIZES, **old}).at_length(5000)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "precision"), [("default", "exact"), ("yarn", "hf"), ("llama3", "exact")])
def test_half_rotation_of_llama(name, precision):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    hf = config(name, base=10_000.0)
    x = np.random.default_rng(0).standard_normal((2, 64, 3, 2 * HALF)).astype(np.float32)
    positions = np.stack([np.arange(64), 1900 + np.arange(64)])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.tensor(x), torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    frequencies, factor = from_hf(hf.to_dict()).at_length()
    table = rotary_table(positions, frequencies, attention_factor=factor, precision=precision)
    found = apply_rotary(x, table)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)
    np.testing.assert_allclose(table.cos[:1], cos[:1, :, :HALF].numpy(), atol=1e-5)
    np.testing.assert_allclose(found[:1], expected[:1].numpy(), atol=5e-5)


def test_interleaved_rotation_of_gptj_llama4_and_deepseek():
    """DeepSeek takes interleaved input but gives half-split output: the same scores, another layout."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    x = np.random.default_rng(1).standard_normal((1, 32, 3, 2 * HALF)).astype(np.float32)
    tensor, table = torch.tensor(x), rotary_table(np.arange(32), inverse_frequencies(2 * HALF))
    cos, sin = (torch.tensor(np.array(part))[None] for part in table)
    found = apply_rotary(x, table, pairing="interleaved")
    np.testing.assert_allclose(found, apply_rotary_pos_emb(tensor, sin, cos).numpy(), atol=1e-6)
    np.testing.assert_allclose(found, apply_rotary_emb(tensor, tensor, torch.complex(cos, sin))[0].numpy(), atol=1e-6)
    doubled = (torch.cat([part, part], dim=-1) for part in (cos, sin))
    deepseek = apply_rotary_pos_emb_interleave(tensor, tensor, *doubled, unsqueeze_dim=2)[0]
    np.testing.assert_allclose(permute_projection(found, "interleaved", "half"), deepseek.numpy(), atol=1e-6)


@pytest.mark.parametrize(("module", "pairing"), [("gpt_neox", "half"), ("glm4", "interleaved")])
def test_partial_rotation(module, pairing):
    theirs = importlib.import_module(f"transformers.models.{module}.modeling_{module}").apply_rotary_pos_emb
    x = np.random.default_rng(2).standard_normal((1, 32, 3, 2 * HALF)).astype(np.float32)
    table = rotary_table(np.arange(32), inverse_frequencies(2 * HALF, partial_rotary_factor=0.5))
    doubled = (torch.tensor(np.concatenate([part, part], axis=-1))[None] for part in table)
    expected = theirs(torch.tensor(x), torch.tensor(x), *doubled, unsqueeze_dim=2)[0].numpy()
    np.testing.assert_allclose(apply_rotary(x, table, pairing=pairing), expected, atol=1e-6)


def test_a_multimodal_config_is_refused_and_its_text_config_is_read():
    settings = transformers.Gemma3Config()
    with pytest.raises(ValueError, match=r"config.text_config of an object"):
        from_hf(settings)
    rules = from_hf(settings.text_config)
    assert rules == from_hf(settings.text_config.to_dict())
    assert set(rules) == {"full_attention", "sliding_attention"}


# --- several axes -----------------------------------------------------------------------------------------------------

LONGER = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VISION = {"hidden_size": 128, "num_attention_heads": 4, "patch_size": 14}
Q = np.random.default_rng(3).standard_normal((1, 13, 4, 32)).astype(np.float32)


def rotated(apply, q, cos, sin):
    """``apply`` of a Hugging Face model, on ``[batch, length, heads, size]``."""
    return apply(torch.tensor(q).transpose(1, 2), torch.tensor(q).transpose(1, 2), cos, sin)[0].transpose(1, 2).numpy()


def ours(name, q, places):
    return rotary.AXIAL_LAYOUTS[name].query({}, q, places, head_dim=32)


def test_llama4_vision():
    from transformers.models.llama4 import modeling_llama4 as hf

    config = transformers.Llama4VisionConfig(image_size=42, **VISION)
    ci = hf.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q = Q[:, :10]
    expected = hf.vision_apply_rotary_emb(torch.tensor(q), torch.tensor(q), ci)[0].numpy()
    places = np.concatenate([rotary.grid_coordinates(3, 3), [[-1, -1]]])
    np.testing.assert_allclose(ours("llama4-vision", q, places), expected, atol=5e-6)


def test_pixtral():
    from transformers.models.pixtral import modeling_pixtral as hf

    config = transformers.PixtralVisionConfig(head_dim=32, **VISION)
    places = rotary.grid_coordinates(3, 4)
    cos, sin = hf.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), torch.tensor(places))
    expected = rotated(hf.apply_rotary_pos_emb, Q[:, :12], cos[None], sin[None])
    np.testing.assert_allclose(ours("pixtral", Q[:, :12], places), expected, atol=5e-6)


def test_dinov3():
    from transformers.models.dinov3_vit import modeling_dinov3_vit as hf

    config = transformers.DINOv3ViTConfig(**VISION)
    cos, sin = hf.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 42, 56))
    expected = rotated(hf.apply_rotary_pos_emb, Q, cos, sin)
    places = np.concatenate([np.zeros((1, 2), np.float32), rotary.patch_centres(3, 4)])
    np.testing.assert_allclose(ours("dinov3", Q, places), expected, atol=5e-6)


SPANS = [3, (2, 3), 1]


@pytest.mark.parametrize(
    ("model", "name", "layout", "sections", "rule", "scaling"),
    [
        (
            "qwen2_vl",
            "Qwen2VL",
            "chunked",
            (4, 6, 6),
            rotary.YaRN(4.0, 64, base=1e6),
            LONGER,
        ),
        ("qwen3_vl", "Qwen3VLText", "interleaved", (6, 5, 5), rotary.Plain(1e6), {"rope_type": "default"}),
    ],
)
def test_mrope(model, name, layout, sections, rule, scaling):
    hf = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=["*"])
    options = {"mrope_section": list(sections), "rope_theta": 1e6, **scaling}
    config = getattr(transformers, f"{name.removesuffix('Text')}TextConfig")(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=options,
    )
    ids = rotary.mrope_positions(SPANS).coordinates
    embedding = getattr(hf, f"{name}RotaryEmbedding")(config)
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), torch.tensor(ids.T[:, None]))
    expected = rotated(hf.apply_rotary_pos_emb, Q[:, : len(ids)], cos, sin)
    slot = rotary.Rotary(rotary.MRoPE(rule=rule, sections=sections, layout=layout))
    np.testing.assert_allclose(slot.query({}, Q[:, : len(ids)], ids, head_dim=32), expected, atol=5e-6)
