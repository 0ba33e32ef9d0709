"""The scheme: one choice for each slot of attention, and recipes whose layers differ.

``slots`` has the protocol of each slot, ``choices`` the properties of a scheme, ``checks`` which slots compose,
``registry`` the names of specs and ``changes`` the replacement of slots. ``softmax`` and ``linear`` compute attention.
``scheme`` combines them, ``layers`` has one scheme for each layer, and ``presets`` are the known schemes by name.
"""

from posjax.scheme.choices import SLOT_NAMES
from posjax.scheme.layers import Layers, uniform
from posjax.scheme.scheme import Scheme

__all__ = ["SLOT_NAMES", "Layers", "Scheme", "uniform"]
