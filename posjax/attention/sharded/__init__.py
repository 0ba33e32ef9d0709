"""Attention on a mesh of devices: the batch, the heads and the sequence split over its axes.

``Placement`` assigns them to axes; ``attend_on_mesh`` enters ``shard_map``; inside it ``posjax.attention`` with
``placement=`` computes, for the tokens of every device, what it computes for whole sequences without one.
"""

from posjax.attention.placement import Placement, Sizes, choose
from posjax.attention.sharded.mesh import attend_on_mesh

__all__ = ["Placement", "Sizes", "attend_on_mesh", "choose"]
