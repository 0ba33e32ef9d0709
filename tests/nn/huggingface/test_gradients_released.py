"""The gradients of mixtures, delta layers and latent attention against transformers, with its balance loss."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.theirs import TOKENS, random_model, torch

from posjax.nn import from_pretrained
from posjax.nn.experts import balance_loss
from posjax.nn.huggingface.load import named_parameters

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
]

BALANCED = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared")
BALANCED += ("qwen3_next", "qwen3_5_moe_text")
OTHERS = ("qwen3_5_text", "glm4_moe", "ernie4_5_moe", "minimax_m2", "llama4_text", "cohere2_moe", "exaone_moe")
OTHERS += ("deepseek_v2-groups", "deepseek_v3", "mistral4", "minicpm3", "youtu", "gemma4_text-experts")
"""Without a balance loss in transformers, or with one that does not count the experts that are chosen."""
WITHOUT = ("correction", "/scale")
"""The ends of the names of what has no gradient in transformers: buffers, and corrections."""
OPTIONS = {"qwen3_5_text": {"initializer_range": 0.15}, "qwen3_5_moe_text": {"initializer_range": 0.1}}
"""Weights so large that decays have gradients far above rounding errors.

With 0.07, a gradient of transformers in float32 is off by 4e-4 of its largest number, and posjax' by 8e-7 (Qwen3.5 with
experts, `decay_log`, against transformers in float64).
"""


def their_gradients(model, balanced):
    """The loss of transformers, and a model whose parameters are the gradients of this one's."""
    tokens = torch.tensor(TOKENS)
    found = model(tokens, labels=tokens, **({"output_router_logits": True} if balanced else {}))
    found.loss.backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, of in zip(gradients.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(parameter) if of.grad is None else of.grad)
    return float(found.loss.detach()), gradients


@nnx.jit
def loss_and_gradients(model, tokens):
    def loss(model):
        hidden, loads = model.hidden_and_loads(tokens)
        picked = jax.nn.log_softmax(model.logits(hidden))[:, :-1]
        spec = model.config.experts
        balance = 0.0 if spec is None else spec.balance * balance_loss(spec, loads)
        return -jnp.take_along_axis(picked, tokens[:, 1:, None], -1).mean() + balance

    return nnx.value_and_grad(loss)(model)


CASES = [pytest.param(name, marks=() if name == "mixtral" else pytest.mark.wide) for name in (*BALANCED, *OTHERS)]


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_a_batch_are_those_of_transformers(name, tmp_path):
    weight = {"router_aux_loss_coef": 0.05 if name in BALANCED else 0.0}
    model = random_model(released.CASES[name] | weight | OPTIONS.get(name, {}))
    model.save_pretrained(tmp_path / "model")
    wanted, gradients = their_gradients(model, name in BALANCED)
    gradients.save_pretrained(tmp_path / "gradients")
    loss, found = loss_and_gradients(from_pretrained(tmp_path / "model"), jnp.asarray(TOKENS))
    assert abs(float(loss) - wanted) < 1e-5 * wanted
    expected = from_pretrained(tmp_path / "gradients")
    pairs = zip(
        named_parameters(released.parameters(found)), named_parameters(released.parameters(expected)), strict=True
    )
    for (path, ours), (_, theirs) in pairs:
        if not path.endswith(WITHOUT):
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max(), err_msg=path)
