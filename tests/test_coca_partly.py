"""CoCA's constraint in chosen planes: scores against the definition in float64, and the cases of no and all planes."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import coca
from posjax.coca import PartlyCollinear
from posjax.nn import DecoderConfig
from posjax.rotary import DynamicNTK, Plain, Rotary, inverse_frequencies, rotary_table

BATCH, QUERIES, KEYS, HEADS, SIZE = 2, 5, 7, 4, 16
PLANES = SIZE // 2
M = np.array([0, 1, 3, 40, -9], np.int32)
N = np.array([0, 2, 3, 41, 100, 7, -20], np.int32)
PAIRINGS = ("half", "interleaved")
EVERY, NONE, SOME = (0, PLANES), (0, 0), (2, 5)

close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def projections(kv_heads=HEADS, dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((BATCH, QUERIES, HEADS, SIZE))
    k = rng.standard_normal((BATCH, KEYS, kv_heads, SIZE))
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype)


def features_of(slot, q, k, shift=0, length=None):
    at = {"q_positions": jnp.asarray(M + shift), "kv_positions": jnp.asarray(N + shift)}
    return jax.jit(lambda q, k: slot(q, k, **at, head_dim=SIZE, length=length))(q, k)


def scores(slot, q, k, **where):
    """Scores from the features, summed in float64."""
    phi, psi = (np.asarray(x, np.float64) for x in features_of(slot, q, k, **where))
    return np.einsum("bmhd,bnhd->bhmn", phi, np.repeat(psi, HEADS // k.shape[2], axis=2))


def components(x, pairing):
    x = np.asarray(x, np.float64)
    return (x[..., :PLANES], x[..., PLANES:]) if pairing == "half" else (x[..., ::2], x[..., 1::2])


def defined(q, k, planes, pairing="half", base=10_000.0):
    """The scores ``[batch, head, m, n]`` of the definition, a plane, a query and a key at a time."""
    (x, y), (a, b) = (components(z, pairing) for z in (q, np.repeat(k, HEADS // k.shape[2], axis=2)))
    found = np.zeros((BATCH, HEADS, QUERIES, KEYS))
    for row, head, m, n, j in np.ndindex(*found.shape, PLANES):
        (qx, qy), (ka, kb) = (x[row, m, head, j], y[row, m, head, j]), (a[row, n, head, j], b[row, n, head, j])
        angle = (int(M[m]) - int(N[n])) * base ** (-2 * j / SIZE)
        if planes[0] <= j < planes[1]:
            term = max((ka + kb) / 2, 0.0) * (qx * qx + qy * qy) * np.cos(angle)
        else:
            between = np.arctan2(qy, qx) - np.arctan2(kb, ka)
            term = np.hypot(qx, qy) * np.hypot(ka, kb) * np.cos(angle + between)
        found[row, head, m, n] += term
    return found


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("planes", "kv_heads"), [(SOME, 4), (SOME, 2), ((0, 3), 1), ((7, 8), 4), (EVERY, 4), (NONE, 4)]
)
def test_scores_are_those_of_the_definition(planes, kv_heads, pairing):
    q, k = projections(kv_heads)
    close(scores(PartlyCollinear(planes=planes, pairing=pairing), q, k), defined(q, k, planes, pairing))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_without_planes_it_is_rope(pairing, dtype):
    q, k = projections(2, dtype)
    for planes in (NONE, (3, 3)):
        found = features_of(PartlyCollinear(planes=planes, pairing=pairing), q, k)
        chex.assert_trees_all_equal(found, features_of(Rotary(pairing=pairing), q, k))
        chex.assert_type(found, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_with_all_planes_it_is_strict_coca_of_merged_keys(pairing, dtype):
    q, k = projections(2, dtype)

    @jax.jit
    def of_coca(q, k):
        t = coca.half_width(coca.merge_projection(k.astype(jnp.float32), pairing))
        tables = [rotary_table(at, inverse_frequencies(SIZE)) for at in (M, N)]
        phi, psi = coca.features(q, t, tables[0], kv_table=tables[1], variant="strict", pairing=pairing)
        return phi, psi.astype(dtype)

    found, wanted = features_of(PartlyCollinear(planes=EVERY, pairing=pairing), q, k), of_coca(q, k)
    # CoCA's features are ordered by component; those of a rotation keep the order of the channels.
    by_components = [np.concatenate(components(x, pairing), axis=-1) for x in found]
    chex.assert_trees_all_close(by_components, [np.asarray(x, np.float64) for x in wanted], rtol=1e-6, atol=1e-6)


def test_shifting_all_positions_changes_nothing():
    q, k = projections()
    slot = PartlyCollinear(planes=SOME)
    assert slot.shift_invariant
    close(scores(slot, q, k, shift=12345), scores(slot, q, k), atol=1e-4)


def test_bfloat16_projections_lose_only_the_last_cast():
    q, k = projections(dtype=jnp.bfloat16)
    slot = PartlyCollinear(planes=SOME)
    exact = features_of(slot, q.astype(jnp.float32), k.astype(jnp.float32), shift=8191)
    chex.assert_trees_all_equal(
        features_of(slot, q, k, shift=8191), jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    )


def test_gradients_against_central_differences_of_the_definition():
    q, k = projections(2)
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((BATCH, HEADS, QUERIES, KEYS))
    along = [rng.standard_normal(x.shape) for x in (q, k)]
    slot = PartlyCollinear(planes=SOME)

    @jax.jit
    def gradients(q, k):
        def loss(q, k):
            phi, psi = slot(q, k, q_positions=M, kv_positions=N, head_dim=SIZE)
            return jnp.sum(jnp.einsum("bmhd,bnhd->bhmn", phi, jnp.repeat(psi, 2, axis=2)) * weight.astype(np.float32))

        return jax.grad(loss, argnums=(0, 1))(q, k)

    wide, step = [np.asarray(x, np.float64) for x in (q, k)], 1e-6
    ends = [
        (weight * defined(*(x + e * d for x, d in zip(wide, along, strict=True)), SOME)).sum() for e in (step, -step)
    ]
    slope = sum(np.vdot(np.asarray(g, np.float64), d) for g, d in zip(gradients(q, k), along, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


def test_channels_that_do_not_rotate_belong_to_no_plane():
    q, k = projections()
    rule = Plain(partial_rotary_factor=0.5)
    some, none, every = (features_of(PartlyCollinear(rule, planes=p), q, k) for p in ((1, 3), (0, 0), (0, 4)))
    for raw, *found in zip((q, k), some, none, every, strict=True):
        for each in found:
            chex.assert_trees_all_equal(each[..., 8:], raw[..., 8:])
    chex.assert_trees_all_equal(none, features_of(Rotary(rule), q, k))
    inside, outside = np.array([1, 2, 5, 6]), np.array([0, 3, 4, 7])
    for i in range(2):
        chex.assert_trees_all_equal(some[i][..., inside], every[i][..., inside])
        chex.assert_trees_all_equal(some[i][..., outside], none[i][..., outside])


@pytest.mark.parametrize("planes", [SOME, EVERY, NONE])
def test_dynamic_ntk_after_training_changes_the_planes_of_both_kinds(planes):
    """At a length L above L0, the base is multiplied by (s L / L0 - s + 1)^(d / (d - 2))."""
    q, k = projections(2)
    trained = pj.scheme("coca-planes", planes=planes)
    extended = trained.extend(frequencies={"name": "dynamic-ntk", "original_length": 32, "factor": 4.0})
    assert extended.features == PartlyCollinear(DynamicNTK(original_length=32, factor=4.0), planes=planes)
    assert extended.reads_length
    assert (trained.caches, extended.caches) == ("rotated", "raw")
    base = 10_000.0 * (4.0 * 128 / 32 - 3.0) ** (SIZE / (SIZE - 2))
    close(scores(extended.features, q, k, length=128), defined(q, k, planes, base=base), atol=1e-4)
    close(scores(extended.features, q, k, length=32), defined(q, k, planes))


def test_the_preset_and_the_slot_take_lists():
    rule = {"name": "default", "base": 500.0}
    found = pj.scheme("coca-planes", planes=[2, 5], pairing="interleaved", frequencies=rule)
    assert found.features == PartlyCollinear(Plain(500.0), "interleaved", planes=(2, 5))
    assert pj.scheme("rope", features={"name": "coca-planes", "planes": [2, 5]}).features == PartlyCollinear(
        planes=SOME
    )


BEYOND = r"planes must not end after 8, the number that .* rotates in a head of 16, found \(2, 9\)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartlyCollinear(planes=(2, 9)).query_size(SIZE), BEYOND),
        (lambda: PartlyCollinear(Plain(head_dim=SIZE), planes=(2, 9)), BEYOND),
        (lambda: features_of(PartlyCollinear(planes=(2, 9)), *projections()), BEYOND),
        (lambda: PartlyCollinear(Plain(partial_rotary_factor=0.5), planes=(0, 5)).query_size(SIZE), "not end after 4"),
        (lambda: config(planes=(2, 9)), BEYOND),
        (lambda: PartlyCollinear(planes=(5, 2)), r"planes must be \(first, last\), .* found \(5, 2\)"),
        (lambda: PartlyCollinear(planes=(-1, 2)), r"planes must be \(first, last\)"),
        (lambda: PartlyCollinear(planes=(0, 1.0)), r"planes must be \(first, last\)"),
        (lambda: pj.scheme("coca-planes"), "needs planes"),
        (lambda: features_of(PartlyCollinear(planes=SOME), *(x[..., :8] for x in projections())), "q must be as wide"),
        (lambda: PartlyCollinear(planes=SOME).collinear_key(np.ones((1, 1, 1, SIZE), int), head_dim=SIZE), "k must be"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def config(planes):
    scheme = pj.scheme("coca-planes", planes=planes)
    return DecoderConfig(vocab_size=8, model_dim=32, num_layers=1, num_heads=2, mlp_dim=8, scheme=scheme)
