"""Generated tokens: against full forward passes, rows alone, and the distribution that they are drawn from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import VOCAB, config, preset
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refusals import refused

import posjax as pj
from posjax.nn import Decoder, Sampling, choose, generate, stream

LENGTHS, COLUMNS, NEW = (9, 4, 1), 9, 7
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, COLUMNS)).astype(np.int32)
RIGHT = np.arange(COLUMNS) < np.array(LENGTHS)[:, None]
SCHEMES = {
    "rope": preset("rope"),
    "dynamic NTK": pj.scheme("rope").extend(frequencies={"name": "dynamic-ntk", "original_length": 4}),
    "ring, raw and half-width keys": pj.Layers((((preset("window"), preset("rerope"), preset("coca-slack")), 1),)),
    "a state": preset("linear-elu"),
    "an embedding": preset("learned"),
}
SOME = [name if n < 3 else pytest.param(name, marks=pytest.mark.wide) for n, name in enumerate(SCHEMES)]


@functools.cache
def decoder(name="rope"):
    """A random decoder; its parameters are thrice as large, so that much depends on what attention finds."""
    settings = config(SCHEMES[name])
    graph, state = nnx.split(nnx.jit(lambda: Decoder(settings, rngs=nnx.Rngs(3)))())
    return nnx.merge(graph, jax.tree.map(lambda x: 3 * x, state))


def predicted(model, text, prompt):
    """The likeliest tokens after each token from the prompt's last on, in one forward pass over a whole text."""
    return np.asarray(nnx.jit(lambda model: model(text[None]))(model))[0, prompt - 1 : -1].argmax(-1)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_greedy_tokens_are_those_of_one_forward_pass_over_each_row_alone(name, left):
    order = slice(None, None, -1) if left else slice(None)
    prompts = np.where(RIGHT, PROMPTS, VOCAB - 1)
    valid = RIGHT[:, order]
    placed = np.zeros_like(prompts)
    placed[valid] = prompts[RIGHT]
    found, counts = generate(decoder(name), placed, NEW, valid=valid, chunk=4)
    assert counts.tolist() == [NEW] * 3
    for row, prompt, new in zip(PROMPTS, LENGTHS, np.asarray(found), strict=True):
        np.testing.assert_array_equal(new, predicted(decoder(name), np.concatenate([row[:prompt], new]), prompt))
    assert len(np.unique(found)) > 6


def test_positions_of_a_rule_are_those_of_the_forward_pass():
    ids = preset("randomised").training_positions.evaluate(COLUMNS + NEW).positions
    new = np.asarray(generate(decoder(), PROMPTS[:1], NEW, positions=ids, chunk=4).tokens)[0]
    text = np.concatenate([PROMPTS[0], new])
    logits = nnx.jit(lambda model: model(text[None], positions=ids))(decoder())
    np.testing.assert_array_equal(new, np.asarray(logits)[0, COLUMNS - 1 : -1].argmax(-1))
    assert new.tolist() != np.asarray(generate(decoder(), PROMPTS[:1], NEW).tokens)[0].tolist()


def test_a_row_ends_at_a_stop_token_and_the_stream_with_the_last_row():
    whole = np.asarray(generate(decoder(), PROMPTS, NEW, valid=RIGHT).tokens)
    stop = {int(row[n]) for row, n in zip(whole, (2, 0, 4), strict=True)}
    found, counts = map(np.asarray, generate(decoder(), PROMPTS, NEW, valid=RIGHT, stop=stop))
    wanted = [next(n for n, token in enumerate(row) if token in stop) for row in whole]
    assert counts.tolist() == wanted
    for row, before, count in zip(found, whole, counts, strict=True):
        assert row.tolist() == before[: count + 1].tolist() + [-1] * (NEW - count - 1)
    steps = list(stream(decoder(), PROMPTS, NEW, valid=RIGHT, stop=stop))
    assert len(steps) == max(wanted) + 1 < NEW
    np.testing.assert_array_equal(np.stack(steps, 1), found[:, : len(steps)])


def test_a_stream_draws_the_tokens_of_the_program():
    options = {"sampling": Sampling(2.0, top_k=9, top_p=0.9), "key": jax.random.key(5), "valid": RIGHT}
    found = np.asarray(generate(decoder(), PROMPTS, NEW, **options).tokens)
    np.testing.assert_array_equal(np.stack(list(stream(decoder(), PROMPTS, NEW, **options)), 1), found)
    other = generate(decoder(), PROMPTS, NEW, **options | {"key": jax.random.key(6)})
    assert found.tolist() != other.tokens.tolist()


def test_it_is_part_of_a_compiled_program():
    whole = nnx.jit(lambda model, prompts, valid: generate(model, prompts, NEW, valid=valid))
    found = whole(decoder("dynamic NTK"), PROMPTS, RIGHT)
    np.testing.assert_array_equal(found.tokens, generate(decoder("dynamic NTK"), PROMPTS, NEW, valid=RIGHT).tokens)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_rows_may_be_split_over_a_mesh(kind):
    """The mesh is that of the arrays, or in use too."""
    mesh, wanted = jax.make_mesh((3,), ("data",), (kind,), devices=jax.devices()[:3]), generate(decoder(), PROMPTS, 3)
    prompts = jax.device_put(PROMPTS, NamedSharding(mesh, PartitionSpec("data")))
    graph, state = nnx.split(decoder())
    model = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, PartitionSpec())))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(generate(model, prompts, 3).tokens, wanted.tokens)
    if kind == AxisType.Explicit:
        refused("mesh", lambda: stream(model, prompts, 3))
    else:
        np.testing.assert_array_equal(np.stack(list(stream(model, prompts, 3)), 1), wanted.tokens)


def test_logits_that_are_not_finite_end_a_row():
    """Those of tokens beyond a learned embedding; a compiled program does not know how long the prompts are."""
    whole = nnx.jit(lambda model, valid: generate(model, PROMPTS, 10, valid=valid))
    found, counts = whole(decoder("an embedding"), RIGHT)
    assert counts.tolist() == [16 - COLUMNS + 1, 10, 10]
    assert (np.asarray(found) < 0).sum() == 10 - counts[0]


DRAWS = 20_000
PROBABILITIES = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
DISTRIBUTIONS = [
    (Sampling(), [0.05, 0.4, 0.15, 0.3, 0.1]),
    (Sampling(0.5), PROBABILITIES**2 / (PROBABILITIES**2).sum()),
    (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
    (Sampling(top_k=9), [0.05, 0.4, 0.15, 0.3, 0.1]),
    (Sampling(top_p=0.8), [0, 8 / 17, 3 / 17, 6 / 17, 0]),
    (Sampling(top_p=0.72), [0, 8 / 17, 3 / 17, 6 / 17, 0]),
    (Sampling(top_p=0.68), [0, 4 / 7, 0, 3 / 7, 0]),
    (Sampling(top_p=1e-9), [0, 1, 0, 0, 0]),
    (Sampling(top_k=3, top_p=0.8), [0, 4 / 7, 0, 3 / 7, 0]),  # 0.7 / 0.85 > 0.8
    (Sampling(0.5, top_p=0.8), [0, 16 / 25, 0, 9 / 25, 0]),  # 0.25 / 0.285 > 0.8
    (Sampling(0), [0, 1, 0, 0, 0]),
]


@pytest.mark.parametrize(("sampling", "wanted"), DISTRIBUTIONS, ids=[str(sampling) for sampling, _ in DISTRIBUTIONS])
def test_draws_follow_the_distribution(sampling, wanted):
    """Within five standard deviations of the binomial distribution; tokens of probability 0 are never drawn."""
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES) + 3, (DRAWS, 5))
    drawn = jax.jit(choose, static_argnums=2)(jax.random.key(0), logits, sampling)
    shares, wanted = np.bincount(drawn, minlength=5) / DRAWS, np.asarray(wanted)
    assert (np.abs(shares - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / DRAWS)).all(), shares


def test_of_equally_likely_tokens_the_nucleus_is_the_smallest_set():
    drawn = choose(jax.random.key(0), jnp.zeros((1000, 8)), Sampling(top_p=0.5))
    assert len(np.unique(drawn)) == 4


def test_all_tokens_as_likely_as_the_last_of_top_k_may_be_drawn():
    drawn = choose(jax.random.key(0), jnp.tile(jnp.log(jnp.array([0.1, 0.3, 0.3, 0.3])), (1000, 1)), Sampling(top_k=1))
    assert np.unique(drawn).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "sampling", [Sampling(1e-6), Sampling(1e-38, top_k=2), Sampling(1e-45, top_p=0.9), Sampling(1e-300, top_k=2)]
)
def test_ever_smaller_temperatures_end_at_the_likeliest_token(sampling):
    """The limit of softmax(z / T) for T -> 0; below 1e-38 float32 holds neither T nor z / T."""
    logits = np.array([[1.0, 3.0, 2.999, -50.0], [-7.0, -90.0, -6.0, -6.5], [0.0, -2.0, 80.0, 79.0]], np.float32)
    drawn = choose(jax.random.key(0), jnp.repeat(logits, 50, axis=0), sampling)
    assert drawn.reshape(3, 50).tolist() == [[1] * 50, [2] * 50, [2] * 50]


def generated(name="rope", prompts=PROMPTS, new_tokens=NEW, **options):
    return lambda: generate(decoder(name), prompts, new_tokens, **options)


def bidirectional():
    model = nnx.eval_shape(lambda: Decoder(config(pj.scheme("rope"), causal=False), rngs=nnx.Rngs(0)))
    return stream(model, PROMPTS, NEW)


REFUSED = [
    ("temperature", lambda: Sampling(-0.5)),
    ("temperature", lambda: Sampling(float("nan"))),
    ("top_k", lambda: Sampling(top_k=2.5)),
    ("top_k", lambda: Sampling(top_k=-1)),
    ("top_p", lambda: Sampling(top_p=0)),
    ("top_p", lambda: Sampling(top_p=1.5)),
    ("bidirectional", bidirectional),
    ("prompts", generated(prompts=PROMPTS[0])),
    ("prompts", generated(prompts=PROMPTS[:, :0])),
    ("prompts", generated(prompts=PROMPTS.tolist())),
    ("new_tokens", generated(new_tokens=0)),
    ("chunk", generated(chunk=0)),
    ("sampling", generated(sampling=0.8)),
    ("key", generated(sampling=Sampling())),
    ("stop", generated(stop=7)),
    ("stop", generated(stop=["</s>"])),
    ("valid", generated(valid=RIGHT[:, :3])),
    ("valid", generated(valid=RIGHT.astype(np.int32))),
    ("valid", generated(valid=RIGHT & (np.arange(3) < 2)[:, None])),
    ("length", generated(length=0)),
    ("length", generated(length=np.array([4, 5]))),
    ("positions", generated(positions=np.arange(4))),
    ("prompts", generated("an embedding", new_tokens=8)),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[f"{n} {name}" for n, (name, _) in enumerate(REFUSED)])
def test_a_bad_value_is_refused_by_name(name, call):
    refused(name, call)
