"""Schemes: presets and options, refusals, what a scheme declares, and attention against NumPy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scheme.calls import BATCH, HEADS, KV, SIZE, TOKENS, as_float32, attended, decoded, draw, projections

import posjax as pj
from posjax import absolute, bias, coca, masks, norms, rotary, scales
from posjax.positions import Range
from posjax.scheme import Layers, Scheme, uniform
from posjax.scheme.registry import SLOTS, slot

ROPE = pj.scheme("rope")


# --- presets and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "wanted"),
    [
        (pj.scheme("nope"), Scheme()),
        (pj.scheme("rope", base=500.0), Scheme(features=rotary.Rotary(rotary.Plain(500.0)))),
        (pj.scheme("p-rope", partial_rotary_factor=0.25), Scheme(features=rotary.Rotary(rotary.Proportional(0.25)))),
        (pj.scheme("alibi", learned=True), Scheme(bias=bias.ALiBi(learned=True))),
        (pj.scheme("t5", max_distance=24), Scheme(bias=bias.T5(max_distance=24))),
        (pj.scheme("kerple-power"), Scheme(bias=bias.Kerple("power"))),
        (pj.scheme("learned", max_length=7), Scheme(embedding=absolute.Learned(7))),
        (pj.scheme("sinusoidal", base=100.0), Scheme(embedding=absolute.Sinusoidal(base=100.0))),
        (pj.scheme("coca-tied", base=500.0), Scheme(features=coca.Coca("tied", rotary.Plain(500.0)))),
        (pj.scheme("nope", scale={"name": "log-n", "length": 64}), Scheme(scale=scales.LogN(64))),
        (pj.scheme("rope", mask=masks.Window(3)), Scheme(features=rotary.Rotary(), mask=masks.Window(3))),
        (
            pj.scheme("rope", base=500.0, frequencies={"name": "linear", "factor": 2.0}),
            Scheme(features=rotary.Rotary(rotary.Linear(2.0, base=500.0))),
        ),
    ],
    ids=str,
)
def test_presets_and_their_options(built, wanted):
    assert built == wanted
    assert hash(built) == hash(wanted)


def test_an_option_of_a_preset_takes_the_slot_of_its_name():
    assert pj.scheme("vo-rope", frequencies={"name": "default", "base": 5e5}).features.frequencies.base == 5e5
    assert pj.scheme("streaming", recent=5, first=2).remap.first == 2
    assert pj.scheme("streaming", recent=5, sinks={"name": "learned"}).sinks is not None
    made = pj.scheme("nope", features={"name": "rotary"}, frequencies={"name": "ntk", "factor": 4})
    assert made.features == rotary.Rotary(rotary.NTKAware(4))
    rule = pj.scheme("mrope", sections=(2, 1, 1)).extend(frequencies=rotary.YaRN(4.0, 8)).features.frequencies
    assert (type(rule), rule.rule) == (rotary.MRoPE, rotary.YaRN(4.0, 8))


def test_every_preset_is_named_and_there_is_no_bare_coca():
    assert {"nope", "rope", "alibi", "t5", "coca-strict", "coca-slack", "coca-tied"} <= set(pj.scheme_names())
    assert "coca" not in pj.scheme_names()


def test_every_slot_makes_its_specs_by_name():
    assert slot("norm", "qk-norm", gain=False) == norms.QKNorm(gain=False)
    assert slot("mask", "window", size=5) == masks.Window(5)
    for slot_name, kinds in SLOTS.items():
        for kind in kinds.values():
            assert callable(kind), (slot_name, kind)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pj.scheme("alibii"), r"unknown scheme 'alibii'; did you mean 'alibi'\?"),
        (lambda: pj.scheme("coca"), r"unknown scheme 'coca'; did you mean 'coca-"),
        (lambda: pj.scheme("rope", bse=1.0), r"unknown scheme 'rope' option 'bse'; did you mean 'base'\?"),
        (lambda: pj.scheme("rope", scales=None), r"option 'scales'; did you mean 'scale'\?"),
        (lambda: pj.scheme("nope", base=1.0), r"unknown scheme 'nope' option 'base'"),
        (lambda: pj.scheme("kerple-log", kind="power"), r"unknown scheme 'kerple-log' option 'kind'"),
        (lambda: pj.scheme("learned"), r"scheme 'learned' needs max_length"),
        (lambda: pj.scheme("rope", scale={"name": "log"}), r"unknown scale 'log'; did you mean 'log-n'\?"),
        (lambda: pj.scheme("rope", scale={"length": 3}), r"scale: expected a spec or \{'name': \.\.\.\}"),
        (lambda: pj.scheme("rope", scale={"name": "log-n"}), r"scale 'log-n' needs length"),
        (lambda: pj.scheme("alibi", frequencies={"name": "linear"}), r"this scheme rotates nothing"),
        (lambda: slot("feature", "rope"), r"unknown slot 'feature'"),
        (lambda: pj.scheme("rope", mask={"name": ["window"]}), r"unknown mask \['window'\]"),
        (lambda: pj.scheme("rope", features=None, frequencies={"name": "ntk", "factor": 4}), r"rotates nothing"),
        (lambda: pj.scheme("alibi", symmetric={"a": 1}), r"symmetric must be True or False, found"),
        (lambda: Layers(()), r"patterns is empty"),
        (lambda: Layers((((ROPE,), 0),)), r"every period needs schemes and repeats, found 0"),
    ],
)
def test_bad_names_and_options_are_refused(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_scheme_is_a_static_argument():
    stack = Layers((((ROPE, pj.scheme("nope")), 2), ((ROPE,), 1)))
    doubled = jax.jit(lambda x, scheme: 2 * x, static_argnums=1)
    assert doubled(1.0, ROPE) == doubled(1.0, dataclasses.replace(ROPE)) == doubled(1.0, stack) == 2.0
    assert stack.schemes == (ROPE, pj.scheme("nope"), ROPE, pj.scheme("nope"), ROPE)
    assert uniform(ROPE, 3).schemes == (ROPE,) * 3


# --- what a scheme declares -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "invariant"),
    [
        (pj.scheme("rope", mask=masks.Window(3), scale=scales.LogN(8)), True),
        (pj.scheme("rope", mask=masks.Window(3) | masks.FirstTokens(1)), False),
        (pj.scheme("rope", mask=masks.Chunked(4)), False),
        (pj.scheme("nope", scale=scales.Llama4Temperature()), False),
        (pj.scheme("alibi", embedding=absolute.Sinusoidal()), False),
        (pj.scheme("coca-relative", scale=scales.SSMax()), True),
        (pj.scheme("coca-slack"), False),
    ],
    ids=str,
)
def test_shift_invariance_follows_from_the_slots(scheme, invariant):
    assert scheme.shift_invariant is invariant
    assert Layers((((pj.scheme("nope", embedding=scheme.embedding), scheme), 1),)).shift_invariant is invariant


def test_reading_the_length_follows_from_the_features():
    dynamic = ROPE.extend(frequencies=rotary.DynamicNTK(8))
    assert (ROPE.reads_length, dynamic.reads_length, pj.scheme("alibi").reads_length) == (False, True, False)
    assert Layers((((ROPE, dynamic), 1),)).reads_length


def test_parameters_of_a_layer_and_of_all_layers():
    scheme = pj.scheme("t5", num_buckets=8, norm=norms.QKNorm(), scale=scales.SSMax())
    key = jax.random.key(0)
    own, shared = scheme.init(key, 4, 16), scheme.init_shared(key, 4, 16)
    assert jax.tree.map(jnp.shape, own) == {"norm": {"q": (16,), "k": (16,)}, "scale": {"s": (4,)}}
    assert jax.tree.map(jnp.shape, shared) == {"bias": {"table": (8, 4)}}
    assert ROPE.init(key, 4, 16) == ROPE.init_shared(key, 4, 16) == {}
    assert pj.scheme("alibi", learned=True).init(key, 4, 16)["bias"]["slopes"].shape == (4,)


# --- attend -----------------------------------------------------------------------------------------------------------


def strict_coca_logits(q, t, theta):
    """``sum_j t_j |q_j|^2 cos((m - n) theta_j)`` with the keys of every query head, float64 ``[B, H, T, T]``."""
    half = q.shape[-1] // 2
    squared = q[..., :half] ** 2 + q[..., half:] ** 2
    t = np.repeat(np.maximum(t, 0), HEADS // KV, axis=2)
    n = np.arange(TOKENS)
    turn = np.cos((n[:, None] - n)[..., None] * theta)
    return np.einsum("bmhj,bnhj,mnj->bhmn", squared, t, turn)


@pytest.mark.parametrize("temperature", [{}, {"mscale": 0.7, "mscale_all_dim": 1.0}], ids=["yarn", "deepseek"])
def test_coca_yarn_log_n_and_a_window_are_one_scheme(temperature):
    rule = rotary.YaRN(4.0, 8, base=100.0, **temperature)
    scheme = Scheme(
        features=coca.Coca("strict", rule), scale=scales.LogN(5, minimum=1), bias=bias.ALiBi(), mask=masks.Window(4)
    )
    q, t, v = projections(key_size=SIZE // 2)
    found = jax.jit(lambda *arrays: scheme.attend(*arrays))(*as_float32(q, t, v))

    n = np.arange(TOKENS)
    distance = n[:, None] - n
    plain = 100.0 ** (-np.arange(4) / 4)
    kept = 1 - np.clip((np.arange(4) - 0) / 1, 0, 1)  # The ramp's range over eight positions: pairs 0 to 1.
    logits = strict_coca_logits(q, t, plain * ((1 - kept) / 4 + kept))
    extra = 0.1 * np.log(4) + 1
    temper = ((0.07 * np.log(4) + 1) / extra) ** 2 * extra**2 if temperature else extra**2
    logits *= temper * (np.log(np.minimum(n + 1, 4)) / np.log(5))[:, None] / np.sqrt(SIZE)
    slopes = 2.0 ** -np.array([2, 4, 6, 8])
    # The oracle takes logits as a bias on features that are zero.
    bias_values = logits - slopes[:, None, None] * distance
    wanted, _ = oracles.attention(
        0 * q, 0 * q, np.repeat(v, 2, 2), bias=bias_values, allowed=(distance >= 0) & (distance < 4)
    )
    chex.assert_shape(found, (BATCH, TOKENS, HEADS, SIZE))
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_rope_with_learned_norm_and_scale_is_their_formula():
    rule = rotary.YaRN(4.0, 8, base=100.0, mscale=1.0, mscale_all_dim=1.0)
    scheme = Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rule), scale=scales.SSMax(bias=True))
    q, k, v = projections()
    gains, s, b = {"q": draw(SIZE, 5), "k": draw(SIZE, 6)}, draw(HEADS, 7), draw(HEADS, 8)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), {"norm": gains, "scale": {"s": s, "b": b}})
    found = scheme.attend(*as_float32(q, k, v), params=params, causal=False)

    def normed(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

    def rotated(x):
        kept = 1 - np.clip(np.arange(4), 0, 1)
        theta = 100.0 ** (-np.arange(4) / 4) * ((1 - kept) / 4 + kept)
        turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * np.arange(TOKENS)[:, None, None] * theta)
        return np.concatenate([turned.real, turned.imag], -1)

    factor = (s * np.log(TOKENS) + b)[:, None] * (0.1 * np.log(4) + 1) ** 2
    wanted, _ = oracles.attention(rotated(normed(q, gains["q"])) * factor, rotated(normed(k, gains["k"])), v)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_causal_default_counts_keys_by_position_and_a_given_count_wins():
    scheme = pj.scheme("nope", scale=scales.LogN(4, minimum=1))
    q, k, v = as_float32(*projections())
    causal = scheme.attend(q, k, v)
    by_hand = scheme.attend(q, k, v, visible=jnp.arange(TOKENS) + 1)
    chex.assert_trees_all_equal(causal, by_hand)
    shifted = Range(1_000_003, TOKENS)
    np.testing.assert_allclose(scheme.attend(q, k, v, q_positions=shifted, kv_positions=shifted), causal, atol=1e-6)
    last = scheme.attend(q[:, -1:], k, v, q_positions=Range(TOKENS - 1, 1))
    np.testing.assert_allclose(last, causal[:, -1:], atol=1e-6)


def test_options_reach_attention_and_length_decides_the_rule():
    scheme = ROPE.extend(frequencies=rotary.DynamicNTK(4))
    q, k, v = as_float32(*projections())
    _, lse = scheme.attend(q, k, v, return_residuals=True, implementation="blockwise", sinks=jnp.zeros(HEADS))
    chex.assert_shape(lse, (BATCH, TOKENS, HEADS))
    chex.assert_trees_all_equal(scheme.attend(q, k, v, length=4), ROPE.attend(q, k, v))
    chex.assert_trees_all_equal(scheme.attend(q, k, v), scheme.attend(q, k, v, length=TOKENS))
    traced = jax.jit(lambda length: scheme.attend(q, k, v, length=length))(jnp.int32(9))
    np.testing.assert_allclose(traced, scheme.attend(q, k, v, length=9), atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "option"), [(pj.scheme("alibi"), "symmetric"), (pj.scheme("t5"), "bidirectional")], ids=str
)
def test_attend_refuses_the_other_direction(scheme, option):
    with pytest.raises(ValueError, match=f"is for causal attention; use .*{option}=True"):
        scheme.attend(*as_float32(*projections()), causal=False)


def test_attend_says_which_parameters_are_missing():
    with pytest.raises(ValueError, match="params must hold 'table'"):
        pj.scheme("t5").attend(*as_float32(*projections()))


@pytest.mark.parametrize("name", ["rope", "linear-elu"])
@pytest.mark.parametrize("call", [attended, decoded])
def test_an_unknown_option_is_refused(call, name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'soft_cap'"):
        call(pj.scheme(name), soft_cap=2.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear-elu", {}),
        ("performer", {"causal": False}),
        ("rope", {"implementation": "blockwise"}),
        ("coca-strict", {"implementation": "dense"}),
    ],
)
def test_gradients_under_two_vmaps_are_those_of_single_calls(name, options):
    """Several query heads share a key head, so the products have as many axes as they can have."""
    scheme = pj.scheme(name)
    params = scheme.init(jax.random.key(0), 4, 8, num_kv_heads=2)
    sizes = (4, scheme.query_size(8)), (2, scheme.key_size(8)), (2, 8)
    qkv = [jax.random.normal(jax.random.key(n), (2, 3, 2, 5, *size)) for n, size in enumerate(sizes)]
    gradient = jax.grad(lambda *qkv: jnp.sin(scheme.attend(*qkv, params=params, **options)).sum(), (0, 1, 2))
    got, one = jax.jit(jax.vmap(jax.vmap(gradient)))(*qkv), jax.jit(gradient)
    for at in np.ndindex(2, 3):
        chex.assert_trees_all_close([x[at] for x in got], list(one(*(x[at] for x in qkv))), atol=1e-5)
