"""Presets and layer recipes: their options, numbers and patterns."""

import inspect
import math

import pytest
from decoders import OPTIONS, preset
from refusals import refused

import posjax as pj
from posjax import absolute, bias, coca, masks, norms, rotary, scales, sinks
from posjax.scheme import Layers, Scheme
from posjax.scheme.presets import PRESETS, scheme_options

NAMES = pj.scheme_names()


def where(layers, holds):
    """The indices of the layers for which ``holds`` is true."""
    return [index for index, scheme in enumerate(layers.schemes) if holds(scheme)]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_value_and_names_the_options_that_it_needs(name):
    made, options = preset(name), OPTIONS.get(name, {})
    assert hash(made) == hash(preset(name))
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    assert pj.scheme(name, **lists) == made
    parameters = inspect.signature(PRESETS[name][0]).parameters
    assert scheme_options(name) == tuple(parameters)
    for option in (key for key, of in parameters.items() if of.default is of.empty):
        refused(option, lambda: pj.scheme(name))
    if not isinstance(made, Layers) and made.linear is None:
        assert pj.scheme(name, **options, sinks={"name": "plus-one"}).sinks == sinks.SoftmaxPlusOne()


ROTARY = rotary.Rotary()
BUILT = [
    (pj.scheme("nope"), Scheme()),
    (pj.scheme("rope", base=500.0), Scheme(features=rotary.Rotary(rotary.Plain(500.0)))),
    (pj.scheme("alibi", learned=True), Scheme(bias=bias.ALiBi(learned=True))),
    (pj.scheme("kerple-power"), Scheme(bias=bias.Kerple("power"))),
    (pj.scheme("learned", max_length=7), Scheme(embedding=absolute.Learned(7))),
    (pj.scheme("coca-tied", base=500.0), Scheme(features=coca.Coca("tied", rotary.Plain(500.0)))),
    (
        pj.scheme("rope", base=500.0, frequencies={"name": "linear", "factor": 2.0}),
        Scheme(features=rotary.Rotary(rotary.Linear(2.0, base=500.0))),
    ),
    # An option of the method wins over the slot of its name, unless a spec by name is given.
    (pj.scheme("ssmax", bias=True), Scheme(features=ROTARY, scale=scales.SSMax(bias=True))),
    (pj.scheme("ssmax", bias={"name": "t5"}), Scheme(features=ROTARY, scale=scales.SSMax(), bias=bias.T5())),
    (pj.scheme("qwen3"), Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rotary.Plain(1e6)))),
    (pj.scheme("longformer"), Scheme(features=ROTARY, mask=masks.Dilated(257, 1) | masks.GlobalFirst(1))),
]


@pytest.mark.parametrize(("built", "wanted"), BUILT)
def test_presets_and_their_options(built, wanted):
    assert built == wanted


@pytest.mark.parametrize(("window", "alpha"), [(16, 0.676), (18, 0.766)])
def test_windows_of_hwfa_reach_a_share_of_the_training_length(window, alpha):
    """24 layers, 512 tokens (kexue.fm/archives/9603): ``(w - 1)(L - 1) + 1 = alpha N``."""
    exact = ((window - 1) * 23 + 1) / 512
    assert exact == pytest.approx(alpha, abs=5e-3)
    for share, found in ((exact, window), (math.nextafter(exact, 0), window - 1)):
        layers = pj.scheme("hwfa", num_layers=24, length=512, alpha=share)
        assert layers.schemes[0].mask == masks.Window(found)


def test_hwfa_is_windows_with_rotation_and_a_last_layer_with_log_n():
    layers = pj.scheme("hwfa", num_layers=24, length=512)
    assert [repeats for _, repeats in layers.patterns] == [23, 1]
    local = Scheme(features=rotary.Rotary(), mask=masks.Window(17))
    assert layers.schemes == (local,) * 23 + (Scheme(scale=scales.LogN(512)),)
    given = pj.scheme("hwfa", num_layers=24, length=512, window=16, base=500.0).schemes[0]
    assert (given.mask, given.features.frequencies.base) == (masks.Window(16), 500.0)


@pytest.mark.parametrize(("depth", "full", "places"), [(24, 1, [12]), (24, 2, [8, 16]), (12, 3, [3, 6, 9])])
def test_hwfa2_spreads_its_full_layers_and_takes_the_window_of_its_article(depth, full, places):
    """Two to four times the length over the depth (kexue.fm/archives/9731), whose best is 64 for 24 layers and 512."""
    layers = pj.scheme("hwfa2", num_layers=depth, length=512, full_layers=full)
    assert len(layers.schemes) == depth
    assert where(layers, lambda scheme: scheme.mask is None) == places
    assert where(layers, lambda scheme: scheme.scale == scales.LogN(512)) == places
    assert where(layers, lambda scheme: scheme.rotates) == list(range(depth))
    assert layers.schemes[0].mask == masks.Window(1536 // depth)
    given = pj.scheme("hwfa2", num_layers=depth, length=512, window=32)
    assert given.schemes[0].mask == masks.Window(32)


@pytest.mark.parametrize(
    ("name", "depth", "repeats", "full", "without"),
    [
        ("gemma3", 26, [4, 1], [5, 11, 17, 23], []),
        ("llama4", 48, [12], [*range(3, 48, 4)], [*range(3, 48, 4)]),
        ("llama4", 6, [1, 1], [3], [3]),
        ("smollm3", 36, [9], [*range(36)], [*range(3, 36, 4)]),
        ("gpt-oss", 5, [2, 1], [1, 3], []),
        ("rnope-swa", 32, [8], [*range(3, 32, 4)], [*range(3, 32, 4)]),
    ],
)
def test_periods_and_what_is_left_of_the_last(name, depth, repeats, full, without):
    layers = pj.scheme(name, num_layers=depth)
    assert [times for _, times in layers.patterns] == repeats
    assert len(layers.schemes) == depth
    assert where(layers, lambda scheme: scheme.mask is None) == full
    assert where(layers, lambda scheme: not scheme.rotates) == without


def test_numbers_of_released_recipes():
    local, whole = (pj.scheme("gemma3", num_layers=6, factor=8.0).schemes[index] for index in (0, 5))
    assert (local.features.frequencies, local.mask) == (rotary.Plain(10_000.0), masks.Window(1024))
    assert whole.features.frequencies == rotary.Linear(8.0, base=1_000_000.0)
    assert local.norm == whole.norm == norms.QKNorm()
    assert pj.scheme("gemma3", num_layers=6).schemes[5].features.frequencies == rotary.Plain(1_000_000.0)
    oss = pj.scheme("gpt-oss", num_layers=2).schemes[0]
    assert oss.features.frequencies == rotary.YaRN(32.0, 4096, base=150_000.0, truncate=False)
    assert (oss.mask, oss.sinks) == (masks.Window(128), sinks.LearnedSinks())
    assert pj.scheme("smollm3", num_layers=4).schemes[0].features.frequencies == rotary.Plain(5_000_000.0)
    assert pj.scheme("rnope-swa", num_layers=4).schemes[0].mask == masks.Window(4096)


def test_scout_and_maverick():
    scout, maverick = pj.scheme("llama4", num_layers=4, factor=16.0), pj.scheme("llama4", num_layers=4, qk_norm=False)
    plain = rotary.Plain(500_000.0).inverse_frequencies(128)
    kept = 2 * math.pi / plain < 8192
    found = scout.schemes[0].features.frequencies.inverse_frequencies(128)
    assert found.tolist() == pytest.approx([x if k else x / 16 for x, k in zip(plain, kept, strict=True)])
    assert [scheme.norm for scheme in scout.schemes] == [norms.QKNorm(gain=False, eps=1e-5)] * 3 + [None]
    assert (scout.schemes[0].mask, scout.schemes[3].scale) == (masks.Chunked(8192), scales.Llama4Temperature(8192, 0.1))
    assert {scheme.norm for scheme in maverick.schemes} == {None}


def test_new_frequencies_skip_layers_without_position():
    before = pj.scheme("llama4", num_layers=5)
    after = before.extend(frequencies={"name": "yarn", "factor": 4.0, "original_length": 64}, mask=masks.Window(4))
    assert where(after, lambda scheme: scheme.rotates) == [0, 1, 2, 4]
    assert {s.features.frequencies for s in after.schemes if s.rotates} == {rotary.YaRN(4.0, 64, base=500_000.0)}
    assert after.schemes[3] == before.schemes[3].replace(mask=masks.Window(4))


def test_a_rule_within_a_rule_is_given_by_name_and_inherits_what_it_does_not_change():
    before = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0, partial_rotary_factor=0.5)))
    yarn = {"name": "yarn", "factor": 4.0, "original_length": 64}
    found = before.extend(frequencies={"name": "resonance", "rule": yarn})
    wanted = rotary.Resonance(rule=rotary.YaRN(4.0, 64, base=500.0, partial_rotary_factor=0.5))
    assert found.features.frequencies == wanted
