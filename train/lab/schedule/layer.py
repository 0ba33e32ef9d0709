"""The compiler's cycles of a whole attention layer: projections, features and the kernel, as in `posjax.nn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from posjax.attention.tpu.blocks import cheapest_forward
from posjax.nn import Attention, DecoderConfig
from posjax.scheme.presets import scheme as named
from train.lab.schedule.compiling import expected_cycles
from train.lab.schedule.implementations import schedule_of
from train.lab.schedule.posjax_kernels import CAUSAL, Case, arguments, call, target_of
from train.lab.schedule.program import KernelShape

LAYER_SHAPE = KernelShape(8192, 32, 128)
"""The shape of the layer; its tokens are as wide as all heads together."""


@dataclass(frozen=True)
class AttentionLayer:
    """The forward pass of one layer on one chip, in cycles of one core."""

    chip: str
    scheme: str
    others: float  # the compiler's estimate for everything except the kernel
    kernel: float  # by the kernel's schedule, stalls included
    blocks: tuple[int, int, int]

    @property
    def total(self) -> float:
        """The sum of both, since they run one after the other."""
        return self.others + self.kernel


def measure(scheme: str, chip: str, timeout: int) -> AttentionLayer:
    """Compiles the layer of a named scheme whose features need no other kernel than causal attention.

    The kernel is compiled alone, at its sizes in the layer, because listings of the projections take minutes to write.
    """
    others = expected_cycles(chip, "train.lab.schedule.layer:make", {"scheme": scheme}, timeout)
    blocks = cheapest_forward(target_of(chip), call(Case(), *arguments(LAYER_SHAPE)))
    name = CAUSAL[target_of(chip).wide]
    (cost,), _ = schedule_of(name, chip, LAYER_SHAPE, dict(zip(("q", "kv", "part"), blocks, strict=True)), timeout)
    return AttentionLayer(chip, scheme, others, cost.total_with_stalls, tuple(blocks))


def make(scheme: str) -> tuple[Callable, list]:
    """The layer as a function of its parameters and of tokens, all bfloat16, and its abstract arguments."""
    width = LAYER_SHAPE.heads * LAYER_SHAPE.head_dim
    config = DecoderConfig(1, num_layers=1, model_dim=width, num_heads=LAYER_SHAPE.heads, compute_dtype="bfloat16")
    abstract = nnx.eval_shape(lambda: Attention(config, named(scheme), rngs=nnx.Rngs(0)))
    layer, parameters = nnx.split(abstract)
    parameters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), parameters)
    tokens = jax.ShapeDtypeStruct((1, LAYER_SHAPE.length, width), jnp.bfloat16)
    return lambda parameters, x: nnx.merge(layer, parameters)(x), [parameters, tokens]


def table(layers: Sequence[AttentionLayer]) -> Table:
    """One row for each chip and scheme, with ratios to the chip's first scheme."""
    title = (
        f"A whole attention layer forward, {LAYER_SHAPE.heads} heads x {LAYER_SHAPE.head_dim}, "
        f"{LAYER_SHAPE.length:,} tokens, bfloat16: millions of cycles of one core"
    )
    grid = Table("chip", "scheme", "projections and features", "kernel", "blocks", "together", "ratio", title=title)
    for layer in layers:
        first = next(other for other in layers if other.chip == layer.chip)
        numbers = (f"{number / 1e6:,.2f}" for number in (layer.others, layer.kernel, layer.total))
        others, kernel, total = numbers
        blocks = " x ".join(map(str, layer.blocks))
        grid.add_row(layer.chip, layer.scheme, others, kernel, blocks, total, f"{layer.total / first.total:.3f}")
    return grid
