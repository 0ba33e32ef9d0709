"""What a config says about its model: lengths, the scheme and its extension, the vocabulary, the layout over a mesh."""

from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

import posjax as pj
from posjax import rotary
from posjax.attention.sharded import Placement
from posjax.layout import Layout
from train.config import SchemeConfig, parse
from train.model import build
from train.model.build import (
    build_scheme,
    check_model,
    check_vocabulary,
    decoder_config,
    evaluated_scheme,
    learned_positions,
    own_length,
    placement,
    trained_changes,
)
from train.model.mesh import AXES

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2}


def abstract(**sizes):
    """A mesh of these sizes without devices; the other axes have one."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.mark.parametrize(
    ("scheme", "stated", "trained", "own"),
    [
        ("released", 64, 32, 64),
        ("released", 16, 32, 32),
        ("released", None, 32, 32),
        ("rope", 64, 32, 32),
    ],
)
def test_a_model_was_made_for_the_longer_of_its_own_length_and_that_of_its_training(scheme, stated, trained, own):
    """Another scheme than that of the released model has only seen the length of the training."""
    config = SimpleNamespace(
        scheme=SimpleNamespace(name=scheme),
        model=SimpleNamespace(trained_length=stated),
        train=SimpleNamespace(length=trained),
    )
    assert own_length(config) == own


@pytest.mark.parametrize(
    ("shards", "length", "options", "kind"),
    [
        (1, 32, {}, "contiguous"),
        (2, 32, {}, "zigzag"),
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
    found = placement(config, abstract(context=shards))
    assert found.layout == Layout(kind, shards)
    assert found.context == (None if shards == 1 else "context")
    assert found.batch == ("replica", "data", "fsdp")


def test_without_a_mesh_nothing_is_split():
    assert placement(parse({}), None) == Placement()
    assert decoder_config(parse({})).placement == Placement()


@pytest.mark.parametrize(("heads", "axis"), [(1, None), (2, "tensor")])
def test_heads_are_split_over_two_devices_or_more(heads, axis):
    assert placement(parse({}), abstract(tensor=heads)).heads == axis


@pytest.mark.parametrize(("length", "factor"), [(None, 2.0), (128, 4.0), (32, 1.0)])
def test_an_extension_fits_the_longest_text_of_the_evaluation_or_the_given_length(length, factor):
    extend = {"frequencies": {"name": "yarn"}}
    config = parse(
        {"scheme": {"name": "rope", "extend": extend}, "train": {"length": 32}, "evaluate": {"lengths": [32, 64]}}
    )
    assert evaluated_scheme(config, length=length).features.frequencies == rotary.YaRN(factor, 32)


def test_a_recipe_has_as_many_layers_as_the_model_or_as_it_says():
    assert len(build_scheme(SchemeConfig("gemma3"), 7).schemes) == 7
    assert len(build_scheme(SchemeConfig("gemma3", options={"num_layers": 13}), 7).schemes) == 13


ROPE, SLOW, PLAIN = (
    pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0))),
    pj.Scheme(features=rotary.Rotary(rotary.Plain(900.0))),
    pj.Scheme(),
)


@pytest.mark.parametrize(
    ("released", "entry", "options"),
    [
        (ROPE, SchemeConfig("rope"), {"base": 500.0}),
        (pj.Layers((((ROPE, PLAIN), 2),)), SchemeConfig("coca-slack"), {"base": 500.0}),
        (pj.Layers((((ROPE, SLOW), 2),)), SchemeConfig("rope"), {}),
        (PLAIN, SchemeConfig("rope"), {}),
        (ROPE, SchemeConfig("rope", options={"base": 7.0}), {"base": 7.0}),
        (ROPE, SchemeConfig("alibi"), {}),
        (None, SchemeConfig("rope"), {}),
    ],
)
def test_another_scheme_keeps_the_only_base_of_the_released_model(monkeypatch, released, entry, options):
    monkeypatch.setattr(build, "read_config", lambda values: SimpleNamespace(scheme=values["scheme"]))
    values = {} if released is None else {"scheme": released}
    config = SimpleNamespace(init=SimpleNamespace(values=values), model=SimpleNamespace(num_layers=4))
    assert build._with_base(config, entry).options == options


@pytest.mark.parametrize(("stated", "changes"), [(64, {"factor": 2.0, "original_length": 64}), (None, None)])
def test_a_released_model_is_trained_as_extended_from_its_own_length(monkeypatch, stated, changes):
    """If that is unknown, the model was made for the length of the training, up to which nothing changes."""
    monkeypatch.setattr(build, "read_config", lambda values: SimpleNamespace(scheme=ROPE))
    config = SimpleNamespace(
        init=SimpleNamespace(values={}),
        model=SimpleNamespace(trained_length=stated),
        train=SimpleNamespace(length=128),
    )
    found = trained_changes(config, SchemeConfig("released", options={"frequencies": {"name": "yarn"}}))
    assert found == ({} if changes is None else {"frequencies": {"name": "yarn", **changes}})


@pytest.mark.parametrize(
    ("causal", "mask", "size", "message"),
    [
        (True, 3, None, None),
        (False, 5, None, None),
        (False, 3, None, "the tokenizer has no mask token of its own"),
        (True, 3, 10, None),
        (True, 3, 9, "the tokenizer has 10 tokens, found 9; leave it out, or use at least 10"),
    ],
)
def test_a_vocabulary_holds_the_tokens_and_a_mask_if_text_is_masked(monkeypatch, causal, mask, size, message):
    monkeypatch.setattr(build, "load_tokenizer", lambda data: SimpleNamespace(encoded_size=10, eos=3, mask=mask))
    model = SimpleNamespace(causal=causal, vocab_size=size)
    config = SimpleNamespace(model=model, data=None, init=SimpleNamespace(path=""))
    if message is None:
        check_vocabulary(config)
    else:
        with pytest.raises(ValueError, match=message):
            check_vocabulary(config)


@pytest.mark.parametrize(("given", "size"), [({}, 260), ({"vocab_size": 300}, 300)])
def test_the_vocabulary_is_that_of_the_tokenizer_unless_it_is_given(given, size):
    """Bytes, and four special tokens."""
    assert decoder_config(parse({"model": given})).vocab_size == size


def of_length(length, scheme):
    return parse({"model": SMALL, "scheme": scheme, "train": {"length": length, "batch_tokens": 2 * length}})


def test_learned_embeddings_reach_the_training_length():
    scheme = {"name": "learned", "max_length": 32}
    check_model(of_length(32, scheme))
    with pytest.raises(ValueError, match=r"learned has 32 positions, .* is 33; scheme.max_length=33 would work"):
        check_model(of_length(33, scheme))


def test_positions_are_drawn_for_the_training_length():
    scheme = {"name": "rope", "training_positions": {"name": "randomised", "max_length": 32}}
    check_model(of_length(32, scheme))
    with pytest.raises(ValueError, match="length 33 is above max_length=32"):
        check_model(of_length(33, scheme))


@pytest.mark.parametrize(
    ("scheme", "patterns"),
    [
        ("rope", ()),
        ("t5", ("shared/*",)),
        ({"name": "learned", "max_length": 32}, ("embedding/*",)),
        ("pope", ("*/learned/features/*",)),
        ("fox", ("*/learned/bias/*",)),
        ("performer", ()),
    ],
)
def test_the_parameters_that_encode_positions(scheme, patterns):
    assert learned_positions(of_length(32, scheme)) == patterns
