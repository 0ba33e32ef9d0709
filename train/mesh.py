"""The devices of a run, as a mesh with named axes."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from train.config import MeshConfig


def make_mesh(config: MeshConfig, rows: int) -> Mesh:
    """A mesh of the first ``config.data`` devices (all of them for -1), over which a batch of `rows` rows is split.

    Raises ValueError, before anything is compiled, when there are too few devices or the rows cannot be shared evenly.
    """
    devices = jax.devices()
    data = len(devices) if config.data == -1 else config.data
    if data > len(devices):
        raise ValueError(f"train.mesh.data={data}, but there are {len(devices)} devices; -1 takes them all")
    if rows % data:
        fits = max(count for count in range(1, data + 1) if rows % count == 0)
        raise ValueError(
            f"train.batch_tokens gives {rows} rows, which {data} devices cannot share evenly; train.mesh.data={fits} "
            f"would work, or a batch of {-(-rows // data) * data} rows"
        )
    return Mesh(np.array(devices[:data]), ("data",), axis_types=(AxisType.Auto,))
