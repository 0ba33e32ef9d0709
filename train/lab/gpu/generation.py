"""Measures the decoding of a whole model: greedy tokens after a prompt that is in the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from posjax import nn
from train.config import load
from train.lab.gpu.jobs import NEW_TOKENS, ROWS, Job, Options, milliseconds
from train.model.build import Setup
from train.model.sharding import cast_matrices


def measure_generation(job: Job, options: Options) -> dict[str, Any]:
    """Tokens a second of all rows together, and milliseconds for a token of each."""
    model = Setup(load(options.generation)).model(jnp.uint32(0))
    rows = ROWS[job.shape.form]
    graph, parameters = nnx.split(model)
    parameters = nnx.to_pure_dict(parameters)
    narrow = partial(cast_matrices, axes=nn.logical_axes(model), dtype=model.config.dtype, mesh=None)
    parameters = jax.jit(narrow)(parameters)
    prompt = jnp.ones((rows, job.shape.length - NEW_TOKENS), jnp.int32)

    @jax.jit
    def begin(parameters):
        model = nnx.merge(graph, parameters)
        cache = model.init_cache(rows, job.shape.length, chunk=prompt.shape[1])
        logits, cache = model.decode(prompt, cache, length=job.shape.length)
        return jnp.argmax(logits[:, -1:], -1), cache

    @jax.jit
    def follow(parameters, token, cache):
        def one(carry, _):
            token, cache = carry
            logits, cache = nnx.merge(graph, parameters).decode(token, cache, length=job.shape.length)
            return (jnp.argmax(logits, -1), cache), token

        return jax.lax.scan(one, (token, cache), None, length=NEW_TOKENS)[1]

    ready = begin(parameters)
    ms = milliseconds(lambda: follow(parameters, *ready), jax.block_until_ready, options.row_seconds) / NEW_TOKENS
    return {"ms": ms, "tokens_per_second": rows / ms * 1e3}
