"""ALiBi attention by different libraries, as functions without arguments that can be timed.

Each takes a `Shape` and returns a function that runs attention once and waits for the result: the forward pass, or
forward and backward with respect to q, k and v. All use inputs from the same normal distribution.

``python -m train.lab.libraries`` is the process that `train.lab.bench` starts for each measurement.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import posjax as pj
from train.runtime.machine import resident_peak_bytes
from train.runtime.reuse import keep_memory

FORWARD, BACKWARD = "forward", "forward + backward"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One measurement: batch 1, causal ALiBi attention."""

    length: int
    heads: int
    head_dim: int
    dtype: str
    direction: str


def posjax_blockwise(shape: Shape) -> Callable[[], Any]:
    """posjax's blockwise attention, in linear memory."""

    def attend(q, k, v):
        return pj.attention(q, k, v, bias=pj.bias.ALiBi(), mask=pj.masks.Causal(), implementation="blockwise")

    return _jax_call(attend, shape)


def jax_nn(shape: Shape) -> Callable[[], Any]:
    """jax.nn.dot_product_attention with the bias as an array."""
    positions = jnp.arange(shape.length)
    bias = jax.jit(lambda: pj.alibi_bias(shape.heads, positions, positions)[None].astype(shape.dtype))()

    def attend(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    return _jax_call(attend, shape, bias)


def torch_flex(shape: Shape) -> Callable[[], Any]:
    """torch.nn.attention.flex_attention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor(pj.alibi_slopes(shape.heads).tolist())
    block_mask = create_block_mask(
        lambda b, h, i, j: j <= i, None, None, shape.length, shape.length, device="cpu", _compile=True
    )
    compiled = torch.compile(flex_attention)

    def attend(q, k, v):
        return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j), block_mask=block_mask)

    return _torch_call(attend, shape)


def torch_sdpa(shape: Shape) -> Callable[[], Any]:
    """torch.nn.functional.scaled_dot_product_attention with the bias as a mask."""
    import torch

    i, slopes = torch.arange(shape.length), torch.tensor(pj.alibi_slopes(shape.heads).tolist())
    r = i[:, None] - i[None, :]
    bias = (-slopes[:, None, None] * r).masked_fill(r < 0, float("-inf"))[None].to(getattr(torch, shape.dtype))

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return _torch_call(attend, shape)


def _jax_call(attend, shape: Shape, *rest) -> Callable[[], Any]:
    q, k, v, d_out = (
        jax.random.normal(key, (1, shape.length, shape.heads, shape.head_dim), shape.dtype)
        for key in jax.random.split(jax.random.key(0), 4)
    )

    def both(d_out, q, k, v, *rest):
        out, transpose = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
        return out, transpose(d_out)

    run = jax.jit(attend) if shape.direction == FORWARD else partial(jax.jit(both), d_out)
    return lambda: jax.block_until_ready(run(q, k, v, *rest))


def _torch_call(attend, shape: Shape) -> Callable[[], Any]:
    import torch

    torch.manual_seed(0)
    backward = shape.direction == BACKWARD
    size = (1, shape.heads, shape.length, shape.head_dim)
    q, k, v, d_out = (torch.randn(size, dtype=getattr(torch, shape.dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(backward)

    def run():
        with torch.set_grad_enabled(backward):
            out = attend(q, k, v)
        return torch.autograd.grad(out, (q, k, v), d_out) if backward else out

    return run


LIBRARIES: dict[str, Callable[[Shape], Callable[[], Any]]] = {
    "posjax": posjax_blockwise,
    "jax.nn": jax_nn,
    "torch flex": torch_flex,
    "torch sdpa": torch_sdpa,
}


def refuses(name: str, shape: Shape) -> str | None:
    """Why a library cannot run a measurement, or None."""
    if name.startswith("torch") and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if name == "torch flex" and shape.direction == BACKWARD:
        return "has no backward on CPU"
    return None


def _measure(library: str, shape: dict[str, Any], repeats: int) -> dict[str, float]:
    """The best time of several calls after one that compiles, and the peak memory of this process."""
    if Path("/proc/self/oom_score_adj").exists():
        # If memory runs out, the system should kill this process, not its parent.
        Path("/proc/self/oom_score_adj").write_text("1000")
    keep_memory()
    run = LIBRARIES[library](Shape(**shape))
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times), "peak_bytes": resident_peak_bytes()}


if __name__ == "__main__":
    print(json.dumps(_measure(**json.loads(sys.argv[1]))))
