"""The tokenizer of a GGUF file as a ``tokenizer.json``: byte-level BPE, or the BPE of SentencePiece."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from posjax._checks import check, check_choice, describe

# The pre-tokenizers of a tokenizer.json by llama.cpp's names: how text is split before BPE merges pairs.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> dict[str, Any]:
    """Words by a pattern, then bytes as letters."""
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [words, _BYTES | {"use_regex": False}]}


_SPLITS = {
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Splits after which BPE keeps a word that is in the vocabulary, without merges."""
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6
_SPACE = "▁"

Get = Callable[[str], Any]


def tokenizer_files(get: Get) -> dict[str, str]:
    """``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        get: the value of a key of the file's metadata, or None.

    Raises:
        ValueError: for another kind of tokenizer, an unsupported split of words, and lists that do not fit each other.
    """
    kind = get("tokenizer.ggml.model")
    check_choice("tokenizer.ggml.model", kind, tuple(_KINDS))
    tokens = _list(get, "tokens")
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(get, tokens),
        "post_processor": _added_around(get, tokens, kind),
        **_KINDS[kind](get, tokens),
    }
    return {
        "tokenizer.json": json.dumps(whole, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_special(get, tokens), ensure_ascii=False, indent=2),
    }


def _list(get: Get, key: str, count: int | None = None) -> list[Any]:
    """A list of the metadata, of so many values if that is given."""
    found = get(f"tokenizer.ggml.{key}")
    fits = isinstance(found, list) and count in (None, len(found))
    wanted = "a list" if count is None else f"a list of {count}"
    check(fits, f"tokenizer.ggml.{key} must be {wanted}, found {describe(found)}")
    return found


def _types(get: Get, tokens: Sequence[str]) -> list[int]:
    """The type of every token; all are normal in a file that does not say."""
    unsaid = get("tokenizer.ggml.token_type") is None
    return [_NORMAL] * len(tokens) if unsaid else _list(get, "token_type", len(tokens))


def _id(get: Get, name: str, tokens: Sequence[str]) -> int | None:
    """The number of a special token, or None."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = get(key)
    fits = found is None or (isinstance(found, int) and 0 <= found < len(tokens))
    check(fits, f"{key} must be one of {len(tokens)} tokens, found {describe(found)}")
    return found


def _byte_level(get: Get, tokens: Sequence[str]) -> dict[str, Any]:
    """BPE over bytes that are written as letters, as in GPT-2."""
    split = get("tokenizer.ggml.pre")
    check_choice("tokenizer.ggml.pre", split, tuple(_SPLITS))
    merges = [merge.split(" ") for merge in _list(get, "merges")]
    return {
        "normalizer": _NORMALIZERS.get(split),
        "pre_tokenizer": _SPLITS[split],
        "decoder": _BYTES,
        "model": _bpe(tokens, merges, ignore_merges=split in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece(get: Get, tokens: Sequence[str]) -> dict[str, Any]:
    """BPE over characters, with spaces as U+2581 and bytes for characters not in the vocabulary, as in Llama 2."""
    first = [] if get("tokenizer.ggml.add_space_prefix") is False else [{"type": "Prepend", "prepend": _SPACE}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if first else []
    types = _types(get, tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(tokens, _list(get, "scores", len(tokens)))
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types),
    }


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""The parts of a tokenizer.json that depend on the kind, by llama.cpp's names."""


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """The pairs that SentencePiece would merge: pairs whose concatenation is a token, by its score, best first."""
    ids = {token: n for n, token in enumerate(tokens)}
    pairs = [
        (-score, ids[token[:cut]], ids[token[cut:]])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [[tokens[left], tokens[right]] for _, left, right in sorted(pairs)]


def _bpe(tokens: Sequence[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {**fixed, **usual, **options, "vocab": {token: n for n, token in enumerate(tokens)}, "merges": merges}


def _added(get: Get, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Special tokens, and tokens that are never split."""
    types = _types(get, tokens)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": n, "content": token, "special": kind in (_CONTROL, _UNKNOWN)} | flags
        for n, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in (_NORMAL, _UNUSED, _BYTE)
    ]


def _special(get: Get, tokens: Sequence[str]) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {key: _id(get, ours, tokens) for ours, key in names.items()}
    tokenizer_config = {key: tokens[n] for key, n in ids.items() if n is not None}
    template = get("tokenizer.chat_template")
    tokenizer_config |= {"chat_template": template} if template else {}
    return tokenizer_config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def _added_around(get: Get, tokens: Sequence[str], kind: str) -> dict[str, Any] | None:
    """The tokens before and after every text, or None.

    As in llama.cpp, BOS is added before texts of SentencePiece and Llama 3 unless the metadata says otherwise.
    """
    usual = {"bos": kind == "llama" or get("tokenizer.ggml.pre") == "llama-bpe", "eos": False}
    ids = {name: _id(get, name, tokens) for name in usual}
    asked = {name: get(f"tokenizer.ggml.add_{name}_token") for name in usual}
    wanted = {name: usual[name] if asked[name] is None else asked[name] for name in usual}
    added = {name: n for name, n in ids.items() if n is not None and wanted[name]}
    if not added:
        return None
    special = {name: [{"SpecialToken": {"id": tokens[n], "type_id": 0}}] for name, n in added.items()}
    single = [*special.get("bos", []), {"Sequence": {"id": "A", "type_id": 0}}, *special.get("eos", [])]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in added.values()},
    }
