"""Reads a released model onto four simulated devices and writes it back; prints the memory as a line of JSON.

It measures anonymous memory (RssAnon of /proc/PID/status), which the process has allocated itself. Pages of mapped
files do not count: the kernel drops them when it needs memory, and any number of them remains after reading a file.
Another process takes a sample every millisecond, so that no work in this process can delay the samples.

    python memory_worker.py FOLDER OUT TINY ...
"""

import gc
import json
import multiprocessing
import os
import re
import sys
import time


def anonymous(process):
    """Bytes of anonymous memory of a process."""
    with open(f"/proc/{process}/status") as file:
        return int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) * 1024


def watch(process, peak):
    while True:
        peak.value = max(peak.value, anonymous(process))
        time.sleep(0.001)


def main(*folders):
    peak = multiprocessing.get_context("fork").Value("q", 0)
    watcher = multiprocessing.get_context("fork").Process(target=watch, args=(os.getpid(), peak), daemon=True)
    watcher.start()

    import jax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from posjax.nn import from_pretrained, save_pretrained

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

    def sharding(axes, shape):
        names = [rules.get(axis) if size % 2 == 0 else None for axis, size in zip(axes, shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*names))

    def measured(function):
        """The result of ``function``, and how much the memory grew at most while it ran."""
        gc.collect()
        before = peak.value = anonymous(os.getpid())
        found = function()
        time.sleep(0.01)
        return found, peak.value - before

    for model, out, tiny in zip(folders[::3], folders[1::3], folders[2::3], strict=True):
        # A small model of the same layers comes first, so that imports and compilation are not measured.
        save_pretrained(from_pretrained(tiny, sharding=sharding), f"{out}-tiny", like=tiny)
        decoder, read = measured(lambda model=model: jax.block_until_ready(from_pretrained(model, sharding=sharding)))
        leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(decoder)))
        arrays = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        _, write = measured(lambda decoder=decoder, out=out, model=model: save_pretrained(decoder, out, like=model))
        print(json.dumps({"arrays": arrays, "read": read - arrays, "write": write}))
        del decoder, leaves


if __name__ == "__main__":
    main(*sys.argv[1:])
