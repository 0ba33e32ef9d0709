"""Gradients of the loss of one batch, by the names of tensors, against those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.theirs import TOKENS, random_model, torch

from posjax.nn import from_pretrained, save_pretrained

pytestmark = [
    pytest.mark.parity,
    pytest.mark.wide,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
]


def loss(model, tokens):
    """The mean over all tokens but the first of ``-log p``."""
    logits = model(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_gradients_are_those_of_transformers(name, tmp_path):
    """With weights so large that decays have gradients far above rounding errors."""
    model = random_model(released.CASES[name] | {"initializer_range": 0.15})
    model.save_pretrained(tmp_path / "theirs")
    tokens = torch.tensor(TOKENS)
    torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    decoder = from_pretrained(tmp_path / "theirs")
    nnx.update(decoder, nnx.jit(nnx.grad(loss))(decoder, TOKENS))
    save_pretrained(decoder, tmp_path / "gradients", like=tmp_path / "theirs")
    found = released.stored(tmp_path / "gradients")
    wanted = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for tensor, gradient in wanted.items():
        difference = np.abs(found[tensor] - gradient).max()
        assert difference < 1e-4 * np.abs(gradient).max(), (tensor, difference)
