"""GGUF files as llama.cpp writes them: tensors, metadata and tokenizers, against their sources and other libraries."""

import io
import json
import random

import jax
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from refusals import refused

from posjax import rotary
from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface import read_config
from posjax.nn.huggingface.gguf import GGUF
from posjax.nn.huggingface.load import read_values
from train.config import DataConfig
from train.data.tokenizer import ends_of_text, load_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.parity

F32, Q8, Q4 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_1"))
VALUES = {key: value for key, value in released.LLAMA.items() if key != "head_dim"} | {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
PLAIN = released.tensor_shapes(VALUES)
TOKENS = np.random.default_rng(0).integers(3, released.VOCAB, (2, 24))
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, VALUES["num_hidden_layers"])


def pairs(rows, heads):
    """The rows of queries and keys as llama.cpp's convert_hf_to_gguf.py orders them: halves become pairs."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def random_tensors(values):
    """The tensors of a random model by their names in safetensors."""
    shapes = PLAIN if values is VALUES else released.tensor_shapes(values)
    draw = np.random.default_rng(0)
    return {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def stored(tensor, kind):
    """The content of a tensor in a format, the format, and the decoded values; vectors are always float32."""
    if kind == F32 or tensor.ndim == 1:
        return tensor, F32, tensor
    packed = gguf.quants.quantize(tensor, kind)
    return packed, kind, gguf.quants.dequantize(packed, kind)


def write(path, values=VALUES, tensors=None, kind=F32, more=None, edit=lambda writer: None, architecture="llama"):
    """Writes a file as llama.cpp does; returns the decoded values of its tensors by their names in safetensors."""
    writer, held, tensors = gguf.GGUFWriter(path, architecture), {}, tensors or random_tensors(values)
    writer.add_name("tiny")
    heads = {"q_proj": values["num_attention_heads"], "k_proj": values["num_key_value_heads"]}
    writer.add_vocab_size(values["vocab_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_rope_dimension_count(values.get("head_dim", values["hidden_size"] // heads["q_proj"]))
    if "head_dim" in values:
        writer.add_key_length(values["head_dim"])
    for name, tensor in tensors.items():
        head_count = next((count for part, count in heads.items() if part in name), None)
        content, raw, held[name] = stored(tensor, kind)
        content = content if head_count is None else pairs(content, head_count)
        writer.add_tensor(NAMES.get_name(name, (".weight",)), np.ascontiguousarray(content), raw_dtype=raw)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, wanted)))


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"), [(F32, {}), (Q8, {"tie_word_embeddings": True, "head_dim": 24}), (Q4, {})]
)
def test_a_file_is_read_as_the_model_of_its_values(kind, changes, tmp_path):
    values = VALUES | changes
    held = write(tmp_path / "tiny.gguf", values, kind=kind)
    found = from_pretrained(tmp_path / "tiny.gguf")
    released.write_config(tmp_path, values)
    released.write_tensors(tmp_path, held)
    wanted = from_pretrained(tmp_path)
    assert found.config == wanted.config
    assert_same(found, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet_transformers")
def test_logits_are_those_of_transformers(tmp_path):
    """transformers reads the file itself, which it dequantises, and the safetensors that are written back."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    write(tmp_path / "tiny.gguf", kind=Q8)
    decoder = from_pretrained(tmp_path / "tiny.gguf")
    save_pretrained(decoder, tmp_path / "folder")
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs = read(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32), read(tmp_path / "folder")
    found = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(decoder, TOKENS))
    for model in theirs:
        with torch.no_grad():
            wanted = model.eval()(torch.tensor(TOKENS)).logits.numpy()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_parameters_of_a_quantised_file_are_float32_also_on_a_mesh(tmp_path):
    write(tmp_path / "tiny.gguf", kind=Q8)
    whole = from_pretrained(tmp_path / "tiny.gguf", dtype=None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(released.parameters(whole))} == {"float32"}
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    names = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}

    def sharding(axes, shape):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*map(names.get, axes)))

    assert_same(from_pretrained(tmp_path / "tiny.gguf", sharding=sharding), whole)


# --- metadata ---------------------------------------------------------------------------------------------------------


def scaled(kind, factor=None, original=None):
    def edit(writer):
        writer.add_rope_scaling_type(kind)
        if factor is not None:
            writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    return edit


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (lambda writer: None, rotary.Plain(base=5e4)),
        (scaled(gguf.RopeScalingType.NONE), rotary.Plain(base=5e4)),
        (scaled(gguf.RopeScalingType.LINEAR, 4.0), rotary.Linear(4.0, base=5e4)),
        (scaled(gguf.RopeScalingType.YARN, 4.0, 32), rotary.YaRN(4.0, 32, base=5e4)),
    ],
    ids=["left out", "none", "linear", "yarn"],
)
def test_frequency_rules(edit, rule, tmp_path):
    write(tmp_path / "tiny.gguf", edit=edit)
    assert read_config(read_values(tmp_path / "tiny.gguf")).scheme.features.frequencies == rule


def test_numbers_of_the_metadata_are_those_that_were_written(tmp_path):
    """A file holds float32: 1e-5 is stored as 9.999999747378752e-06 and is read as 1e-5."""

    def edit(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    write(tmp_path / "tiny.gguf", edit=edit)
    values = read_values(tmp_path / "tiny.gguf")
    wanted = {key: VALUES[key] for key in VALUES if key not in ("initializer_range", "pad_token_id")}
    assert values == wanted | {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 16}


# --- tokenizers -------------------------------------------------------------------------------------------------------

TEXTS = [
    "the cat sat on the mat",
    " leading and  double   spaces ",
    "numbers 12345 and 3.14, 007",
    "It's we'll they've I'm",
    "naïve café / 日本語 🙂 \n\n\ttabs\r\n",
    "<|im_start|>user\nHi<|im_end|>",
    "code: for(i=0;i<10;i++){}",
    "",
]
LLAMA_3 = (  # of Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]


def trained(split):
    """A byte-level BPE tokenizer of 400 tokens with the given split of words."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    # Its merges join digits, so a split that separates digits gives other ids.
    model.pre_tokenizer = byte_level
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([*TEXTS, "the cat and 1234 cats sat there in 2024 and 12 or 123 more"] * 9, trainer)
    if split == "smollm":
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    if split == "llama-bpe":
        words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
        letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, letters])
    return model


def with_tokenizer(model, split, **flags):
    """The function that writes a tokenizer into a file."""
    parts = json.loads(model.to_str())["model"]

    def edit(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(list(parts["vocab"]))
        kinds = gguf.TokenType
        writer.add_token_types([kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in parts["vocab"]])
        writer.add_token_merges([" ".join(pair) for pair in parts["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for name, value in flags.items():
            getattr(writer, name)(value)

    return edit


def tokenizer_of(path):
    return tokenizers.Tokenizer.from_str(GGUF(path).tokenizer_files()["tokenizer.json"])


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe"])
def test_ids_are_those_of_the_tokenizer_that_was_written(split, tmp_path):
    model = trained(split)
    write(tmp_path / "tiny.gguf", edit=with_tokenizer(model, split))
    found = tokenizer_of(tmp_path / "tiny.gguf")
    assert found.get_vocab() == model.get_vocab()
    for text in TEXTS:
        ids = model.encode(text).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == text
    assert found.encode(TEXTS[0]).ids[:1] == ([1] if split == "llama-bpe" else model.encode(TEXTS[0]).ids[:1])


def test_llama_3_keeps_words_of_its_vocabulary_whole(tmp_path):
    """Its vocabulary also has words that merges alone do not form."""
    model = trained("llama-bpe")
    merges = [" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]

    def with_one_merge(writer):
        with_tokenizer(model, "llama-bpe")(writer)
        writer.kv_data[0].pop("tokenizer.ggml.merges")
        writer.add_token_merges(merges[:1])

    write(tmp_path / "tiny.gguf", edit=with_one_merge)
    found = tokenizer_of(tmp_path / "tiny.gguf")
    for words in ("the", " cat", " sat"):
        ids = model.encode(words).ids
        assert found.encode(words, add_special_tokens=False).ids == ids
        assert len(ids) == 1


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_those_of_sentencepiece(prefix, tmp_path):
    """The tokenizer of Llama 2 and Mistral: merges by score, and bytes for characters outside the vocabulary."""
    library = pytest.importorskip("sentencepiece")
    content = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text] * 20),
        model_writer=content,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    model = library.SentencePieceProcessor(model_proto=content.getvalue())
    token_ids, kinds = range(model.vocab_size()), gguf.TokenType
    special = {0: kinds.UNKNOWN, model.bos_id(): kinds.CONTROL, model.eos_id(): kinds.CONTROL}
    types = [special.get(n, kinds.BYTE if model.is_byte(n) else kinds.NORMAL) for n in token_ids]

    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([model.id_to_piece(n) for n in token_ids])
        writer.add_token_scores([model.get_score(n) for n in token_ids])
        writer.add_token_types(types)
        writer.add_add_space_prefix(prefix)
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())

    write(tmp_path / "tiny.gguf", edit=edit)
    found = tokenizer_of(tmp_path / "tiny.gguf")
    # Random letters: where two merges compete for one letter, their order decides.
    scrambled = "".join(random.Random(0).choices("abdeilnorst", k=2_000))
    for text in [text for text in TEXTS if text] + ["Ω and ß are not in it: 漢字", scrambled]:
        ids = model.encode(text)
        assert found.encode(text).ids == [model.bos_id(), *ids], text
        assert found.decode(ids, skip_special_tokens=False) == model.decode(ids) == text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet_transformers")
def test_transformers_reads_the_tokenizer_that_goes_with_a_model(tmp_path):
    transformers, model = pytest.importorskip("transformers"), trained("smollm")
    write(tmp_path / "tiny.gguf", edit=with_tokenizer(model, "smollm"))
    save_pretrained(from_pretrained(tmp_path / "tiny.gguf"), tmp_path / "folder", like=tmp_path / "tiny.gguf")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in TEXTS:
        assert found(text)["input_ids"] == model.encode(text).ids, text
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)
    assert found.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"


@pytest.mark.parametrize(("turn", "ends"), [(None, {2}), (2, {2}), (9, {2, 9})])
def test_a_text_ends_with_the_end_of_a_turn_too(turn, ends, tmp_path):
    flags = {} if turn is None else {"add_eot_token_id": turn}
    write(tmp_path / "tiny.gguf", edit=with_tokenizer(trained("smollm"), "smollm", **flags))
    data = DataConfig(tokenizer=str(tmp_path / "tiny.gguf"), special_tokens="own")
    assert ends_of_text(data, load_tokenizer(data)) == ends


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True)])
def test_tokens_that_are_added_to_every_text(first, last, tmp_path):
    model = trained("smollm")
    edit = with_tokenizer(model, "smollm", add_add_bos_token=first, add_add_eos_token=last)
    write(tmp_path / "tiny.gguf", edit=edit)
    found = tokenizer_of(tmp_path / "tiny.gguf")
    plain = model.encode(TEXTS[0]).ids
    assert found.encode(TEXTS[0]).ids == [1] * first + plain + [2] * last
    assert found.encode(TEXTS[0], add_special_tokens=False).ids == plain


# --- refusals ---------------------------------------------------------------------------------------------------------


def without(key):
    return lambda writer: writer.kv_data[0].pop(key)


def partly_rotated(writer):
    without("llama.rope.dimension_count")(writer)
    writer.add_rope_dimension_count(8)


def heads_by_layer(writer):
    without("llama.attention.head_count")(writer)
    writer.add_head_count([4, 4])


REFUSED = [
    ("architecture", {"architecture": "mamba"}),
    ("mixture of experts", {"edit": lambda writer: writer.add_expert_count(8)}),
    ("rope_freqs.weight", {"more": {"rope_freqs.weight": np.ones(9, np.float32)}}),
    ("llama.rope.scaling.type", {"edit": scaled(gguf.RopeScalingType.LONGROPE)}),
    ("llama.rope.scaling.attn_factor", {"edit": lambda writer: writer.add_rope_scaling_attn_factors(1.5)}),
    ("llama.rope.scale_linear", {"edit": lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0)}),
    ("llama.rope.dimension_count", {"edit": partly_rotated}),
    ("llama.attention.sliding_window", {"edit": lambda writer: writer.add_sliding_window(9)}),
    ("llama.logit_scale", {"edit": lambda writer: writer.add_logit_scale(0.5)}),
    ("llama.attention.head_count", {"edit": without("llama.attention.head_count")}),
    ("llama.attention.head_count", {"edit": heads_by_layer}),
    ("unexpected tensors", {"more": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}),
    ("blk.0.attn_sinks", {"more": {"blk.0.attn_sinks": np.ones(4, np.float32)}}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=[f"{n} {name}" for n, (name, _) in enumerate(REFUSED)])
def test_a_file_that_decoder_does_not_support(name, options, tmp_path):
    write(tmp_path / "tiny.gguf", **options)
    refused(name, lambda: from_pretrained(tmp_path / "tiny.gguf"))


UNREADABLE = [
    ("pre", lambda writer: writer.add_tokenizer_pre("chatglm-bpe")),
    ("pre", lambda writer: writer.add_tokenizer_pre("default")),
    ("model", lambda writer: writer.add_tokenizer_model("bert")),
    ("merges", lambda writer: None),
    ("token_type", lambda writer: writer.add_token_types([1])),
    ("eos_token_id", lambda writer: writer.add_eos_token_id(10**6)),
]


@pytest.mark.parametrize(("name", "replace"), UNREADABLE, ids=[f"{n} {name}" for n, (name, _) in enumerate(UNREADABLE)])
def test_an_unreadable_tokenizer_is_refused(name, replace, tmp_path):
    """The model itself is read. Writing it back with that tokenizer is refused and leaves no folder."""

    def edit(writer):
        with_tokenizer(trained("gpt-2"), "gpt-2")(writer)
        writer.kv_data[0].pop(f"tokenizer.ggml.{name}", None)
        replace(writer)

    path = tmp_path / "tiny.gguf"
    write(path, edit=edit)
    decoder = from_pretrained(path)
    refused(f"tokenizer.ggml.{name}", lambda: save_pretrained(decoder, tmp_path / "folder", like=path))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_missing_and_invalid_files_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    refused(str(path), lambda: from_pretrained(path), FileNotFoundError)
    refused("memory://tiny.gguf", lambda: from_pretrained("memory://tiny.gguf"))
    write(path)
    content = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    cut = (content[:size] for size in (0, 5, 100, len(content) // 2, len(content) - 40))
    for broken in (*cut, b"no GGUF at all, whatever it is called" * 9, pointer):
        path.write_bytes(broken)
        refused(str(path), lambda: from_pretrained(path))
    write(path, VALUES, {name: x for name, x in random_tensors(VALUES).items() if "embed_tokens" not in name})
    refused("token_embd.weight", lambda: from_pretrained(path))
