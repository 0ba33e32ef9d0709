"""GGUF files of every architecture that can be read, written as llama.cpp's converter writes random models of
transformers."""

import io
import json

import jax
import numpy as np
import pytest
from nn.huggingface import released
from nn.huggingface.theirs import assert_close, logits, random_model, torch, transformers
from refusals import refused

from posjax import rotary
from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface import read_config
from posjax.nn.huggingface.gguf import GGUF
from posjax.nn.huggingface.gguf_architectures import ARCHITECTURES
from posjax.nn.huggingface.load import read_values

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
]

TINY = released.LLAMA | {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}
SMALL = TINY | {"num_hidden_layers": 7, "tie_word_embeddings": True, "sliding_window": 5}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GEMMA3 = {"model_type": "gemma3_text", "query_pre_attn_scalar": 12}
BASES = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
BASES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
FARTHER = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
MODELS = {
    "gemma3": ("gemma3", SMALL | GEMMA3 | {"rope_parameters": BASES}),
    "gemma3-4b": ("gemma3", SMALL | GEMMA3 | {"rope_parameters": BASES | FARTHER}),
    "qwen2": ("qwen2", TINY | {"model_type": "qwen2", "head_dim": 16, "rope_parameters": released.rope(1e6)}),
    "qwen3": (
        "qwen3",
        TINY | {"model_type": "qwen3", "tie_word_embeddings": True, "rope_parameters": released.rope(1e6)},
    ),
    "llama-3.1": ("llama", TINY | {"model_type": "llama", "head_dim": 32, "rope_parameters": LLAMA3 | {"factor": 8.0}}),
    "llama-3.2": (
        "llama",
        TINY | {"model_type": "llama", "head_dim": 64, "rope_parameters": LLAMA3 | {"factor": 32.0}},
    ),
}
# The first tokens are the special ones; the length is above the windows.
TOKENS = np.random.default_rng(1).integers(3, released.VOCAB, (2, 24))


def pairs(rows, heads):
    """The rows of queries and keys in llama.cpp's order for Llama: halves become pairs."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def converted(architecture, name, tensor, config):
    """A tensor as the converter stores it."""
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    count = next((count for end, count in heads.items() if name.endswith(end)), None)
    if architecture == "llama" and count:
        return pairs(tensor, count)
    return tensor + 1 if architecture == "gemma3" and name.endswith("norm.weight") else tensor


def llama3_divisors(rope, size):
    """Llama 3's rule in float32, as a list of what the frequencies are divided by (Meta, 2024)."""
    length, low, high = (
        rope[f"{key}"] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    divisors = []
    for wavelength in (2 * np.pi / frequencies).tolist():
        smooth = (length / wavelength - low) / (high - low)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        if wavelength < length / high:
            divisors[-1] = 1
        if wavelength > length / low:
            divisors[-1] = rope["factor"]
    return np.array(divisors, np.float32)


def write(path, architecture, model, more=None, edit=lambda writer: None):
    """Writes a model of transformers into a file."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = converted(architecture, name, tensor.numpy(), config)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(stored))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim))
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_architecture_has_a_model():
    assert {architecture for architecture, _ in MODELS.values()} == {*ARCHITECTURES}


@pytest.mark.parametrize(
    "name", [each if each == "gemma3" else pytest.param(each, marks=pytest.mark.wide) for each in MODELS]
)
def test_logits_are_those_of_the_model_that_was_written(name, tmp_path):
    architecture, values = MODELS[name]
    model = random_model(values)
    write(tmp_path / "tiny.gguf", architecture, model)
    found = from_pretrained(tmp_path / "tiny.gguf")
    wanted = logits(model, TOKENS)
    assert_close(np.asarray(jax.jit(lambda tokens: found(tokens))(TOKENS)), wanted)
    save_pretrained(found, tmp_path / "folder")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert_close(logits(again, TOKENS), wanted)


# --- frequencies in a tensor ------------------------------------------------------------------------------------------


def rule_of(path):
    return read_config(read_values(path)).scheme.features.frequencies


def plain_llama(**changes):
    return random_model(TINY | {"model_type": "llama", "head_dim": 32, "rope_parameters": released.rope(5e5)} | changes)


@pytest.mark.wide
@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_rule_of_llama_3_is_recovered_from_its_divisors(factor, base, size, tmp_path):
    divisors = llama3_divisors(LLAMA3 | {"factor": factor, "rope_theta": base}, size)
    model = plain_llama(head_dim=size, rope_parameters=released.rope(base))
    write(tmp_path / "tiny.gguf", "llama", model, {"rope_freqs.weight": divisors})
    assert rule_of(tmp_path / "tiny.gguf") == rotary.Llama3(factor, 8192, base=base)


@pytest.mark.wide
def test_divisors_of_no_rule_are_kept(tmp_path):
    """They are a model of their own, which transformers reads back from the folder with the same logits."""
    divisors = np.linspace(1, 3, 16, dtype=np.float32)
    model = plain_llama()
    write(tmp_path / "tiny.gguf", "llama", model, {"rope_freqs.weight": divisors})
    found = from_pretrained(tmp_path / "tiny.gguf")
    rule = rule_of(tmp_path / "tiny.gguf")
    np.testing.assert_allclose([rule.short_factor, rule.long_factor], [divisors, divisors], rtol=1e-6)
    save_pretrained(found, tmp_path / "folder")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert_close(np.asarray(jax.jit(lambda tokens: found(tokens))(TOKENS)), logits(again, TOKENS))


@pytest.mark.wide
def test_divisors_of_one_divide_nothing(tmp_path):
    write(tmp_path / "tiny.gguf", "llama", plain_llama(), {"rope_freqs.weight": np.ones(16, np.float32)})
    assert rule_of(tmp_path / "tiny.gguf") == rotary.Plain(base=5e5)


@pytest.mark.wide
@pytest.mark.parametrize("divisors", [np.ones(9), np.zeros(16), np.full(16, np.nan)], ids=["count", "zero", "nan"])
def test_other_divisors_are_refused(divisors, tmp_path):
    write(tmp_path / "tiny.gguf", "llama", plain_llama(), {"rope_freqs.weight": divisors.astype(np.float32)})
    refused("rope_freqs.weight", lambda: from_pretrained(tmp_path / "tiny.gguf"))


@pytest.mark.wide
def test_two_scalings_are_refused(tmp_path):
    def edit(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    more = {"rope_freqs.weight": np.full(16, 2, np.float32)}
    write(tmp_path / "tiny.gguf", "llama", plain_llama(), more, edit)
    refused("llama.rope.scaling.type", lambda: from_pretrained(tmp_path / "tiny.gguf"))


# --- what a file of Gemma 3 says, and what it leaves to its reader ----------------------------------------------------

LOCAL, WHOLE = "sliding_attention", "full_attention"


def gemma3_values(tmp_path, edit=lambda writer: None, **changes):
    """The values of a file whose model has the given changes; its tensors are not read."""
    write(tmp_path / "tiny.gguf", "gemma3", random_model(MODELS["gemma3"][1] | changes), edit=edit)
    return read_values(tmp_path / "tiny.gguf")


@pytest.mark.wide
def test_the_layers_with_windows_of_gemma_3(tmp_path):
    kinds = {
        "left out": (lambda writer: None, [LOCAL] * 5 + [WHOLE, LOCAL]),
        "every third": (lambda writer: writer.add_uint32("gemma3.attention.sliding_window_pattern", 3), None),
        "by layer": (
            lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", [True, False] * 3 + [True]),
            [LOCAL, WHOLE] * 3 + [LOCAL],
        ),
        "none": (lambda writer: writer.kv_data[0].pop("gemma3.attention.sliding_window"), [WHOLE] * 7),
    }
    for name, (edit, types) in kinds.items():
        config = read_config(gemma3_values(tmp_path, edit))
        found = [WHOLE if scheme.mask is None else LOCAL for scheme in config.layers.schemes]
        assert found == (types or [LOCAL, LOCAL, WHOLE] * 2 + [LOCAL]), name


@pytest.mark.wide
def test_the_base_of_windows_and_the_width_that_scales_queries(tmp_path):
    edit = lambda writer: writer.add_float32("gemma3.rope.freq_base_swa", 5e3)  # noqa: E731
    assert gemma3_values(tmp_path, edit)["rope_local_base_freq"] == 5e3
    values = gemma3_values(tmp_path)
    assert (values["rope_local_base_freq"], values["query_pre_attn_scalar"]) == (1e4, 12.0)
    large = gemma3_values(tmp_path, num_hidden_layers=62)  # Gemma 3 27B
    assert large["query_pre_attn_scalar"] == 64 / 4


# --- tokenizers -------------------------------------------------------------------------------------------------------

TEXTS = [
    "numbers 12345 and 3.14, 007",
    "It's we'll they've I'm SHOUTING'S",
    "caf\u00e9 and cafe\u0301, na\u00efve",
    "def f(x):\n    return  x  # tab\there\n\n\n   \r\n",
    "emoji \U0001f642\U0001f469\u200d\U0001f4bb and \u6f22\u5b57, \u0639\u0631\u0628\u064a",
    " leading and  double   spaces ",
    "    ",
]


def tokenizer_of(path):
    return tokenizers.Tokenizer.from_str(GGUF(path).tokenizer_files()["tokenizer.json"])


@pytest.mark.wide
def test_ids_are_those_of_qwen_in_transformers(tmp_path):
    """The file fills the vocabulary up with unused tokens, which a text never has."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(TEXTS * 9, trainer)
    parts = json.loads(model.to_str())["model"]
    end, unused = "<|endoftext|>", "[PAD7]"
    tokens = [*sorted(parts["vocab"], key=parts["vocab"].get), end, unused]
    merges = [tuple(pair) for pair in parts["merges"]]
    wanted = transformers.Qwen2Tokenizer(parts["vocab"] | {end: len(tokens) - 2}, merges)

    def edit(writer):
        kinds = gguf.TokenType
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.NORMAL] * len(parts["vocab"]) + [kinds.CONTROL, kinds.UNUSED])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_eos_token_id(len(tokens) - 2)
        writer.add_add_bos_token(False)

    write(tmp_path / "tiny.gguf", "qwen2", random_model(MODELS["qwen2"][1]), edit=edit)
    found = tokenizer_of(tmp_path / "tiny.gguf")
    for text in [*TEXTS, f"one{end}two", f"one {unused} two"]:
        assert found.encode(text).ids == wanted(text)["input_ids"], text


@pytest.mark.wide
def test_ids_are_those_of_sentencepiece_with_tokens_of_its_user(tmp_path):
    """The tokenizer of Gemma: runs of spaces and line breaks are tokens, which a file stores as they are in texts."""
    library = pytest.importorskip("sentencepiece")
    content = io.BytesIO()
    user = ["\n", "\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>", "</table>"]
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n") if line] * 20),
        model_writer=content,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=user,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = library.SentencePieceProcessor(model_proto=content.getvalue())
    token_ids, kinds = range(model.vocab_size()), gguf.TokenType
    pieces = [model.id_to_piece(n) for n in token_ids]
    types = [kinds.BYTE if model.is_byte(n) else kinds.NORMAL for n in token_ids]
    types = [kinds.USER_DEFINED if piece in user else kind for piece, kind in zip(pieces, types, strict=True)]
    types[0], types[model.bos_id()], types[model.eos_id()] = kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL
    stored = [piece.replace("\u2581", " ") if piece in user else piece for piece in pieces]

    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(stored)
        writer.add_token_scores([-1000.0 if piece in user else model.get_score(n) for n, piece in enumerate(pieces)])
        writer.add_token_types(types)
        writer.add_add_space_prefix(False)
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_add_bos_token(True)

    write(tmp_path / "tiny.gguf", "gemma3", random_model(MODELS["gemma3"][1]), edit=edit)
    found = tokenizer_of(tmp_path / "tiny.gguf")
    for text in [*TEXTS, "a" + " " * 7 + "b", "\n" * 8 + " x", "<table>1</table>", "<tables>"]:
        ids = model.encode(text)
        assert found.encode(text).ids == [model.bos_id(), *ids], text
        assert found.decode(ids, skip_special_tokens=False) == model.decode(ids) == text
