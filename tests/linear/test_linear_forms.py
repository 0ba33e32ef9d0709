"""Forms of linear attention: each against NumPy in float64, against each other, and what a state must carry."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear.quadratic import quadratic
from refusals import refused

from posjax import linear
from posjax.linear import Elu, Exponential
from posjax.scheme import Scheme

B, T, H, K, D, DV = 2, 19, 4, 2, 4, 3
RNG = np.random.default_rng(0)
Q, KEY = RNG.standard_normal((B, T, H, D), np.float32), 3 * RNG.standard_normal((B, T, K, D), np.float32)
V = RNG.standard_normal((B, T, K, DV), np.float32)
# Padding before, between and after documents, a document that continues after padding, and decreasing ids.
IDS = np.array([[0] * 6 + [1] * 6 + [-1] + [2] * 4 + [-1] * 2, [-1] * 2 + [5] * 4 + [-1] * 2 + [5] * 2 + [3] * 9])
SAME = (IDS[:, :, None] == IDS[:, None, :]) & (IDS >= 0)[:, :, None]

PLAIN = jax.device_get(linear.features(Elu(), Q, KEY))
# All options at once: a scale of the keys, and separate features for the numerator.
FULL = jax.device_get(
    linear.features(Exponential(), Q, KEY, rotate_q=lambda x: x[..., 1:] - 0.1, rotate_k=lambda x: x[..., 1:] + 1)
)


def oracle(mapped, v, allowed):
    """One query at a time; ``log_scale`` is used without stabilisation."""
    mapped = {name: None if x is None else np.asarray(x, np.float64) for name, x in mapped.items()}
    scale = np.ones((B, T, K)) if mapped["log_scale"] is None else np.exp(mapped["log_scale"])
    numerator_features = [mapped[a] if mapped["q_numerator"] is None else mapped[b] for a, b in NUMERATOR_NAMES]
    out = np.zeros((B, T, H, DV))
    for b, i, h in np.ndindex(B, T, H):
        g, see = h // (H // K), allowed[b, i]
        numerator, denominator = (
            (psi[b, :, g] @ phi[b, i, h]) * scale[b, :, g] * see
            for phi, psi in (numerator_features, (mapped["phi"], mapped["psi"]))
        )
        if see.any():
            out[b, i, h] = numerator @ np.asarray(v, np.float64)[b, :, g] / denominator.sum()
    return out


recurrent, by_four = (partial(linear.chunked, chunk_size=size) for size in (1, 4))
NUMERATOR_NAMES = (("phi", "q_numerator"), ("psi", "k_numerator"))
FORMS = {
    "quadratic": lambda v, ids, mapped: quadratic(v=v, segment_ids=ids, **mapped),
    "chunked": lambda v, ids, mapped: linear.chunked(v=v, segment_ids=ids, chunk_size=5, **mapped)[0],
    "recurrent": lambda v, ids, mapped: recurrent(v=v, segment_ids=ids, **mapped)[0],
    "all keys, quadratic": lambda v, ids, mapped: quadratic(v=v, segment_ids=ids, causal=False, **mapped),
    "bidirectional": lambda v, ids, mapped: linear.bidirectional(v=v, segment_ids=ids, chunk_size=5, **mapped),
}
OVER_ALL = ("all keys, quadratic", "bidirectional")
REFERENCES = {"chunked": "quadratic", "recurrent": "quadratic", "bidirectional": "all keys, quadratic"}
TARGET = np.cos(np.arange(T * H * DV, dtype=np.float32)).reshape(T, H, DV)


def visible(form, allowed):
    return allowed if form in OVER_ALL else np.tril(allowed)


def loss(form, mapped, v, ids, target=TARGET):
    out = FORMS[form](v, ids, mapped)
    return jnp.square(out + target).sum(), out


@partial(jax.jit, static_argnums=0)
def gradients(form, mapped, v, ids, target=TARGET):
    (_, out), found = jax.value_and_grad(partial(loss, form), argnums=(0, 1), has_aux=True)(mapped, v, ids, target)
    return out, found


def test_forms_agree_forward_and_backward():
    found = {form: jax.device_get(gradients(form, FULL, V, IDS)) for form in FORMS}
    for form, (out, _) in found.items():
        np.testing.assert_allclose(out, oracle(FULL, V, visible(form, SAME)), atol=1e-5, err_msg=form)
    for form, reference in REFERENCES.items():
        want = found[reference][1]
        assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(want))
        chex.assert_trees_all_close(found[form][1], want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("form", ["chunked", "bidirectional"])
def test_features_alone_without_segments(form):
    out = jax.jit(partial(FORMS[form], V, None))(PLAIN)
    np.testing.assert_allclose(out, oracle(PLAIN, V, visible(form, np.ones((B, T, T), bool))), atol=1e-5)


@pytest.mark.parametrize("form", REFERENCES)
def test_what_sees_nothing_gives_zero_and_has_zero_gradients(form):
    ids = IDS.copy()
    ids[1] = -1
    out, slopes = gradients(form, FULL, V, ids)
    chex.assert_tree_all_finite(slopes)
    for array in (out, *jax.tree.leaves(slopes)):
        np.testing.assert_array_equal(np.asarray(array)[ids < 0], 0)
        assert np.abs(np.asarray(array)[ids >= 0]).max() > 1e-3


@partial(jax.jit, static_argnums=(0, 1, 2))
def in_two(cut, first, second, mapped, v, ids):
    """A row cut in two; the second part starts from the state of the first."""

    def run(form, part, state):
        named = jax.tree.map(part, mapped)
        return form(v=part(v), segment_ids=None if ids is None else part(ids), state=state, **named)

    before, state = run(first, lambda x: x[:, :cut], None)
    after, state = run(second, lambda x: x[:, cut:], state)
    return jnp.concatenate([before, after], 1), state


@pytest.mark.parametrize(
    ("cut", "first", "second", "ids"),
    [(1, by_four, recurrent, None), (9, recurrent, by_four, IDS), (14, by_four, by_four, IDS)],
)
def test_a_state_carries_over_any_cut(cut, first, second, ids):
    out, state = in_two(cut, first, second, FULL, V, ids)
    want, want_state = whole(V, ids, FULL)
    chex.assert_trees_all_close(out, want, atol=1e-5)
    chex.assert_trees_all_close(state, want_state, atol=1e-5, rtol=1e-5)
    chex.assert_shape((state.s, state.z, state.log_scale, state.segment), [(B, K, D - 1, DV), (B, K, D), (B, K), (B,)])
    np.testing.assert_array_equal(state.segment, [0, 0] if ids is None else [2, 3])


@jax.jit
def whole(v, ids, mapped):
    return linear.chunked(v=v, segment_ids=ids, chunk_size=7, **mapped)


def test_tokens_without_ids_continue_the_document_of_the_state():
    ids = np.full((B, T), 4)
    head, tail = (jax.tree.map(lambda x, at=at: x[:, at], (FULL, V)) for at in (slice(10), slice(10, None)))
    _, state = linear.chunked(v=head[1], segment_ids=ids[:, :10], **head[0])
    out, state = recurrent(v=tail[1], state=state, **tail[0])
    chex.assert_trees_all_close(out, whole(V, ids, FULL)[0][:, 10:], atol=1e-5)
    np.testing.assert_array_equal(state.segment, 4)


@pytest.mark.parametrize("form", REFERENCES)
def test_huge_keys_neither_overflow_nor_reach_back(form):
    """exp(400) overflows float32. Queries before this key and in other documents give the same as without it."""
    ids = np.where(np.arange(T) < 15, 0, 1) + np.zeros((B, 1), np.int32)
    rotations = {"rotate_q": lambda x: x[..., 1:], "rotate_k": lambda x: x[..., 1:]}
    large = KEY.copy()
    large[:, 12] += 400
    mapped = jax.jit(lambda k: linear.features(Exponential(), Q, k, **rotations))
    plain, huge = jax.device_get([mapped(KEY), mapped(large)])
    want, found = jax.device_get([gradients(form, mapped, V, ids) for mapped in (plain, huge)])
    chex.assert_tree_all_finite(found)
    for part in (np.s_[:, 15:],) if form in OVER_ALL else (np.s_[:, :12], np.s_[:, 15:]):
        chex.assert_trees_all_close(found[0][part], want[0][part], atol=1e-6)
    weights = huge["phi"][:, 13] * np.repeat(huge["psi"][:, 12], H // K, 1)
    only = weights[..., 1:].sum(-1, keepdims=True) / weights.sum(-1, keepdims=True) * np.repeat(V[:, 12], H // K, 1)
    chex.assert_trees_all_close(found[0][:, 13], only, atol=1e-5)


DECAY = -np.exp(RNG.normal(-1, 1.5, (B, T, K))).astype(np.float32)


def decaying(mapped, v, allowed):
    """One query at a time: the weight of a key decays with every token behind it."""
    out = np.zeros((B, T, H, DV))
    for b, i, h in np.ndindex(B, T, H):
        g, sums = h // (H // K), np.asarray(DECAY, np.float64)[b, : i + 1, h // (H // K)][::-1].cumsum()[::-1]
        factor = np.exp(np.append(sums[1:], 0)) * allowed[b, i, : i + 1]
        weights = np.asarray(mapped["psi"], np.float64)[b, : i + 1, g] @ mapped["phi"][b, i, h] * factor
        out[b, i, h] = weights @ v[b, : i + 1, g] / max(weights.sum(), 1e-300)
    return out


@pytest.mark.parametrize("form", [recurrent, by_four, linear.chunked])
def test_weights_decay_with_every_token(form):
    ids = np.where(np.arange(T) < 8, 0, 1) + np.zeros((B, 1), np.int32)
    same = np.tril(ids[:, :, None] == ids[:, None, :])
    out, state = jax.jit(form)(v=V, segment_ids=ids, log_decay=DECAY, **PLAIN)
    np.testing.assert_allclose(out, decaying(PLAIN, V, same), atol=1e-5)
    parts, after = [], None
    for at in (np.s_[:, :5], np.s_[:, 5:]):
        named = {name: x if x is None else x[at] for name, x in PLAIN.items()}
        part, after = form(v=V[at], segment_ids=ids[at], log_decay=DECAY[at], state=after, **named)
        parts.append(part)
    chex.assert_trees_all_close((jnp.concatenate(parts, 1), after.segment), (out, state.segment), atol=1e-5)


def test_kernels_of_retention_decay_by_head():
    """``1 - 2^(-5-h)`` of RetNet, equation 8; one state in decoding."""
    scheme = Scheme(linear=Elu(decay=True))
    q, k, v = (RNG.standard_normal((B, T, K, D), np.float32) for _ in range(3))
    found = scheme.attend(q, k, v)
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    gamma = 1 - 2.0 ** (-5 - np.arange(K))
    kernel = np.einsum("bihm,bjhm->bhij", *(np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k)))
    weights = np.tril(kernel * gamma[:, None, None] ** np.maximum(distance, 0))
    np.testing.assert_allclose(
        found, np.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdims=True), v), atol=1e-5
    )
    refused("decay", lambda: scheme.attend(q, k, v, causal=False))


def test_outputs_have_the_dtype_of_values_and_states_are_float32():
    mapped, v = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (FULL, V))
    for form in (linear.chunked, recurrent):
        out, state = jax.eval_shape(lambda form=form: form(v=v, **mapped))
        chex.assert_type(
            [out, state.s, state.z, state.log_scale, state.segment], ["bfloat16", *["float32"] * 3, "int32"]
        )
    chex.assert_type(jax.eval_shape(lambda: linear.bidirectional(v=v, **mapped)), "bfloat16")


def test_queries_of_another_sequence():
    few = FULL | {name: FULL[name][:, :5] for name in ("phi", "q_numerator")}
    want, out = (jax.jit(partial(FORMS[form], V, None))(few) for form in ("all keys, quadratic", "bidirectional"))
    chex.assert_shape(want, (B, 5, H, DV))
    chex.assert_trees_all_close(out, want, atol=1e-6)


def planned_bytes(length):
    """Temporary memory in the compiler's plan for a gradient."""
    shapes = [jax.ShapeDtypeStruct((1, length, 2, size), jnp.float32) for size in (8, 8, 8)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(phi, psi, v, ids):
        return jnp.square(linear.chunked(phi, psi, v, segment_ids=ids, chunk_size=64)[0]).sum()

    return jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes, ids).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_length():
    n, arrays = 4096, 4 * 2 * 8
    one, two = planned_bytes(n), planned_bytes(2 * n)
    assert two < 2.1 * one
    assert two < 30 * 2 * n * arrays


PHI, PSI = PLAIN["phi"], PLAIN["psi"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("phi", lambda: linear.chunked(PHI[0], PSI, V)),
        ("phi", lambda: linear.chunked(PHI[..., :3], PSI, V)),
        ("v", lambda: linear.chunked(PHI, PSI, V[:, :, :1])),
        ("queries", lambda: linear.chunked(PHI[:, :5], PSI, V)),
        ("chunk_size", lambda: linear.chunked(PHI, PSI, V, chunk_size=0)),
        ("segment_ids", lambda: linear.chunked(PHI, PSI, V, segment_ids=IDS[:1])),
        ("segment_ids", lambda: linear.chunked(PHI, PSI, V, segment_ids=IDS * 1.0)),
        ("log_scale", lambda: linear.chunked(PHI, PSI, V, log_scale=V[..., 0, 0])),
        ("k_numerator", lambda: linear.chunked(PHI, PSI, V, q_numerator=PHI)),
        ("state.s", lambda: linear.chunked(PHI, PSI, V, state=linear.empty_state(B, K, D, D))),
    ],
)
def test_bad_input_is_named(name, call):
    refused(name, call)
