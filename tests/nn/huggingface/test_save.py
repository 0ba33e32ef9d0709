"""What is written into the folder of a released model, and numbers that do not fit the dtype."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from refusals import refused

import posjax as pj
from posjax.nn import Decoder, DecoderConfig, from_pretrained, save_pretrained
from posjax.nn.huggingface.files import TensorFolder
from posjax.nn.huggingface.views import View

CONFIG = DecoderConfig(
    vocab_size=6, num_layers=2, model_dim=4, num_heads=2, mlp_dim=8, embedding_scale=1.0, scheme=pj.scheme("rope")
)


def filled(number, dtype):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.full(leaf.shape, number, dtype), abstract)
    return nnx.merge(graph, state)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_folder_holds_the_config_the_tensors_and_files_of_the_source(tmp_path):
    decoder = filled(0.5, jnp.bfloat16)
    save_pretrained(decoder, first := tmp_path / "first")
    assert {path.name for path in first.iterdir()} == {"config.json", "model.safetensors"}
    assert config_of(first)["dtype"] == "bfloat16"
    (first / "tokenizer.json").write_text("{}")
    (first / "other.txt").write_text("")
    old = {"mine": "kept", "bos_token_id": 1, "rope_theta": 5.0, "torch_dtype": "float16", "vocab_size": 99}
    (first / "config.json").write_text(json.dumps(config_of(first) | old))
    save_pretrained(decoder, second := tmp_path / "second", like=first, dtype="float32")
    assert {path.name for path in second.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    written = config_of(second)
    kept = [written[key] for key in ("dtype", "mine", "bos_token_id", "vocab_size", "rope_theta")]
    assert kept == ["float32", "kept", 1, 6, 10_000.0]
    assert "torch_dtype" not in written
    found = TensorFolder(second)
    for name in found.entries:
        np.testing.assert_array_equal(found.tensor(name), np.full(found.entries[name].shape, np.float32(0.5)))


def test_without_a_name_the_family_is_that_of_the_source(tmp_path):
    save_pretrained(filled(0.0, jnp.float32), tmp_path / "first", family="mistral", dtype="float32")
    save_pretrained(filled(0.0, jnp.float32), tmp_path / "second", like=tmp_path / "first")
    assert config_of(tmp_path / "second")["model_type"] == "mistral"


@pytest.mark.parametrize("part", ["embed", "stacks"])
def test_a_number_beyond_the_dtype_is_refused_before_anything_is_written(part, tmp_path):
    decoder = filled(0.0, jnp.float32)
    leaf = decoder.embed if part == "embed" else decoder.stacks[0][0].mlp.up
    leaf[...] = leaf[...].at[(-1,) * leaf[...].ndim].set(1e5)
    name = "model.embed_tokens.weight" if part == "embed" else "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name}.*100000.*float16"):
        save_pretrained(decoder, tmp_path / "narrow", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    save_pretrained(decoder, tmp_path / "wide")
    with pytest.raises(ValueError, match=f"{name}.*100000.*float16"):
        from_pretrained(tmp_path / "wide", dtype="float16")


LIMITS = [
    # IEEE 754: 65504 is the largest float16, and 65520, half a unit above it, rounds to the even 65536: infinite.
    ("float32", "float16", np.nextafter(np.float32(65520), np.float32(0)), 65520.0),
    ("bfloat16", "float16", 65280.0, 65536.0),
    # The largest bfloat16 is (2 - 2^-7) 2^127; half a unit more, (2 - 2^-8) 2^127, rounds to 2^128.
    ("float32", "bfloat16", np.nextafter(np.float32((2 - 2**-8) * 2.0**127), np.float32(0)), (2 - 2**-8) * 2.0**127),
    ("float64", "float32", float(np.finfo(np.float32).max), 2.0**128),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("wide", "narrow", "fits", "too_large"), LIMITS)
def test_a_number_beyond_the_range_of_the_dtype_is_refused(wide, narrow, fits, too_large, sign):
    view, kinds = View("some", "embed -> embed"), [np.dtype(getattr(ml_dtypes, name, name)) for name in (wide, narrow)]

    def read(number):
        tensor = np.array([0, np.inf, -np.inf, np.nan, 1, sign * number], kinds[0])
        return view.read(tensor, {"embed": 6}, (slice(0, 6),), kinds[1]).astype(np.float64)

    found = read(fits)
    np.testing.assert_array_equal(found[:5], [0, np.inf, -np.inf, np.nan, 1])
    np.testing.assert_allclose(found[5], sign * fits, rtol=2**-8)
    refused("tensor 'some'", lambda: read(too_large))
