"""Text as tokens: bytes, tokenizers of Hugging Face, and SentencePiece, each with four special tokens."""

import hashlib
import json
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt

from posjax._checks import POINTER, check_no_pointer
from train.config import DataConfig
from train.config.settings.checks import check
from train.data.chat import ChatFiles, ChatTemplate, Rendered, named_templates, words_of
from train.data.learned import marked
from train.data.storage import is_url, open_url, optional
from train.runtime.lines import in_a_line

PADDING = 259  # of bytes; it fills the last row with a negative segment id: neither attended to nor predicted

_ROLES = ("bos", "eos", "mask", "padding")
_COMMON_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "[CLS]", "<|endoftext|>"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "padding": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}


class Tokenizer:
    """Text to ids and back: special tokens around the ids that `_ids` of a subclass gives.

    Ids are below `vocabulary_size`; `opening` and `eos` surround each document. `opening` is BOS, or empty for a
    released tokenizer that adds none. `identity` differs between tokenizers that encode anything differently; it is
    part of the key of a token cache. The results of `encode_all` and the four special tokens are below `encoded_size`:
    a released tokenizer may have further special tokens, which no text is encoded to.

    Args:
        size: how many ids there are.
        found: the ids of the special tokens among them, by role.
        identity: the bytes of the file.
        own: whether only the tokenizer's own special tokens are used; see ``data.special_tokens``.
        begins: whether the tokenizer itself puts BOS before a text; without `own`, BOS is always put there.
    """

    def __init__(self, size: int, found: dict[str, int], identity: bytes, own: bool, begins: bool):
        self._size, self._specials = size, specials_of(size, found, own)
        self.bos, self.eos, self.mask, self.padding, self.vocabulary_size = self._specials
        self.encoded_size = self.vocabulary_size
        self.opening = (self.bos,) if begins or not own else ()
        how = repr(self._specials) if self.opening else f"{self._specials} without an opening"
        self.identity = hashlib.sha256(identity + how.encode()).hexdigest()

    def tokens(self, text: bytes) -> UInt[np.ndarray, "tokens"]:
        """The tokens of a piece of text. Special tokens that are spelled out in it are encoded as plain text."""
        return np.array(self._ids([text])[0], token_type(self.vocabulary_size))

    def prompt(self, text: bytes, opening: bool = True) -> UInt[np.ndarray, "tokens"]:
        """The opening, unless left out, and the tokens of a prompt. Special tokens that are spelled out in it, as in
        chats, are recognised."""
        ids = self._prompt_ids(text)
        spelt = not opening or tuple(ids[: len(self.opening)]) == self.opening
        return np.array([*(() if spelt else self.opening), *ids], token_type(self.vocabulary_size))

    @property
    def special(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(self._specials[:4])

    def text(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, special tokens included where the tokenizer spells them."""
        return self._text([int(token) for token in tokens if token < self._size])

    def encode_all(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, "_"]]:
        """The tokens of several documents, each its opening, its text and EOS; on all cores if the library can."""
        return [self._document(ids) for ids in self._ids(texts)]

    @cached_property
    def chat(self) -> ChatTemplate:
        """The template of conversations: that of ``data.chat_template``, or else the tokenizer's own.

        Raises ValueError without one, or for one that is not valid.
        """
        raise ValueError("data.messages_key: conversations need a tokenizer.json or a GGUF file with a chat template")

    def encode_conversations(self, conversations: Sequence[Rendered]) -> list[Int32[np.ndarray, "_"]]:
        """The tokens of conversations, as a template renders them: nothing is put around them, and special tokens that
        are spelled out in them are recognised. Those that overlap no turn are unlearned; see `train.data.learned`."""
        raise NotImplementedError

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of tokens, without special tokens."""
        left_out = set(self._specials[:4])
        return self.text([token for token in np.asarray(tokens).reshape(-1) if token not in left_out])

    def _document(self, ids: Sequence[int]) -> UInt[np.ndarray, "_"]:
        first = len(self.opening)
        tokens = np.empty(first + len(ids) + 1, token_type(self.vocabulary_size))
        tokens[:first], tokens[first:-1], tokens[-1] = self.opening, ids, self.eos
        return tokens

    def _ids(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        raise NotImplementedError

    def _prompt_ids(self, text: bytes) -> Sequence[int]:
        return self._ids([text])[0]

    def _text(self, ids: list[int]) -> bytes:
        raise NotImplementedError


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names.

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a tokenizer or a package is missing.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    system, path = _open(config)
    own = config.special_tokens == "own"
    if not system.isfile(path):
        model = path.removesuffix(".json") + ".model"
        known = model != path and system.isfile(model)
        beside = f"; {posixpath.basename(model)} is in the same folder: set data.tokenizer to that" if known else ""
        others = beside or "; name a tokenizer.json or a SentencePiece model, or bytes if its 260 ids are the model's"
        raise FileNotFoundError(f"data.tokenizer: no file {config.tokenizer!r}{others}")
    check_no_pointer(system.cat_file(path, 0, len(POINTER)), f"data.tokenizer: {path}")
    if path.endswith(".gguf"):
        files = _gguf(config).tokenizer_files()
        values = json.loads(files["tokenizer_config.json"])
        chat = partial(_chat_files, config, lambda: (values, {}))
        return HuggingFaceTokenizer(files["tokenizer.json"].encode(), _named(values), config.tokenizer, own, chat)
    content = system.cat_file(path)
    if path.endswith(".json"):
        folder = path.rpartition("/")[0]
        chat = partial(_chat_files, config, partial(_beside, system, folder))
        return HuggingFaceTokenizer(content, _declared(system, folder), config.tokenizer, own, chat)
    return SentencePieceTokenizer(content, config.tokenizer, own)


def ends_of_text(config: DataConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a generated text: EOS, and the end tokens that the tokenizer's released model names.

    The model names them in ``config.json`` and ``generation_config.json`` in the folder of ``tokenizer.json``, or in
    the metadata of its GGUF file: a chat model ends its turn with a special token.
    """
    found = {tokenizer.eos}
    for ends in _named_ends(config):
        found |= {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    return frozenset(found)


def _named_ends(config: DataConfig) -> Iterator[Any]:
    """The values of ``eos_token_id`` that the files of the tokenizer's model hold."""
    if config.tokenizer.endswith(".gguf"):
        yield _gguf(config).values.get("eos_token_id")
    if config.tokenizer.endswith("tokenizer.json"):
        system, path = _open(config)
        for name in ("config.json", "generation_config.json"):
            location = posixpath.join(posixpath.dirname(path), name)
            if system.isfile(location):
                yield _read_json(system.cat_file(location), location).get("eos_token_id")


def _gguf(config: DataConfig) -> Any:
    from posjax.nn.huggingface.gguf import GGUF  # imports flax, which other tokenizers do not need
    from posjax.nn.huggingface.hub import file_on_disk

    return GGUF(file_on_disk(config.tokenizer))


def _open(config: DataConfig) -> tuple[Any, str]:
    """The file system of ``data.tokenizer`` and the path in it; that of a model at the hub is downloaded first."""
    system, path = open_url(config.tokenizer, "data.tokenizer")
    if is_url(config.tokenizer) or system.isfile(path):
        return system, path
    from posjax.nn.huggingface.hub import file_on_disk  # imports flax, which other tokenizers do not need

    return open_url(file_on_disk(config.tokenizer), "data.tokenizer")


def token_type(vocabulary_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16, or uint32 from 65,537 ids on."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


class Specials(NamedTuple):
    """The ids of the special tokens, and how many ids there are with them."""

    bos: int
    eos: int
    mask: int
    padding: int
    vocabulary_size: int


def specials_of(size: int, found: dict[str, int], own: bool) -> Specials:
    """Special ids as `found`. If `own`, no new ones: the end of a document replaces missing ones, so without a mask
    token ``mask`` equals ``eos``. Else missing ones are added after `size` ids, in the order of `_ROLES`.

    Raises ValueError for `own` without an end of a document.
    """
    lacking = [role for role in _ROLES if role not in found]
    if not own:
        added = {role: size + index for index, role in enumerate(lacking)}
        return Specials(**found, **added, vocabulary_size=size + len(lacking))
    check(
        not found.keys().isdisjoint(("eos", "bos")),
        "data.special_tokens: the tokenizer has neither bos nor eos of its own; 'added' would work",
    )
    return Specials(**dict.fromkeys(lacking, found.get("eos", found.get("bos"))), **found, vocabulary_size=size)


class ByteTokenizer(Tokenizer):
    """Bytes as tokens: ids 0 to 255 are the bytes themselves, 256 to 259 the four special tokens."""

    def __init__(self):
        super().__init__(256, {}, b"", own=False, begins=True)
        self.identity = "bytes"

    def _ids(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def _text(self, ids: list[int]) -> bytes:
        return bytes(ids)


def _words(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. Its special tokens are those declared by files in the same folder, else tokens with common
    names.

    It begins texts with BOS if its post-processor does, as in transformers. `chat` reads its files for conversations.
    """

    def __init__(
        self,
        content: bytes,
        declared: dict[str, str | int],
        path: str,
        own: bool = False,
        chat: Callable[[], ChatFiles] | None = None,
    ):
        self._read_chat = chat
        library = optional("tokenizers", "data.tokenizer with a tokenizer.json")
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises no narrower class
            reason = in_a_line(error)
            raise ValueError(f"data.tokenizer: {path} is not a tokenizer.json of Hugging Face: {reason}") from None
        # The tokenizer must not truncate or pad rows, and "<s>" in a text is plain text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        found = self._find(vocabulary, declared)
        begins = self._tokenizer.encode("a").ids[:1] == [found.get("bos")]
        super().__init__(max(vocabulary.values()) + 1, found, content, own, begins)
        self._all_special = frozenset(vocabulary[name] for name in self._special_tokens())
        self.encoded_size = 1 + max({*vocabulary.values()} - self._all_special | {*self._specials[:4]})

    @property
    def special(self) -> frozenset[int]:
        """The ids of the special tokens, also those without a role of the four."""
        return super().special | self._all_special

    def _special_tokens(self) -> set[str]:
        return {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}

    def _find(self, vocabulary: dict[str, int], declared: dict[str, str | int]) -> dict[str, int]:
        special = self._special_tokens()
        found = {}
        for role, names in _COMMON_NAMES.items():
            common = next((name for name in names if name in special), None)
            name = declared.get(role, common)
            if name in vocabulary:
                found[role] = vocabulary[name]
            elif name in vocabulary.values():
                found[role] = name
        return found

    def _ids(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        words = [_words(text) for text in texts]
        return [found.ids for found in self._tokenizer.encode_batch_fast(words, add_special_tokens=False)]

    @cached_property
    def chat(self) -> ChatTemplate:
        """The template of conversations; see `Tokenizer`."""
        if self._read_chat is None:
            return super().chat
        files = self._read_chat()
        return ChatTemplate(files.templates, files.specials, sorted(self._special_tokens()))

    def encode_conversations(self, conversations: Sequence[Rendered]) -> list[Int32[np.ndarray, "_"]]:
        """The tokens of conversations; see `Tokenizer`."""
        texts = [conversation.text for conversation in conversations]
        with self._spelt_out():
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [_of_turns(each, text.turns) for each, text in zip(encoded, conversations, strict=True)]

    def _prompt_ids(self, text: bytes) -> Sequence[int]:
        with self._spelt_out():
            return self._ids([text])[0]

    @contextmanager
    def _spelt_out(self) -> Iterator[None]:
        """Recognises special tokens that are spelled out in a text."""
        self._tokenizer.encode_special_tokens = False
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = True

    def _text(self, ids: list[int]) -> bytes:
        return self._tokenizer.decode(ids, skip_special_tokens=False).encode()


def _of_turns(encoding: Any, turns: Sequence[tuple[int, int]]) -> Int32[np.ndarray, "_"]:
    """The tokens of an encoded conversation; learned are those of which a character is in a turn."""
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    learned = np.zeros(len(begins), bool)
    for first, stop in turns:
        learned |= (begins < stop) & (ends > first)
    return marked(np.array(encoding.ids, np.int64), learned)


def _chat_files(config: DataConfig, beside: Callable[[], tuple[dict[str, Any], dict[str, str]]]) -> ChatFiles:
    """The chat template of ``data.chat_template``, or those beside a tokenizer, and the special tokens' words.

    `beside` gives what ``tokenizer_config.json`` says, and templates in files of their own, which go before its own.

    Raises FileNotFoundError for a file that is not there, and ValueError if there is no template.
    """
    values, files = beside()
    templates = files or named_templates(values.get("chat_template"))
    if config.chat_template:
        system, path = open_url(config.chat_template, "data.chat_template")
        if not system.isfile(path):
            raise FileNotFoundError(f"data.chat_template: no file {config.chat_template!r}")
        templates = {"default": _words(system.cat_file(path))}
    lacks = f"data.messages_key: {config.tokenizer} has no chat template; name a file with one by data.chat_template"
    check(bool(templates), lacks)
    return ChatFiles(templates, words_of(values))


def _beside(system: Any, folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What the files beside a ``tokenizer.json`` say, as `_chat_files` takes it."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = f"{folder}/{name}"
        values |= _read_json(system.cat_file(path), path) if system.isfile(path) else {}
    found = {"default": f"{folder}/chat_template.jinja"}
    found |= {posixpath.basename(path).removesuffix(".jinja"): path for path in _further_templates(system, folder)}
    return values, {name: _words(system.cat_file(path)) for name, path in found.items() if system.isfile(path)}


def _further_templates(system: Any, folder: str) -> list[str]:
    further = f"{folder}/additional_chat_templates"
    return sorted(system.glob(f"{further}/*.jinja")) if system.isdir(further) else []


def _declared(system: Any, folder: str) -> dict[str, str | int]:
    """The special tokens that tokenizer_config.json, or else special_tokens_map.json, in a folder names.

    Without either file, those of the model's config.json in the folder, which are ids.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        path = f"{folder}/{name}"
        if system.isfile(path):
            return _named(_read_json(system.cat_file(path), path), "token_id" if name == "config.json" else "token")
    return {}


def _named(values: dict[str, Any], ending: str = "token") -> dict[str, str | int]:
    """The special tokens of a configuration, by role: words, or ids; of several the first."""
    found = {}
    for role, name in {"bos": "bos", "eos": "eos", "mask": "mask", "padding": "pad"}.items():
        token = values.get(f"{name}_{ending}")
        if isinstance(token, dict):
            token = token.get("content")
        elif isinstance(token, list):
            token = next(iter(token), None)
        if type(token) is int or (isinstance(token, str) and token):
            found[role] = token
    return found


def _read_json(content: bytes, path: str) -> dict[str, Any]:
    check_no_pointer(content, f"data.tokenizer: {path}")
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {path} beside it is not valid JSON: {error}") from None
    return values if isinstance(values, dict) else {}


class SentencePieceTokenizer(Tokenizer):
    """A .model of SentencePiece, with the special tokens it defines."""

    def __init__(self, content: bytes, path: str, own: bool = False):
        library = optional("sentencepiece", "data.tokenizer with a .model")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
            size = self._model.vocab_size()
        except RuntimeError:
            size = 0
        if not size:  # an empty file loads without an error
            raise ValueError(f"data.tokenizer: {path} is not a .model of SentencePiece")
        found = self._find()
        super().__init__(size, found, content, own, begins="bos" in found)

    def _find(self) -> dict[str, int]:
        model = self._model
        found = {"bos": model.bos_id(), "eos": model.eos_id(), "padding": model.pad_id()}
        masks = [model.piece_to_id(name) for name in _COMMON_NAMES["mask"]]
        found["mask"] = next((index for index in masks if not model.is_unknown(index)), -1)
        return {role: index for role, index in found.items() if index >= 0}

    def _ids(self, texts: Sequence[bytes]) -> list[Sequence[int]]:
        return self._model.encode([_words(text) for text in texts], out_type=int)

    def _text(self, ids: list[int]) -> bytes:
        return self._model.decode(ids).encode()
