"""What a config says about its model: lengths, the scheme and its extension, the vocabulary, the layout over a mesh."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh
from refusals import refused

from posjax import rotary
from posjax.attention.sharded import Placement
from posjax.layout import Layout
from train.config import SchemeConfig, parse
from train.config.settings.model import InitConfig
from train.model.build import (
    Setup,
    build_scheme,
    check_model,
    evaluated_scheme,
    learned_positions,
    model_length,
    scheme_of,
    trained_changes,
)
from train.model.mesh import AXES

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "rope_theta": 500.0}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}


def abstract(**sizes):
    """A mesh of these sizes without devices; the other axes have one."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def of_length(length, scheme, stated=None, **model):
    model = SMALL | {"trained_length": stated} | model
    return parse({"model": model, "scheme": scheme, "train": {"length": length, "batch_tokens": 2 * length}})


def released(length, scheme="released", stated=None):
    """The config of a run that starts from a model like Llama."""
    return dataclasses.replace(of_length(length, scheme, stated), init=InitConfig("model", LLAMA))


@pytest.mark.parametrize(
    ("scheme", "stated", "trained", "own"),
    [("released", 64, 32, 64), ("released", 16, 32, 32), ("released", None, 32, 32), ("rope", 64, 32, 32)],
)
def test_a_model_was_made_for_the_longer_of_its_own_length_and_that_of_its_training(scheme, stated, trained, own):
    """Another scheme than that of the released model has only seen the length of the training."""
    assert model_length(released(trained, scheme, stated)) == own


def test_another_scheme_keeps_the_base_of_the_released_model():
    entries = SchemeConfig("rope"), SchemeConfig("coca-slack"), SchemeConfig("rope", options={"base": 7.0})
    bases = [scheme_of(released(32), entry).features.frequencies.base for entry in entries]
    assert bases == [500.0, 500.0, 7.0]


@pytest.mark.parametrize(("stated", "wanted"), [(64, {"factor": 2.0, "original_length": 64}), (None, None)])
def test_a_released_model_is_trained_as_extended_from_its_own_length(stated, wanted):
    """If that is unknown, the model was made for the length of the training, up to which nothing changes."""
    entry = SchemeConfig("released", options={"frequencies": {"name": "yarn"}})
    found = trained_changes(released(128, stated=stated), entry)
    assert found == ({} if wanted is None else {"frequencies": {"name": "yarn", **wanted}})


@pytest.mark.parametrize(
    ("shards", "length", "options", "kind"),
    [
        (1, 32, {}, "contiguous"),
        (4, 32, {}, "zigzag"),
        (4, 12, {}, "contiguous"),  # the chunks would not be whole
        (4, 32, {"causal": False}, "contiguous"),
        (4, 32, {"strategy": "ring-ulysses"}, "zigzag"),
        (4, 32, {"strategy": ["neighbour", "ring"]}, "zigzag"),
        (4, 32, {"strategy": "neighbour"}, "contiguous"),
        (4, 32, {"layout": "contiguous"}, "contiguous"),
        (4, 32, {"layout": "zigzag", "strategy": "neighbour"}, "zigzag"),
    ],
)
def test_tokens_are_balanced_where_a_ring_is_causal(shards, length, options, kind):
    model = {"causal": options.pop("causal", True)}
    config = parse({"model": model, "train": {"length": length, "batch_tokens": 4 * length, "context": options}})
    found = Setup(config, abstract(context=shards)).placement
    assert found.layout == Layout(kind, shards)
    assert found.context == (None if shards == 1 else "context")
    assert found.batch == ("replica", "data", "fsdp")


def test_heads_are_split_over_two_devices_or_more_and_without_a_mesh_nothing_is():
    assert [Setup(parse({}), abstract(tensor=devices)).placement.heads for devices in (1, 2)] == [None, "tensor"]
    assert Setup(parse({})).decoder.placement == Setup(parse({}), None).placement == Placement()


@pytest.mark.parametrize(("length", "factor"), [(None, 2.0), (128, 4.0), (32, 1.0)])
def test_an_extension_fits_the_longest_text_of_the_evaluation_or_the_given_length(length, factor):
    scheme = {"name": "rope", "extend": {"frequencies": {"name": "yarn"}}}
    config = parse({"scheme": scheme, "train": {"length": 32}, "evaluate": {"lengths": [32, 64]}})
    assert evaluated_scheme(config, length=length).features.frequencies == rotary.YaRN(factor, 32)


def test_layers_and_vocabulary_are_those_of_the_recipe_and_the_tokenizer_unless_they_are_given():
    """The tokenizer has bytes, and four special tokens."""
    assert len(build_scheme(SchemeConfig("gemma3"), 7).schemes) == 7
    assert len(build_scheme(SchemeConfig("gemma3", options={"num_layers": 13}), 7).schemes) == 13
    assert [Setup(parse({"model": given})).decoder.vocab_size for given in ({}, {"vocab_size": 300})] == [260, 300]


LEARNED = {"name": "learned", "max_length": 32}
RANDOMISED = {"name": "rope", "training_positions": {"name": "randomised", "max_length": 32}}


@pytest.mark.parametrize(
    ("named", "scheme", "model"),
    [
        ("scheme.max_length=33", LEARNED, {}),
        ("max_length=32", RANDOMISED, {}),
        ("model.vocab_size", "rope", {"vocab_size": 259}),
        ("scheme", "released", {}),
    ],
)
def test_a_model_that_does_not_fit_is_refused(named, scheme, model):
    if "max_length" in named:
        check_model(Setup(of_length(32, scheme)))
    refused(named, lambda: check_model(Setup(of_length(33, scheme, **model))))


def test_the_parameters_that_encode_positions():
    learned = {"t5": "shared/*", "pope": "*/learned/features/*", "fox": "*/learned/bias/*"}
    found = {scheme: learned_positions(Setup(of_length(32, scheme))) for scheme in (*learned, "rope", "performer")}
    assert found == {scheme: (pattern,) for scheme, pattern in learned.items()} | {"rope": (), "performer": ()}
    assert learned_positions(Setup(of_length(32, LEARNED))) == ("embedding/*",)
