"""Bad input to posjax: the error message is one line and names the argument."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from posjax import bias, coca, linear, masks, nn, norms, pope, positions, remap, rotary, scales
from posjax.diagnostics import entropy_curve
from posjax.nn import Decoder, DecoderConfig, Experts
from posjax.positions import Range
from posjax.scheme import Scheme
from posjax.scheme.registry import slot

X, HALF = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 6, 4, 4))
IDS = jnp.zeros((2, 6), jnp.int32)
TABLE = pj.rotary_table(Range(0, 6), rotary.inverse_frequencies(8))
ROPE, LINEAR = Scheme(features=rotary.Rotary()), Scheme(linear=linear.Elu())
COCA = Scheme(features=coca.Coca("strict"))
SIZES = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
WIDE = rotary.Plain(head_dim=128)


@functools.cache
def decoder(name: str = "rope", **options) -> Decoder:
    config = DecoderConfig(vocab_size=11, num_layers=1, model_dim=16, num_heads=2, scheme=pj.scheme(name, **options))
    return Decoder(config, rngs=nnx.Rngs(0))


def sized(**sizes) -> DecoderConfig:
    return DecoderConfig(**{"vocab_size": 11, "num_layers": 1, "model_dim": 16, "num_heads": 2} | sizes)


def attention(q=X, k=X, v=X, **options):
    return lambda: pj.attention(q, k, v, **options)


def attend(scheme, q=X, k=X, v=X, **options):
    return lambda: scheme.attend(q, k, v, **options)


def decode(batch: int = 2, tokens=None, **options):
    tokens = jnp.zeros((2, 1), jnp.int32) if tokens is None else tokens
    return lambda: decoder().decode(tokens, decoder().init_cache(batch, 4), **{"length": 4} | options)


def traced(make):
    """Calls ``make`` with a traced number."""
    return lambda: jax.eval_shape(make, 2.0)


def narrow(x=X):
    return x.astype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Short(rotary.FrequencyRule):
    """A frequency rule from outside the library that gives one number too few, or a JAX array."""

    of: Callable = np.ones

    def inverse_frequencies(self, head_dim=None):
        return self.of(3 if self.of is np.ones else 4)


@dataclasses.dataclass(frozen=True)
class Recency(bias.BiasSpec):
    """A bias from outside the library that reads its parameters."""

    def init(self, key, num_heads):
        return {"rates": jnp.ones(num_heads)}

    def bind(self, params=None, *, num_heads):
        return bias.LinearBias(params["rates"])


BAD = {
    "one frequency too few": (attend(Scheme(features=rotary.Rotary(Short()))), "inverse_frequencies must give 4"),
    "frequencies on a device": (attend(Scheme(features=rotary.Rotary(Short(of=jnp.ones)))), "give a NumPy array"),
    "parameters left out": (attend(Scheme(bias=Recency())), "params must hold 'bias', .* Recency.bind fails without"),
    "lists of segments": (attention(mask=masks.Segments([[0] * 6] * 2)), "Segments q_ids must be an array, found"),
    "a number for a branch": (attention(remap=3), "remap must be a posjax.remap.Branch or several, found 3"),
    "a list of rates": (attention(decay=[0.1] * 8, mask=masks.Causal()), "decay must be an array, found"),
    "a flag for a start": (lambda: Range(True, 3), "start must be an integer .* found True"),
    "a flag for a length": (lambda: Range(0, True), "length must be a Python int, found bool"),
    "a bias beside a scheme": (attend(ROPE, bias=jnp.ones((6, 6))), r"bias: a scheme has its own; .*Scheme\(bias="),
    "a name for a spec": (
        lambda: pj.scheme("rope", bias="alibi"),
        "bias: .* found 'alibi'; to give its name, write .*'name'",
    ),
    "the class of a mask": (attention(mask=masks.Causal), r"found the class Causal: write Causal\("),
    "one position too few": (
        attend(ROPE, q_positions=jnp.arange(5)),
        r"q_positions must have shape \(6,\) or \(2, 6\)",
    ),
    "lengths of rows as positions": (
        attend(ROPE, X[:, :1], q_positions=jnp.array([3, 5])),
        r"q_positions .* for one position a row write q_positions\[:, None\]",
    ),
    "a traced size of a preset": (
        lambda: jax.eval_shape(lambda n: jnp.ones(len(pj.scheme("window", size=n).name)), 2),
        "size is an array, but a scheme is fixed before anything runs",
    ),
    "a negative length of arange": (lambda: positions.arange(-1), "length must be a whole number of at least 0"),
    "a real length of arange": (lambda: positions.arange(2.5), "length must be .* found 2.5"),
    "a negative length of a rule": (lambda: rotary.DynamicNTK(8).at_length(-3, head_dim=8), "length .* found -3"),
    "a negative length of LongRoPE": (
        lambda: rotary.LongRoPE((1.0,) * 4, (2.0,) * 4, 8, factor=2.0).at_length(-3, head_dim=8),
        "length .* found -3",
    ),
    "a negative length of CLEX": (lambda: rotary.CLEX(8).at_length(np.array([4, -3]), head_dim=8), "length .*-3"),
    "a negative length of attend": (attend(ROPE, length=-1), "length must be at least 1, found -1"),
    "a length of 0 of attend": (attend(ROPE, length=0), "length must be at least 1, found 0"),
    "a real length of attend": (attend(ROPE, length=6.0), "length must be a whole number .* found 6.0"),
    "a negative length of a decoder": (lambda: decoder()(IDS, length=-1), "length must be at least 1, found -1"),
    "a negative length of decode": (decode(length=-1), "length must be at least 1, found -1"),
    "no tokens for a decoder": (lambda: decoder()(IDS[:, :0]), "tokens must hold at least one token"),
    "no tokens for attend": (attend(ROPE, X[:, :0], X[:, :0], X[:, :0]), "q must hold at least one token"),
    "no tokens for linear attention": (attend(LINEAR, X[:, :0], X[:, :0], X[:, :0]), "q must hold at least one token"),
    "one-sided ALiBi": (attention(bias=bias.ALiBi()), "bias: .*at position 1; use mask=Causal.*symmetric=True"),
    "one-sided ALiBi, bound": (attention(bias=bias.ALiBi().bind(num_heads=4)), "bias: .*symmetric=True"),
    "one-sided ALiBi in a window": (attention(bias=bias.ALiBi(), mask=masks.Window(3)), "bias: .*symmetric=True"),
    "one-sided ALiBi, jitted": (lambda: jax.jit(attention(bias=bias.ALiBi()))(), "bias: .*symmetric=True"),
    "one-sided ALiBi, one key ahead": (
        attention(bias=bias.ALiBi(), q_positions=Range(4, 6), kv_positions=Range(0, 6)),
        "bias: .*sees the key at position 5",
    ),
    "one-sided FoX": (
        attention(bias=bias.FoX().bind(num_heads=4, q_gates=jnp.zeros((2, 4, 6)), kv_gates=jnp.zeros((2, 4, 6)))),
        "bias: .*symmetric=True",
    ),
    "an implementation of linear attention": (
        attend(LINEAR, implementation="blokwise"),
        "implementation: .*did you mean 'blockwise'",
    ),
    "lists for q": (attention(X.tolist()), "q must be an array, found .*"),
    "lists for v": (attention(v=[1.0]), r"v must be an array, found \[1.0\]; jnp.asarray makes one"),
    "lists for attend": (attend(ROPE, k=[1.0]), r"k must be an array, found \[1.0\]"),
    "lists for linear attention": (attend(LINEAR, v=[1.0]), r"v must be an array, found \[1.0\]"),
    "lists for tokens": (lambda: decoder()([[1, 2]]), "tokens must be an array"),
    "lists for tokens of decode": (decode(tokens=[[1], [2]]), "tokens must be an array"),
    "lists for apply_rotary": (lambda: pj.apply_rotary([1.0], TABLE), "x must be an array"),
    "lists for CoCA": (lambda: coca.features(X, [1.0], TABLE, variant="strict"), "t must be an array"),
    "float8": (attention(narrow(), narrow(), narrow()), "q must be bfloat16, .* found float8_e4m3fn; cast it"),
    "float8 values": (attention(v=narrow()), "v must be bfloat16, .* found float8_e4m3fn"),
    "float8 for attend": (attend(ROPE, narrow(), narrow(), narrow()), "q must be bfloat16, .* found float8_e4m3fn"),
    "float8 for linear attention": (attend(LINEAR, narrow(), narrow(), narrow()), "q must be bfloat16"),
    "float8 for apply_rotary": (lambda: pj.apply_rotary(narrow(), TABLE), "x must be bfloat16"),
    "0 heads": (attention(X[:, :, :0], X[:, :, :0], X[:, :, :0]), "q must hold at least one head"),
    "0 key heads": (attention(k=X[:, :, :0], v=X[:, :, :0]), "k must hold at least one head"),
    "0 heads for attend": (attend(ROPE, X[:, :, :0], X[:, :, :0], X[:, :, :0]), "q must hold at least one head"),
    "0 heads of parameters": (lambda: ROPE.init(jax.random.key(0), 0, 8), "num_heads must be positive"),
    "0 key heads of parameters": (
        lambda: Scheme(features=pope.PoPE()).init(jax.random.key(0), 4, 8, num_kv_heads=0),
        "num_kv_heads must be positive",
    ),
    "heads of size 0": (attention(X[..., :0], X[..., :0], X), "q must hold at least one feature"),
    "values of size 0": (attention(v=X[..., :0]), "v must hold at least one feature"),
    "parameters of size 0": (lambda: ROPE.init(jax.random.key(0), 4, 0), "head_dim must be positive"),
    "a scale by name": (attention(scale="log-n"), "scale must be a number or an array, found 'log-n'"),
    "a scale by spec": (attention(scale=scales.LogN(8)), r"scale must be a number .*Scheme\(scale=...\)"),
    "a scale by name in a scheme": (lambda: Scheme(scale="log-n"), "scale: expected .* found 'log-n'"),
    "sinks=True": (attention(sinks=True), r"sinks must have shape \(4,\), .* found True"),
    "sinks=True in a scheme": (lambda: Scheme(sinks=True), "sinks: expected .* found True"),
    "YaRN of a tracer": (traced(lambda f: rotary.YaRN(f, 32)), "factor must be .* known before tracing.* traced float"),
    "a base that is traced": (traced(lambda b: rotary.Plain(b)), "base must be .* known before tracing"),
    "a length of YaRN that is traced": (
        traced(lambda n: rotary.YaRN(4.0, n)),
        "original_length must be .* known before tracing",
    ),
    "a class for a bias": (attention(bias=bias.ALiBi), r"bias must be .*the class ALiBi: write ALiBi\(...\)"),
    "a class in a scheme": (lambda: Scheme(bias=bias.ALiBi), r"bias: .*the class ALiBi; write ALiBi\(...\)"),
    "a rule for frequencies": (
        lambda: pj.rotary_table(Range(0, 6), rotary.YaRN(4.0, 32, head_dim=8)),
        r"inverse_frequencies .*the rule YaRN: .*at_length\(\)",
    ),
    "frequencies with their factor": (
        lambda: pj.rotary_table(Range(0, 6), rotary.YaRN(4.0, 32, head_dim=8).at_length()),
        "inverse_frequencies .*factor = rule.at_length.*attention_factor=factor",
    ),
    "a name for frequencies": (lambda: pj.rotary_table(Range(0, 6), "yarn"), "inverse_frequencies .*found 'yarn'"),
    "a pair for a table": (lambda: pj.apply_rotary(X, tuple(TABLE)), r"table must be .*RotaryTable\(cos, sin\)"),
    "an array for a table": (lambda: pj.apply_rotary(X, TABLE.cos), "table must be .*found float32 array"),
    "arguments of apply_rotary swapped": (lambda: pj.apply_rotary(TABLE, X), r"x must .*apply_rotary\(x, table\)"),
    "a real start of a Range": (lambda: Range(0.5, 3), "start must be an integer .*found 0.5"),
    "a start of a Range by name": (lambda: Range("0", 3), "start must be an integer .*found '0'"),
    "a real length of a Range": (lambda: Range(0, 2.5), "length must be a Python int, found float"),
    "CoCA with wide keys": (
        lambda: coca.features(X, X, TABLE, variant="strict"),
        "the table rotates 4 planes and t has 8",
    ),
    "a pair for a table of CoCA": (
        lambda: coca.features(X, HALF, tuple(TABLE), variant="strict"),
        r"table must be .*RotaryTable\(cos, sin\)",
    ),
    "CoCA with wide keys, attended": (attend(COCA), r"k must be 4 wide for a q that is 8 wide"),
    "CoCA with wide keys, in one call": (
        lambda: pj.coca_attention(X, X, X, table=TABLE),
        "the table rotates 4 planes and t has 8",
    ),
    "keys of another width": (attend(ROPE, k=HALF), "k must be 8 wide for a q that is 8 wide"),
    "no scheme": (lambda: pj.scheme(None), r"unknown scheme None \(64 are known; posjax.scheme_names\(\)"),
    "an unknown scheme": (
        lambda: pj.scheme("coca"),
        r"unknown scheme 'coca'; did you mean 'coca-\w+'\? "
        r"\(64 are known, among them (coca-[\w-]+, ){2}coca-[\w-]+; posjax.scheme_names\(\)",
    ),
    "attend of Layers": (attend(pj.scheme("smollm3", num_layers=4)), r"attend: .*schemes\[n\].attend"),
    "tokens that are real": (lambda: decoder()(IDS + 0.5), "tokens must be integers, found float32"),
    "tokens of decode that are real": (decode(tokens=jnp.zeros((2, 1))), "tokens must be integers, found float32"),
    "another batch than the cache's": (decode(3), r"tokens must have the 3 rows of the cache, found shape \(2, 1\)"),
    "another batch than the cache's, in a scheme": (
        lambda: ROPE.decode(X, X, X, ROPE.init_cache(3, 8, **SIZES, chunk=6), index=IDS, valid=IDS == 0, length=6),
        "q must have the 3 rows of the cache, found a batch of 2",
    ),
    "a negative batch of a cache": (lambda: decoder().init_cache(-1, 4), "batch must be positive .* found -1"),
    "a negative capacity": (lambda: decoder().init_cache(2, -4), "capacity must be positive .* found -4"),
    "a negative chunk": (lambda: decoder().init_cache(2, 4, chunk=-1), "chunk must be positive .* found -1"),
    **{
        f"a huge {name}": (lambda name=name: sized(**{name: 2**63}), f"{name} must be at most .* found {2**63}")
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
    },
    "more parameters than any machine holds": (
        lambda: sized(vocab_size=2**30, model_dim=2**25),
        f"vocab_size {2**30}, .* model_dim {2**25}: .* parameters",
    ),
    "more experts than any machine holds": (lambda: sized(experts=Experts(2**62, 1)), "num_layers 1 .* parameters"),
    "a huge table of positions": (lambda: pj.absolute.Learned(2**63), f"max_length must be .* found {2**63}"),
    "a row beyond the learned positions": (
        lambda: decoder("learned", max_length=4)(jnp.zeros((2, 5), jnp.int32)),
        "tokens: rows of 5 tokens, .* 4 positions",
    ),
    "a range beyond the learned positions": (
        lambda: decoder("learned", max_length=4)(IDS[:, :3], positions=pj.positions.Range(2, 3)),
        "tokens: rows of 5 tokens, .* 4 positions",
    ),
    "a row beyond the hierarchical positions": (
        lambda: decoder("hierarchical", max_length=2)(jnp.zeros((2, 5), jnp.int32)),
        "tokens: rows of 5 tokens, .* 4 positions",
    ),
    "a cache beyond the learned positions": (
        lambda: decoder("learned", max_length=4).init_cache(2, 5),
        "capacity: rows of 5 tokens, .* 4 positions",
    ),
    "a negative size of a linear cache": (
        lambda: LINEAR.init_cache(2, 4, **SIZES | {"num_kv_heads": -2}),
        "num_kv_heads must be positive .* found -2",
    ),
    "a negative size of a state": (lambda: linear.empty_state(2, 4, -8, 8), "size must be positive .* found -8"),
    "negative decay": (attention(decay=-np.ones(8), mask=masks.Causal()), "decay must not be negative.* found -1"),
    "negative decay on a device": (attention(decay=jnp.full(8, -0.5)), "decay must not be negative.* found -0.5"),
    "a scale for a bias": (lambda: Scheme(bias=scales.SSMax()), r"bias: .*SSMax.*which has no bind\(\)"),
    "features for a kernel": (lambda: Scheme(linear=rotary.Rotary()), r"linear: .*Rotary.*which has no size\(\)"),
    "a kernel for positions": (
        lambda: Scheme(training_positions=linear.Performer()),
        r"training_positions: .*Performer.*which has no evaluate\(\)",
    ),
    "a rule for a scale": (lambda: Scheme(scale=rotary.Linear(2.0)), r"scale: .*Linear.*which has no factor\(\)"),
    "a bias for a scale": (lambda: Scheme(scale=bias.ALiBi()), r"scale: .*ALiBi.*which has no factor\(\)"),
    "a rule for features": (lambda: Scheme(features=rotary.Plain()), "features: .*Plain.*which has no query_size"),
    "a kernel for features": (lambda: Scheme(features=linear.Elu()), "features: .*Elu.*which has no query_size"),
    "features for far": (lambda: Scheme(remap=rotary.Rotary()), r"remap: .*Rotary.*which has no check\(\)"),
    "a norm for sinks": (lambda: Scheme(sinks=norms.QKNorm()), r"sinks: .*QKNorm.*which has no logits\(\)"),
    "a scale for a norm": (lambda: Scheme(norm=scales.SSMax()), r"norm: .*SSMax.*which has no apply\(\)"),
    "a bias for an embedding": (lambda: Scheme(embedding=bias.T5()), r"embedding: .*T5.*which has no embed\(\)"),
    "a window beyond int32": (lambda: remap.LeakyReRoPE(2**20, 2.0**20), "factor times window must fit in int32"),
    "a distance beyond int32": (lambda: bias.T5(max_distance=2**31), "max_distance must fit in int32"),
    "positions beyond int32 on a device": (
        lambda: positions.as_array(jnp.array([0, 2**31], jnp.uint32)),
        "positions 0 .. 2147483648 do not fit in int32",
    ),
    "an offset beyond int32": (lambda: positions.arange(3, 2**31), "offset .* do not fit in int32"),
    "an unknown name of a slot": (lambda: slot("bias", None), "unknown bias None .known: alibi"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_line(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


MODEL = {"vocab_size": 11, "num_layers": 1, "model_dim": 16, "num_heads": 2}
NUMBERS = {
    "scale": lambda x: attention(scale=x)(),
    "scale of each head": lambda x: attention(scale=jnp.array([1, 1, 1, x]))(),
    "scale of NumPy": lambda x: attention(scale=np.asarray(x))(),
    "scale of CoCA": lambda x: pj.coca_attention(X, HALF, X, table=TABLE, scale=x),
    "query_scale": lambda x: attend(ROPE, query_scale=x)(),
    "softcap": lambda x: attention(softcap=x)(),
    "decay": lambda x: attention(decay=np.full(8, x), mask=masks.Causal())(),
    "attention_factor": lambda x: pj.rotary_table(Range(0, 6), rotary.inverse_frequencies(8), attention_factor=x),
    "eps": lambda x: norms.qk_norm(X, X, eps=x),
    "offset": lambda x: bias.LinearBias(jnp.ones(4), symmetric=True, offset=x),
    "decay_times": lambda x: bias.FoX(decay_times=(2.0, x)),
    "decay_times as one number": lambda x: bias.FoX(decay_times=x),
    "max_distance": lambda x: bias.t5_thresholds(32, x),
    "n": lambda x: scales.cosine_scale(x),
    "shift": lambda x: rotary.scalings.Ahead(WIDE, 2.0, x),
    "gain": lambda x: entropy_curve(ROPE, [4], gain=x),
    "trained_length": lambda x: DecoderConfig(**MODEL, trained_length=x),
}


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite_are_refused(name, number):
    with pytest.raises(ValueError, match=rf"^{name.split()[0]} must"):
        NUMBERS[name](number)


LONG = jnp.arange(2 * 1000, dtype=jnp.int32).reshape(2, 1000)
SEGMENTS = masks.Segments(LONG)
TURNS = rotary.GeneralRotary(np.kron(np.eye(32), [[0.0, 1.0], [-1.0, 0.0]])[None])
PRINTS = {
    "a mask of a scheme": lambda: Scheme(mask=masks.Causal() & SEGMENTS),
    "a mask of linear attention": attend(LINEAR, mask=masks.Causal() & SEGMENTS),
    "an array for a bias": lambda: Scheme(bias=LONG),
    "an array for a mask": lambda: Scheme(mask=np.asarray(LONG)),
    "an array for a rule": lambda: rotary.Rotary(LONG),
    "an array for a factor": lambda: rotary.Linear(np.asarray(LONG)),
    "an array for a name": lambda: pj.scheme(LONG),
    "an array for a choice": attention(implementation=LONG),
    "a list for an array": attention(LONG.tolist()),
    "an array for a length": attend(ROPE, length=LONG / 2),
    "features with long fields": lambda: Scheme(features=TURNS, linear=linear.Elu()),
    "an array in a Range": lambda: Range(LONG, 3),
}


@pytest.mark.parametrize("name", PRINTS)
def test_no_message_prints_an_array(name):
    with pytest.raises(ValueError, match=r".") as caught:
        PRINTS[name]()
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert not re.search(r"(\d+(\.\d*)?,? +){40}", str(caught.value))


def test_a_range_prints_no_number_of_an_array():
    assert repr(Range(3, 4)) == "Range(start=3, length=4)"
    assert repr(Range(jnp.int32(3), 4)) == "Range(start=int32 array of shape (), length=4)"


@pytest.mark.parametrize(
    "options",
    [
        {"mask": masks.Causal()},
        {"mask": masks.Causal() & masks.Window(3)},
        {"mask": masks.Beyond(1)},
        {"mask": masks.Segments(IDS)},
        {"q": X[:, :1], "q_positions": Range(5, 1)},
        {"q_positions": Range(6, 6)},
        {"q": X[:, :1], "q_positions": Range(5, 1), "mask": masks.Window(2)},
        {"q": X[:, :1], "q_positions": Range(jnp.int32(5), 1)},
        {"q_positions": jnp.arange(6) + 5},
    ],
    ids=[
        "causal",
        "causal window",
        "beyond",
        "segments",
        "decoding",
        "after all keys",
        "in a window",
        "traced",
        "array",
    ],
)
def test_one_sided_biases_are_allowed_where_no_key_ahead_is_known_to_be_seen(options):
    out = jax.eval_shape(lambda: pj.attention(**{"q": X, "k": X, "v": X, "bias": bias.ALiBi()} | options))
    assert out.shape == (2, options.get("q", X).shape[1], 4, 8)


def test_checks_use_the_head_dim_of_the_rule():
    xpos = rotary.XPos(WIDE)
    assert Scheme(features=xpos, training_positions=pj.training_positions.Randomised(512)).features == xpos
    with pytest.raises(ValueError, match="training_positions: ids below 20000 may make a tile of xPos longer"):
        Scheme(features=xpos, training_positions=pj.training_positions.Randomised(20_000))
    with pytest.raises(ValueError, match="remap: ReRoPE replaces the distances that the decay of XPos reads"):
        Scheme(features=xpos, remap=remap.ReRoPE(8))
    for before, after in (
        (rotary.Rotary(WIDE), {"frequencies": {"name": "yarn", "factor": 2.0, "original_length": 32}}),
        (pope.PoPE(rotary.Plain(head_dim=256)), {"frequencies": {"name": "linear", "factor": 2.0}}),
        (rotary.Rotary(rotary.CLEX(32, head_dim=128)), {"frequencies": rotary.CLEX(32, steps=9, head_dim=128)}),
        (rotary.Rotary(rotary.CLEX(32, head_dim=128)), {"scale": {"name": "clipped-log-n", "length": 32}}),
    ):
        assert Scheme(features=before).extend(**after) != Scheme(features=before)
    assert pj.scheme("clex", original_length=32, head_dim=128).rotates


def test_an_own_method_needs_no_base_class():
    class Even:
        """A scale that has no base class of the library."""

        shift_invariant = True

        def init(self, key, num_heads):
            return {}

        def factor(self, params, *, positions, visible, num_heads):
            return jnp.ones((1, 1))

    class Own(bias.BiasSpec):
        def bind(self, params=None, *, num_heads):
            return bias.ALiBi().bind(num_heads=num_heads)

    scheme = Scheme(scale=Even(), bias=Own())
    want = Scheme(bias=bias.ALiBi()).attend(X + 1, X + 1, X + 1)
    np.testing.assert_array_equal(scheme.attend(X + 1, X + 1, X + 1), want)


def test_tokens_outside_the_vocabulary():
    """As ``Decoder.hidden`` documents: negative ids count from the end; ids beyond an end are the token at that end."""
    tokens = jnp.array([[11, 400, -1, -11, -12]])
    meant = jnp.array([[10, 10, 10, 0, 0]])
    model = decoder("nope")
    np.testing.assert_array_equal(model.hidden(tokens), model.hidden(meant))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_negative_decay_that_is_traced_counts_as_none(implementation):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 8))
    rates = jnp.array([-0.5, 0.1] * 4)

    @jax.jit
    def run(rates):
        return pj.attention(q, k, v, mask=masks.Causal(), decay=rates, implementation=implementation)

    want = pj.attention(q, k, v, mask=masks.Causal(), decay=np.maximum(rates, 0), implementation="dense")
    np.testing.assert_allclose(run(rates), want, atol=1e-5)


def test_counts_of_visible_keys_do_not_wrap():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, 2, 8))
    last = {"q_positions": Range(2**31 - 1, 1), "kv_positions": Range(0, 1)}
    counted = Scheme(scale=scales.LogN(1024)).attend(q, k, v, return_residuals=True, **last)[1]
    want = Scheme(scale=scales.Constant(31 / 10)).attend(q, k, v, return_residuals=True, **last)[1]
    np.testing.assert_allclose(counted, want, rtol=1e-5)


WITH_FLAGS = (
    *(bias.ALiBi(), bias.T5(), bias.FIRE(), bias.FoX(), linear.Performer(), norms.QKNorm(), scales.SSMax()),
    *(bias.LinearBias(jnp.ones(4)), bias.ForgetBias(HALF, HALF), bias.BucketBias(HALF, 8, True), masks.Segments(IDS)),
    *(rotary.NTKByParts(2.0, 8), rotary.YaRN(2.0, 8), rotary.DynamicYaRN(8)),
    *(DecoderConfig(vocab_size=11, num_layers=1, model_dim=16, num_heads=2), nn.Norm(), nn.Residual()),
)


def test_every_flag_of_a_spec_is_true_or_false():
    """The text "false" of an unquoted configuration would count as true."""
    flags = [
        (spec, field.name) for spec in WITH_FLAGS for field in dataclasses.fields(spec) if field.type in (bool, "bool")
    ]
    for spec, name in flags:
        for value in ("false", 1, None):
            with pytest.raises(ValueError, match=f"{name} must be True or False, found {value!r}"):
                dataclasses.replace(spec, **{name: value})
    with pytest.raises(ValueError, match="qk_norm must be True or False, found 'false'"):
        pj.scheme("llama4", num_layers=4, qk_norm="false")


def test_every_spec_with_a_flag_is_tried():
    rooms = (bias, coca, linear, masks, norms, pope, remap, rotary, scales, nn)
    specs = {one for room in rooms for one in vars(room).values() if dataclasses.is_dataclass(one)}
    flags = {one for one in specs if any(field.type in (bool, "bool") for field in dataclasses.fields(one))}
    assert flags == {type(spec) for spec in WITH_FLAGS}
