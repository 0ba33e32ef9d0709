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
from flax import nnx
from nn.huggingface import released

from posjax.nn import Decoder
from posjax.nn.huggingface import FAMILIES, files, read_config
from posjax.nn.huggingface.family import sizes_of
from posjax.nn.huggingface.load import stored

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("memory_worker.py")
HEADS = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
# 212 MB and 2.5 GB in float32; the largest tensors are the embeddings, of 34 and 262 MB.
SIZES = {
    "small": {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16},
    "large": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 12},
}
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures with Linux's /proc"),
]


def shapes_of(values):
    """The shapes of a model's tensors by name."""
    config = read_config(values)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    parameters = stored(FAMILIES[values["model_type"]], config, nnx.to_pure_dict(state))
    return {name: each.view.tensor_shape(sizes_of(config)) for each in parameters for name in each.tensors}


def build(folder, values):
    """Writes a model of arbitrary numbers, a piece at a time; returns the bytes of the largest tensor."""
    folder.mkdir()
    tensors = {name: (np.dtype(np.float32), shape) for name, shape in sorted(shapes_of(values).items())}
    (layout,) = files.lay_out(tensors, 10**12)
    files.create(folder, [layout])
    piece = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(np.float32)
    for start, entry in enumerate(layout.entries.values()):
        flat = files.writable(folder, entry).reshape(-1)
        for offset in range(0, flat.size, piece.size):
            flat[offset : offset + piece.size] = np.roll(piece, start)[: flat.size - offset]
    released.write_config(folder, values)
    return max(4 * int(np.prod(shape)) for _, shape in tensors.values())


def run(*folders):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(("--xla_force_host_platform_device_count=4", *QUICK))}
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, folders)],
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
GPT_OSS |= {"vocab_size": 512, "hidden_size": 768, "intermediate_size": 768, "num_local_experts": 16}


def packed(name, shape):
    """Names, dtypes and shapes of a tensor in files; experts are stored in MXFP4 as two tensors."""
    if "experts" not in name or name.endswith("bias"):
        return {name: (np.dtype(np.float32), shape)}
    experts, width, rows = shape
    blocks, scales = (experts, rows, width // 32, 16), (experts, rows, width // 32)
    return {f"{name}_blocks": (np.dtype(np.uint8), blocks), f"{name}_scales": (np.dtype(np.uint8), scales)}


def build_packed(folder, values):
    """Writes random experts and constant other tensors; returns the bytes of the largest tensor in float32."""
    folder.mkdir()
    shapes, draw = shapes_of(values), np.random.default_rng(0)
    tensors = {name: kind for each in sorted(shapes) for name, kind in packed(each, shapes[each]).items()}
    (layout,) = files.lay_out(tensors, 10**12)
    files.create(folder, [layout])
    for entry in layout.entries.values():
        content = draw.integers(100, 130, entry.shape, np.uint8) if entry.dtype == np.uint8 else 0.01
        files.writable(folder, entry)[...] = content
    released.write_config(folder, values)
    return max(4 * int(np.prod(shape)) for shape in shapes.values())


def test_experts_in_mxfp4_are_unpacked_a_part_at_a_time(tmp_path):
    """The host holds the whole tensor in bfloat16, but only a part of it in float32."""
    largest = build_packed(tmp_path / "model", GPT_OSS)
    build_packed(tmp_path / "tiny", GPT_OSS | TINY | {"num_local_experts": 4})
    found = run(tmp_path / "model", tmp_path / "out", tmp_path / "tiny")
    print("largest", largest, found)
    assert found["arrays"] > 3 * largest
    assert found["read"] < 2 * largest, found


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.wide)])
def test_memory_beside_the_arrays_is_less_than_twice_the_largest_tensor(size, tmp_path):
    values = HEADS | SIZES[size]
    largest = build(tmp_path / "model", values)
    build(tmp_path / "tiny", values | TINY)
    found = run(tmp_path / "model", tmp_path / "out", tmp_path / "tiny")
    print(size, "largest", largest, found)
    assert found["arrays"] > 6 * largest
    assert found["read"] < 2 * largest, found
    assert found["write"] < 2 * largest, found
    ours, theirs = (files.TensorFolder(tmp_path / name) for name in ("out", "model"))
    assert ours.entries.keys() == theirs.entries.keys()
    for name in ours.entries:
        np.testing.assert_array_equal(ours.tensor(name), theirs.tensor(name))
