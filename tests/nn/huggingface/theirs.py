"""Random models of transformers, and what they compute."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface import released

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(3, released.VOCAB, (2, 40))


def random_model(values, kind=transformers.AutoModelForCausalLM):
    """A random model of transformers; its biases, gains of norms and corrections of routers are far from 0 and 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values)
    model = kind.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        for name, number in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("correction_bias", "expert_bias")):
                number.copy_(torch.empty_like(number).uniform_(-0.3, 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.empty_like(buffer).uniform_(-0.3, 0.3))
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def greedy_tokens(model, prompts, new):
    """The tokens that transformers generates with its cache; no token ends the text."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor(prompts)
    with torch.no_grad():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new)
    return found[:, prompt.shape[1] :].numpy()


def assert_close(found, wanted):
    chex.assert_shape(found, wanted.shape)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
