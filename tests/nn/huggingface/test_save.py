"""What is written into the folder of a released model: names, order, values and shards."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import posjax as pj
from posjax.nn import Decoder, DecoderConfig, from_pretrained, save_pretrained
from posjax.nn.huggingface import FAMILIES, save
from posjax.nn.huggingface.files import TensorFolder
from posjax.nn.huggingface.load import Stored
from posjax.nn.huggingface.views import View

CONFIG = DecoderConfig(
    vocab_size=6, num_layers=2, model_dim=4, num_heads=2, mlp_dim=8, embedding_scale=1.0, scheme=pj.scheme("rope")
)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "any.safetensors"])
def test_a_folder_with_a_file_of_a_model_is_full(name):
    with pytest.raises(ValueError, match=f"here holds a model already; choose another folder .found {name}"):
        save._check_empty("here", ["README.md", name])


def test_a_folder_with_other_files_is_empty():
    save._check_empty("here", ["README.md", "tokenizer.json", "safetensors"])


def test_values_of_the_source_are_kept_unless_they_are_old():
    given = {"model_type": "llama", "bos_token_id": 1, "mine": "kept", "rope_theta": 5.0, "torch_dtype": "float16"}
    found = save._values(CONFIG, FAMILIES["llama"], given | {"vocab_size": 99})
    assert (found["mine"], found["bos_token_id"], found["vocab_size"]) == ("kept", 1, 6)
    assert "torch_dtype" not in found
    assert "eos_token_id" not in found


def test_without_a_source_the_special_tokens_are_null():
    found = save._values(CONFIG, FAMILIES["llama"], {})
    assert [found[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    assert found["num_hidden_layers"] == 2


def test_the_family_is_that_of_the_name_or_the_source_or_the_first_that_fits():
    biased = dataclasses.replace(CONFIG, biases=("qkv",))
    assert save._family(biased, None, {}).model_type == "qwen2"
    assert save._family(biased, None, {"model_type": "llama"}).model_type == "llama"
    assert save._family(biased, "mistral", {"model_type": "llama"}).model_type == "mistral"
    assert save._family(biased, "mistral", {}).model_type == "mistral"


def parameter(name, layers, shape, dtype="float32"):
    """Parameters of one axis: tensors ``name`` of ``embed`` numbers."""
    names = [name] if layers is None else [f"{layer}.{name}" for layer in layers]
    return Stored(jnp.arange(np.prod(shape), dtype=dtype).reshape(shape), View(name, "embed -> embed"), names, layers)


PARAMETERS = [parameter("b", [0, 2], (2, 4)), parameter("z", None, (4,), "bfloat16"), parameter("a", [0, 1], (2, 4))]


def test_tensors_are_in_the_order_of_layers_and_names():
    found = save._tensors(CONFIG, PARAMETERS, None)
    assert list(found) == ["z", "0.a", "0.b", "1.a", "2.b"]
    assert found["z"] == (jnp.bfloat16, (4,))
    assert found["2.b"] == (np.float32, (4,))
    assert {dtype for dtype, _ in save._tensors(CONFIG, PARAMETERS, "float16").values()} == {np.dtype("float16")}


def test_parts_are_the_layers_of_every_shard_once():
    """Numbers that several devices hold are written by one of them."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    stack, single, _ = PARAMETERS

    def placed(stored, *axes):
        return stored._replace(leaf=jax.device_put(stored.leaf, NamedSharding(mesh, PartitionSpec(*axes))))

    parts = [(name, index[0].start, values.tolist()) for name, index, values in save._parts(placed(stack, None, "x"))]
    assert sorted(parts) == [("0.b", 0, [0, 1]), ("0.b", 2, [2, 3]), ("2.b", 0, [4, 5]), ("2.b", 2, [6, 7])]
    ((name, index, values),) = save._parts(placed(single))
    assert (name, index, values.tolist()) == ("z", (slice(None),), [0, 1, 2, 3])


def test_the_config_appears_last(tmp_path):
    """A folder with a config is a whole model."""

    class Remote:
        protocol, names = "memory", ()

        def put_file(self, source, target):
            self.names += (target,)
            assert Path(source).read_text() == Path(target).name

    for name in ("b.safetensors", "config.json", "tokenizer.json", "a.safetensors"):
        (tmp_path / name).write_text(name)
    files = Remote()
    save._publish(tmp_path, files, "there")
    assert files.names[-1] == "there/config.json"
    assert sorted(files.names[:-1]) == ["there/a.safetensors", "there/b.safetensors", "there/tokenizer.json"]


def test_files_are_moved_within_a_local_file_system(tmp_path):
    files, root = save.open_location(tmp_path / "deep" / "target")
    with save._partial(files, root) as partial:
        assert partial.parent.parent == tmp_path / "deep"
        save._prepare(partial, [], {"config.json": b"{}", "a.txt": b"a"})
        assert not Path(root).exists()
        save._publish(partial, files, root)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["target"]
    assert {path.name: path.read_bytes() for path in Path(root).iterdir()} == {"config.json": b"{}", "a.txt": b"a"}


@pytest.mark.parametrize("name", ["/short", "/ümlaut/" + "long" * 200])
def test_every_process_gets_the_folder_of_the_first(name):
    assert save._of_first(name) == name


def test_a_folder_holds_the_config_the_tensors_and_files_of_the_source(tmp_path):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, jnp.bfloat16), abstract))
    save_pretrained(decoder, first := tmp_path / "first")
    assert {path.name for path in first.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((first / "config.json").read_text())["dtype"] == "bfloat16"
    (first / "tokenizer.json").write_text("{}")
    (first / "other.txt").write_text("")
    save_pretrained(decoder, second := tmp_path / "second", like=first, dtype="float32")
    assert {path.name for path in second.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((second / "config.json").read_text())["dtype"] == "float32"
    found = TensorFolder(second)
    for name in found.entries:
        np.testing.assert_array_equal(found.tensor(name), np.full(found.entries[name].shape, np.float32(0.5)))
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        save_pretrained(decoder, second / "tokenizer.json")


@pytest.mark.parametrize("part", ["embed", "stacks"])
def test_a_number_beyond_the_dtype_is_refused_before_anything_is_written(part, tmp_path):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract)
    leaf = state["embed"] if part == "embed" else state["stacks"][0][0]["mlp"]["up"]
    leaf[...] = leaf[...].at[(-1,) * leaf[...].ndim].set(1e5)
    decoder = nnx.merge(graph, state)
    name = "model.embed_tokens.weight" if part == "embed" else "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name}.*100000.*float16"):
        save_pretrained(decoder, tmp_path / "narrow", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    save_pretrained(decoder, tmp_path / "wide")
    with pytest.raises(ValueError, match=f"{name}.*100000.*float16"):
        from_pretrained(tmp_path / "wide", dtype="float16")
