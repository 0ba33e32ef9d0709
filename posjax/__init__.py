"""Every way a Transformer tells position, and runs past its training length, as pure JAX functions."""

import importlib

from posjax import absolute, bias, coca, masks, positions, rotary, scales
from posjax.attention import attention
from posjax.attention.coca import coca_attention
from posjax.bias import alibi_bias, alibi_slopes
from posjax.rotary import RotaryTable, apply_rotary, rotary_table
from posjax.scheme import Layers, Scheme, scheme, scheme_names

__version__ = "0.1.0"

__all__ = [
    "Layers",
    "RotaryTable",
    "Scheme",
    "absolute",
    "alibi_bias",
    "alibi_slopes",
    "apply_rotary",
    "attention",
    "bias",
    "coca",
    "coca_attention",
    "masks",
    "nn",
    "positions",
    "rotary",
    "rotary_table",
    "scales",
    "scheme",
    "scheme_names",
]


def __getattr__(name: str):
    # The Flax modules are imported on first use, so that the pure functions need jax and numpy alone.
    if name == "nn":
        return importlib.import_module("posjax.nn")
    raise AttributeError(f"module 'posjax' has no attribute {name!r}")
