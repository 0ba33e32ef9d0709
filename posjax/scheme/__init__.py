"""The scheme: one choice for each slot of attention, and recipes whose layers differ.

``slots`` says what each slot asks of its specs, ``choices`` what follows from one choice for each, ``checks`` what
composes, ``registry`` which names the specs have and ``changes`` how a scheme becomes another one. Two executors
compute: ``softmax`` and ``linear``. ``scheme`` puts them together, ``layers`` has one for each layer, and ``presets``
are the schemes of the field by name.
"""

from posjax.scheme.choices import SLOT_NAMES
from posjax.scheme.layers import Layers, uniform
from posjax.scheme.scheme import Scheme

__all__ = ["SLOT_NAMES", "Layers", "Scheme", "uniform"]
