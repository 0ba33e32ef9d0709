"""Tokenizers from files, against the libraries that wrote them; special tokens found, added and never injected."""

import io
import json

import fsspec
import numpy as np
import pytest

from train.config import DataConfig
from train.data.tokenizer import load_tokenizer, token_type

TEXTS = ["the cat sat on the mat", "ein Baum, zwei Bäume", "", "  spaces\n\ttabs", "日本 𝄞"]
SPECIAL = ["<s>", "</s>", "<pad>", "<mask>"]


def load(path):
    return load_tokenizer(DataConfig(tokenizer=str(path)))


def hugging_face(special=(), **options):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    if "length" in options:
        tokenizer.enable_truncation(options["length"])
        tokenizer.enable_padding(length=options["length"])
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


def test_bytes_are_the_default():
    tokenizer = load("bytes")
    assert (tokenizer.vocabulary_size, tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.padding) == (
        260, 256, 257, 258, 259,
    )  # fmt: skip
    np.testing.assert_array_equal(tokenizer.encode_all([b"a"])[0], [256, 97, 257])
    assert tokenizer.decode(tokenizer.encode_all(["日本".encode()])[0]) == "日本".encode()


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_ids_are_those_of_the_library(tmp_path, text):
    library = hugging_face(SPECIAL)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding, tokenizer.mask) == (0, 1, 2, 3)
    assert tokenizer.vocabulary_size == library.get_vocab_size()
    ids = library.encode(text).ids
    np.testing.assert_array_equal(tokenizer.encode_all([text.encode()])[0], [0, *ids, 1])
    assert tokenizer.decode(tokenizer.encode_all([text.encode()])[0]) == text.encode()


@pytest.mark.parity
@pytest.mark.parametrize("text", [*TEXTS, "a <s> in a text"])
def test_hugging_face_ids_are_those_of_transformers(tmp_path, text):
    transformers = pytest.importorskip("transformers")
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    np.testing.assert_array_equal(load(tmp_path / "tokenizer.json").encode_all([text.encode()])[0][1:-1], ids)


def test_a_text_cannot_spell_a_special_token(tmp_path, sentencepiece):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.model").write_bytes(sentencepiece(pad_id=3))
    for name in ("tokenizer.json", "a.model"):
        tokenizer = load(tmp_path / name)
        tokens = tokenizer.encode_all([b"a <s> b</s> <pad>"])[0]
        assert {tokenizer.bos, tokenizer.eos, tokenizer.padding}.isdisjoint(tokens[1:-1].tolist())
        assert tokenizer.decode(tokens) == b"a <s> b</s> <pad>"


@pytest.mark.parity
@pytest.mark.parametrize("text", ["<s>user hi</s><s>cat", "no special token", "<s>", ""])
def test_a_prompt_spells_special_tokens_as_in_transformers(tmp_path, text):
    transformers = pytest.importorskip("transformers")
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = reference(text, add_special_tokens=False)["input_ids"]
    tokenizer = load(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(tokenizer.prompt(text.encode()), ids if ids[:1] == [tokenizer.bos] else [0, *ids])
    assert tokenizer.bos not in tokenizer.tokens(text.encode()), "afterwards it is text again"


def test_a_prompt_begins_as_a_document_does(tmp_path, sentencepiece):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.model").write_bytes(sentencepiece(pad_id=3))
    for name in (tmp_path / "tokenizer.json", tmp_path / "a.model", "bytes"):
        tokenizer = load(name)
        np.testing.assert_array_equal(tokenizer.prompt(b"the cat"), tokenizer.encode_all([b"the cat"])[0][:-1])


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path):
    hugging_face(SPECIAL, length=4).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    long, short = tokenizer.encode_all([b"the cat sat on the mat " * 20, b"a"])
    assert tokenizer.decode(long) == b"the cat sat on the mat " * 20
    assert len(short) == 3


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
    for name, size in (("tokenizer.json", hugging_face().get_vocab_size()), ("a.model", None)):
        tokenizer = load(tmp_path / name)
        first = size or tokenizer.bos
        found = (tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.padding, tokenizer.vocabulary_size)
        assert found == tuple(range(first, first + 5))
        (tokens,) = tokenizer.encode_all([b"cat"])
        assert tokens.max() == tokenizer.eos
        assert tokenizer.decode(np.array([tokenizer.vocabulary_size + 3])) == b""  # a model may round it up
        assert tokenizer.decode(np.array([*tokens, tokenizer.mask, tokenizer.padding])) == b"cat"


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids_are_those_of_the_library(tmp_path, sentencepiece, text):
    content = sentencepiece(pad_id=3, control_symbols=["<mask>"])
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a.model", content)
    tokenizer = load(f"memory://{tmp_path.name}/a.model")
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=content)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding) == (library.bos_id(), library.eos_id(), 3)
    assert tokenizer.mask == library.piece_to_id("<mask>") != library.unk_id()
    assert tokenizer.vocabulary_size == library.vocab_size()
    np.testing.assert_array_equal(tokenizer.encode_all([text.encode()])[0][1:-1], library.encode(text))
    assert tokenizer.decode(tokenizer.encode_all([text.encode()])[0]) == text.encode()


def test_bytes_that_are_not_valid_text_are_replaced(tmp_path):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode_all([b"a\xffb"])[0]) == "a�b".encode()


def test_ids_take_two_bytes_while_they_fit(tmp_path):
    assert token_type(65536) == np.uint16
    assert token_type(65537) == np.uint32
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{number}": number for number in range(70000)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    large = tokenizers.Tokenizer(model)
    large.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    large.save(str(tmp_path / "tokenizer.json"))
    tokens = load(tmp_path / "tokenizer.json").encode_all([b"w69999 w5"])[0]
    assert tokens.dtype == np.uint32
    np.testing.assert_array_equal(tokens, [70000, 69999, 5, 70001])


def test_identity_differs_with_the_file_and_with_its_special_tokens(tmp_path):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    first = load(tmp_path / "tokenizer.json").identity
    assert load(tmp_path / "tokenizer.json").identity == first != load("bytes").identity
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>"}))
    other = load(tmp_path / "tokenizer.json").identity
    hugging_face().save(str(tmp_path / "tokenizer.json"))
    assert len({first, other, load(tmp_path / "tokenizer.json").identity}) == 3


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("none.json", None, FileNotFoundError, r"data.tokenizer: no file '.*none.json'"),
        ("a.json", b"{}", ValueError, r"data.tokenizer: .*a.json is not a tokenizer.json of Hugging Face"),
        ("a.json", b"\xff", ValueError, r"data.tokenizer: .*a.json is not a tokenizer.json of Hugging Face"),
        ("a.model", b"x", ValueError, r"data.tokenizer: .*a.model is not a .model of SentencePiece"),
        ("a.json", POINTER, ValueError, r"data.tokenizer: .*a.json is only a pointer of git-lfs.*git lfs pull"),
        ("a.model", POINTER, ValueError, r"data.tokenizer: .*a.model is only a pointer of git-lfs"),
        ("a.model", b"", ValueError, r"data.tokenizer: .*a.model is not a .model of SentencePiece"),
        ("gpt2", None, ValueError, r"data.tokenizer must be 'bytes', a tokenizer.json .*found '.*gpt2'"),
    ],
)
def test_an_invalid_tokenizer_is_refused(tmp_path, name, content, kind, message):
    for package in ("tokenizers", "sentencepiece"):
        pytest.importorskip(package)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=message) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_declared_tokens_that_are_not_there(tmp_path):
    hugging_face(SPECIAL).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"data.tokenizer: .*tokenizer_config.json beside it is not valid JSON"):
        load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<none>"}')
    tokenizer = load(tmp_path / "tokenizer.json")
    assert tokenizer.bos == tokenizer.vocabulary_size - 1 == hugging_face(SPECIAL).get_vocab_size()


@pytest.mark.parametrize(("name", "package"), [("a.json", "tokenizers"), ("a.model", "sentencepiece")])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"{}")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=rf"needs {package}, not installed here: pip install 'posjax\[data\]'$"):
        load(tmp_path / name)


def beginning_with(token):
    """A tokenizer that puts a token before every text, as the ones of Llama 3 and Gemma do."""
    from tokenizers import processors

    tokenizer = hugging_face(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    return tokenizer


@pytest.mark.parity
@pytest.mark.parametrize("first", ["<s>", "</s>", None])
def test_a_released_tokenizer_begins_texts_as_in_transformers(tmp_path, first):
    transformers = pytest.importorskip("transformers")
    (beginning_with(first) if first else hugging_face(SPECIAL)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("the cat")["input_ids"]
    own = load_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json"), special_tokens="own"))
    # A first token other than BOS is dropped: here a text may begin only with BOS.
    np.testing.assert_array_equal(own.encode_all([b"the cat"])[0], [*(ids[1:] if first == "</s>" else ids), 1])
    added = load(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(added.encode_all([b"the cat"])[0], [0, *own.tokens(b"the cat"), 1])
    assert (own.identity == added.identity) == (first == "<s>")
