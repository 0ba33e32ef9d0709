"""The text part of releases that also see, against the whole model of transformers fed with text.

Parity is in the wide grid; the default run has the config, the names of tensors and what is refused.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nn.huggingface import released, seeing
from nn.huggingface.released import rewritten
from nn.huggingface.theirs import TOKENS, assert_close, class_of, greedy_tokens, logits, random_model, transformers
from refusals import refused

from posjax.nn import from_pretrained, generate, save_pretrained
from posjax.nn.huggingface import TEXT_PARTS, read_config

pytestmark = pytest.mark.usefixtures("quiet_transformers")
quiet = pytest.mark.filterwarnings("ignore")
PROMPT, NEW = 6, 20
"""Tokens of a prompt, and those that are picked after it."""


class Case(NamedTuple):
    """A model of transformers, whole or its text part, the folder of the whole, and the logits of text."""

    model: Any
    folder: Any
    logits: np.ndarray


def runnable(model):
    """The whole model; of a Llama 4 its text part, because transformers 5.24 cannot run the whole."""
    return model.language_model if model.config.model_type == "llama4" else model


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    model = random_model(seeing.TEXT_PARTS[request.param], transformers.AutoModelForImageTextToText)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB")
    return Case(runnable(model), folder, logits(runnable(model), TOKENS))


wide = pytest.mark.parametrize("case", seeing.TEXT_PARTS, indirect=True, scope="module")


@quiet
@pytest.mark.parity
@pytest.mark.wide
@wide
def test_the_text_part_gives_the_logits_and_the_tokens_of_the_whole_model(case):
    decoder = from_pretrained(case.folder)
    found = nnx.jit(lambda model, tokens: model(tokens))(decoder, TOKENS)
    assert_close(np.asarray(found), case.logits)
    tokens, _ = generate(decoder, TOKENS[:, :PROMPT], NEW)
    np.testing.assert_array_equal(tokens, greedy_tokens(case.model, TOKENS[:, :PROMPT], NEW))


@quiet
@pytest.mark.parity
@pytest.mark.wide
@wide
def test_the_text_part_is_written_as_a_model_of_text_alone(case, tmp_path):
    """transformers reads it with nothing missing, and with the logits of the whole model."""
    decoder = from_pretrained(case.folder)
    save_pretrained(decoder, tmp_path / "text", like=case.folder)
    text, loading = class_of(released.config_of(tmp_path / "text")).from_pretrained(
        tmp_path / "text", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading.values()), loading
    np.testing.assert_array_equal(logits(text.eval(), TOKENS), case.logits)
    assert from_pretrained(tmp_path / "text").config == decoder.config


@quiet
@pytest.mark.parity
@pytest.mark.wide
@wide
def test_the_text_part_is_read_onto_a_mesh_and_written_from_it(case, tmp_path):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    rules = {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}

    def sharding(axes, shape):
        names = (rules.get(axis) for axis in axes)
        fits = (name if name and size % 2 == 0 else None for name, size in zip(names, shape, strict=True))
        return NamedSharding(mesh, P(*fits))

    split, alone = from_pretrained(case.folder, sharding=sharding), from_pretrained(case.folder)
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (split, alone)))
    for name, decoder in (("split", split), ("alone", alone)):
        save_pretrained(decoder, tmp_path / name, like=case.folder)
    released.assert_same_tensors(tmp_path / "split", tmp_path / "alone")


@quiet
@pytest.mark.parity
@pytest.mark.wide
def test_stacked_experts_may_be_transposed_as_qwen3_vl_was_released(tmp_path):
    model = random_model(seeing.TEXT_PARTS["qwen3_vl_moe"], transformers.AutoModelForImageTextToText)
    for name in ("model", "transposed"):
        model.save_pretrained(tmp_path / name)
    tensors = released.stored(tmp_path / "model").items()
    changed = {name: np.swapaxes(value, -1, -2) if ".experts." in name else value for name, value in tensors}
    released.write_tensors(tmp_path / "transposed", changed)
    again = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "transposed", attn_implementation="eager"
    )
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))
    found = [released.parameters(from_pretrained(tmp_path / name)) for name in ("model", "transposed")]
    jax.tree.map(np.testing.assert_array_equal, *found)


# --- tensors ----------------------------------------------------------------------------------------------------------

GEMMA = released.CASES["gemma3_text"] | {"tie_word_embeddings": False}
INNER = {key: value for key, value in GEMMA.items() if key != "model_type"}
OTHERS = {f"{name}.weight": np.ones(3, np.float32) for name in ("vision_tower.head", "multi_modal_projector.norm")}
NAMES = {
    "transformers 5": {"model.": "model.language_model.", "lm_head.": "lm_head."},
    "transformers 4": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}


def whole(decoder, folder, names):
    """A folder with the decoder as the text part of a Gemma 3, and with tensors of other parts."""

    def renamed(tensors):
        found = {}
        for name, tensor in tensors.items():
            prefix = next(each for each in names if name.startswith(each))
            found[names[prefix] + name.removeprefix(prefix)] = tensor
        before = "model." if names["model."].startswith("model.") else ""
        return found | {before + name: tensor for name, tensor in OTHERS.items()}

    path = rewritten(decoder, folder, renamed)
    released.write_config(path, {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": INNER})
    return path


@pytest.mark.parametrize("names", NAMES)
def test_the_text_part_has_its_own_names_and_a_warning_says_what_is_left_out(names, tmp_path):
    wanted = released.random_decoder(GEMMA)
    folder = whole(wanted, tmp_path, NAMES[names])
    with pytest.warns(UserWarning, match=f"{folder}.*gemma3.*vision_tower.*multi_modal_projector"):
        found = from_pretrained(folder)
    assert found.config == wanted.config
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, wanted)))
    save_pretrained(found, tmp_path / "back", like=folder)
    written = released.config_of(tmp_path / "back")
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", [1, 106])
    released.assert_same_tensors(tmp_path / "back", tmp_path / "before")


@quiet
def test_tensors_of_no_known_part_are_refused(tmp_path):
    folder = whole(released.random_decoder(GEMMA), tmp_path, NAMES["transformers 4"])
    tensors = released.stored(folder)
    released.write_tensors(folder, tensors | {"audio_tower.norm": np.ones(3, np.float32)})
    refused("audio_tower.norm", lambda: from_pretrained(folder))
    twice = tensors["language_model.model.norm.weight"]
    released.write_tensors(folder, tensors | {"model.language_model.norm.weight": twice})
    refused("model.language_model.norm.weight", lambda: from_pretrained(folder))


# --- config.json ------------------------------------------------------------------------------------------------------


SAID = {"gemma4": {"hidden_size_per_layer_input": 0}, "glm4v_moe": {"head_dim": 128}}
"""What a readable text part says."""
TIED = ("deepseek_vl", "internvl", "mistral3", "ovis2")
"""Releases that say whether they are tied: what it is by default is not the same in transformers 4 and 5."""


@quiet
@pytest.mark.parity
@pytest.mark.parametrize("name", seeing.TEXT_PARTS)
def test_keys_missing_from_text_config_have_the_defaults_of_transformers(name):
    values = seeing.TEXT_PARTS[name]
    theirs = transformers.AutoConfig.for_model(**values)
    assert read_config(values) == read_config(theirs.to_dict())
    few = {"model_type": theirs.text_config.model_type} | SAID.get(values["model_type"], {})
    whole = transformers.AutoConfig.for_model(values["model_type"], text_config=dict(few)).to_dict()
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    given = [key for key in sizes if key not in TEXT_PARTS[values["model_type"]].defaults]
    few |= {key: whole["text_config"][key] for key in given}
    outer = {"model_type": values["model_type"]}
    outer |= {"tie_word_embeddings": True} if values["model_type"] in TIED else {}
    assert read_config(outer | {"text_config": few}) == read_config(whole)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_older_releases_have_the_keys_of_text_outside(name):
    values = seeing.TEXT_PARTS[name]
    flat = {key: value for key, value in values.items() if key != "text_config"} | values["text_config"]
    assert read_config(flat) == read_config(values)
    assert read_config(flat) == read_config(transformers.AutoConfig.for_model(**flat).to_dict())


@pytest.mark.parametrize("name", seeing.TEXT_PARTS)
def test_every_key_of_text_config_may_be_missing_or_of_any_kind(name):
    """The text part is then read, or refused with a ValueError and no other error."""
    values = seeing.TEXT_PARTS[name]
    inner = values["text_config"]
    for key in inner:
        for changed in ({}, *({key: wrong} for wrong in (None, "x", [], {"a": 1}, -1, 1.5, True))):
            rest = {other: value for other, value in inner.items() if other != key}
            with contextlib.suppress(ValueError):
                read_config(values | {"text_config": rest | changed})
