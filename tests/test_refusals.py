"""Bad input to posjax: the error message is one line and names the argument; and input that is no mistake."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import refused

import posjax as pj
from posjax import absolute, bias, coca, linear, masks, nn, norms, pope, positions, remap, rotary, scales
from posjax.diagnostics import entropy_curve
from posjax.layout import Layout
from posjax.nn import Decoder, DecoderConfig, Experts
from posjax.positions import Range, as_array
from posjax.scheme import Scheme
from posjax.sinks import LearnedSinks
from posjax.training_positions import ClexPositions, EqualMean, PoSE, Randomised, sorted_subset

X, HALF = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 6, 4, 4))
IDS = jnp.zeros((2, 6), jnp.int32)
KEY = jax.random.key(0)
INVERSE = rotary.inverse_frequencies(8)
TABLE = pj.rotary_table(Range(0, 6), INVERSE)
ROPE, LINEAR = Scheme(features=rotary.Rotary()), Scheme(linear=linear.Elu())
SIZES = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
MODEL = {"vocab_size": 11, "num_layers": 1, "model_dim": 16, "num_heads": 2}
WIDE = rotary.Plain(head_dim=128)
ROWS = np.ones((4, 3), np.float32)
AT = {"positions": None, "visible": jnp.arange(1, 6), "num_heads": 3}
FLOAT8 = jnp.float8_e4m3fn


@functools.cache
def decoder(name: str = "rope", **options) -> Decoder:
    return Decoder(DecoderConfig(**MODEL, scheme=pj.scheme(name, **options)), rngs=nnx.Rngs(0))


def sized(**sizes):
    return lambda: DecoderConfig(**MODEL | sizes)


def attention(q=X, k=X, v=X, **options):
    return lambda: pj.attention(q, k, v, **options)


def attend(scheme, q=X, k=X, v=X, **options):
    return lambda: scheme.attend(q, k, v, **options)


def decode(batch=2, tokens=IDS[:, :1], **options):
    return lambda: decoder().decode(tokens, decoder().init_cache(batch, 4), **{"length": 4} | options)


def traced(make):
    """Calls ``make`` with a traced number."""
    return lambda: jax.eval_shape(make, 2.0)


def of_coca(q=X, t=HALF, table=TABLE, variant="strict", **options):
    return lambda: coca.features(q, t, table, variant=variant, **options)


@dataclasses.dataclass(frozen=True)
class Short(rotary.FrequencyRule):
    """A frequency rule from outside the library that gives one number too few."""

    def inverse_frequencies(self, head_dim=None):
        return np.ones(3)


CALLS = [
    ("q", attention(X.tolist())),
    ("v", attention(v=[1.0])),
    ("q", attention(X.astype(FLOAT8))),
    ("q", attention(X[:, :, :0])),
    ("q", attend(ROPE, *[X[:, :0]] * 3)),
    ("k", attend(ROPE, k=HALF)),
    ("k", attend(Scheme(features=coca.Coca("strict")))),
    ("bias", attention(bias=bias.ALiBi(), mask=masks.Window(3))),
    ("bias", lambda: jax.jit(attention(bias=bias.ALiBi()))()),
    ("bias", attention(bias=bias.ALiBi(), q_positions=Range(4, 6), kv_positions=Range(0, 6))),
    ("scale", attention(scale=scales.LogN(8))),
    ("remap", attention(remap=3)),
    ("decay", attention(decay=jnp.full(8, -0.5), mask=masks.Causal())),
    ("bias", attend(ROPE, bias=jnp.ones((6, 6)))),
    ("implementation", attend(LINEAR, implementation="blokwise")),
    ("length", attend(ROPE, length=-1)),
    ("inverse_frequencies", attend(Scheme(features=rotary.Rotary(Short())))),
    ("attend", attend(pj.scheme("smollm3", num_layers=4))),
    ("num_heads", lambda: ROPE.init(KEY, 0, 8)),
    ("num_kv_heads", lambda: Scheme(features=pope.PoPE()).init(KEY, 4, 8, num_kv_heads=0)),
    ("head_dim", lambda: ROPE.init(KEY, 4, 0)),
    ("num_kv_heads", lambda: LINEAR.init_cache(2, 4, **SIZES | {"num_kv_heads": -2})),
    ("q", lambda: ROPE.decode(X, X, X, ROPE.init_cache(3, 8, **SIZES), index=IDS, valid=IDS == 0, length=6)),
]
SCHEMES = [
    ("scheme", lambda: pj.scheme(None)),
    ("features", lambda: Scheme(features=rotary.Plain())),
    ("bias", lambda: Scheme(bias=scales.SSMax())),
    ("linear", lambda: Scheme(linear=rotary.Rotary())),
    ("training_positions", lambda: Scheme(training_positions=linear.Performer())),
    ("training_positions", lambda: Scheme(features=rotary.XPos(WIDE), training_positions=Randomised(20_000))),
]
DECODERS = [
    ("tokens", lambda: decoder()([[1, 2]])),
    ("tokens", lambda: decoder()(IDS + 0.5)),
    ("tokens", decode(3)),
    ("batch", lambda: decoder().init_cache(-1, 4)),
    ("capacity", lambda: decoder().init_cache(2, -4)),
    ("chunk", lambda: decoder().init_cache(2, 4, chunk=-1)),
    ("tokens", lambda: decoder("learned", max_length=4)(IDS[:, :5])),
    ("tokens", lambda: decoder("hierarchical", max_length=2)(IDS[:, :5])),
    ("capacity", lambda: decoder("learned", max_length=4).init_cache(2, 5)),
    *((name, sized(**{name: 2**63})) for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "mlp_dim")),
    ("vocab_size", sized(vocab_size=2**30, model_dim=2**25)),
    ("num_layers", sized(experts=Experts(2**62, 1))),
]
POSITIONS = [
    ("start", lambda: Range(True, 3)),
    ("start", lambda: Range(jnp.zeros(2, jnp.int32), 3)),
    ("length", lambda: Range(0, -1)),
    ("length", lambda: Range(0, 2.5)),
    ("positions", lambda: Range(2**31 - 2, 3)),
    ("positions", lambda: Range(-(2**31) - 1, 2)),
    ("positions", lambda: as_array(np.array([2**31]))),
    ("positions", lambda: as_array(jnp.array([0, 2**31], jnp.uint32))),
    ("positions", lambda: as_array(np.array([0.5]))),
    ("length", lambda: positions.arange(-1)),
    ("offset", lambda: positions.arange(3, 0.5)),
    ("offset", lambda: positions.arange(3, np.zeros((2, 2), np.int32))),
    ("offset", lambda: positions.arange(3, 2**31)),
    ("mask", lambda: positions.from_mask(jnp.zeros((2, 4)))),
    ("segment_ids", lambda: positions.from_segments(jnp.zeros(4, jnp.int32))),
    ("model_dim", lambda: absolute.sinusoidal(Range(0, 3), 7)),
    ("model_dim", lambda: absolute.sinusoidal(Range(0, 3), 2, convention="tensor2tensor")),
    ("base", lambda: absolute.sinusoidal(Range(0, 3), 8, base=1.0)),
    ("positions", lambda: absolute.sinusoidal(np.zeros(3, jnp.bfloat16), 8)),
    ("max_length", lambda: absolute.learned(ROWS, Range(-1, 2))),
    ("max_length", lambda: absolute.hierarchical(ROWS, Range(14, 3))),
    ("alpha", lambda: absolute.hierarchical(ROWS, Range(0, 2), alpha=0.5)),
    ("max_length", lambda: absolute.Learned(2**63)),
    ("embedding", lambda: absolute.Learned(4).embed({"embedding": ROWS}, Range(0, 3), 8)),
    ("shards", lambda: Layout("zigzag", 0)),
    ("layout", lambda: Layout("zigzak", 4)),
    ("key", lambda: Randomised(8, test="random").evaluate(4)),
    ("original_length", lambda: ClexPositions(2**28)),
    ("length", lambda: Randomised(8).draw(KEY, 1, 9)),
    ("max_length", lambda: Randomised(8).evaluate(9)),
    ("length", lambda: PoSE(8, chunks=3).draw(KEY, 1, 2)),
    ("length", lambda: ClexPositions(8).draw(KEY, 1, 1)),
    ("batch", lambda: EqualMean().draw(KEY, 0, 4)),
    ("count", lambda: sorted_subset(KEY, 1, 6, 5)),
]
ROTATIONS = [
    ("x", lambda: pj.apply_rotary([1.0], TABLE)),
    ("x", lambda: pj.apply_rotary(X.astype(FLOAT8), TABLE)),
    ("x", lambda: pj.apply_rotary(TABLE, X)),
    ("table", lambda: pj.apply_rotary(X, tuple(TABLE))),
    ("table", lambda: pj.apply_rotary(X, TABLE.cos)),
    ("inverse_frequencies", lambda: pj.rotary_table(Range(0, 6), "yarn")),
    ("inverse_frequencies", lambda: pj.rotary_table(Range(0, 6), rotary.YaRN(4.0, 32, head_dim=8))),
    ("length", lambda: rotary.DynamicNTK(8).at_length(-3, head_dim=8)),
    ("factor", traced(lambda f: rotary.YaRN(f, 32))),
    ("PoPE", lambda: pope.PoPE(rotary.Plain(partial_rotary_factor=0.5)).query_size(8)),
    ("delta", lambda: pope.PoPE().key({}, X, IDS, head_dim=8)),
    ("delta", lambda: pope.PoPE().key({"delta": jnp.zeros((2, 8))}, X, IDS, head_dim=8)),
    ("t", of_coca(t=[1.0])),
    ("t", of_coca(t=X)),
    ("t", of_coca(t=HALF[0])),
    ("t", of_coca(t=HALF[:, :5], kv_table=TABLE)),
    ("q", of_coca(q=X[0])),
    ("q", of_coca(q=X[:, :5])),
    ("table", of_coca(table=tuple(TABLE))),
    ("variant", of_coca(variant="stric")),
    ("tied", of_coca(variant="tied")),
    ("pairing", of_coca(pairing="halves")),
    ("table", of_coca(table=pj.rotary_table(Range(0, 6), rotary.inverse_frequencies(4)))),
    ("table", lambda: pj.coca_attention(X, X, X, table=TABLE)),
    ("precision", lambda: coca.Coca("slack", precision="float")),
    ("partial_rotary_factor", lambda: coca.Coca("slack", rotary.Plain(partial_rotary_factor=0.5))),
    ("length", lambda: coca.Coca("strict", rotary.DynamicNTK(32)).query({}, X, IDS, head_dim=8)),
    ("planes", lambda: coca.PartlyCollinear(planes=(2, 9)).query_size(16)),
    ("planes", lambda: coca.PartlyCollinear(rotary.Plain(partial_rotary_factor=0.5), planes=(0, 5)).query_size(16)),
    ("planes", sized(scheme=pj.scheme("coca-planes", planes=(2, 9)))),
    ("factor", lambda: remap.LeakyReRoPE(1, 2**31 + 1)),
]
LOGITS = [
    ("length", lambda: scales.log_n(IDS, 1)),
    ("minimum", lambda: scales.LogN(512, 2**31)),
    ("length", lambda: scales.ClippedLogN(2**31)),
    ("length", lambda: scales.ssmax_initial(1)),
    ("floor_scale", lambda: scales.llama4_temperature(IDS, floor_scale=2**31)),
    ("factor", lambda: scales.yarn_temperature(0.0)),
    ("b", lambda: scales.SSMax(bias=True).factor(scales.SSMax().init(KEY, 3), **AT)),
    ("s", lambda: scales.SSMax().factor(scales.SSMax().init(KEY, 4), **AT)),
    ("g", lambda: scales.LearnedCosineScale(64).factor({}, **AT)),
    ("QKNorm", lambda: norms.QKNorm().apply(norms.QKNorm().init(KEY, 4), X, X)),
    ("LearnedSinks", lambda: LearnedSinks().logits({"sinks": jnp.zeros(2)}, 4)),
    ("max_distance", lambda: bias.T5(max_distance=2**31)),
    ("size", lambda: linear.empty_state(2, 4, -8, 8)),
]
BAD = [*CALLS, *SCHEMES, *DECODERS, *POSITIONS, *ROTATIONS, *LOGITS]


@pytest.mark.parametrize(("name", "call"), BAD)
def test_bad_input_is_named_in_one_line(name, call):
    refused(name, call)


ADVICE = [
    ("did you mean 'coca-\\w+'.*; posjax.scheme_names\\(\\)", lambda: pj.scheme("coca")),
    ("; to give its name, write .*'name'", lambda: pj.scheme("rope", bias="alibi")),
    (r"to give its name, write frequencies=\{'name': 'yarn'\}", lambda: ROPE.extend(frequencies="yarn")),
    (r"write q_positions\[:, None\]", attend(ROPE, X[:, :1], q_positions=jnp.array([3, 5]))),
    ("use mask=Causal.*symmetric=True", attention(bias=bias.ALiBi())),
    (r"write ALiBi\(...\)", lambda: Scheme(bias=bias.ALiBi)),
    ("attention_factor=factor", lambda: pj.rotary_table(Range(0, 6), rotary.YaRN(4.0, 32, head_dim=8).at_length())),
    ("jnp.asarray makes one", attention(v=[1.0])),
]


@pytest.mark.parametrize(("advice", "call"), ADVICE)
def test_a_message_says_what_to_write_instead(advice, call):
    with pytest.raises(ValueError, match=advice):
        call()


NUMBERS = {
    "scale of CoCA": lambda x: pj.coca_attention(X, HALF, X, table=TABLE, scale=x),
    "query_scale": lambda x: attend(ROPE, query_scale=x)(),
    "attention_factor": lambda x: pj.rotary_table(Range(0, 6), INVERSE, attention_factor=x),
    "eps": lambda x: norms.qk_norm(X, X, eps=x),
    "offset": lambda x: bias.LinearBias(jnp.ones(4), symmetric=True, offset=x),
    "decay_times": lambda x: bias.FoX(decay_times=(2.0, x)),
    "max_distance": lambda x: bias.t5_thresholds(32, x),
    "n": lambda x: scales.cosine_scale(x),
    "shift": lambda x: rotary.scalings.Ahead(WIDE, 2.0, x),
    "gain": lambda x: entropy_curve(ROPE, [4], gain=x),
    "trained_length": lambda x: DecoderConfig(**MODEL, trained_length=x),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite_are_refused(name):
    for number in (np.nan, np.inf, -np.inf):
        refused(name.split()[0], lambda number=number: NUMBERS[name](number))


LONG = jnp.arange(2 * 1000, dtype=jnp.int32).reshape(2, 1000)
PRINTS = [
    lambda: Scheme(mask=masks.Causal() & masks.Segments(LONG)),
    attend(LINEAR, mask=masks.Causal() & masks.Segments(LONG)),
    lambda: Scheme(bias=LONG),
    lambda: rotary.Linear(np.asarray(LONG)),
    lambda: pj.scheme(LONG),
    attention(implementation=LONG),
    attention(LONG.tolist()),
    lambda: Range(LONG, 3),
]


@pytest.mark.parametrize("call", PRINTS)
def test_no_message_prints_an_array(call):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert len(str(caught.value)) < 400
    assert not re.search(r"\n|(\d+(\.\d*)?,? +){40}", str(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": masks.Causal() & masks.Window(3)},
        {"mask": masks.Beyond(1)},
        {"mask": masks.Segments(IDS)},
        {"q_positions": Range(6, 6)},
        {"q": X[:, :1], "q_positions": Range(5, 1), "mask": masks.Window(2)},
        {"q": X[:, :1], "q_positions": Range(jnp.int32(5), 1)},
    ],
)
def test_one_sided_biases_are_allowed_where_no_key_ahead_is_known_to_be_seen(options):
    out = jax.eval_shape(lambda: pj.attention(**{"q": X, "k": X, "v": X, "bias": bias.ALiBi()} | options))
    assert out.shape == (2, options.get("q", X).shape[1], 4, 8)


@pytest.mark.parametrize(
    ("features", "changes"),
    [
        (rotary.Rotary(WIDE), {"frequencies": {"name": "yarn", "factor": 2.0, "original_length": 32}}),
        (pope.PoPE(rotary.Plain(head_dim=256)), {"frequencies": {"name": "linear", "factor": 2.0}}),
        (rotary.Rotary(rotary.CLEX(32, head_dim=128)), {"scale": {"name": "clipped-log-n", "length": 32}}),
    ],
)
def test_a_scheme_whose_rule_has_its_own_head_dim_can_be_extended(features, changes):
    assert Scheme(features=features).extend(**changes) != Scheme(features=features)


def test_tokens_outside_the_vocabulary_are_those_that_the_documentation_names():
    """Negative ids count from the end; ids beyond an end are the token at that end."""
    given, meant = jnp.array([[11, 400, -1, -11, -12]]), jnp.array([[10, 10, 10, 0, 0]])
    np.testing.assert_array_equal(decoder("nope").hidden(given), decoder("nope").hidden(meant))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_negative_decay_that_is_traced_counts_as_none(implementation):
    q, k, v = jax.random.normal(KEY, (3, 1, 40, 2, 8))
    rates = jnp.array([-0.5, 0.1] * 4)
    run = jax.jit(lambda r: pj.attention(q, k, v, mask=masks.Causal(), decay=r, implementation=implementation))
    want = pj.attention(q, k, v, mask=masks.Causal(), decay=np.maximum(rates, 0), implementation="dense")
    np.testing.assert_allclose(run(rates), want, atol=1e-5)


def test_counts_of_visible_keys_do_not_wrap():
    q, k, v = jax.random.normal(KEY, (3, 1, 1, 2, 8))
    last = {"q_positions": Range(2**31 - 1, 1), "kv_positions": Range(0, 1), "return_residuals": True}
    want = Scheme(scale=scales.Constant(31 / 10)).attend(q, k, v, **last)[1]
    np.testing.assert_allclose(Scheme(scale=scales.LogN(1024)).attend(q, k, v, **last)[1], want, rtol=1e-5)


WITH_FLAGS = (
    *(bias.ALiBi(), bias.T5(), bias.FIRE(), bias.FoX(), linear.Performer(), norms.QKNorm(), scales.SSMax()),
    *(bias.LinearBias(jnp.ones(4)), bias.ForgetBias(HALF, HALF), bias.BucketBias(HALF, 8, True), masks.Segments(IDS)),
    *(bias.Relative(), bias.Shaw(), bias.RelativeBias(jnp.ones((1, 1, 2, 3)), jnp.ones((3, 4)), False, False)),
    *(rotary.NTKByParts(2.0, 8), rotary.YaRN(2.0, 8), rotary.DynamicYaRN(8), rotary.FoPE(8)),
    *(DecoderConfig(**MODEL), nn.Norm(), nn.Residual(), nn.Router(), nn.LoRA(), nn.Experts(4, 2, shared_dim=8)),
    *(kernel() for kernel in (linear.Elu, linear.Exponential, linear.Taylor, linear.Limit, linear.Cosine)),
)


def test_every_flag_of_every_spec_is_true_or_false():
    """The text "false" of an unquoted configuration would count as true."""
    rooms = (bias, coca, linear, masks, norms, pope, remap, rotary, scales, nn)
    found = {one for room in rooms for one in vars(room).values() if dataclasses.is_dataclass(one)}
    specs = {one for one in found if not inspect.isabstract(one)}
    flags = {one: [f.name for f in dataclasses.fields(one) if f.type in (bool, "bool")] for one in specs}
    assert {one for one, names in flags.items() if names} == {type(spec) for spec in WITH_FLAGS}
    for spec in WITH_FLAGS:
        for name in flags[type(spec)]:
            for value in ("false", 1, None):
                refused(name, lambda spec=spec, change={name: value}: dataclasses.replace(spec, **change))
    refused("qk_norm", lambda: pj.scheme("llama4", num_layers=4, qk_norm="false"))
