"""The scheme: one choice for each slot of attention, and recipes whose layers differ.

``registry`` has the slots and the specs by name, ``choices`` what follows from the choices of a scheme and whether they
compose, ``executors`` what computes attention with them. ``scheme`` is the scheme itself, ``layers`` has one for each
layer, and ``presets`` are the known schemes by name.
"""

from posjax.scheme.choices import SLOT_NAMES
from posjax.scheme.layers import Layers, uniform
from posjax.scheme.scheme import Scheme

__all__ = ["SLOT_NAMES", "Layers", "Scheme", "uniform"]
