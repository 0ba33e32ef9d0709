"""The loss, whole and in chunks of the vocabulary, against NumPy in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax.nn import DecoderConfig
from train.loop.loss import token_losses

TOKENS, SIZE, VOCABULARY = (2, 5), 4, 12


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, VOCABULARY, TOKENS)
    labels[0, 1] = labels[1, 4] = -1
    return rng.normal(size=(*TOKENS, SIZE)), rng.normal(size=(SIZE, VOCABULARY)), labels


@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_losses_are_sums_over_predicted_tokens(values, chunks):
    """Of the negative log-likelihoods and of the squared log-normalisers."""
    hidden, head, labels = values
    logits, places = hidden @ head, [place for place in np.ndindex(TOKENS) if labels[place] >= 0]
    normaliser = np.log(np.exp(logits).sum(-1))
    nll = sum(normaliser[place] - logits[place][labels[place]] for place in places)
    found = token_losses(jnp.float32(hidden), jnp.float32(head), jnp.asarray(labels), chunks)
    chex.assert_type(list(found), jnp.float32)
    wanted = nll, sum(normaliser[place] ** 2 for place in places), len(places)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("chunks", [1, 3])
def test_logits_too_large_for_an_exponential_have_a_finite_loss(chunks):
    """The logits are 0, 300 and -300, of which float32 has no ``exp``; the label is each of them in turn."""
    hidden, head = np.full((3, 1), 300.0, np.float32), np.array([[0, 1, -1] * 4], np.float32)
    found = token_losses(jnp.asarray(hidden), jnp.asarray(head), jnp.array([0, 4, 8]), chunks)
    normaliser = 300 + np.log(4)
    np.testing.assert_allclose(found, [3 * normaliser, 3 * normaliser**2, 3], rtol=1e-6)


@pytest.mark.parametrize("chunks", [1, 3])
def test_losses_and_gradients_with_biases_scales_and_soft_caps_of_logits(values, chunks):
    hidden, head, labels = values
    rng, config = np.random.default_rng(1), DecoderConfig(VOCABULARY, 1, SIZE, 1, logit_scale=0.7, logit_softcap=1.5)
    bias, step = rng.normal(size=VOCABULARY), 1e-6

    def exact(hidden, head, bias):
        logits = 1.5 * np.tanh(0.7 * (hidden @ head + bias) / 1.5)
        normaliser, places = np.log(np.exp(logits).sum(-1)), map(tuple, np.argwhere(labels >= 0))
        return sum(normaliser[p] - logits[p][labels[p]] + 0.3 * normaliser[p] ** 2 for p in places)

    def ours(hidden, head, bias):
        losses = token_losses(hidden, head, jnp.asarray(labels), chunks, bias, config.finish_logits)
        return losses.nll + 0.3 * losses.z

    given = (hidden, head, bias)
    found, gradients = jax.value_and_grad(ours, (0, 1, 2))(*map(jnp.float32, given))
    np.testing.assert_allclose(found, exact(*given), rtol=2e-6)
    for argument, place in ((0, (0, 1, 2)), (0, (1, 2, 3)), (1, (3, 11)), (1, (2, 7)), (2, (0,)), (2, (5,))):
        ends = []
        for sign in (1, -1):
            moved = [x.copy() for x in given]
            moved[argument][place] += sign * step
            ends.append(exact(*moved))
        wanted = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradients[argument][place], wanted, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_half_precision_multiply_no_float32_matrices(chunks):
    """A GPU multiplies these at a fraction of its rate."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((*TOKENS, SIZE), (SIZE, VOCABULARY))]
    loss = jax.grad(lambda *x: token_losses(*x, jnp.zeros(TOKENS, jnp.int32), chunks).nll, argnums=(0, 1))
    products = [line for line in jax.jit(loss).lower(*arguments).as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 3
    for product in products:
        assert "f32" not in product.split(" : ")[-1].split("->")[0]


def test_no_logits_of_all_tokens_are_kept():
    tokens, size, vocabulary = 512, 8, 4096

    def temporary(chunks):
        def objective(hidden, head):
            return token_losses(hidden, head, jnp.zeros(tokens, jnp.int32), chunks).nll

        shapes = (
            jax.ShapeDtypeStruct((tokens, size), jnp.float32),
            jax.ShapeDtypeStruct((size, vocabulary), jnp.float32),
        )
        return jax.jit(jax.grad(objective, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    whole = tokens * vocabulary * 4
    assert temporary(1) >= whole
    assert temporary(16) < whole / 4


def test_chunks_that_do_not_divide_the_vocabulary_are_refused(values):
    hidden, head, labels = values
    refused("train.loss_chunks", lambda: token_losses(jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(labels), 5))
