"""Mistakes with a released model, and the files beside the weights that are read."""

import json

import pytest
from released_models import GPT2, LENGTH, TEXT, VOCABULARY, write_released

import posjax as pj
from posjax import rotary
from posjax.nn import from_pretrained
from train import cli
from train.config import parse
from train.data.tokenizer import ends_of_text, load_tokenizer
from train.evaluate.generate import Draws, tokens_after
from train.model.build import as_released, check_model
from train.model.convert import check_continues


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_released(folder)
    return folder


def error_of(capsys, *arguments):
    """The error message of a command."""
    assert cli.main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


def edit(place, **changes):
    values = json.loads(place.read_text())
    place.write_text(json.dumps(values | changes))


# --- schemes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["scheme=alibi", "scheme.frequencies={name: yarn, factor: 4}"])
@pytest.mark.parametrize("command", [["evaluate"], ["generate", "--prompt", "The"], ["export", "out"]])
def test_a_scheme_that_was_never_trained_is_not_measured_as_the_model(tiny, capsys, command, change):
    name, *rest = command
    rest = [tiny.parent / "out"] if name == "export" else rest
    found = error_of(capsys, name, tiny, *rest, change)
    assert (
        "scheme: nothing is trained here, so the model keeps its own scheme; put changes under scheme.extend" in found
    )


def test_a_model_that_rotates_a_part_of_its_channels_does_not_turn_into_coca(tmp_path):
    half = rotary.Plain(500.0, partial_rotary_factor=0.5)
    write_released(tmp_path, scheme=pj.Scheme(features=rotary.Rotary(half)))
    config = parse({"init": str(tmp_path), "scheme": "coca-strict"})
    with pytest.raises(ValueError, match="cannot start from the weights of 'released'"):
        check_continues(as_released(config), config)


def test_learned_positions_have_an_end(tmp_path, capsys):
    write_released(tmp_path, **GPT2)
    found = error_of(capsys, "generate", tmp_path, "--prompt", "The", "--tokens", str(LENGTH))
    assert "--tokens" in found
    assert f"{LENGTH} positions" in found
    with pytest.raises(ValueError, match=f"but train.length is 64; train.length={LENGTH} would work"):
        check_model(parse({"init": str(tmp_path), "train": {"length": 64}}))


def test_longrope_without_factors_names_them(tiny, capsys):
    found = error_of(capsys, "generate", tiny, "--prompt", "The", "scheme.extend={frequencies: {name: longrope}}")
    assert "needs short_factor and long_factor" in found


def test_a_dynamic_rule_has_no_factor_to_divide_by(tmp_path):
    write_released(tmp_path, scheme=pj.Scheme(features=rotary.Rotary(rotary.DynamicNTK(LENGTH, 2.0, base=500.0))))
    out = tmp_path / "out"
    assert (
        cli.main(["export", str(tmp_path), str(out), "scheme.extend={frequencies: {name: linear, factor: 4.0}}"]) == 0
    )
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4 * LENGTH


def test_a_length_of_training_where_nothing_is_trained(tiny, capsys):
    """It would be mistaken for the model's own length."""
    for command in ("evaluate", "export"):
        rest = ["out"] if command == "export" else []
        found = error_of(capsys, command, tiny, *rest, "train.length=64")
        assert f"nothing is trained, so the model's own length stays {LENGTH}, found 64; if it was made for" in found


def test_an_extension_that_changes_nothing_is_not_written(tiny, tmp_path, capsys):
    extend = "scheme.extend={frequencies: {name: yarn}}"
    found = error_of(capsys, "export", tiny, tmp_path / "out", extend, f"evaluate.lengths=[16,{LENGTH}]")
    assert f"scheme.extend changes nothing up to {LENGTH} tokens, the longest of evaluate.lengths; raise that" in found
    assert not (tmp_path / "out").exists()


def test_a_search_starts_from_the_model_as_it_is(tiny, capsys):
    extend = "scheme.extend={frequencies: {name: yarn}}"
    assert "scheme.extend: a search starts" in error_of(capsys, "search", tiny, "--length", "64", extend)


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["evaluate"], ["generate", "--prompt", "The"], ["search", "--length", "64"], ["export", "out"]]
)
def test_a_place_with_nothing_in_it(tmp_path, capsys, command):
    name, *rest = command
    assert "there is no run, released model or config at" in error_of(capsys, name, tmp_path / "nowhere", *rest)
    assert "is neither a run nor a released model" in error_of(capsys, name, tmp_path, *rest)


def test_another_kind_of_tokenizer_beside_the_model_is_named(tiny, capsys):
    (tiny / "tokenizer.json").rename(tiny / "tokenizer.model")
    found = error_of(capsys, "generate", tiny, "--prompt", "The")
    assert "tokenizer.json'; tokenizer.model is in the same folder: set data.tokenizer to that" in found


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_special_tokens_beyond_the_vocabulary_are_not_used(tiny):
    """Gemma 3's ``<image_soft_token>`` has no embedding."""
    spare = {"id": VOCABULARY, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False}
    tokens = json.loads((tiny / "tokenizer.json").read_text())
    spare |= {"normalized": False, "special": True}
    edit(tiny / "tokenizer.json", added_tokens=[*tokens["added_tokens"], spare])
    config = parse({"init": str(tiny)})
    check_model(config)
    tokenizer = load_tokenizer(config.data)
    assert (tokenizer.vocabulary_size, tokenizer.encoded_size) == (VOCABULARY + 1, VOCABULARY)
    assert max(tokenizer.encode_all([b"an <image> of " + TEXT.encode()])[0]) < VOCABULARY
    edit(tiny / "tokenizer_config.json", eos_token="<image>")
    with pytest.raises(ValueError, match=f"the tokenizer has {VOCABULARY + 1} tokens, found {VOCABULARY}"):
        check_model(parse({"init": str(tiny)}))


def test_a_prompt_without_an_embedding(tiny, capsys):
    edit(tiny / "tokenizer_config.json", additional_special_tokens=["<image>"])
    tokens = json.loads((tiny / "tokenizer.json").read_text())
    spare = {**tokens["added_tokens"][0], "id": VOCABULARY, "content": "<image>"}
    edit(tiny / "tokenizer.json", added_tokens=[*tokens["added_tokens"], spare])
    found = error_of(capsys, "generate", tiny, "--prompt", "a <image>")
    assert f"--prompt: the model has {VOCABULARY} tokens, and no embedding for [{VOCABULARY}]" in found


def test_a_chat_model_ends_its_turn_by_its_own_token(tiny, capsys):
    config = parse({"init": str(tiny)})
    tokenizer = load_tokenizer(config.data)
    assert ends_of_text(config.data, tokenizer) == {tokenizer.eos}
    prompt = tokenizer.encode_all([b"The cat"])[0][:-1]
    first = next(tokens_after(from_pretrained(tiny), prompt, Draws(tokens=8, temperature=0), {tokenizer.eos}))
    edit(tiny / "config.json", eos_token_id=tokenizer.eos)
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos, first]}))
    assert ends_of_text(config.data, tokenizer) == {tokenizer.eos, first}
    assert cli.main(["generate", str(tiny), "--prompt", "The cat", "--tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "The cat\n"
