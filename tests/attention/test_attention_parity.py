"""Attention of ``torch`` and Hugging Face, with sinks, soft caps, biases and masks, forward and backward."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import bias, masks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

BATCH, TOKENS, HEADS, KV, SIZE = 2, 24, 4, 2, 8


def draw(*heads):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(BATCH, TOKENS, n, SIZE)).astype(np.float32) for n in heads]


def minus_infinity(allowed):
    """A boolean mask as the additive mask of Hugging Face."""
    return torch.tensor(np.where(allowed, 0, np.finfo(np.float32).min), dtype=torch.float32)


CAUSAL = np.tri(TOKENS, dtype=bool)


@pytest.mark.parametrize(
    ("model", "name", "implementation"), [("gpt_oss", "sinks", "blockwise"), ("gemma2", "softcap", "dense")]
)
def test_eager_attention_and_its_gradients(model, name, implementation):
    """gpt-oss: each head adds one unscaled logit to its rows. Gemma 2: ``c tanh(z / c)`` after the scale."""
    eager = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=["*"]).eager_attention_forward
    inputs, sinks = draw(HEADS, KV, KV), np.linspace(-1, 2, HEADS, dtype=np.float32)
    q, k, v, s = (torch.tensor(x, requires_grad=True) for x in (*inputs, sinks))
    module = SimpleNamespace(num_key_value_groups=HEADS // KV, head_dim=SIZE, sinks=s, training=False)
    options = {"scaling": SIZE**-0.5} | ({} if name == "sinks" else {"softcap": 0.7})
    allowed = CAUSAL & ~np.tri(TOKENS, k=-7, dtype=bool)
    wanted, _ = eager(module, *(x.transpose(1, 2) for x in (q, k, v)), minus_infinity(allowed)[None, None], **options)
    wanted.square().sum().backward()

    def loss(q, k, v, sinks):
        extra = {"sinks": sinks} if name == "sinks" else {"softcap": 0.7}
        mask = masks.Causal() & masks.Window(7)
        out = pj.attention(q, k, v, mask=mask, implementation=implementation, **extra)
        return jnp.square(out).sum(), out

    gradients, found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs, sinks)
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=2e-6)
    for ours, theirs in zip(gradients, (q, k, v, s), strict=True):
        np.testing.assert_allclose(ours, np.zeros(HEADS) if theirs.grad is None else theirs.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("implementation", ["blockwise", pytest.param("dense", marks=pytest.mark.wide)])
def test_flex_attention_with_a_bias_a_mask_and_a_row_that_sees_nothing(implementation):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs, slopes = draw(HEADS, KV, KV), torch.tensor(np.asarray(bias.alibi_slopes(HEADS)))
    ids = np.array([[0] * 9 + [1] * 15, [-1] * 4 + [3] * 20])
    segments = torch.tensor(ids)

    def biased(score, b, h, i, j):
        return score - slopes[h] * (i - j)

    def seen(b, h, i, j):
        return (j <= i) & (segments[b, i] == segments[b, j]) & (segments[b, i] >= 0)

    wanted = flex_attention(
        *(torch.tensor(x).transpose(1, 2) for x in inputs),
        score_mod=biased,
        block_mask=create_block_mask(seen, BATCH, None, TOKENS, TOKENS, device="cpu"),
        enable_gqa=True,
    ).transpose(1, 2)
    mask = masks.Causal() & masks.Segments(jnp.asarray(ids))
    found = pj.attention(*map(jnp.asarray, inputs), bias=bias.ALiBi(), mask=mask, implementation=implementation)
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-6)
    assert not np.any(found[1, :4])


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.wide), 3])
def test_attention_of_longformer(first):
    """A window of eight keys and the query's own; global tokens use the same projections as the others."""
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    width = HEADS * SIZE
    config = transformers.LongformerConfig(
        hidden_size=width, num_attention_heads=HEADS, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    module = LongformerSelfAttention(config, 0).eval()
    for name in ("query", "key", "value"):
        torch.nn.init.normal_(getattr(module, name).weight, std=0.3)
        getattr(module, f"{name}_global").load_state_dict(getattr(module, name).state_dict())
    x, is_global = torch.randn(BATCH, TOKENS, width), torch.arange(TOKENS).expand(BATCH, -1) < first
    with torch.no_grad():
        q, k, v = (
            getattr(module, name)(x).reshape(BATCH, TOKENS, HEADS, SIZE).numpy() for name in ("query", "key", "value")
        )
        wanted = module(
            x,
            attention_mask=10_000.0 * is_global,
            is_index_masked=torch.zeros(BATCH, TOKENS, dtype=torch.bool),
            is_index_global_attn=is_global,
            is_global_attn=first > 0,
        )[0]
    mask = pj.scheme("longformer", window=8, global_tokens=first).mask if first else masks.Dilated(5, 1)
    found = pj.attention(*map(jnp.asarray, (q, k, v)), mask=mask)
    np.testing.assert_allclose(np.asarray(found).reshape(BATCH, TOKENS, -1), wanted.numpy(), atol=2e-6)
