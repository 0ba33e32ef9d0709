"""Bad input to schemes is refused in one line that names the slot or the option."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from attention.own_methods import LearnedRows
from jax.sharding import PartitionSpec
from refusals import refused

import posjax as pj
from posjax import coca, masks, norms, remap, rotary, scales
from posjax.attention.sharded import Placement
from posjax.positions import Range
from posjax.scheme import Layers, Scheme, uniform
from posjax.scheme.registry import slot

ROPE, NOPE, ALIBI, T5, LINEAR = map(pj.scheme, ("rope", "nope", "alibi", "t5", "linear-elu"))
HUGE = 2**63
LATE = norms.QKNorm(after_features=True)

# --- the numbers and choices of specs ---------------------------------------------------------------------------------

NOT_A_COUNT = (0, 2.5, math.nan)
NOT_POSITIVE = (0, math.nan)
NEGATIVE = (-1, math.nan)
BELOW_ONE = (0.5, math.nan)
ABOVE_ONE = (1, 0.5, math.nan)
BASE = {"base": ABOVE_ONE}
TABLE = {"max_length": NOT_A_COUNT, "stddev": NEGATIVE, "unused": (-1, 2.5, math.nan)}
SIZE = {"size": NOT_A_COUNT}
LENGTH = {"length": ABOVE_ONE}
SPECS = [
    ("embedding", "sinusoidal", {}, BASE | {"convention": ("sines",)}),
    ("embedding", "learned", {"max_length": 8}, TABLE),
    ("embedding", "hierarchical", {"max_length": 8}, TABLE | {"alpha": (0, 1, 0.5, math.nan)}),
    ("features", "coca", {"variant": "strict"}, {"variant": ("coca",), "pairing": ("both",)}),
    ("features", "coca-planes", {"planes": (1, 3)}, {"planes": ((3, 1), (-1, 2), (1,), (0, 1.5), (False, True), 2)}),
    ("features", "fope", {"original_length": 8}, {"original_length": (6, math.nan), "planes": NOT_A_COUNT} | BASE),
    ("features", "fope", {"original_length": 8}, {"gain": NEGATIVE, "learned": (1,), "pairing": ("both",)}),
    ("features", "rope-pp", {}, {"frequencies": (None,), "pairing": ("both",), "precision": ("half",)}),
    ("features", "pope", {}, {"frequencies": (None,), "init_delta": ("ones",), "precision": ("half",)}),
    *(("norm", name, {}, {"eps": NEGATIVE}) for name in ("key-norm", "qk-norm", "cosine")),
    ("scale", "log-n", {"length": 8}, LENGTH | {"minimum": NOT_POSITIVE}),
    ("scale", "clipped-log-n", {"length": 8}, LENGTH),
    ("scale", "ssmax", {}, {"initial": (math.nan, "log")}),
    ("scale", "llama4", {}, {"floor_scale": NOT_A_COUNT, "attn_scale": NEGATIVE}),
    ("scale", "ministral", {"length": 8}, {"length": NOT_A_COUNT, "beta": NEGATIVE}),
    ("scale", "inkling", {}, {"length": NOT_A_COUNT, "alpha": NEGATIVE}),
    ("scale", "yarn", {"extension": 2.0}, {"extension": NOT_POSITIVE, "mscale": NEGATIVE}),
    ("scale", "cosine", {"length": 8}, {"length": (3, math.nan)}),
    ("scale", "learned-cosine", {"length": 8}, LENGTH),
    ("scale", "constant", {"value": 2.0}, {"value": NOT_POSITIVE}),
    ("scale", "drope", {"extension": 2.0}, {"extension": BELOW_ONE, "slope": NEGATIVE}),
    ("scale", "gradient-maximal", {"n": 8}, {"n": ABOVE_ONE}),
    ("bias", "alibi", {}, {"factor": BELOW_ONE, "direction": ("left", "slopes")}),
    ("bias", "t5", {}, {"num_buckets": (1, 2.5), "max_distance": (4, 2.5), "stddev": NEGATIVE}),
    ("bias", "kerple", {}, {"kind": ("linear",)}),
    ("bias", "sandwich", {}, {"dbar": (7, 0), "variant": ("from_two",), "factor": NOT_POSITIVE}),
    ("bias", "fire", {}, {"width": NOT_A_COUNT, "c": NOT_POSITIVE, "threshold": NOT_POSITIVE}),
    ("bias", "fox", {}, {"decay_times": ((0, 8.0), (8.0, 2.0), (math.nan, 8.0)), "data_dependent": (False,)}),
    ("bias", "cope", {}, {"max_position": (1, 2.5)}),
    ("bias", "path", {}, {"rank": NOT_A_COUNT}),
    ("bias", "relative", {}, {"size": NOT_A_COUNT, "clip": NOT_POSITIVE, "scaled": (1,), "extent": NOT_A_COUNT}),
    ("bias", "shaw", {}, {"extent": NOT_A_COUNT, "bidirectional": (1,), "stddev": NEGATIVE}),
    ("bias", "scale-invariant", {}, {"tau": NOT_POSITIVE, "alpha": NOT_POSITIVE, "beta": (*NOT_POSITIVE, 0.1)}),
    *(("mask", name, {"size": 4}, SIZE) for name in ("window", "chunked", "band")),
    *(("mask", name, {"count": 2}, {"count": NOT_A_COUNT}) for name in ("global-first", "first-tokens")),
    ("mask", "dilated", {"size": 4, "dilation": 2}, SIZE | {"dilation": (0, 1.5, (), (1, 0))}),
    ("mask", "lambda", {"window": 4, "first": 2}, {"window": NOT_A_COUNT, "first": NOT_A_COUNT}),
    ("remap", "rerope", {"window": 4}, {"window": NOT_A_COUNT}),
    ("remap", "leaky-rerope", {"window": 4}, {"window": NOT_A_COUNT, "factor": (*NOT_POSITIVE, 1.3)}),
    ("remap", "self-extend", {}, {"group": (3, 0), "window": (1023, 0)}),
    ("remap", "lm-infinite", {}, {"n_local": NOT_A_COUNT, "n_global": NOT_A_COUNT}),
    ("remap", "streaming", {}, {"first": NOT_A_COUNT, "recent": NOT_A_COUNT}),
    ("remap", "dual-chunk", {"length": 8}, {"length": (7, 0), "chunk": (3, 8, 0)}),
    ("remap", "string", {"length": 500}, {"length": (*NOT_A_COUNT, 2), "shift": (501, 128, 0), "window": (166, 0)}),
    ("linear", "performer", {}, {"num_features": NOT_A_COUNT, "norms": ("unit",), "eps": NEGATIVE, "scale": (0,)}),
    *(("linear", name, {}, {"order": (1, 3, 2.5), "scale": NOT_POSITIVE}) for name in ("taylor", "limit")),
    ("training_positions", "randomised", {}, {"max_length": (2**31, 0), "test": ("odd",)}),
    ("training_positions", "equal-mean", {}, {"distribution": ("normal",), "factor": ABOVE_ONE, "alpha": (0,)}),
    ("training_positions", "clex", {"original_length": 8}, {"original_length": (2**31, 0), "max_factor": NOT_A_COUNT}),
    ("training_positions", "pose", {"max_length": 8}, {"max_length": (2**31, 0), "chunks": NOT_A_COUNT}),
]


@pytest.mark.parametrize(("slot_name", "name", "good", "bad"), SPECS)
def test_numbers_and_choices_out_of_range_are_refused(slot_name, name, good, bad):
    assert slot(slot_name, name, **good) == slot(slot_name, name, **good)
    refused("sise", lambda: slot(slot_name, name, **good, sise=3))
    for option, values in bad.items():
        for value in values:
            refused(option, lambda option=option, value=value: slot(slot_name, name, **(good | {option: value})))


DEPTH = {"num_layers": (*NOT_A_COUNT, HUGE)}
RECIPES = [
    ("hwfa", {"num_layers": 3, "length": 16}, DEPTH | BASE | {"length": (2, 2.5), "alpha": (0, 1.1, math.nan)}),
    ("hwfa2", {"num_layers": 3, "length": 8}, DEPTH | BASE | {"length": NOT_A_COUNT, "full_layers": (3, 0)}),
    ("gemma3", {"num_layers": 6}, DEPTH | {"factor": BELOW_ONE}),
    ("llama4", {"num_layers": 4}, DEPTH | BASE | {"floor_scale": NOT_A_COUNT, "original_length": NOT_A_COUNT}),
    ("smollm3", {"num_layers": 4}, {"num_layers": (3, HUGE)} | BASE),
    ("gpt-oss", {"num_layers": 2}, DEPTH | BASE | {"factor": BELOW_ONE, "original_length": BELOW_ONE}),
    ("rnope-swa", {"num_layers": 4}, DEPTH | BASE),
    ("longformer", {}, {"window": NOT_A_COUNT, "dilation": (0, ()), "global_tokens": NOT_A_COUNT}),
    ("inverse-leaky", {"length": 16, "extension": 2.0}, {"length": (6, 0), "extension": BELOW_ONE}),
    ("mrope", {}, {"sections": ((2,), (2, 0, 2), (2, 1.5, 1))}),
]


@pytest.mark.parametrize(("name", "good", "bad"), RECIPES)
def test_bad_options_of_recipes_are_refused(name, good, bad):
    for option, values in bad.items():
        for value in values:
            refused(option, lambda option=option, value=value: pj.scheme(name, **(good | {option: value})))


# --- calls ------------------------------------------------------------------------------------------------------------


class Unhashable(LearnedRows):
    __hash__ = None


@dataclasses.dataclass(frozen=True)
class Loose:
    def init(self, key, num_heads):
        return {}


def decoded(scheme, placement):
    cache = scheme.init_cache(1, 4, num_heads=2, num_kv_heads=2, head_dim=X.shape[-1])
    index = jnp.zeros((1, 1), jnp.int32)
    return scheme.decode(X[:, :1], X[:, :1], X[:, :1], cache, index=index, length=4, placement=placement)


def cached(scheme, placement):
    at = {"q_positions": Range(0, X.shape[1]), "kv_positions": Range(0, X.shape[1])}
    return scheme.attend_cached(X, X, X, params={}, head_dim=X.shape[-1], length=4, placement=placement, **at)


@dataclasses.dataclass(frozen=True)
class Unbound(pj.bias.BiasSpec):
    pass


@dataclasses.dataclass(frozen=True)
class WithoutFactor(pj.scales.Scale):
    pass


def layers(*schemes, repeats=1):
    return Layers(((schemes, repeats),))


X = jnp.zeros((1, 3, 2, 8))
SEGMENTS = masks.Segments(jnp.zeros((1, 2), jnp.int32))
REROPE = {"name": "rerope", "window": 4}
DYNAMIC = {"name": "dynamic-ntk", "original_length": 8}
YARN = {"name": "yarn", "factor": 4, "original_length": 8}
COCA = pj.scheme("coca-strict")
P_ROPE = pj.scheme("p-rope")
TWO_BASES = pj.scheme("gemma3", num_layers=6)
CALLS = [
    # names and options
    ("alibi", lambda: pj.scheme("alibii")),
    ("scale", lambda: pj.scheme("rope", scales=None)),
    ("max_length", lambda: pj.scheme("learned")),
    ("log-n", lambda: pj.scheme("rope", scale={"name": "log"})),
    ("slot", lambda: slot("feature", "rope")),
    ("symmetric", lambda: pj.scheme("alibi", symmetric={"a": 1})),
    ("sinks", lambda: pj.scheme("gemma3", num_layers=6, sinks={"name": "plus-one"})),
    ("size", lambda: pj.scheme("window", size=jnp.int32(3))),
    # specs in the wrong slot, and slots that do not compose
    ("scale", lambda: pj.scheme("rope", scale="log-n")),
    ("mask", lambda: Scheme(mask=masks.Causal() & SEGMENTS)),
    ("norm", lambda: pj.scheme("coca-slack", norm=norms.KeyNorm())),
    *(("features", lambda name=name: pj.scheme(name, features={"name": "rotary"})) for name in ("cope", "path")),
    ("bias", lambda: pj.scheme("rope-pp", bias={"name": "fox"})),
    ("features", lambda: pj.scheme("rope").extend(features={"name": "rope-pp"})),
    ("rotates the whole head", lambda: rotary.RoPEPP(rotary.Plain(partial_rotary_factor=0.5)).query_size(8)),
    ("remap", lambda: pj.scheme("xpos", remap=REROPE)),
    ("remap", lambda: pj.scheme("alibi", remap=REROPE)),
    ("bias", lambda: pj.scheme("linear-elu", bias={"name": "alibi"})),
    ("features", lambda: pj.scheme("linear-elu", features={"name": "xpos"})),
    ("norm", lambda: pj.scheme("performer", norm={"name": "key-norm"})),
    ("norm", lambda: ROPE.replace(norm=LATE, frequencies=rotary.YaRN(4.0, 8))),
    ("norm", lambda: pj.scheme("xpos", norm=LATE)),
    ("norm", lambda: pj.scheme("linear-elu", norm=LATE)),
    ("frequencies", lambda: pj.scheme("linear-elu", frequencies=DYNAMIC)),
    ("features", lambda: pj.scheme("linear-elu", frequencies=YARN)),
    *(
        ("scale", lambda rule=rule: pj.scheme("rope", frequencies=rule, scale={"name": "yarn", "extension": 4.0}))
        for rule in (YARN, {"name": "resonance", "rule": YARN})
    ),
    ("training_positions", lambda: pj.scheme("learned", max_length=8, training_positions={"name": "randomised"})),
    ("training_positions", lambda: pj.scheme("alibi", training_positions={"name": "equal-mean"})),
    ("training_positions", lambda: pj.scheme("xpos", training_positions={"name": "pose", "max_length": 65536})),
    ("frequencies", lambda: pj.scheme("rope", features=None, frequencies=YARN)),
    # sizes of heads, calls of attention
    ("head_dim", lambda: pj.scheme("xpos").query_size(7)),
    ("symmetric", lambda: ALIBI.attend(X, X, X, causal=False)),
    ("bidirectional", lambda: T5.attend(X, X, X, causal=False)),
    ("params", lambda: T5.attend(X, X, X)),
    ("softcap", lambda: LINEAR.attend(X, X, X, softcap=2.0)),
    ("sinks", lambda: pj.scheme("softmax-plus-one").attend(X, X, X, sinks=np.zeros(2))),
    *(
        ("gates", lambda name=name: pj.scheme(name).attend(X, X, X))
        for name in ("fox", "path", "relative", "token-sinks")
    ),
    ("cache_entries", lambda: LINEAR.cache_entries({}, X, X, Range(0, 3))),
    ("placement", lambda: decoded(ROPE, Placement(heads="tensor"))),
    ("placement", lambda: cached(ROPE, PartitionSpec("data"))),
    # slots that need another model
    ("scale", lambda: ROPE.extend(scale=scales.SSMax())),
    ("bias", lambda: T5.extend(bias=None)),
    ("features", lambda: ROPE.extend(features=coca.Coca("strict"))),
    ("frequencies", lambda: ROPE.extend(frequency=None)),
    ("frequencies", lambda: NOPE.extend(frequencies=rotary.Linear(2.0))),
    ("frequencies", lambda: P_ROPE.extend(frequencies=DYNAMIC)),
    ("frequencies", lambda: pj.scheme("rope", partial_rotary_factor=0.5).extend(frequencies={"name": "proportional"})),
    # layers
    ("patterns", lambda: layers()),
    ("patterns", lambda: layers(ROPE, NOPE, repeats=HUGE)),
    ("num_layers", lambda: uniform(ROPE, HUGE)),
    ("num_layers", lambda: uniform(layers(ROPE, NOPE), 3)),
    ("layers", lambda: layers(ROPE).extend(layers="local", scale=scales.ClippedLogN(8))),
    ("frequencies", lambda: layers(NOPE).extend(frequencies=rotary.Linear(2.0))),
    ("remap", lambda: pj.scheme("hwfa", num_layers=3, length=16).extend(layers="full", remap=remap.ReRoPE(8))),
    ("norm", lambda: TWO_BASES.extend(norm=None)),
    # registered names
    ("name", lambda: pj.register("bias", "alibi", LearnedRows)),
    ("spec", lambda: pj.register("bias", "mine", LearnedRows())),
    ("BiasSpec", lambda: pj.register("bias", "mine", Loose)),
    ("bind", lambda: pj.register("bias", "mine", Unbound)),
    ("hashable", lambda: pj.register("bias", "mine", Unhashable)),
    ("factor", lambda: pj.register("scale", "mine", WithoutFactor)),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_bad_calls_are_refused(name, call):
    refused(name, call)


def test_an_unknown_option_of_attention_is_refused():
    for scheme in (ROPE, LINEAR):
        refused("soft_cap", functools.partial(scheme.attend, X, X, X, soft_cap=2.0), TypeError)


def test_a_name_in_a_slot_is_not_a_preset_and_the_error_says_how_to_use_it():
    refused("scheme('rope', frequencies={'name': 'yarn'}", lambda: pj.scheme("yarn"))
