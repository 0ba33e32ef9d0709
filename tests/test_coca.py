"""CoCA features against the paper's three-way product in float64, one plane at a time."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from posjax import coca
from posjax.rotary import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKAware,
    NTKByParts,
    Plain,
    Proportional,
    YaRN,
    apply_rotary,
    inverse_frequencies,
    rotary_table,
)

PAIRINGS = ("half", "interleaved")
BATCH, QUERIES, KEYS, HEADS, SIZE = 2, 5, 7, 4, 16
M = np.array([0, 1, 3, 40, -9])
N = np.array([0, 2, 3, 41, 100, 7, -20])
THETA = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)


def inputs(kv_heads=HEADS, *, tied=False, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((BATCH, QUERIES, HEADS, SIZE // 2 if tied else SIZE))
    t = rng.standard_normal((BATCH, KEYS, kv_heads, SIZE // 2))
    return q.astype(np.float32), t.astype(np.float32)


@partial(jax.jit, static_argnames="size")
def table(positions, size=SIZE):
    return rotary_table(positions, inverse_frequencies(size))


@partial(jax.jit, static_argnames=("variant", "pairing"))
def features_at(q, t, m, n, variant, pairing="half"):
    """Features of queries and keys at these positions."""
    size = 2 * t.shape[-1]
    return coca.features(q, t, table(m, size), kv_table=table(n, size), variant=variant, pairing=pairing)


def planes(q, pairing):
    q = np.asarray(q, np.float64)
    return (q[..., : SIZE // 2], q[..., SIZE // 2 :]) if pairing == "half" else (q[..., ::2], q[..., 1::2])


def per_plane(q, t, pairing="half", m=M, n=N):
    """``x, y`` of every query, ``t``, ``m theta`` and ``n theta``, broadcast to ``[batch, head, m, n, plane]``."""
    x, y = (np.swapaxes(a, 1, 2)[:, :, :, None] for a in planes(q, pairing))
    t = np.repeat(np.maximum(np.asarray(t, np.float64), 0), HEADS // t.shape[2], axis=2)
    return x, y, np.swapaxes(t, 1, 2)[:, :, None], (m[:, None] * THETA)[:, None], n[:, None] * THETA


def naive(q, t, variant, pairing="half", m=M, n=N):
    """Scores ``[batch, head, m, n]`` as defined: ``k_{m,n} = q_m t_n``; slack as coded: ``q . (R q) . (R t)``."""
    x, y, t, a, b = per_plane(q, t, pairing, m, n)
    z = x + 1j * y
    if variant == "strict":
        return ((z * np.exp(1j * a)) * np.conj(z * t * np.exp(1j * b))).real.sum(-1)
    rotated, key = z * np.exp(1j * a), (t + 1j * t) * np.exp(1j * b)
    return (x * rotated.real * key.real + y * rotated.imag * key.imag).sum(-1)


def closed(q, t, variant, pairing="half", m=M, n=N):
    """The closed forms of the relative and absolute parts of slack."""
    x, y, t, a, b = per_plane(q, t, pairing, m, n)
    u, w = (x + y) / np.sqrt(2), (y - x) / np.sqrt(2)
    if variant == "relative":
        return (t * (u * u * np.cos(a - b) - u * w * np.sin(a - b))).sum(-1)
    return (t * (w * w * np.cos(a + b) + u * w * np.sin(a + b))).sum(-1)


def scores(q, t, variant, pairing="half", m=M, n=N):
    """Scores from the features, summed in float64."""
    phi, psi = features_at(q, t, m, n, variant, pairing)
    psi = np.repeat(np.asarray(psi, np.float64), HEADS // t.shape[2], axis=2)
    return np.einsum("bmhd,bnhd->bhmn", np.asarray(phi, np.float64), psi)


def reference(q, t, variant, pairing="half", m=M, n=N):
    if variant == "tied":
        q = np.concatenate([q, q], -1) if pairing == "half" else np.repeat(q, 2, -1)
        return naive(q, t, "strict", pairing, m, n)
    return (closed if variant == "relative" else naive)(q, t, variant, pairing, m, n)


close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_t1_features_give_the_naive_product(variant, pairing, kv_heads):
    q, t = inputs(kv_heads, tied=variant == "tied")
    close(scores(q, t, variant, pairing), reference(q, t, variant, pairing))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_t1_strict_closed_form(pairing):
    q, t = inputs()
    x, y, t64, a, b = per_plane(q, t, pairing)
    close(scores(q, t, "strict", pairing), (t64 * (x * x + y * y) * np.cos(a - b)).sum(-1))


def test_t2_tied_query_makes_slack_strict_and_relative():
    q, t = inputs(tied=True)
    doubled = np.concatenate([q, q], -1)
    for variant in ("strict", "slack", "relative"):
        close(scores(doubled, t, variant), scores(q, t, "tied"))


def test_t3_anti_tied_query_leaves_the_absolute_term_alone():
    half, t = inputs(tied=True)
    q = np.concatenate([half, -half], -1)
    x, _, t64, a, b = per_plane(q, t)
    close(scores(q, t, "slack"), (2 * x * x * t64 * np.cos(a + b)).sum(-1))
    close(scores(q, t, "relative"), np.zeros((BATCH, HEADS, QUERIES, KEYS)))


@pytest.mark.parametrize("variant", ["tied", "strict", "relative"])
def test_t4_shift_changes_nothing(variant):
    q, t = inputs(tied=variant == "tied")
    close(scores(q, t, variant, m=M + 12345, n=N + 12345), scores(q, t, variant), atol=1e-4)


def test_t4_shift_changes_slack():
    """For random inputs and shifts of 10 to 1000, scores change by 21 to 57% of their norm; more for larger shifts."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 64, 1, 64)).astype(np.float32)
    t = rng.standard_normal((1, 64, 1, 32)).astype(np.float32)

    def at(shift):
        phi, psi = features_at(q, t, np.arange(64) + shift, np.arange(64) + shift, "slack")
        return np.einsum("bmhd,bnhd->mn", phi, psi)

    drift = [np.linalg.norm(at(shift) - at(0)) / np.linalg.norm(at(0)) for shift in (10, 100, 1000)]
    assert 0.21 < drift[0] < drift[1] < drift[2] < 0.57, drift


def strict_decay(distances, seed=0):
    """Strict scores of one query at position 5000 and one key at each distance before it; and that query and key."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 1, 1, SIZE)).astype(np.float32)
    t = np.abs(rng.standard_normal((1, 1, 1, SIZE // 2))).astype(np.float32)
    keys = np.broadcast_to(t, (1, len(distances), 1, SIZE // 2))
    phi, psi = map(np.asarray, features_at(q, keys, np.array([5000]), 5000 - distances, "strict"))
    return np.einsum("d,nd->n", phi[0, 0, 0], psi[0, :, 0]), q, t


@pytest.mark.parametrize("seed", range(5))
def test_t5_distance_zero_has_the_largest_score(seed):
    a, _, _ = strict_decay(np.arange(2000), seed)
    assert a[0] >= 0
    assert np.all(np.abs(a) <= a[0] * (1 + 1e-6))


@pytest.mark.parametrize("seed", range(5))
def test_t6_krein_inequality(seed):
    a, _, _ = strict_decay(np.arange(2000), seed)
    s = np.arange(1000)
    assert np.all(a[0] - a[2 * s] <= 4 * (a[0] - a[s]) + 1e-4)


@jax.jit
def rotated(x, positions):
    return apply_rotary(x, table(positions))


def test_t7_strict_is_rope_on_squared_radii():
    q, t = inputs()
    x, y = planes(q, "half")
    rope_q = np.concatenate([x * x + y * y, 0 * x], -1).astype(np.float32)
    rope_k = np.concatenate([np.maximum(t, 0), 0 * t], -1)
    phi, psi = features_at(q, t, M, N, "strict")
    close(phi, rotated(rope_q, M))
    close(psi, rotated(rope_k, N))


def test_t8_rotating_the_doubled_key_turns_the_feature_by_an_eighth():
    """R_n (t, t) = sqrt(2) t (cos(n theta + pi / 4), sin(n theta + pi / 4))."""
    _, t = inputs()
    psi = np.asarray(coca.key_feature(t, table(N)), np.float64)
    first, second = np.split(psi, 2, axis=-1)
    eighth = np.concatenate([first - second, second + first], -1)
    close(rotated(np.maximum(np.concatenate([t, t], -1), 0), N), eighth)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_t9_merged_projection(pairing):
    """Projecting d channels and averaging the halves is projecting d / 2 with averaged weights and biases."""
    rng = np.random.default_rng(1)
    h, weights, biases = (rng.standard_normal(shape) for shape in ((3, 10), (10, HEADS, SIZE), (HEADS, SIZE)))
    full = np.einsum("tm,mhd->thd", h, weights) + biases
    first, second = planes(full, pairing)
    merge = jax.jit(lambda *x: [coca.merge_projection(a, pairing) for a in x])
    kernel, offset = jax.device_get(merge(weights.astype(np.float32), biases.astype(np.float32)))
    chex.assert_shape(kernel, (10, HEADS, SIZE // 2))
    close(np.einsum("tm,mhd->thd", h.astype(np.float32), kernel) + offset, (first + second) / 2)


def test_t11_decay_bound_of_equation_20():
    """|a(s)| <= max |l_{j+1} - l_j| sum_j |C_{j+1}(s)|, with l_{d/2} = 0."""
    distances = np.arange(500)
    a, q, t = strict_decay(distances)
    x, y = planes(q[0, 0, 0], "half")
    lengths = np.append(t[0, 0, 0] * (x * x + y * y), 0.0)
    c = np.cumsum(np.cos(distances[:, None] * THETA), axis=1)
    assert np.all(np.abs(a) <= np.max(np.abs(np.diff(lengths))) * np.abs(c).sum(1) + 1e-4)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_slack_closed_form(pairing):
    q, t = inputs()
    x, y, t64, a, b = per_plane(q, t, pairing)
    (ca, sa), (cb, sb) = ((np.cos(z), np.sin(z)) for z in (a, b))
    expected = t64 * ((x * x + y * y) * ca * cb + (y * y - x * x) * ca * sb + 2 * x * y * sa * sb)
    close(scores(q, t, "slack", pairing), expected.sum(-1))


def test_slack_minus_strict():
    q, t = inputs()
    x, y, t64, a, b = per_plane(q, t)
    expected = -t64 * np.sin(b) * (x - y) * ((x + y) * np.cos(a) + (x - y) * np.sin(a))
    close(scores(q, t, "slack") - scores(q, t, "strict"), expected.sum(-1))


def test_slack_is_relative_plus_absolute():
    q, t = inputs()
    close(scores(q, t, "slack") - scores(q, t, "relative"), closed(q, t, "absolute"))


def test_expectation_of_slack_over_isotropic_queries():
    """t r^2 cos(m theta) cos(n theta): the mean over eight equally spaced angles is the mean over all angles."""
    t = inputs()[1]
    angle = np.arange(8) * np.pi / 4
    radius = np.linspace(0.5, 2, SIZE // 2)
    q = [np.concatenate([radius * np.cos(z), radius * np.sin(z)]) for z in angle]
    q = [np.broadcast_to(z, (BATCH, QUERIES, HEADS, SIZE)).astype(np.float32) for z in q]
    _, _, t64, a, b = per_plane(q[0], t)
    mean = np.mean([scores(z, t, "slack") for z in q], axis=0)
    close(mean, (t64 * radius**2 * np.cos(a) * np.cos(b)).sum(-1), atol=1e-4)


def test_strict_diagonal_is_never_negative_and_slack_may_be():
    half, t = inputs(tied=True)
    anti_tied, fastest = np.concatenate([half, -half], -1), np.abs(t[:, :QUERIES]) * (THETA == 1)
    diagonal = {v: np.einsum("bhmm->bhm", scores(anti_tied, fastest, v, n=M)) for v in ("strict", "slack")}
    assert np.all(diagonal["strict"] >= 0)
    assert np.all(diagonal["slack"][:, :, M == 1] < 0)


def test_slack_is_strict_for_keys_that_do_not_turn():
    q, t = inputs()
    close(scores(q, t, "slack", n=0 * N), scores(q, t, "strict", n=0 * N))


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_key_may_come_raw_or_through_relu(variant):
    q, t = inputs(tied=variant == "tied")
    chex.assert_trees_all_equal(features_at(q, t, M, N, variant), features_at(q, coca.half_width(t), M, N, variant))
    assert np.any(t < 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_shapes_and_dtypes(variant, dtype):
    q, t = (a.astype(dtype) for a in inputs(2, tied=variant == "tied"))
    phi, psi = jax.eval_shape(lambda: features_at(q, t, M, N, variant))
    chex.assert_shape(phi, (BATCH, QUERIES, HEADS, SIZE))
    chex.assert_shape(psi, (BATCH, KEYS, 2, SIZE))
    chex.assert_type([phi, psi], dtype)
    chex.assert_type(jax.eval_shape(coca.half_width, t), dtype)


def test_table_per_row_of_the_batch():
    q, t = inputs()
    both = jax.device_get(features_at(q, t, np.stack([M, M + 7]), np.stack([N, N + 7]), "slack"))
    for row, shift in enumerate((0, 7)):
        one = jax.device_get(features_at(q, t, M + shift, N + shift, "slack"))
        chex.assert_trees_all_close(*(jax.tree.map(lambda a, r=row: a[r], pair) for pair in (both, one)))


@pytest.mark.parametrize("position", [257, 8191, 131_071, 1_000_003])
@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_bfloat16_inputs_lose_only_the_last_cast(variant, position):
    """The features in bfloat16 are those in float32, rounded once, at any position."""
    q, t = (a.astype(jnp.bfloat16) for a in inputs(tied=variant == "tied"))
    at = M + position, N + position, variant
    exact = jax.device_get(features_at(q.astype(np.float32), t.astype(np.float32), *at))
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), exact)
    chex.assert_trees_all_equal(jax.device_get(features_at(q, t, *at)), rounded)


def test_bfloat16_logits_err_as_those_of_rope():
    """Near position 32k, heads of 128: an rms error of 0.2% of the logits' standard deviation, for RoPE as for CoCA."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 64, 1, 128)).astype(jnp.bfloat16) for _ in range(2))
    variants = ("strict", "slack", "relative")

    @jax.jit
    def features(q, k):
        at = table(32_000 + np.arange(64), 128)
        of_coca = {name: coca.features(q, k[..., :64], at, variant=name) for name in variants}
        return of_coca | {"rope": (apply_rotary(q, at), apply_rotary(k, at))}

    found = [
        {name: np.einsum("bmhd,bnhd->mn", *map(np.float64, pair)) for name, pair in jax.device_get(run).items()}
        for run in (features(q.astype(np.float32), k.astype(np.float32)), features(q, k))
    ]
    error = {name: np.sqrt(np.mean((x - found[1][name]) ** 2)) / np.std(x) for name, x in found[0].items()}
    assert 0.0015 < error["rope"] < 0.003
    for variant in variants:
        assert error[variant] < 1.1 * error["rope"]


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_gradients_against_central_differences_of_the_oracle(variant):
    q, t = inputs(2, tied=variant == "tied")
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((BATCH, HEADS, QUERIES, KEYS))

    def loss(q, t):
        phi, psi = features_at(q, t, M, N, variant)
        return jnp.sum(jnp.einsum("bmhd,bnhd->bhmn", phi, jnp.repeat(psi, 2, axis=2)) * weight.astype(np.float32))

    along = [rng.standard_normal(a.shape) for a in (q, t)]
    step = 1e-6
    ends = [(weight * reference(q + e * along[0], t + e * along[1], variant)).sum() for e in (step, -step)]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, t)
    slope = sum(np.vdot(np.asarray(g, np.float64), a) for g, a in zip(gradients, along, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


def test_jit_and_vmap():
    q, t = (jnp.asarray(a) for a in inputs())
    f = partial(coca.features, variant="slack")
    plain = f(q, t, table(M), kv_table=table(N))
    chex.assert_trees_all_close(jax.jit(f)(q, t, table(M), kv_table=table(N)), plain, atol=1e-6)
    per_row = jax.jit(jax.vmap(lambda q, t: f(q[None], t[None], table(M), kv_table=table(N))))(q, t)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[:, 0], jax.device_get(per_row)), plain, atol=1e-6)


def sharded_inputs():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 8, 4, SIZE)).astype(np.float32)
    t = rng.standard_normal((2, 8, 4, SIZE // 2)).astype(np.float32)
    return q, t, table(np.arange(8))


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_shard_map_over_batch_length_and_heads(variant):
    q, t, at = sharded_inputs()
    q = t if variant == "tied" else q
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "length", "heads"))
    spec, rows = PartitionSpec("data", "length", "heads"), PartitionSpec("length")
    f = partial(coca.features, variant=variant)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, rows), out_specs=(spec, spec))

    def loss(q, t, f):
        phi, psi = f(q, t, at)
        return jnp.sum(jnp.sin(phi)) + jnp.sum(psi**2), (phi, psi)

    @jax.jit
    def both(q, t):
        return [jax.grad(loss, argnums=(0, 1), has_aux=True)(q, t, g) for g in (sharded, f)]

    (got, found), (want, plain) = both(q, t)
    chex.assert_trees_all_close(found, plain, atol=1e-6)
    chex.assert_trees_all_close(got, want, atol=1e-5)


def test_pmap():
    q, t, at = sharded_inputs()
    q, t = (np.stack([a + np.float32(i) for i in range(8)]) for a in (q, t))
    f = partial(coca.features, variant="slack")
    mapped = jax.pmap(f, in_axes=(0, 0, None))(q, t, at)
    expected = jax.jit(jax.vmap(f, in_axes=(0, 0, None)))(q, t, at)
    chex.assert_trees_all_close(mapped, expected, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Tempered(Plain):
    """A rule with both factors, as YaRN has."""

    @property
    def table_factor(self):
        return 1.25

    @property
    def softmax_scale(self):
        return 1.5


RULES = [
    (Plain(500.0), None),
    (Proportional(0.5), None),
    (Linear(factor=4.0), None),
    (NTKAware(factor=4.0), None),
    (NTKByParts(factor=4.0, original_length=32), None),
    (YaRN(factor=4.0, original_length=32), None),
    (Llama3(), None),
    (DynamicNTK(original_length=32), 128),
    (LongRoPE(short_factor=(1.0,) * 8, long_factor=(4.0,) * 8, original_length=32, factor=4.0), 128),
]


SLOTS = [(variant, pairing, *RULES[0]) for variant in coca.VARIANTS for pairing in PAIRINGS]
SLOTS += [("slack", "interleaved", *rule) for rule in RULES[1:]]


@pytest.mark.parametrize(("variant", "pairing", "rule", "length"), SLOTS)
def test_slot_is_the_function(variant, pairing, rule, length):
    q, t = (jnp.asarray(a) for a in inputs(2, tied=variant == "tied"))
    slot = coca.Coca(variant, rule, pairing)
    m, n = jnp.asarray(M), jnp.asarray(N)
    theta, factor = rule.at_length(length, head_dim=SIZE)
    tables = [rotary_table(p, theta, attention_factor=factor) for p in (m, n)]
    expected = coca.features(q, t, tables[0], kv_table=tables[1], variant=variant, pairing=pairing)
    found = slot(q, t, q_positions=m, kv_positions=n, head_dim=SIZE, length=length)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    assert slot.reads_length == (length is not None)
    assert (slot.query_size(SIZE), slot.key_size(SIZE)) == (q.shape[-1], t.shape[-1])


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_slot_puts_the_attention_factor_in_both_tables_and_leaves_the_softmax_scale_to_the_scheme(variant):
    q, t = (jnp.asarray(a) for a in inputs(tied=variant == "tied"))
    at = {"q_positions": jnp.asarray(M), "kv_positions": jnp.asarray(N), "head_dim": SIZE}
    phi, psi = coca.Coca(variant)(q, t, **at)
    scaled = coca.Coca(variant, Tempered())(q, t, **at)
    chex.assert_trees_all_close(scaled, (1.25 * phi, 1.25 * psi), rtol=1e-5)


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_slot_declares_its_shift_invariance(variant):
    q, t = (jnp.asarray(a) for a in inputs(tied=variant == "tied"))
    slot = coca.Coca(variant)

    def logits(shift):
        at = {"q_positions": jnp.asarray(M + shift), "kv_positions": jnp.asarray(N + shift)}
        return np.einsum("bmhd,bnhd->bhmn", *slot(q, t, **at, head_dim=SIZE))

    moved = np.abs(logits(1000) - logits(0)).max()
    assert (moved < 1e-4) if slot.shift_invariant else (moved > 0.1)


def test_slot_is_a_static_argument():
    slot = coca.Coca("tied", Linear(factor=2.0))
    assert hash(slot) == hash(coca.Coca("tied", Linear(factor=2.0)))
    assert slot == dataclasses.replace(coca.Coca("strict", Linear(factor=2.0)), variant="tied")


def test_refusals():
    q, t = inputs()
    at, f = table(M), coca.features
    t = t[:, :QUERIES]
    cases = [
        ("did you mean 'strict'", lambda: f(q, t, at, variant="stric")),
        ("pairing: unknown", lambda: f(q, t, at, variant="strict", pairing="halves")),
        ("half as wide", lambda: f(q, t, at, variant="tied")),
        ("no partial rotation", lambda: f(q, t, table(M, SIZE // 2), variant="strict")),
        ("t, and the q of 'tied'", lambda: f(q, np.tile(t, 2), at, variant="strict")),
        ("t must be 8 wide", lambda: f(q, t[..., :4], at, kv_table=table(M, SIZE // 2), variant="strict")),
        ("even number, found 15", lambda: f(q[..., 1:], t, at, variant="slack")),
        ("q must have 4 axes", lambda: f(q[0], t, at, variant="slack")),
        ("t must have 4 axes", lambda: f(q, t[0], at, variant="slack")),
        ("does not fit q, with 5 tokens", lambda: f(q, t, table(N), variant="slack")),
        ("does not fit t", lambda: f(q, t, at, kv_table=table(N), variant="slack")),
        ("does not fit q", lambda: f(q, t, table(np.stack([M, M, M])), variant="slack")),
        ("variant: unknown", lambda: coca.Coca("coca")),
        ("pairing: unknown", lambda: coca.Coca("slack", pairing="half-split")),
        ("precision: unknown", lambda: coca.Coca("slack", precision="float")),
        ("must be a frequency rule", lambda: coca.Coca("slack", 10_000.0)),
        ("partial_rotary_factor is 0.5", lambda: coca.Coca("slack", Plain(partial_rotary_factor=0.5))),
        ("even", lambda: coca.Coca("slack").query_size(SIZE) and coca.Coca("slack").key_size(15)),
        ("even", lambda: coca.merge_projection(q[..., 1:])),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    slot = coca.Coca("strict", DynamicNTK(original_length=32))
    with pytest.raises(ValueError, match="reads the current length"):
        slot(q, t, q_positions=jnp.asarray(M), kv_positions=jnp.asarray(M), head_dim=SIZE)
