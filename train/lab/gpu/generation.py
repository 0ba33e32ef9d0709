"""Measures the decoding of a whole model: greedy tokens after a prompt that is in the cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posjax import nn
from train.config import load
from train.evaluate.decoder import to_decode
from train.lab.gpu.jobs import NEW_TOKENS, ROWS, Job, Options, milliseconds
from train.model.build import Setup


def measure_generation(job: Job, options: Options) -> dict[str, Any]:
    """Tokens a second of all rows together, and milliseconds for a token of each, in one program for all tokens."""
    model = to_decode(Setup(load(options.generation)).model(jnp.uint32(0)), None)
    rows = ROWS[job.shape.form]
    prompts = jnp.ones((rows, job.shape.length - NEW_TOKENS), jnp.int32)

    def of(new_tokens: int) -> float:
        return milliseconds(lambda: nn.generate(model, prompts, new_tokens), jax.block_until_ready, options.row_seconds)

    ms = (of(NEW_TOKENS) - of(1)) / (NEW_TOKENS - 1)  # without the prompt
    return {"ms": ms, "tokens_per_second": rows / ms * 1e3}
