"""Tokenizers from files, against the libraries that wrote them; special tokens found, added and never injected."""

import io
import json

import fsspec
import numpy as np
import pytest
from refusals import refused

from train.config import DataConfig
from train.data.tokenizer import load_tokenizer

TEXTS = ["the cat sat on the mat", "ein Baum, zwei Bäume", "", "  spaces\n\ttabs", "日本 𝄞"]
SPECIAL = ["<s>", "</s>", "<pad>", "<mask>"]


def load(path):
    return load_tokenizer(DataConfig(tokenizer=str(path)))


def hugging_face(special=(), length=None):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    options = {"initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), **options)
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    if length:
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece():
    library = pytest.importorskip("sentencepiece")

    def trained(**options):
        content = io.BytesIO()
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 20), model_writer=content, vocab_size=330, byte_fallback=True,
            hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
            num_threads=1, minloglevel=2, **options,
        )  # fmt: skip
        return content.getvalue()

    return trained


def test_every_byte_is_a_token_by_default():
    tokenizer, text = load("bytes"), bytes(range(256))
    assert (tokenizer.vocabulary_size, tokenizer.mask, tokenizer.padding) == (260, 258, 259)
    [tokens] = tokenizer.encode_all([text])
    np.testing.assert_array_equal(tokens, [256, *range(256), 257])
    assert tokenizer.decode(tokens) == text


def test_hugging_face_ids_are_those_of_the_library(tmp_path):
    """Truncation and padding that the file asks for do not count."""
    library = hugging_face(SPECIAL)
    hugging_face(SPECIAL, length=4).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding, tokenizer.mask) == (0, 1, 2, 3)
    assert tokenizer.vocabulary_size == library.get_vocab_size()
    for text, tokens in zip(TEXTS, tokenizer.encode_all([text.encode() for text in TEXTS]), strict=True):
        np.testing.assert_array_equal(tokens, [0, *library.encode(text).ids, 1])
        assert tokenizer.decode(tokens) == text.encode()
    assert tokenizer.decode(tokenizer.encode_all([b"a\xffb"])[0]) == "a\ufffdb".encode(), "invalid UTF-8 is replaced"


def test_a_text_cannot_spell_a_special_token(tmp_path, sentencepiece):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.model").write_bytes(sentencepiece(pad_id=3))
    for name in ("tokenizer.json", "a.model"):
        tokenizer = load(tmp_path / name)
        tokens = tokenizer.encode_all([b"a <s> b</s> <pad>"])[0]
        assert {tokenizer.bos, tokenizer.eos, tokenizer.padding}.isdisjoint(tokens[1:-1].tolist())
        assert tokenizer.decode(tokens) == b"a <s> b</s> <pad>"


@pytest.mark.parity
def test_texts_and_prompts_are_spelt_as_in_transformers(tmp_path):
    """A prompt may spell special tokens; a text of the corpus may not."""
    transformers = pytest.importorskip("transformers")
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    for text in [*TEXTS, "a <s> in a text", "<s>user hi</s><s>cat", "<s>"]:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(tokenizer.prompt(text.encode()), ids if ids[:1] == [tokenizer.bos] else [0, *ids])
        ids = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        np.testing.assert_array_equal(tokenizer.encode_all([text.encode()])[0][1:-1], ids)


def test_special_tokens_are_declared_beside_the_file(tmp_path):
    hugging_face(["<|endoftext|>", "<x>", "<s>"]).save(str(tmp_path / "tokenizer.json"))
    declared = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert load(tmp_path / "tokenizer.json").bos == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**declared, "mask_token": "<x>"}))
    tokenizer = load(tmp_path / "tokenizer.json")
    size = hugging_face(["<|endoftext|>", "<x>", "<s>"]).get_vocab_size()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.padding) == (0, 0, 1, size)
    assert tokenizer.vocabulary_size == size + 1


def test_special_tokens_that_a_file_lacks_come_after_its_vocabulary(tmp_path, sentencepiece):
    hugging_face().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.model").write_bytes(sentencepiece(bos_id=-1, eos_id=-1))
    assert load(tmp_path / "tokenizer.json").bos == hugging_face().get_vocab_size()
    for name in ("tokenizer.json", "a.model"):
        tokenizer = load(tmp_path / name)
        found = (tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.padding, tokenizer.vocabulary_size)
        assert found == tuple(range(found[0], found[0] + 5))
        (tokens,) = tokenizer.encode_all([b"cat"])
        assert tokens.max() == tokenizer.eos
        assert tokenizer.decode(np.array([tokenizer.vocabulary_size + 3])) == b""  # a model may round it up
        assert tokenizer.decode(np.array([*tokens, tokenizer.mask, tokenizer.padding])) == b"cat"


def test_sentencepiece_ids_are_those_of_the_library(tmp_path, sentencepiece):
    content = sentencepiece(pad_id=3, control_symbols=["<mask>"])
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a.model", content)
    tokenizer = load(f"memory://{tmp_path.name}/a.model")
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=content)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding) == (library.bos_id(), library.eos_id(), 3)
    assert tokenizer.mask == library.piece_to_id("<mask>") != library.unk_id()
    assert tokenizer.vocabulary_size == library.vocab_size()
    for text, tokens in zip(TEXTS, tokenizer.encode_all([text.encode() for text in TEXTS]), strict=True):
        np.testing.assert_array_equal(tokens[1:-1], library.encode(text))
        assert tokenizer.decode(tokens) == text.encode()


def test_ids_take_two_bytes_while_they_fit(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    for size, dtype in ((65532, np.uint16), (65533, np.uint32)):  # and four special tokens
        model = tokenizers.models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0")
        large = tokenizers.Tokenizer(model)
        large.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        large.save(str(tmp_path / "tokenizer.json"))
        [tokens] = load(tmp_path / "tokenizer.json").encode_all([b"w65531 w5"])
        assert tokens.dtype == dtype
        np.testing.assert_array_equal(tokens, [size, 65531, 5, size + 1])


def test_declared_tokens_that_are_not_there_are_added(tmp_path):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    refused("data.tokenizer", lambda: load(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<none>"}')
    tokenizer = load(tmp_path / "tokenizer.json")
    assert tokenizer.bos == tokenizer.vocabulary_size - 1 == hugging_face(SPECIAL).get_vocab_size()


@pytest.mark.parity
@pytest.mark.parametrize("first", ["<s>", "</s>", None])
def test_a_released_tokenizer_begins_texts_as_in_transformers(tmp_path, first):
    """As those of Llama 3 and Gemma, which put a token before every text."""
    processors = pytest.importorskip("tokenizers").processors
    transformers = pytest.importorskip("transformers")
    tokenizer = hugging_face(SPECIAL)
    if first:
        special = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("the cat")["input_ids"]
    own = load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json"), special_tokens="own"))
    # A first token other than BOS is dropped: here a text may begin only with BOS.
    np.testing.assert_array_equal(own.encode_all([b"the cat"])[0], [*(ids[1:] if first == "</s>" else ids), 1])
    added = load(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(added.encode_all([b"the cat"])[0], [0, *own.tokens(b"the cat"), 1])
    assert (own.identity == added.identity) == (first == "<s>")
