"""What all families of released models share: sizes, layers, rules, windows and lengths of ``config.json``."""

import dataclasses

import pytest

from posjax import masks, rotary
from posjax.nn import DecoderConfig, Experts
from posjax.nn.huggingface import family
from posjax.nn.huggingface.family import FULL, SLIDING
from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, Plain, Rotary, YaRN
from posjax.scheme import Layers, Scheme

A, B, C = (Scheme(mask=masks.Window(n)) for n in (3, 4, 5))
CONFIG = DecoderConfig(vocab_size=50, num_layers=4, model_dim=48, num_heads=6, num_kv_heads=2, mlp_dim=20)
VALUES = {"model_type": "llama", "num_hidden_layers": 5, "rope_theta": 1e4, "max_position_embeddings": 64}


def config(scheme, **options):
    return dataclasses.replace(CONFIG, scheme=scheme, **options)


def rope(rule, **slots):
    return Scheme(features=Rotary(rule), **slots)


def rotated(rule, **options):
    return config(rope(rule), **options)


def test_sizes_of_the_axes_of_tensors():
    dense = {"vocab": 50, "embed": 48, "heads": 6, "kv_heads": 2, "each": 3, "size": 8, "mlp": 20}
    assert family.sizes_of(CONFIG) == dense | {"experts": 0, "positions": 0}
    mixed = dataclasses.replace(CONFIG, experts=Experts(count=5, per_token=2))
    assert family.sizes_of(mixed)["experts"] == 5


def test_an_activation_is_written_by_its_first_name():
    assert family.key_of({"silu": "swiglu", "gelu_new": "geglu", "gelu_tanh": "geglu"}, "geglu") == "gelu_new"
    assert family.key_of({"silu": "swiglu"}, "relu") == "relu"


@pytest.mark.parametrize(
    ("schemes", "patterns"),
    [
        ([A, B], [((A, B), 1)]),
        ([A, B, A, B], [((A, B), 2)]),
        ([A, B, A, B, A], [((A, B), 2), ((A,), 1)]),
        ([A, A, B, A, A, B, A, A], [((A, A, B), 2), ((A, A), 1)]),
        ([A, B, A, C], [((A, B, A, C), 1)]),
    ],
)
def test_layers_repeat_their_shortest_period(schemes, patterns):
    assert family.of_layers(schemes) == Layers(tuple(patterns))


@pytest.mark.parametrize("count", [1, 3])
def test_equal_layers_are_one_scheme(count):
    assert family.of_layers([B] * count) == B


def test_types_of_layers_are_those_named_or_a_repeated_period():
    assert family.layer_types(VALUES) == [FULL] * 5
    assert family.layer_types(VALUES, (SLIDING, SLIDING, FULL)) == [SLIDING, SLIDING, FULL, SLIDING, SLIDING]
    named = [FULL, SLIDING, FULL, FULL, SLIDING]
    assert family.layer_types(VALUES | {"layer_types": named}, (SLIDING,)) == named
    with pytest.raises(ValueError, match="layer_types names 4 layers of 5"):
        family.layer_types(VALUES | {"layer_types": named[:4]})


LINEAR = {f: {"rope_type": "linear", "factor": f, "rope_theta": 1e4} for f in (2.0, 4.0)}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, Plain(1e4)),
        ({"rope_parameters": LINEAR[2.0]}, Linear(2.0)),
        ({"rope_scaling": LINEAR[4.0]}, Linear(4.0)),
        ({"rope_scaling": LINEAR[4.0], "rope_parameters": LINEAR[2.0]}, Linear(4.0)),
    ],
    ids=("plain", "parameters", "scaling", "both"),
)
def test_rope_scaling_wins_over_rope_parameters(given, rule):
    assert family.rope_rule(VALUES | given) == rule


def test_part_of_the_head_rotates_only_in_some_families():
    part = VALUES | {"partial_rotary_factor": 0.5}
    assert family.rope_rule(part | {"model_type": "phi3"}) == Plain(1e4, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1 for llama, which rotates whole heads"):
        family.rope_rule(part)
    proportional = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    assert isinstance(family.rope_rule(VALUES | {"rope_parameters": proportional}), rotary.Proportional)


@pytest.mark.parametrize("size", [1, 7])
def test_a_window_is_a_whole_number_above_zero(size):
    assert family.window_size({"sliding_window": size}) == size


@pytest.mark.parametrize("size", [None, 0, -3, 2.5, True, "4"])
def test_other_windows_are_refused(size):
    with pytest.raises(ValueError, match="sliding_window must be a whole number above 0"):
        family.window_size({"sliding_window": size})


def test_sliding_layers_have_a_window_and_full_ones_have_none():
    values = VALUES | {"sliding_window": 7}
    slots = {"features": Rotary(Plain(1e4))}
    full, sliding = Scheme(**slots), Scheme(**slots, mask=masks.Window(7))
    found = family.rope_schemes(values, [SLIDING, FULL, SLIDING])
    assert found == Layers((((sliding, full), 1), ((sliding,), 1)))
    assert family.types_of(config(found, num_layers=3)) == [SLIDING, FULL, SLIDING]
    rules = {FULL: None, SLIDING: Plain(5.0)}
    assert family.rope_schemes(values, [FULL, FULL], rules) == Scheme()
    assert family.rope_schemes(values, [SLIDING], rules) == rope(Plain(5.0), mask=masks.Window(7))


def test_the_window_of_all_sliding_layers():
    assert family.window_of(CONFIG) is None
    assert family.window_of(config(Layers((((A, Scheme()), 2),)))) == 3
    with pytest.raises(ValueError, match="has one window for all layers"):
        family.window_of(config(Layers((((A, B), 2),))))
    with pytest.raises(ValueError, match="cannot store mask Dilated"):
        family.window_of(config(Scheme(mask=masks.Dilated(4, 2))))


def test_the_rule_of_a_type_of_layers_has_the_head_size():
    full, sliding = Scheme(features=Rotary(Plain(5.0))), Scheme(features=Rotary(Plain(7.0)), mask=masks.Window(3))
    both = config(Layers((((Scheme(), sliding, full, Scheme()), 1),)))
    assert family.rule_of(both) == family.rule_of(both, SLIDING) == Plain(7.0, head_dim=8)
    assert family.rule_of(both, FULL) == Plain(5.0, head_dim=8)
    assert family.rule_of(CONFIG) is None


@pytest.mark.parametrize(
    ("rule", "stated", "length"),
    [
        (YaRN(4.0, 100), None, 400),
        (YaRN(4.0, 100), 300, 400),
        (YaRN(4.0, 100), 500, 500),
        (Llama3(factor=4.0, original_length=100), None, 400),
        (Llama3(factor=4.0, original_length=100), 100, 400),
        (Llama3(factor=4.0, original_length=100), 101, 101),
        (Llama3(factor=4.0, original_length=100), 500, 500),
        (LongRoPE((1.0,) * 4, (2.0,) * 4, 100, attention_factor=1.0), None, 100),
        (LongRoPE((1.0,) * 4, (2.0,) * 4, 100, attention_factor=1.0), 300, 300),
    ],
)
def test_a_rule_reaches_the_larger_of_its_factor_and_the_stated_length(rule, stated, length):
    """Llama 3's rule is stated to be used for less than its factor would allow."""
    assert family.reach(rule, stated) == length
    found = family.length_value(rotated(dataclasses.replace(rule, head_dim=8), trained_length=stated))
    assert found == {"max_position_embeddings": length}


def test_without_an_original_length_the_trained_length_is_written():
    assert family.length_value(rotated(Plain(1e4), trained_length=300)) == {"max_position_embeddings": 300}
    assert family.length_value(rotated(Plain(1e4))) == {}
    dynamic = rotated(DynamicNTK(100, factor=2.0), trained_length=300)
    assert family.length_value(dynamic) == {"max_position_embeddings": 100}


LLAMA = family.Family("llama", "", {}, read=dict, write=dict, tensors=dict)
SAME = [
    ({}, {"compute_dtype": "bfloat16", "remat": "full", "scan_layers": False, "trained_length": 9}),
    ({"query_scale": None}, {"query_scale": 8**-0.5}),
    ({"biases": ("mlp", "qkv")}, {"biases": ("qkv", "mlp")}),
    ({"scheme": A}, {"scheme": Layers((((A, A), 2),))}),
    ({"scheme": rope(Plain(1e4))}, {"scheme": rope(Plain(1e4, head_dim=8))}),
    # NTK-aware scaling by 2 is plain RoPE with the base 10,000 * 2^(8/6).
    ({"scheme": rope(NTKAware(2.0))}, {"scheme": rope(Plain(1e4 * 2 ** (8 / 6)))}),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME)
def test_equal_models_may_be_configured_differently(ours, theirs):
    family.check_same(LLAMA, *(dataclasses.replace(CONFIG, **options) for options in (ours, theirs)))


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"query_scale": 0.5}, {}, "query_scale: the layout of llama cannot store 0.5, only 0.35"),
        ({"norm": family.Norm(eps=1e-3)}, {}, "norm: the layout of llama cannot store"),
        ({"biases": ("mlp",)}, {"biases": ("mlp", "qkv")}, "biases: the layout of llama cannot store"),
        (
            {"scheme": Layers((((A, B), 2),))},
            {"scheme": Layers((((A, C), 2),))},
            r"scheme: the layout of llama cannot store mask Window\(size=4\), only mask Window\(size=5\)",
        ),
        ({"scheme": rope(Plain(2e4))}, {"scheme": rope(Plain(1e4))}, "scheme: .* features"),
        ({"scheme": rope(YaRN(2.0, 9))}, {"scheme": rope(Plain(1e4))}, "scheme: .* features"),
    ],
)
def test_a_field_that_is_not_stored_is_named(ours, theirs, message):
    with pytest.raises(ValueError, match=message):
        family.check_same(LLAMA, *(dataclasses.replace(CONFIG, **options) for options in (ours, theirs)))


def test_rules_rotate_alike_if_frequencies_and_factors_are_equal():
    same = family._rotate_alike
    assert same(NTKAware(2.0), Plain(1e4 * 2 ** (8 / 6)), 8)
    assert not same(NTKAware(2.0), Plain(1e4 * 2 ** (8 / 6) * (1 + 1e-9)), 8)
    assert not same(YaRN(4.0, 10), dataclasses.replace(YaRN(4.0, 10), attention_factor=1.0), 8)

    class Own(Plain):
        """A rule from outside the library, which may rotate differently from its frequencies."""

    assert not same(Own(1e4), Plain(1e4), 8)


def test_basics_of_a_config():
    values = {"rms_norm_eps": 1e-4, "hidden_act": "gelu_new"}
    assert LLAMA.read_basics(values) == {"norm": family.Norm(eps=1e-4), "embedding_scale": 1.0, "activation": "geglu"}
    written = LLAMA.write_basics(dataclasses.replace(CONFIG, norm=family.Norm(eps=1e-4), activation="geglu"))
    assert written == {"rms_norm_eps": 1e-4, "hidden_act": "gelu_pytorch_tanh"}
