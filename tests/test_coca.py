"""CoCA, in all planes and in chosen ones: scores against the paper's three-way product in float64."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import coca
from posjax.coca import PartlyCollinear
from posjax.rotary import DynamicNTK, Plain, Rotary, inverse_frequencies, rotary_table

BATCH, HEADS, SIZE = 2, 4, 16
PLANES = SIZE // 2
M, N = np.array([0, 1, 3, 40, -9]), np.array([0, 2, 3, 41, 100, 7, -20])
THETA = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def inputs(kv_heads=HEADS, q_size=SIZE, k_size=PLANES, dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((BATCH, len(M), HEADS, q_size))
    return q.astype(dtype), rng.standard_normal((BATCH, len(N), kv_heads, k_size)).astype(dtype)


def of(variant, kv_heads=HEADS, dtype=np.float32):
    return inputs(kv_heads, PLANES if variant == "tied" else SIZE, dtype=dtype)


@partial(jax.jit, static_argnames="size")
def table(positions, size=SIZE):
    return rotary_table(positions, inverse_frequencies(size))


@partial(jax.jit, static_argnames=("variant", "pairing"))
def features(q, t, variant, pairing="half", m=M, n=N):
    return coca.features(q, t, table(m), kv_table=table(n), variant=variant, pairing=pairing)


@partial(jax.jit, static_argnums=0, static_argnames="length")
def of_slot(slot, q, k, m=M, n=N, length=None):
    return slot(q, k, q_positions=m, kv_positions=n, head_dim=SIZE, length=length)


def scores(pair):
    """``[batch, head, m, n]``, summed in float64."""
    phi, psi = (np.asarray(x, np.float64) for x in pair)
    return np.einsum("bmhd,bnhd->bhmn", phi, np.repeat(psi, HEADS // psi.shape[2], axis=2))


def by_head(x):
    """``[batch, heads, length, ...]`` in float64, with key heads repeated."""
    return np.swapaxes(np.repeat(np.asarray(x, np.float64), HEADS // x.shape[2], axis=2), 1, 2)


def planes(x, pairing):
    """The planes of ``[..., size]`` as complex numbers."""
    x = np.asarray(x, np.float64)
    return x[..., :PLANES] + 1j * x[..., PLANES:] if pairing == "half" else x[..., ::2] + 1j * x[..., 1::2]


def defined(q, t, variant, pairing="half"):
    """As defined: ``k_{m,n} = q_m t_n``; slack as coded: ``q . (R q) . (R t)``; relative: slack without ``m + n``."""
    t = np.maximum(by_head(t), 0)[:, :, None]
    q = planes(np.tile(q, 2) if variant == "tied" else q, "half" if variant == "tied" else pairing)
    z, a, b = (
        by_head(q.real)[:, :, :, None] + 1j * by_head(q.imag)[:, :, :, None],
        M[:, None, None] * THETA,
        N[:, None] * THETA,
    )
    if variant in ("strict", "tied"):
        return ((z * np.exp(1j * a)) * np.conj(z * t * np.exp(1j * b))).real.sum(-1)
    if variant == "slack":
        rotated, key = z * np.exp(1j * a), (t + 1j * t) * np.exp(1j * b)
        return (z.real * rotated.real * key.real + z.imag * rotated.imag * key.imag).sum(-1)
    u, w = (z.real + z.imag) / np.sqrt(2), (z.imag - z.real) / np.sqrt(2)
    return (t * (u * u * np.cos(a - b) - u * w * np.sin(a - b))).sum(-1)


CASES = [
    *[("strict", "half", 4), ("strict", "interleaved", 2), ("slack", "half", 1), ("slack", "interleaved", 4)],
    *[("relative", "half", 2), ("relative", "interleaved", 1), ("tied", "half", 4), ("tied", "interleaved", 2)],
]


@pytest.mark.parametrize(("variant", "pairing", "kv_heads"), CASES)
def test_features_give_the_product_of_the_paper(variant, pairing, kv_heads):
    q, t = of(variant, kv_heads)
    close(scores(features(q, t, variant, pairing)), defined(q, t, variant, pairing))


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_a_shift_of_all_positions_changes_what_is_declared(variant):
    q, t = of(variant)
    here, there = (scores(features(q, t, variant, m=M + shift, n=N + shift)) for shift in (0, 12345))
    if coca.Coca(variant).shift_invariant:
        close(there, here, atol=1e-4)
    else:
        assert np.abs(there - here).max() > 0.1


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_bfloat16_inputs_lose_only_the_last_cast_at_any_position(variant):
    q, t = of(variant, dtype=jnp.bfloat16)
    at = {"m": M + 1_000_003, "n": N + 1_000_003}
    exact = features(q.astype(np.float32), t.astype(np.float32), variant, **at)
    chex.assert_trees_all_equal(features(q, t, variant, **at), jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact))


@pytest.mark.parametrize("variant", coca.VARIANTS)
def test_gradients_are_central_differences_of_the_definition(variant):
    check_gradients(partial(features, variant=variant), partial(defined, variant=variant), of(variant, 2))


def check_gradients(pair, wanted, at):
    rng, step = np.random.default_rng(5), 1e-6
    weight = rng.standard_normal((BATCH, HEADS, len(M), len(N)))

    def loss(q, k):
        phi, psi = pair(q, k)
        return jnp.sum(jnp.einsum("bmhd,bnhd->bhmn", phi, jnp.repeat(psi, 2, axis=2)) * weight.astype(np.float32))

    along = [rng.standard_normal(x.shape) for x in at]
    ends = [(weight * wanted(*(x + e * d for x, d in zip(at, along, strict=True)))).sum() for e in (step, -step)]
    slope = sum(np.vdot(g, d) for g, d in zip(jax.jit(jax.grad(loss, (0, 1)))(*at), along, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_merged_projection_gives_the_means_of_pairs(pairing):
    """Projecting d channels and averaging the halves is projecting d / 2 with averaged weights."""
    rng = np.random.default_rng(1)
    x, weights = rng.standard_normal((3, 10)), rng.standard_normal((10, HEADS, SIZE)).astype(np.float32)
    full = planes(np.einsum("tm,mhd->thd", x, weights), pairing)
    close(np.einsum("tm,mhd->thd", x, coca.merge_projection(weights, pairing)), (full.real + full.imag) / 2)


def test_a_key_may_come_raw_or_through_relu():
    q, t = of("slack")
    chex.assert_trees_all_equal(features(q, t, "slack"), features(q, coca.half_width(t), "slack"))


@dataclasses.dataclass(frozen=True)
class Tempered(Plain):
    """A rule with both factors, as YaRN has."""

    table_factor = 1.25
    softmax_scale = 1.5


@pytest.mark.parametrize(
    ("variant", "pairing", "rule", "length"),
    [
        ("slack", "half", Plain(500.0), None),
        ("relative", "interleaved", Tempered(), None),
        ("tied", "half", Tempered(), None),
        ("strict", "interleaved", DynamicNTK(original_length=32), 128),
    ],
)
def test_a_slot_gives_the_features_of_its_rule(variant, pairing, rule, length):
    """The attention factor is in both tables; the factor of the softmax is left to the scheme."""
    (q, t), slot = of(variant, 2), coca.Coca(variant, rule, pairing)
    theta, factor = rule.at_length(length, head_dim=SIZE)
    assert factor == rule.table_factor
    tables = [rotary_table(p, theta, attention_factor=factor) for p in (M, N)]
    want = coca.features(q, t, tables[0], kv_table=tables[1], variant=variant, pairing=pairing)
    chex.assert_trees_all_close(of_slot(slot, q, t, length=length), want, rtol=1e-6)
    assert (slot.query_size(SIZE), slot.key_size(SIZE)) == (q.shape[-1], t.shape[-1])
    assert (slot.reads_length, slot.softmax_scale) == (length is not None, rule.softmax_scale)


def in_planes(q, k, chosen, pairing="half", base=10_000.0):
    """CoCA's strict score, of the mean of a key's pair, in the planes that are chosen, and RoPE's in the others."""
    q, k = (planes(x, pairing) for x in (q, k))
    q, k = ((by_head(x.real) + 1j * by_head(x.imag)) for x in (q, k))
    q, k = q[:, :, :, None], k[:, :, None]
    turn = np.exp(1j * (M[:, None] - N)[..., None] * base ** (-np.arange(0, SIZE, 2) / SIZE))
    collinear = np.maximum((k.real + k.imag) / 2, 0) * abs(q) ** 2 * turn.real
    inside = (np.arange(PLANES) >= chosen[0]) & (np.arange(PLANES) < chosen[1])
    return np.where(inside, collinear, (q * np.conj(k) * turn).real).sum(-1)


SOME = (2, 5)


@pytest.mark.parametrize(
    ("chosen", "kv_heads", "pairing"),
    [(SOME, 4, "half"), (SOME, 2, "interleaved"), ((0, 3), 1, "half"), ((7, 8), 4, "interleaved"), ((0, 8), 4, "half")],
)
def test_scores_in_chosen_planes_are_those_of_the_definition(chosen, kv_heads, pairing):
    q, k = inputs(kv_heads, k_size=SIZE)
    slot = PartlyCollinear(planes=chosen, pairing=pairing)
    close(scores(of_slot(slot, q, k)), in_planes(q, k, chosen, pairing))
    assert slot.shift_invariant
    far = {"m": M + 12345, "n": N + 12345}
    close(scores(of_slot(slot, q, k, **far)), in_planes(q, k, chosen, pairing), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_planes_it_is_rope(dtype):
    q, k = inputs(2, k_size=SIZE, dtype=dtype)
    found = of_slot(PartlyCollinear(planes=(3, 3)), q, k)
    chex.assert_trees_all_equal(found, of_slot(Rotary(), q, k))
    chex.assert_type(found, dtype)


def test_gradients_in_chosen_planes_are_central_differences_of_the_definition():
    slot = partial(of_slot, PartlyCollinear(planes=SOME))
    check_gradients(slot, partial(in_planes, chosen=SOME), inputs(2, k_size=SIZE))


def test_channels_that_do_not_rotate_belong_to_no_plane():
    q, k = inputs(k_size=SIZE)
    rule = Plain(partial_rotary_factor=0.5)
    some, none, every = (of_slot(PartlyCollinear(rule, planes=p), q, k) for p in ((1, 3), (0, 0), (0, 4)))
    chex.assert_trees_all_equal(none, of_slot(Rotary(rule), q, k))
    inside, outside = np.array([1, 2, 5, 6]), np.array([0, 3, 4, 7, *range(8, 16)])
    for i in range(2):
        chex.assert_trees_all_equal(some[i][..., inside], every[i][..., inside])
        chex.assert_trees_all_equal(some[i][..., outside], none[i][..., outside])


def test_dynamic_ntk_after_training_changes_the_planes_of_both_kinds():
    """At a length L above L0, the base is multiplied by (s L / L0 - s + 1)^(d / (d - 2))."""
    q, k = inputs(2, k_size=SIZE)
    trained = pj.scheme("coca-planes", planes=[2, 5])
    extended = trained.extend(frequencies={"name": "dynamic-ntk", "original_length": 32, "factor": 4.0})
    assert extended.reads_length
    assert (trained.caches, extended.caches) == ("rotated", "raw")
    base = 10_000.0 * (4.0 * 128 / 32 - 3.0) ** (SIZE / (SIZE - 2))
    close(scores(of_slot(extended.features, q, k, length=128)), in_planes(q, k, SOME, base=base), atol=1e-4)
    close(scores(of_slot(extended.features, q, k, length=32)), in_planes(q, k, SOME))
