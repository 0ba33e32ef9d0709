"""Every family against transformers: its models read, run, decoded and written back, bit by bit.

The models are tiny and random, biases and gains of norms too, and are stored in many small files.
"""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released

from posjax.nn import from_pretrained, save_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPT, NEW, LENGTH = 6, 20, 40
TOKENS = np.random.default_rng(0).integers(3, released.VOCAB, (2, LENGTH))


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity_warning()


def theirs(values):
    """A random model of transformers; its biases and the gains of its norms are far from 0 and 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    return model


def written(model, folder):
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def generated(model):
    """The tokens that transformers picks, with its cache; none of them ends the text."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor(TOKENS[:, :PROMPT])
    with torch.no_grad():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW)
    return found[:, PROMPT:].numpy()


def ours(decoder, tokens, greedy):
    """Logits of whole rows, and the tokens that the decoder picks one by one with its cache: one program."""
    graph, state = nnx.split(decoder)

    def pick(cache, logits, model):
        token = logits[:, -1:].argmax(-1)
        logits, cache = model.decode(token, cache, length=PROMPT + NEW)
        return (cache, logits), token[:, 0]

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        whole = model(tokens)
        if not greedy:
            return whole, None
        cache = model.init_cache(len(tokens), PROMPT + NEW, chunk=PROMPT)
        logits, cache = model.decode(tokens[:, :PROMPT], cache, length=PROMPT + NEW)
        start = cache, logits[:, -1:]
        return whole, jax.lax.scan(lambda kept, _: pick(*kept, model), start, length=NEW)[1].T

    return jax.device_get(run(state, jnp.asarray(tokens)))


def assert_close(found, wanted):
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print("ERR", error, np.abs(wanted).max())
    assert error < 1e-5, error


@pytest.mark.parametrize("name", released.CASES)
def test_a_family_in_and_out(name, tmp_path):
    model = theirs(released.CASES[name])
    folder = written(model, tmp_path / "theirs")
    assert len(list(folder.glob("*.safetensors"))) > 3
    decoder = from_pretrained(folder)
    found, tokens = ours(decoder, TOKENS[:, :26], True)
    wanted = logits(model, TOKENS[:, :26])
    chex.assert_shape(found, wanted.shape)
    assert_close(found, wanted)
    np.testing.assert_array_equal(tokens, generated(model))
    import time
    t=time.time()
    save_pretrained(decoder, tmp_path / "ours", like=folder, max_file_bytes=40_000)
    print("TSAVE",time.time()-t); t=time.time()
    released.assert_same_tensors(tmp_path / "ours", folder)
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    print("TREAD",time.time()-t); t=time.time()
    assert not any(loading.values()), loading
    np.testing.assert_array_equal(logits(again.eval(), TOKENS[:,:26]), wanted)
    print("TRUN",time.time()-t); t=time.time()


@pytest.mark.parametrize("name", released.CASES)
def test_bfloat16(name, tmp_path):
    model = theirs(released.CASES[name])
    folder = written(model.bfloat16(), tmp_path / "theirs")
    import time
    t=time.time()
    d=from_pretrained(folder, dtype=None)
    print("TREAD",time.time()-t); t=time.time()
    save_pretrained(d, tmp_path / "ours", like=folder)
    print("TSAVE",time.time()-t); t=time.time()
    released.assert_same_tensors(tmp_path / "ours", folder)
    assert released.config_of(tmp_path / "ours")["dtype"] == "bfloat16"
