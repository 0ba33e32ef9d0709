"""Attention on a mesh of devices: the batch, the heads and the sequence itself split over its axes.

``Placement`` says which axis holds what; ``attend_on_mesh`` enters the mesh, and inside ``context_attention`` computes
for the tokens of every device exactly what ``posjax.attention`` computes for the whole rows.
"""

from posjax.attention.sharded.choice import Sizes, choose
from posjax.attention.sharded.context import context_attention
from posjax.attention.sharded.enter import attend_on_mesh
from posjax.attention.sharded.placement import Placement

__all__ = ["Placement", "Sizes", "attend_on_mesh", "choose", "context_attention"]
