"""Host memory for reading and writing, beside the arrays on the devices: less than twice the largest tensor.

See ``memory_worker.py`` for what is measured.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flags import QUICK
from nn.huggingface import released

from posjax.nn.huggingface import files

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("memory_worker.py")
HEADS = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
# 115 MB and 2.5 GB in float32; the largest tensors are the embeddings, of 34 and 262 MB.
SIZES = {
    "small": {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7},
    "large": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 12},
}
# An expert is the largest tensor, of 19 MB; the 16 of a layer are one array of 302 MB, a quarter of it on each device.
APART = {"model_type": "mixtral", "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
APART |= {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 4608, "num_local_experts": 16}
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
GPT_OSS |= {"vocab_size": 512, "hidden_size": 768, "intermediate_size": 768, "num_local_experts": 16}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc"),
]


def in_files(name, shape):
    """Names, dtypes and shapes of a tensor in files; experts are stored in MXFP4 as two tensors."""
    if "experts" not in name or name.endswith(("bias", "weight")):
        return {name: (np.dtype(np.float32), shape)}
    experts, width, rows = shape
    blocks, scales = (experts, rows, width // 32, 16), (experts, rows, width // 32)
    return {f"{name}_blocks": (np.dtype(np.uint8), blocks), f"{name}_scales": (np.dtype(np.uint8), scales)}


def build(folder, values):
    """Writes a model of arbitrary numbers; returns the bytes of the largest tensor in float32."""
    folder.mkdir()
    shapes, draw = released.tensor_shapes(values), np.random.default_rng(0)
    piece = draw.normal(0, 0.02, 2**20).astype(np.float32)
    tensors = {name: kind for each in sorted(shapes) for name, kind in in_files(each, shapes[each]).items()}
    (layout,) = files.lay_out(tensors, 10**12)
    files.create(folder, [layout])
    for n, entry in enumerate(layout.entries.values()):
        packed = entry.dtype == np.uint8
        numbers = draw.integers(100, 130, entry.shape) if packed else np.resize(np.roll(piece, n), entry.shape)
        files.writable(folder, entry)[...] = numbers
    released.write_config(folder, values)
    return max(4 * int(np.prod(shape)) for shape in shapes.values())


def run(*folders):
    """Reads and writes models in another process, from triples of folders: the model, its copy, and a tiny model."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(("--xla_force_host_platform_device_count=4", *QUICK))}
    flags["MALLOC_MMAP_THRESHOLD_"] = "65536"  # else glibc keeps tens of MB that were freed
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, folders)],
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.wide)])
def test_memory_beside_the_arrays_is_less_than_twice_the_largest_tensor(size, tmp_path):
    """Also for experts in MXFP4: the host holds a whole tensor in bfloat16, but only a part of it in float32.

    And for experts apart, the largest tensors of a model whose arrays have those of a layer together.
    """
    dense = HEADS | SIZES[size]
    models = {"dense": dense, "packed": GPT_OSS, "apart": APART}
    models |= {"dense-tiny": dense | TINY, "packed-tiny": GPT_OSS | TINY | {"num_local_experts": 4}}
    models |= {"apart-tiny": APART | {"num_local_experts": 4}}  # arrays so large that XLA uses threads for them
    largest = {name: build(tmp_path / name, values) for name, values in models.items()}
    names = ("dense", "packed", "apart")
    triples = [tmp_path / f"{name}{end}" for name in names for end in ("", "-out", "-tiny")]
    # In a process of its own: memory that an earlier model has left would hide what the experts need.
    measured = [*run(*triples[:6]), *run(*triples[6:])]
    for name, found in zip(names, measured, strict=True):
        print(size, name, "largest", largest[name], found)
        assert found["arrays"] > 3 * largest[name]
        assert found["read"] < 2 * largest[name], found
        assert found["write"] < 2 * largest[name], found
    written, built = (files.TensorFolder(tmp_path / name) for name in ("dense-out", "dense"))
    assert written.entries.keys() == built.entries.keys()
    for name in built.entries:
        np.testing.assert_array_equal(written.tensor(name), built.tensor(name))
