"""Gated DeltaNet and its convolution: against transformers, the recurrence in float64, and what a state must carry."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax import linear
from posjax.linear import gated_delta, short_convolution

B, T, H, K, D, DV = 2, 40, 4, 2, 8, 6
RNG = np.random.default_rng(0)
Q, KEY = RNG.standard_normal((2, B, T, K, D)).astype(np.float32)
KEY /= np.linalg.norm(KEY, axis=-1, keepdims=True)
V = RNG.standard_normal((B, T, H, DV)).astype(np.float32)
DECAY = -np.exp(2 * RNG.standard_normal((B, T, H))).astype(np.float32)  # from one that keeps all to one that forgets
RATE = RNG.uniform(0, 1, (B, T, H)).astype(np.float32)
X = (Q, KEY, V, DECAY, RATE)
# Padding before, between and after documents, and a document that continues after padding.
IDS = np.array([[0] * 13 + [1] * 12 + [-1] * 3 + [1] * 2 + [2] * 6 + [-1] * 4, [-1] * 3 + [5] * 20 + [3] * 17])
PARTS = [np.s_[0, :13], np.s_[0, np.r_[13:25, 28:30]], np.s_[0, 30:36], np.s_[1, 3:23], np.s_[1, 23:]]
TARGET = np.cos(np.arange(T * H * DV, dtype=np.float32)).reshape(T, H, DV)


def recurrence(q, k, v, decay, rate):
    """One document, one token at a time, in float64."""
    q, k, v, decay, rate = (np.asarray(x, np.float64) for x in (q, k, v, decay, rate))
    out, s = np.zeros(v.shape), np.zeros((H, D, DV))
    for t, h in np.ndindex(v.shape[:2]):
        key = k[t, h // (H // K)]
        s[h] *= np.exp(decay[t, h])
        s[h] += rate[t, h] * np.outer(key, v[t, h] - key @ s[h])
        out[t, h] = q[t, h // (H // K)] @ s[h]
    return out, s


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunks_are_the_recurrence_in_every_document(chunk_size):
    out, state = jax.jit(partial(gated_delta, chunk_size=chunk_size))(*X, segment_ids=IDS)
    for part in PARTS:
        want, s = recurrence(*(x[part] for x in X))
        np.testing.assert_allclose(out[part], want, atol=1e-5)
    np.testing.assert_allclose(state.s[1], s, atol=1e-5)
    np.testing.assert_array_equal(state.segment, [2, 3])
    np.testing.assert_array_equal(np.asarray(out)[IDS < 0], 0)


def test_outputs_states_and_gradients_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = [torch.tensor(x, requires_grad=True) for x in X]
    out, state = qwen.torch_recurrent_gated_delta_rule(*theirs, output_final_state=True)
    (out * torch.tensor(TARGET)).sum().backward()

    def loss(x):
        out, state = gated_delta(x[0] * D**-0.5, *x[1:], chunk_size=16)
        return (out * TARGET).sum(), (out, state.s)

    ours = jax.jit(jax.grad(loss, has_aux=True))(X)
    wanted = tuple(x.grad.numpy() for x in theirs), (out.detach().numpy(), state.detach().numpy())
    chex.assert_trees_all_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 14, 33])
def test_a_state_carries_over_any_cut(cut):
    weights = RNG.standard_normal((4, D)).astype(np.float32)
    for run, arrays in ((gated_delta, X), (partial(short_convolution, weights=weights), (Q[:, :, 0],))):
        whole, last = run(*arrays, segment_ids=IDS)
        parts, state = [], None
        for at in (np.s_[:, :cut], np.s_[:, cut:]):
            out, state = run(*(x[at] for x in arrays), segment_ids=IDS[at], state=state)
            parts.append(out)
        chex.assert_trees_all_close((jnp.concatenate(parts, 1), state), (whole, last), atol=1e-5)


def test_the_convolution_is_that_of_torch_in_every_document():
    torch = pytest.importorskip("torch")
    x, weights = Q[:, :, 0], RNG.standard_normal((4, D)).astype(np.float32)
    ids = np.where(IDS == 1, 7, IDS)
    ids[0, 25:30] = -1  # padding between tokens of a document takes a place
    out, _ = short_convolution(x, weights, segment_ids=ids)
    kernel = torch.tensor(weights.T.copy())[:, None]
    for part in (np.s_[0, :13], np.s_[0, 13:25], np.s_[0, 30:36], np.s_[1, 3:23], np.s_[1, 23:]):
        tokens = torch.tensor(x[part].T[None].copy())
        want = torch.nn.functional.conv1d(tokens, kernel, padding=3, groups=D)[0, :, : tokens.shape[-1]]
        np.testing.assert_allclose(out[part], want.numpy().T, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[ids < 0], 0)


def test_padding_may_hold_anything():
    def loss(x):
        return (gated_delta(*x, segment_ids=IDS)[0] * TARGET).sum()

    hidden = [np.where((IDS < 0).reshape(B, T, *[1] * (x.ndim - 2)), np.nan, x) for x in X]
    chex.assert_trees_all_close(*(jax.jit(jax.value_and_grad(loss))(tuple(x)) for x in (X, hidden)))


def planned_bytes(length):
    """Temporary memory in the compiler's plan for a gradient."""
    shapes = [jax.ShapeDtypeStruct((1, length, *x.shape[2:]), jnp.float32) for x in X]
    program = jax.jit(jax.grad(lambda x: jnp.square(gated_delta(*x)[0]).sum()))
    return program.lower(shapes).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_length():
    one, two = planned_bytes(2048), planned_bytes(4096)
    assert two < 2.1 * one


SHORT = tuple(x[:, :3] for x in X)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("v", lambda: gated_delta(Q, KEY, V[:, :, :3], DECAY, RATE)),
        ("rate", lambda: gated_delta(Q, KEY, V, DECAY, RATE[:1])),
        ("segment_ids", lambda: gated_delta(*X, segment_ids=IDS[:, 1:])),
        ("state.s", lambda: gated_delta(*SHORT, state=linear.empty_memory(B, H, D, D))),
        ("chunk_size", lambda: gated_delta(*SHORT, chunk_size=0)),
        ("weights", lambda: short_convolution(Q[:, :, 0], jnp.ones((4, 3)))),
        ("num_heads", lambda: linear.GatedDelta(3, 8, num_key_heads=2)),
    ],
)
def test_refusals(name, call):
    refused(name, call)
