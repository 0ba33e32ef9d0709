"""Every family against transformers: its models are read, run, decoded, and written back bit for bit.

The models are tiny and random, also in biases and gains of norms, and are stored in many small files.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.released import WHOLE, cases
from nn.huggingface.theirs import TOKENS, assert_close, greedy_tokens, logits, random_model, transformers

from posjax import rotary
from posjax.nn import Decoder, DecoderConfig, from_pretrained, save_pretrained
from posjax.nn.huggingface import FAMILIES, read_config
from posjax.nn.huggingface.registry import write_config
from posjax.scheme import Scheme

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
]


PROMPT, NEW = 6, 20
"""Tokens of a prompt, and those that are picked after it."""


@nnx.jit
def greedy(model, prompt):
    """The likeliest tokens that the decoder picks after a prompt with its cache."""

    def pick(kept, _):
        logits, cache = kept
        token = logits[:, -1:].argmax(-1)
        return model.decode(token, cache, length=PROMPT + NEW), token[:, 0]

    cache = model.init_cache(len(prompt), PROMPT + NEW, chunk=PROMPT)
    logits, cache = model.decode(prompt, cache, length=PROMPT + NEW)
    return jax.lax.scan(pick, (logits[:, -1:], cache), length=NEW)[1].T


class Case(NamedTuple):
    """A model of transformers, its folder, its logits, and the decoder that was read from the folder."""

    model: Any
    folder: Path
    logits: np.ndarray
    decoder: Decoder


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    model = random_model(released.CASES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB")
    return Case(model, folder, logits(model, TOKENS), from_pretrained(folder))


@pytest.mark.parametrize("case", cases(*WHOLE), indirect=True, scope="module")
def test_a_model_gives_the_logits_of_transformers_and_is_written_back(case, tmp_path):
    assert len(list(case.folder.glob("*.safetensors"))) > 3
    found = nnx.jit(lambda model, tokens: model(tokens))(case.decoder, TOKENS)
    assert_close(np.asarray(found), case.logits)
    save_pretrained(case.decoder, tmp_path / "back", like=case.folder, max_file_bytes=40_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    released.assert_same_tensors(tmp_path / "back", case.folder)
    assert read_config(released.config_of(tmp_path / "back")) == case.decoder.config


@pytest.mark.parametrize("case", cases(*WHOLE), indirect=True, scope="module")
def test_transformers_reads_what_is_written_back(case, tmp_path):
    save_pretrained(case.decoder, tmp_path / "back", like=case.folder)
    again, loading = type(case.model).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert set(loading) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert not any(loading.values()), loading
    chex.assert_trees_all_equal(*({k: v.numpy() for k, v in m.state_dict().items()} for m in (again, case.model)))
    np.testing.assert_array_equal(logits(again.eval(), TOKENS), case.logits)


@pytest.mark.parametrize("case", cases("gpt_oss"), indirect=True, scope="module")
def test_greedy_tokens_are_those_of_transformers(case):
    """For LongRoPE they stay within its original length; the test of both lengths below says why."""
    np.testing.assert_array_equal(
        greedy(case.decoder, TOKENS[:, :PROMPT]), greedy_tokens(case.model, TOKENS[:, :PROMPT], NEW)
    )


SPLIT = "lara_mini"
"""A family whose releases have one tensor where the memory of transformers has several."""


@pytest.mark.parametrize(
    "case",
    [each for each in cases(*WHOLE) if SPLIT not in getattr(each, "values", (each,))],
    indirect=True,
    scope="module",
)
def test_a_file_of_save_model_is_the_model_of_save_pretrained(case, tmp_path):
    """It stores a tied embedding only once, as the head in most families, and GPT-NeoX's head by another name."""
    case.model.config.save_pretrained(tmp_path)
    pytest.importorskip("safetensors.torch").save_model(case.model, str(tmp_path / "model.safetensors"))
    found = from_pretrained(tmp_path)
    chex.assert_trees_all_equal(*map(released.parameters, (found, case.decoder)))
    assert found.config == case.decoder.config


@pytest.mark.wide
@pytest.mark.parametrize("case", [SPLIT], indirect=True, scope="module")
def test_a_file_of_save_model_with_split_tensors_is_refused(case, tmp_path):
    case.model.config.save_pretrained(tmp_path)
    pytest.importorskip("safetensors.torch").save_model(case.model, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"in_proj\.weight' is missing"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("case", cases("gpt_oss", "gpt_neox"), indirect=True, scope="module")
def test_bfloat16_stays_as_it_is(case, tmp_path):
    copy.deepcopy(case.model).bfloat16().save_pretrained(tmp_path / "theirs")
    decoder = from_pretrained(tmp_path / "theirs", dtype=None)
    chex.assert_type(jax.tree.leaves(released.parameters(decoder)), jnp.bfloat16)
    save_pretrained(decoder, tmp_path / "back", like=tmp_path / "theirs")
    released.assert_same_tensors(tmp_path / "back", tmp_path / "theirs")
    assert released.config_of(tmp_path / "back")["dtype"] == "bfloat16"


# --- rules that read the length ---------------------------------------------------------------------------------------

DYNAMIC = released.rope(1e4, rope_type="dynamic", factor=2.0)


@pytest.mark.parametrize(
    "values",
    [
        released.CASES["phi3-longrope"],
        released.LLAMA | {"model_type": "llama", "max_position_embeddings": 32, "rope_parameters": DYNAMIC},
    ],
    ids=["longrope", "dynamic"],
)
def test_texts_within_and_beyond_the_original_length(values, tmp_path):
    """Compares full forward passes only: the cache of transformers keeps each key as it was rotated when it was added.

    Its greedy tokens across the switch thus mix both rules, and no full forward pass gives them.
    """
    model = random_model(values)
    model.save_pretrained(tmp_path)
    decoder, run = from_pretrained(tmp_path), nnx.jit(lambda model, tokens: model(tokens))
    texts = TOKENS[:, :32], TOKENS
    short, long = wanted = [logits(model, tokens) for tokens in texts]
    for tokens, theirs in zip(texts, wanted, strict=True):
        assert_close(np.asarray(run(decoder, tokens)), theirs)
    assert np.abs(long[:, :32] - short).max() > 0.01


# --- config.json ------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size", "model_dim", "num_layers", "num_heads"}
CHOSEN = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["full_attention"], "num_hidden_layers": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
CHOSEN |= {"dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
CHOSEN |= {"deepseek_v2": {"num_experts_per_tok": 6}}
"""Of families whose default model cannot be read: what a readable one says."""


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_missing_from_config_json_have_the_defaults_of_transformers(name):
    """With only the sizes that posjax needs, and with the key names that transformers has for all families."""
    whole = transformers.AutoConfig.for_model(name, **CHOSEN.get(name, {})).to_dict()
    family = FAMILIES[name]
    sizes = [key for key, field in family.keys.items() if field in SIZES and key in whole]
    short = {"model_type": name} | {key: whole[key] for key in (*sizes, *CHOSEN.get(name, {}))}
    assert read_config(short) == read_config(whole)
    other = {ours: theirs for theirs, ours in type(transformers.AutoConfig.for_model(name)).attribute_map.items()}
    assert read_config({other.get(key, key): value for key, value in whole.items()}) == read_config(whole)


def older(case, *without, **values):
    return {key: value for key, value in released.CASES[case].items() if key not in without} | values


FACTORS = {key: released.LONG[key] for key in ("short_factor", "long_factor")}
OLDER = {
    "llama": older(
        "llama",
        "rope_parameters",
        rope_theta=5e3,
        rope_scaling={"rope_type": "llama3", "factor": 4.0, **released.LLAMA3},
    ),
    "gemma3_text": older(
        "gemma3_text",
        "rope_parameters",
        "layer_types",
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": older("phi3", "rope_parameters", rope_theta=2e4, partial_rotary_factor=0.5, rope_scaling=None),
    "phi3-longrope": older(
        "phi3-longrope", "rope_parameters", rope_theta=2e4, rope_scaling=FACTORS | {"type": "longrope"}
    ),
    "gpt_neox": older("gpt_neox", rotary_pct=0.5, rotary_emb_base=3e4),
    "cohere2": older("cohere2", "layer_types", rope_theta=3e4, sliding_window_pattern=3),
    "qwen2": older("qwen2"),
    "smollm3": older("smollm3", "no_rope_layers", no_rope_layer_interval=2),
    "bloom": older("bloom", "hidden_size", "n_head", n_embed=48, num_attention_heads=6, seq_length=64),
}
"""The same settings as releases for transformers 4 write them."""


@pytest.mark.parametrize("name", OLDER)
def test_older_keys_mean_what_they_mean_to_transformers(name):
    values = OLDER[name]
    theirs = transformers.AutoConfig.for_model(**values).to_dict()
    assert read_config(values) == read_config(theirs | {"model_type": values["model_type"]})


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-7b"])
def test_a_model_saved_without_a_source_has_no_special_tokens(name, tmp_path):
    """The defaults of transformers are the ids of a release; a small vocabulary may not even have them."""
    values = released.CASES[name]
    save_pretrained(released.random_decoder(values), tmp_path / "out", family=values["model_type"])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    found = transformers.GenerationConfig.from_model_config(config)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (getattr(config, key), getattr(found, key)) == (None, None), key
    transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", released.CASES)
def test_a_config_is_written_as_transformers_reads_it(name):
    """transformers 4 finds the base in outer keys, which change nothing for transformers 5."""
    values = released.CASES[name]
    config = read_config(values)
    written = write_config(config, FAMILIES[values["model_type"]])
    rules = written.get("rope_parameters", {})
    if name == "gemma3_text":
        assert written["rope_local_base_freq"] == rules["sliding_attention"]["rope_theta"]
    assert written.get("rope_theta") == rules.get("full_attention", rules).get("rope_theta")
    if name.startswith("gpt_neox"):
        assert written["rotary_emb_base"] == written["rope_theta"] == 5000.0
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(written))).to_dict()
    assert read_config(theirs | {"model_type": values["model_type"]}) == config
    assert written.get("new_decoder_architecture") == values.get("new_decoder_architecture")


@pytest.mark.parametrize(
    ("rule", "trained", "length"),
    [
        (rotary.Plain(), 300, 300),
        (rotary.DynamicNTK(100, factor=2.0), 300, 100),
        (rotary.YaRN(4.0, 100), 300, 400),
        (rotary.Llama3(factor=4.0, original_length=100), 100, 400),
        (rotary.Llama3(factor=4.0, original_length=100), 101, 101),
    ],
)
def test_a_config_states_the_length_that_its_rule_reaches(rule, trained, length):
    """Llama 3's rule is stated to be used for less than its factor would allow."""
    config = DecoderConfig(vocab_size=50, num_layers=2, model_dim=32, num_heads=4, embedding_scale=1.0)
    config = dataclasses.replace(config, scheme=Scheme(features=rotary.Rotary(rule)), trained_length=trained)
    assert write_config(config, FAMILIES["llama"])["max_position_embeddings"] == length


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox"])
def test_a_new_rule_overrides_the_older_keys_of_the_source_folder(name, tmp_path):
    values = OLDER[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    decoder = released.random_decoder(values)
    decoder = decoder.with_scheme(decoder.config.scheme.extend(frequencies=rotary.Plain(base=7e4)))
    save_pretrained(decoder, tmp_path / "new", like=tmp_path)
    found = transformers.AutoConfig.from_pretrained(tmp_path / "new").rope_parameters
    for inner in found.values() if name == "gemma3_text" else [found]:
        assert (inner["rope_type"], inner["rope_theta"]) == ("default", 7e4)
        assert inner.get("partial_rotary_factor", 1) == 1
