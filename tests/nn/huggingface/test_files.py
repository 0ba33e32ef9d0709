"""Safetensors files: posjax and the package safetensors read each other's files; broken files; file systems."""

import json
import sys
import tempfile
from functools import partial

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest
from nn.huggingface import released
from refusals import refused

from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface.files import INDEX, TensorFolder

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def tensors():
    """A tensor of random bytes for every dtype, of ranks 0 to 3, and an empty tensor."""
    draw, found = np.random.default_rng(0), {}
    for n, name in enumerate(DTYPES):
        dtype, shape = np.dtype(getattr(ml_dtypes, name, name)), ((), (3,), (5, 2), (2, 3, 3))[n % 4]
        content = draw.integers(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), np.uint8)
        found[f"some.{name}"] = content.view(dtype)[..., 0]
    return found | {"empty": np.zeros((0, 4), np.float32)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def read(path):
    folder = TensorFolder(path)
    return {name: folder.tensor(name) for name in folder.entries}


# --- the package safetensors ------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("several", [False, True])
def test_files_of_the_package_are_read(several, tmp_path):
    """Also in several files without an index. The package does not promise alignment."""
    package, content = pytest.importorskip("safetensors.numpy"), tensors()
    names = sorted(content)
    parts = [names[:4], names[4:]] if several else [names]
    for n, part in enumerate(parts):
        package.save_file({name: content[name] for name in part}, tmp_path / f"part-{n}.safetensors", {"format": "pt"})
    assert_same(read(tmp_path), content)


@pytest.mark.parity
@pytest.mark.parametrize("most", [10**6, 30, 1])
def test_the_package_reads_ours(most, tmp_path):
    pytest.importorskip("safetensors")
    content = {name: tensor for name, tensor in tensors().items() if name != "empty"}
    files = released.write_tensors(tmp_path, content, most)
    assert len(files) == {10**6: 1, 30: 6, 1: len(content)}[most]
    assert_same(released.stored(tmp_path), content)
    assert_same(read(tmp_path), content)


# --- several files ----------------------------------------------------------------------------------------------------

SMALL = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(4, dtype=np.int16)}


def test_files_are_filled_up_to_the_maximum_size(tmp_path):
    content = {str(n): np.full(5, n, np.float32) for n in range(5)}
    assert released.write_tensors(tmp_path, content, 40) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 100}
    assert index["weight_map"] == {name: f"model-0000{int(name) // 2 + 1}-of-00003.safetensors" for name in content}
    assert_same(read(tmp_path), content)


@pytest.mark.parametrize("letters", [1, 4, 6])
def test_one_file_needs_no_index_and_its_tensors_are_aligned(letters, tmp_path):
    content = {"b" * letters: SMALL["b"], "a": SMALL["a"], "none": np.zeros((0, 3), np.float32)}
    assert released.write_tensors(tmp_path, content, 10**6) == ["model.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") % 8 == 0
    assert_same(read(tmp_path), content)


def test_only_files_of_the_index_are_read(tmp_path):
    released.write_tensors(tmp_path, SMALL, 1)
    (tmp_path / "more.safetensors").write_bytes(b"not even a file of tensors")
    assert_same(read(tmp_path), SMALL)


def test_model_safetensors_is_preferred_to_an_index_and_to_other_files(tmp_path):
    """As in transformers, so the files of the index need not even exist."""
    released.write_tensors(tmp_path, SMALL, 10**6)
    index = {"weight_map": dict.fromkeys(SMALL, "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even a file of tensors")
    assert_same(read(tmp_path), SMALL)


def test_another_name_in_the_metadata_is_one_of_the_tensor(tmp_path):
    """``safetensors.torch.save_model`` writes there the names that it leaves out."""
    metadata = {"format": "pt", "tied": "one", "lost": "gone", "one": "one"}
    (tmp_path / "model.safetensors").write_bytes(file(one() | {"__metadata__": metadata}, np.ones(2, "<f4").tobytes()))
    assert_same(read(tmp_path), dict.fromkeys(("one", "tied"), np.ones(2, np.float32)))


def two_files(folder, index=None):
    """Tensor ``a`` in two files with other numbers, ``b`` in the second one, and an index."""
    for name, tensors in (("x", {"a": np.zeros(2)}), ("y", {"a": np.ones(2), "b": np.ones(3)})):
        (folder / name).mkdir()
        released.write_tensors(folder / name, tensors)
        (folder / name / "model.safetensors").rename(folder / f"{name}.safetensors")
    if index is not None:
        map_of = {tensor: f"{name}.safetensors" for tensor, name in index.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": map_of}))
    return folder


def test_a_tensor_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path):
    assert_same(read(two_files(tmp_path, {"a": "x", "b": "y"})), {"a": np.zeros(2), "b": np.ones(3)})


@pytest.mark.parametrize(
    ("index", "name"),
    [(None, "a"), ({"b": "y", "c": "x"}, "a"), ({"a": "y", "b": "x"}, "b"), ({"a": "x", "b": "y", "c": "y"}, "c")],
    ids=("no index", "not in the index", "in another file", "in no file"),
)
def test_a_tensor_without_one_place_is_refused(index, name, tmp_path):
    two_files(tmp_path, index)
    refused(f"tensor '{name}'", lambda: TensorFolder(tmp_path))


# --- broken files -----------------------------------------------------------------------------------------------------


def file(header, data=bytes(8), size=None):
    """The bytes of a file; its header, or the size of the header, may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"one": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
BROKEN = {
    "empty": b"",
    "header too long": file(one(), size=500),
    "header of 2^63 bytes": file(one(), size=2**63),
    "pointer of git lfs": POINTER,
    "a name twice": file(b'{"one": 1, "one": 2}'),
    "not JSON": file(b"{{{{"),
    "too deep": file(b"[" * 100_000),
    "not text": file(b"\xff\xfe{}"),
    "a list": file([1]),
    "unknown dtype": file(one("F8_E4M3")),
    "too few bytes": file(one(shape=(3,))),
    "too many bytes": file(one(shape=(1,))),
    "ends before it starts": file(one(offsets=(8, 0))),
    "starts in the header": file(one(offsets=(-8, 0))),
    "negative shape": file(one(shape=(-1, -2))),
    "no whole shape": file(one(shape=(2.0,))),
    "one offset": file(one(offsets=(0,))),
    "a dtype that is a list": file(one(["F32"])),
    "no shape": file({"one": {"dtype": "F32"}}),
    "a number for a tensor": file({"one": 3}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[name])
    refused(str(path), lambda: TensorFolder(tmp_path))


def test_every_file_that_is_cut_is_refused(tmp_path):
    """At any byte: in the size, in the header, and in the tensors."""
    released.write_tensors(tmp_path, SMALL, 10**6)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refused(str(path), lambda: TensorFolder(tmp_path))


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00005.safetensors", "tokenizer.model"])
def test_a_pointer_of_git_lfs_is_named_with_what_to_do(name, tmp_path):
    decoder = released.random_decoder(released.CASES["falcon"])
    save_pretrained(decoder, tmp_path / "there", max_file_bytes=40_000)
    (tmp_path / "there" / name).write_bytes(POINTER)
    read_or_copy = partial(save_pretrained, decoder, tmp_path / "copy", like=tmp_path / "there")
    with pytest.raises(ValueError, match=rf"{tmp_path}/there/{name} .*git lfs pull"):
        read_or_copy() if name == "tokenizer.model" else from_pretrained(tmp_path / "there")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "index", ["[1]", "{", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "gone.safetensors"}}']
)
def test_a_broken_index(index, tmp_path):
    released.write_tensors(tmp_path, SMALL, 1)
    (tmp_path / INDEX).write_text(index)
    name = "gone.safetensors" if "gone" in index else str(tmp_path / INDEX)
    refused(name, lambda: TensorFolder(tmp_path), (ValueError, FileNotFoundError))


def test_what_is_not_there_or_not_read_is_named(tmp_path):
    refused(f"{tmp_path}/gone/config.json", lambda: from_pretrained(tmp_path / "gone"), FileNotFoundError)
    for text in ("{", "[" * 100_000, "[]"):
        (tmp_path / "config.json").write_text(text)
        refused(f"{tmp_path}/config.json", lambda: from_pretrained(tmp_path))
    released.write_config(tmp_path, released.CASES["gpt2"])
    refused(str(tmp_path), lambda: from_pretrained(tmp_path), FileNotFoundError)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle can run code when it is read")
    refused("pytorch_model.bin", lambda: from_pretrained(tmp_path))


# --- file systems -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """A file system in memory, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def assert_same_parameters(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, wanted)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Sets an empty working folder and an empty folder for temporary files."""
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def test_a_url_is_written_and_read(memory, here, monkeypatch):
    """Through a temporary folder, which is removed afterwards."""
    decoder, put = released.random_decoder(released.CASES["falcon"]), type(memory).put_file
    written = []

    def record(files, source, target, **options):
        written.append(target.rpartition("/")[2])
        return put(files, source, target, **options)

    monkeypatch.setattr(type(memory), "put_file", record)
    save_pretrained(decoder, "memory://models/falcon", max_file_bytes=40_000)
    assert written[-1] == "config.json", "a folder with a config holds a whole model"
    names = {name.rpartition("/")[2] for name in memory.ls("/models/falcon", detail=False)}
    assert names - {"config.json", INDEX} == {f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)}
    assert sorted(path.name for path in here.rglob("*")) == ["here", "temporary"]
    assert_same_parameters(from_pretrained("memory://models/falcon"), decoder)
    with pytest.raises(ValueError, match="memory://models/falcon holds a model already"):
        save_pretrained(decoder, "memory://models/falcon")


def test_a_failed_write_to_a_url_leaves_nothing(memory, here, monkeypatch):
    def disk_full(*arguments):
        raise OSError("no room")

    monkeypatch.setattr(type(memory), "put_file", disk_full)
    with pytest.raises(OSError, match="no room"):
        save_pretrained(released.random_decoder(released.CASES["gpt2"]), "memory://models/gpt2")
    assert sorted(path.name for path in here.rglob("*")) == ["here", "temporary"]


def test_other_files_are_copied_with_a_model_from_a_url(memory, tmp_path):
    decoder = released.random_decoder(released.CASES["gpt2"])
    save_pretrained(decoder, tmp_path / "first")
    (tmp_path / "first" / "merges.txt").write_bytes(b"#version\na b\n")
    (tmp_path / "first" / "secret.txt").write_text("stays")
    memory.put(str(tmp_path / "first"), "/models/gpt2", recursive=True)
    save_pretrained(from_pretrained("memory://models/gpt2"), tmp_path / "second", like="memory://models/gpt2")
    assert (tmp_path / "second" / "merges.txt").read_bytes() == b"#version\na b\n"
    assert not (tmp_path / "second" / "secret.txt").exists()


def test_a_missing_fsspec_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    refused("fsspec", lambda: from_pretrained("memory://models/gpt2"), ModuleNotFoundError)
