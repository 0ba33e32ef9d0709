"""Rules with several axes against Hugging Face's vision and multimodal models."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from posjax.rotary import AXIAL_LAYOUTS, MRoPE, Plain, Rotary, YaRN, grid_coordinates, mrope_positions, patch_centres

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

D, HEADS = 32, 2
SIZES = {"hidden_size": D * HEADS, "num_attention_heads": HEADS, "patch_size": 14}
Q = np.asarray(jax.random.normal(jax.random.key(0), (1, 13, HEADS, D)))


def as_torch(x, heads_first=False):
    x = torch.tensor(x)
    return x.transpose(1, 2) if heads_first else x


def rotated(apply, q, cos, sin):
    """``apply`` of a Hugging Face model, on ``[batch, length, heads, size]``."""
    return apply(as_torch(q, True), as_torch(q, True), cos, sin)[0].transpose(1, 2).numpy()


def test_llama4_vision():
    from transformers.models.llama4 import modeling_llama4 as hf

    config = transformers.Llama4VisionConfig(image_size=42, **{**SIZES, "patch_size": 14})
    ci = hf.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q = Q[:, :10]
    expected = hf.vision_apply_rotary_emb(as_torch(q), as_torch(q), ci)[0].numpy()
    places = np.concatenate([grid_coordinates(3, 3), [[-1, -1]]])
    np.testing.assert_allclose(AXIAL_LAYOUTS["llama4-vision"].query({}, q, places, head_dim=D), expected, atol=5e-6)


def test_pixtral():
    from transformers.models.pixtral import modeling_pixtral as hf

    config = transformers.PixtralVisionConfig(head_dim=D, **SIZES)
    places = grid_coordinates(3, 4)
    cos, sin = hf.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), torch.tensor(places))
    expected = rotated(hf.apply_rotary_pos_emb, Q[:, :12], cos[None], sin[None])
    np.testing.assert_allclose(AXIAL_LAYOUTS["pixtral"].query({}, Q[:, :12], places, head_dim=D), expected, atol=5e-6)


def test_dinov3():
    from transformers.models.dinov3_vit import modeling_dinov3_vit as hf

    config = transformers.DINOv3ViTConfig(**SIZES)
    cos, sin = hf.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 42, 56))
    expected = rotated(hf.apply_rotary_pos_emb, Q, cos, sin)
    places = np.concatenate([np.zeros((1, 2), np.float32), patch_centres(3, 4)])
    np.testing.assert_allclose(AXIAL_LAYOUTS["dinov3"].query({}, Q, places, head_dim=D), expected, atol=5e-6)


SPANS = [3, (2, 3), 1]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model", "name", "layout", "sections", "rule", "scaling"),
    [
        ("qwen2_vl", "Qwen2VL", "chunked", (4, 6, 6), YaRN(4.0, 64, base=1e6), YARN),
        ("qwen3_vl", "Qwen3VLText", "interleaved", (6, 5, 5), Plain(1e6), {"rope_type": "default"}),
    ],
)
def test_mrope(model, name, layout, sections, rule, scaling):
    hf = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=["*"])
    options = {"mrope_section": list(sections), "rope_theta": 1e6, **scaling}
    config = getattr(transformers, f"{name.removesuffix('Text')}TextConfig")(
        hidden_size=D * HEADS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=D,
        max_position_embeddings=256,
        rope_parameters=options,
    )
    ids = mrope_positions(SPANS).coordinates
    embedding = getattr(hf, f"{name}RotaryEmbedding")(config)
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), torch.tensor(ids.T[:, None]))
    expected = rotated(hf.apply_rotary_pos_emb, Q[:, : len(ids)], cos, sin)
    slot = Rotary(MRoPE(rule=rule, sections=sections, layout=layout))
    np.testing.assert_allclose(slot.query({}, Q[:, : len(ids)], ids, head_dim=D), expected, atol=5e-6)


def test_mrope_ids_of_images():
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *a, **k: Qwen2VLModel.get_vision_position_ids(model, *a, **k)
    kinds = torch.tensor([[0] * 3 + [1] * 6 + [0] + [1] * 4 + [0, 0]])
    grids = torch.tensor([[1, 4, 6], [1, 8, 2]])
    expected, deltas = Qwen2VLModel.get_rope_index(model, torch.ones_like(kinds), kinds, image_grid_thw=grids)
    ids, end = mrope_positions([3, (2, 3), 1, (4, 1), 2])
    np.testing.assert_array_equal(ids, expected[:, 0].numpy().T)
    assert end - len(ids) == deltas.item()
