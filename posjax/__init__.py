"""Every way to encode position in a Transformer, and to run it beyond its training length, as pure JAX functions."""

import importlib

from posjax import (
    _serial,
    absolute,
    bias,
    coca,
    layout,
    linear,
    masks,
    norms,
    pope,
    positions,
    remap,
    rotary,
    scales,
    sinks,
    training_positions,
)
from posjax._angles import Frequencies
from posjax._slots import Features
from posjax.attention import attention, coca_attention
from posjax.attention.cache import Cache
from posjax.bias import alibi_bias, alibi_slopes
from posjax.rotary import RotaryTable, apply_rotary, rotary_table
from posjax.scheme import Layers, Scheme
from posjax.scheme.presets import scheme, scheme_names
from posjax.scheme.registry import register

__version__ = "0.1.0"

_serial.register(
    *(RotaryTable, Frequencies, positions.Range, remap.Branch, Cache, layout.Layout),
    *(linear.LinearState, linear.DeltaState, linear.Memory, linear.Recent),
    *_serial.below(masks.Mask),
    *_serial.below(bias.Bias),
)

__all__ = [
    "Features",
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
    "diagnostics",
    "layout",
    "linear",
    "masks",
    "nn",
    "norms",
    "pope",
    "positions",
    "register",
    "remap",
    "rotary",
    "rotary_table",
    "scales",
    "scheme",
    "scheme_names",
    "sinks",
    "training_positions",
]


def __getattr__(name: str):
    # Imported on first use, so that the pure functions need only jax and numpy.
    if name in ("nn", "diagnostics"):
        return importlib.import_module(f"posjax.{name}")
    raise AttributeError(f"module 'posjax' has no attribute {name!r}")
