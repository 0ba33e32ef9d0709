"""Reads a released model onto four simulated devices and writes it back; prints memory and time as one line of JSON.

It measures anonymous memory (RssAnon of /proc/PID/status), which the process has allocated itself. Pages of mapped
files do not count: the kernel drops them when it needs memory, and any number of them remains after reading a file.
Another process takes a sample every millisecond, so that no work in this process can delay the samples.

    python memory_worker.py FOLDER OUT TINY
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


def main(folder, out, tiny):
    peak = multiprocessing.get_context("fork").Value("q", 0)
    watcher = multiprocessing.get_context("fork").Process(target=watch, args=(os.getpid(), peak), daemon=True)
    watcher.start()

    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from posjax.nn import from_pretrained, save_pretrained
    from posjax.nn.huggingface.load import named_parameters

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

    def sharding(axes, shape):
        names = [rules.get(axis) if size % 2 == 0 else None for axis, size in zip(axes, shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*names))

    def measured(function):
        """The result of ``function``, the memory before it, the peak while it ran, and its seconds."""
        gc.collect()
        before = peak.value = anonymous(os.getpid())
        start = time.perf_counter()
        found = function()
        seconds = time.perf_counter() - start
        time.sleep(0.01)
        return found, before, peak.value, seconds

    def leaves(decoder):
        from flax import nnx

        return [leaf for _, leaf in named_parameters(nnx.to_pure_dict(nnx.state(decoder)))]

    # A small model of the same layers comes first, so that imports and compilation are not measured.
    save_pretrained(from_pretrained(tiny, sharding=sharding), f"{out}-tiny", like=tiny)
    decoder, before_read, most_read, read_s = measured(
        lambda: jax.block_until_ready(from_pretrained(folder, sharding=sharding))
    )
    arrays = sum(shard.data.nbytes for leaf in leaves(decoder) for shard in leaf.addressable_shards)
    _, before_write, most_write, write_s = measured(lambda: save_pretrained(decoder, out, like=folder))
    found = {
        "arrays": arrays,
        "read": most_read - before_read - arrays,
        "write": most_write - before_write,
        "read_s": read_s,
        "write_s": write_s,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
