"""Remapped branches: scores against a float64 double loop over effective distances, tiles, and simulated caches."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from refusals import refused

import posjax
from posjax import masks
from posjax.masks import Causal
from posjax.positions import Range
from posjax.remap import STRING, DualChunk, LeakyReRoPE, LMInfinite, ReRoPE, SelfExtend, StreamingLLM, inverse_leaky
from posjax.rotary import Axial, DynamicNTK, Linear, NTKAware, Rotary, XPos

N, HEADS, KV_HEADS, SIZE = 40, 2, 1, 8
THETA = 10_000.0 ** -(np.arange(0, SIZE, 2) / SIZE)


def leaky(w, k):
    return lambda i, j: i - j if i - j < w else w + (i - j - w) / k


def self_extend(w, g):
    return lambda i, j: i - j if i - j < w else i // g - j // g + w - w / g


def dual_chunk(c, s):
    def distance(i, j):
        if i // s == j // s:
            return i - j
        top = s + i % s if i // s == j // s + 1 and i % s < c - s else c - 1
        return top - j % s

    return distance


def streaming(sinks, recent):
    def distance(i, j):
        return i - j if i - j < recent else min(i, sinks + recent - 1) - j

    return distance


METHODS = {
    "rerope": (ReRoPE(7), lambda i, j: min(i - j, 7), None),
    "leaky": (LeakyReRoPE(8, 4), leaky(8, 4), None),
    "leaky by a fraction": (LeakyReRoPE(8, 1.25), leaky(8, 1.25), None),
    "inverse leaky": (inverse_leaky(32, 2), leaky(8, 1 / 4), None),
    "self-extend": (SelfExtend(4, 8), self_extend(8, 4), None),
    "lm-infinite": (LMInfinite(9, 3), lambda i, j: min(i - j, 9), lambda i, j: i - j < 9 or j < 3),
    "streaming": (StreamingLLM(2, 10), streaming(2, 10), lambda i, j: i - j < 10 or j < 2),
    "dual chunk": (DualChunk(16), dual_chunk(16, 12), None),
    "chunk llama": (DualChunk(13, 10), dual_chunk(13, 10), None),
    "string": (STRING(40, 9, 4), lambda i, j: i - j if i - j < 9 else i - j - 9 + 4, None),
}
methods = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    shapes = ((2, N, HEADS, SIZE), (2, N, KV_HEADS, SIZE), (2, N, KV_HEADS, SIZE))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def rope_score(q, k, distance):
    """Plain RoPE at a real distance: the real part of q conj(k) exp(i r theta) over planes (t, t + d/2)."""
    half = q.shape[-1] // 2
    planes = (q[:half] + 1j * q[half:]) * np.conj(k[:half] + 1j * k[half:])
    return (planes * np.exp(1j * distance * THETA)).sum().real


def oracle(score, distance, q, k, positions=None):
    """Scores ``[batch, heads, n, n]`` of causal pairs, zero elsewhere, one pair at a time."""
    positions = np.arange(q.shape[1]) if positions is None else positions
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    out = np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for b, h, i, j in np.ndindex(out.shape):
        if j <= i:
            out[b, h, i, j] = score(q[b, i, h], k[b, j, 0], distance(int(positions[i]), int(positions[j])))
    return out


def branches_and_places(remap, features, q, k, positions):
    """``remap.branches``, and the pairs of each branch."""
    phi, psi, branches = remap.branches(features, {}, q, k, positions, positions, head_dim=q.shape[-1])
    return phi, psi, branches, [masks.materialise(branch.mask, positions, positions) for branch in branches]


def combined(phi, psi, branches, places):
    """Scores of the branches, combined by their masks in NumPy."""
    out = np.einsum("bihd,bjd->bhij", np.float64(phi), np.float64(psi)[:, :, 0])
    taken = 0
    for branch, where in zip(branches, places, strict=True):
        chex.assert_equal_shape([phi, branch.q])
        chex.assert_equal_shape([psi, branch.k])
        taken = taken + where
        out = np.where(where, np.einsum("bihd,bjd->bhij", np.float64(branch.q), np.float64(branch.k)[:, :, 0]), out)
    assert np.max(taken) <= 1
    return np.tril(out)


@partial(jax.jit, static_argnums=(0, 1))
def compiled_branches(remap, features, q, k, positions):
    return branches_and_places(remap, features, q, k, positions)


def scores(remap, features, q, k, positions):
    return combined(*jax.device_get(compiled_branches(remap, features, q, k, positions)))


@methods
def test_scores_and_attention_of_every_backend_are_those_of_the_effective_distance(name, inputs):
    remap, distance, seen = METHODS[name]
    implementations = ("dense", "blockwise") if name in ("rerope", "dual chunk") else ("dense",)

    @jax.jit
    def attend(q, k, v):
        found = branches_and_places(remap, Rotary(), q, k, Range(0, N))
        phi, psi, branches, _ = found
        mask = Causal() if remap.mask() is None else Causal() & remap.mask()
        return found, [
            posjax.attention(phi, psi, v, remap=branches, mask=mask, implementation=i) for i in implementations
        ]

    q, k, v = inputs
    found, outputs = jax.device_get(attend(q, k, v))
    want = oracle(rope_score, distance, q, k)
    np.testing.assert_allclose(combined(*found), want, atol=1e-5)
    i, j = np.mgrid[:N, :N]
    allowed = (j <= i) & (True if seen is None else np.vectorize(seen)(i, j))
    ones = np.zeros((2, N, HEADS, 1))
    logits = want / math.sqrt(SIZE)
    want, _ = oracles.attention(ones, np.zeros((2, N, KV_HEADS, 1)), v, bias=logits, allowed=allowed)
    for out in outputs:
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("name", ["self-extend", "streaming"])
def test_positions_may_differ_by_row_and_start_anywhere(name, inputs):
    remap, distance, _ = METHODS[name]
    q, k, _ = inputs
    rows = np.stack([np.arange(N) + 3, 2 * np.arange(N)])
    found = scores(remap, Rotary(), q, k, rows)
    for row, positions in enumerate(rows):
        pick = slice(row, row + 1)
        np.testing.assert_allclose(found[pick], oracle(rope_score, distance, q[pick], k[pick], positions), atol=1e-5)


def one_score(remap, i, j, features=None):
    """cos(distance): the score of unit vectors in the first plane, whose frequency is 1."""
    unit = np.zeros((1, 1, 1, SIZE), np.float32)
    unit[..., 0] = 1

    @jax.jit
    def run(unit, q_positions, kv_positions):
        given = (features or Rotary(), {}, unit, unit, q_positions, kv_positions)
        phi, psi, branches = remap.branches(*given, head_dim=SIZE)
        found = (phi * psi).sum()
        for branch in branches:
            selected = masks.materialise(branch.mask, q_positions, kv_positions)
            found = jnp.where(selected, (branch.q * branch.k).sum(), found)
        return found.squeeze()

    return float(run(unit, np.array([i]), np.array([j])))


@pytest.mark.parametrize("shift", [0, 1_000_003])
def test_printed_distances(shift):
    leaky_distance = one_score(LeakyReRoPE(128, 16), 990 + shift, shift)
    assert leaky_distance == pytest.approx(math.cos(181.875), abs=2e-6)
    assert one_score(ReRoPE(512), 990 + shift, shift) == pytest.approx(math.cos(512), abs=2e-6)
    trained = one_score(inverse_leaky(512, 8), 511 + shift, shift)
    assert trained == pytest.approx(math.cos(128 + 383 * 16), abs=2e-6)


@pytest.mark.parametrize("remap", [LeakyReRoPE(128, 16), inverse_leaky(512, 8)], ids=["leaky", "inverse"])
@pytest.mark.parametrize("end", [2**31 - 991, -(2**31)], ids=["the highest", "the lowest"])
def test_leaky_distances_at_the_ends_of_int32(remap, end):
    """The offset that is added to the positions of remapped queries may be outside int32."""
    distance = remap.window + (990 - remap.window) / remap.factor
    assert one_score(remap, 990 + end, end) == pytest.approx(math.cos(distance), abs=2e-6)
    exact = one_score(remap, 990 + end, end, Rotary(Linear(4.0)))
    assert exact == pytest.approx(math.cos(distance / 4), abs=2e-6)


@methods
def test_shift_invariance_is_declared_correctly(name, inputs):
    remap, _, _ = METHODS[name]
    q, k, _ = inputs

    def at(shift):
        positions = np.arange(N) + shift
        visible = masks.materialise(Causal() if remap.mask() is None else Causal() & remap.mask(), positions, positions)
        return np.where(visible, scores(remap, Rotary(), q, k, positions), -1e3)

    changed = np.abs(at(0) - at(1_000_003)).max()
    assert changed < 1e-5 if remap.shift_invariant else changed > 0.1


def test_gradients_reach_both_branches(inputs):
    q, k, v = inputs
    positions = Range(0, N)

    def loss(q, k):
        phi, psi, branches = LeakyReRoPE(8, 4).branches(Rotary(), {}, q, k, positions, positions, head_dim=SIZE)
        return jnp.square(posjax.attention(phi, psi, v, remap=branches, mask=Causal())).sum()

    loss = jax.jit(loss)
    dq, dk = jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k))
    chex.assert_tree_all_finite((dq, dk))
    direction = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    step = 1e-2
    slope = (loss(q + step * direction, k) - loss(q - step * direction, k)) / (2 * step)
    np.testing.assert_allclose((dq * direction).sum(), slope, rtol=2e-2)
    assert np.abs(dk[:, 0]).min() > 0


@pytest.mark.parametrize(
    ("rule", "remap", "distance"),
    [(NTKAware(4.0), LeakyReRoPE(8, 4), 8 + 92 / 4), (DynamicNTK(8), SelfExtend(4, 8), 25 + 8 - 2)],
)
def test_the_frequencies_of_the_rule_are_kept(rule, remap, distance):
    """The first frequency is 1 under NTK too, the second is not; the current length is passed on."""
    theta = float(rule.at_length(64, head_dim=SIZE)[0].value[1])
    assert theta != pytest.approx(THETA[1])
    second = np.zeros((1, 1, 1, SIZE), np.float32)
    second[..., 1] = 1
    given = (Rotary(rule), {}, second, second, np.array([100]), np.array([0]))
    _, _, (branch,) = jax.jit(lambda: remap.branches(*given, head_dim=SIZE, length=64))()
    assert np.sum(np.asarray(branch.q) * branch.k) == pytest.approx(math.cos(distance * theta), abs=2e-6)


@methods
def test_a_method_keeps_dtypes_and_is_for_causal_attention(name, inputs):
    remap, _, _ = METHODS[name]
    q, k = (x.astype(jnp.bfloat16) for x in inputs[:2])
    run = partial(remap.branches, Rotary(), {}, head_dim=SIZE)
    phi, psi, branches = jax.eval_shape(lambda: run(q, k, *[Range(0, N)] * 2))
    chex.assert_type(jax.tree.leaves((phi, psi, [(branch.q, branch.k) for branch in branches])), q.dtype)
    assert "causal" in remap.one_sided
    refused("features", lambda: remap.check(None))
    refused("XPos", lambda: remap.check(XPos()))
    refused("positions", lambda: remap.check(Rotary(Axial())))


def test_leaky_rerope_refuses_a_rule_that_reads_the_length():
    refused("length", lambda: LeakyReRoPE(8).check(Rotary(DynamicNTK(8))))


def test_sizes_that_follow_from_others():
    assert [inverse_leaky(512, 8), inverse_leaky(480, 3)] == [LeakyReRoPE(128, 1 / 16), LeakyReRoPE(120, 1 / 6)]
    assert [STRING(131072), STRING(8, 4, 2).shift] == [STRING(131072, 43690, 128), 4]
    assert [DualChunk(4096).chunk, DualChunk(16, 8).chunk, LeakyReRoPE(1, 2**31).factor] == [3072, 8, 2**31]


@pytest.mark.parametrize(
    ("make", "window", "nearest"),
    [
        (lambda window: LeakyReRoPE(window, 1 / 16), 20, 16),
        (lambda window: LeakyReRoPE(window, 1 / 64), 8, 64),
        (lambda window: SelfExtend(8, window), 20, 16),
        (lambda window: SelfExtend(8, window), 3, 8),
    ],
)
def test_a_window_that_does_not_fit_is_refused_with_the_nearest_that_does(make, window, nearest):
    with pytest.raises(ValueError, match=f"window .*found {window}.*; the nearest.* is {nearest}$"):
        make(window)
    assert make(nearest).window == nearest
