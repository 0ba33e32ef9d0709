"""Random models of transformers, and what they compute."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface import released

from posjax.nn.huggingface import FAMILIES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(3, released.VOCAB, (2, 40))


def random_model(values):
    """A random model of transformers; its biases, gains of norms and corrections of routers are far from 0 and 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values)
    of_texts = type(config) in transformers.AutoModelForCausalLM._model_mapping
    make = transformers.AutoModelForCausalLM.from_config if of_texts else class_of(values)._from_config
    model = make(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        for name, number in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("correction_bias", "expert_bias")):
                number.copy_(torch.empty_like(number).uniform_(-0.3, 0.3))
    return model


def class_of(values):
    """The class of a model that transformers has only as a part of others."""
    return getattr(transformers, FAMILIES[values["model_type"]].architecture)


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def assert_close(found, wanted):
    chex.assert_shape(found, wanted.shape)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
