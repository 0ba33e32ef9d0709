"""Attention on a mesh of devices: the batch, the heads and the sequence split over its axes.

``Placement`` assigns them to axes; ``attend_on_mesh`` enters ``shard_map``; inside it ``context_attention`` computes,
for the tokens of every device, what ``posjax.attention`` computes for whole sequences.
"""

from posjax.attention.sharded.choice import Sizes, choose
from posjax.attention.sharded.context import context_attention
from posjax.attention.sharded.enter import attend_on_mesh
from posjax.attention.sharded.placement import Placement

__all__ = ["Placement", "Sizes", "attend_on_mesh", "choose", "context_attention"]
