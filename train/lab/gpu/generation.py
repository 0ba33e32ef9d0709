"""Measures the decoding of a whole model: greedy tokens after a prompt that is in the cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from posjax.training_positions import PositionSample
from train.config import load
from train.evaluate.decoder import cache_for, decoding, read, to_decode
from train.lab.gpu.jobs import NEW_TOKENS, ROWS, Job, Options, milliseconds
from train.model.build import Setup


def measure_generation(job: Job, options: Options) -> dict[str, Any]:
    """Tokens a second of all rows together, and milliseconds for a token of each, in one program for all tokens."""
    model = Setup(load(options.generation)).model(jnp.uint32(0))
    rows, total = ROWS[job.shape.form], job.shape.length
    graph, narrow = to_decode(model, None)
    parameters = jax.jit(narrow)(nnx.to_pure_dict(nnx.state(model)))
    step = decoding(graph, PositionSample(), total)
    prompts, valid = jnp.ones((rows, total - NEW_TOKENS), jnp.int32), jnp.ones((rows, 1), bool)

    @jax.jit
    def begin(parameters):
        logits, cache = read(step, parameters, cache_for(graph, parameters, prompts, total), prompts)
        return jnp.argmax(logits, -1), cache

    @jax.jit
    def follow(parameters, token, cache):
        def one(carry, _):
            token, cache = carry
            logits, cache = step(parameters, cache, token[:, None], valid)
            return (jnp.argmax(logits[:, 0], -1), cache), token

        return jax.lax.scan(one, (token, cache), None, length=NEW_TOKENS)[1]

    ready = begin(parameters)
    ms = milliseconds(lambda: follow(parameters, *ready), jax.block_until_ready, options.row_seconds) / NEW_TOKENS
    return {"ms": ms, "tokens_per_second": rows / ms * 1e3}
