"""Safetensors files: posjax and the package safetensors read each other's files; broken files; file systems."""

import json
import sys
import tempfile

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest
from nn.huggingface import released

from posjax.nn import from_pretrained, save_pretrained
from posjax.nn.huggingface.files import INDEX, TensorFolder, create, is_local, lay_out

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


def test_one_file_needs_no_index(tmp_path):
    assert released.write_tensors(tmp_path, SMALL, 10**6) == ["model.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(read(tmp_path), SMALL)


@pytest.mark.parametrize("letters", range(1, 10))
def test_tensors_are_aligned(letters):
    (layout,) = lay_out({"b" * letters: (np.dtype(np.float32), (2, 3)), "a": (np.dtype(np.int16), (4,))}, 10**6)
    assert (len(layout.header) % 8, layout.entries["b" * letters].start) == (0, len(layout.header))


def test_a_created_file_has_its_whole_size_and_holds_zeros(tmp_path):
    (layout,) = lay_out({name: (tensor.dtype, tensor.shape) for name, tensor in SMALL.items()}, 10**6)
    create(tmp_path, [layout])
    assert (tmp_path / "model.safetensors").stat().st_size == len(layout.header) + 6 * 4 + 4 * 2
    assert_same(read(tmp_path), {name: np.zeros_like(tensor) for name, tensor in SMALL.items()})


def test_only_files_of_the_index_are_read(tmp_path):
    released.write_tensors(tmp_path, SMALL, 1)
    (tmp_path / "more.safetensors").write_bytes(b"not even a file of tensors")
    assert_same(read(tmp_path), SMALL)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet_transformers")
def test_model_safetensors_is_preferred_to_an_index_as_in_transformers(tmp_path):
    """transformers prefers ``model.safetensors``, so the files of the index need not even exist."""
    transformers = pytest.importorskip("transformers")
    values = released.CASES["llama"]
    whole, parts = (released.random_decoder(values, seed) for seed in (0, 1))
    save_pretrained(whole, tmp_path / "out")
    save_pretrained(parts, tmp_path / "parts", max_file_bytes=40_000)
    for file in (tmp_path / "parts").glob("model*"):
        file.rename(tmp_path / "out" / file.name)
    assert (tmp_path / "out" / INDEX).exists()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in read(tmp_path / "out").items():
        np.testing.assert_array_equal(tensor, found[name].numpy())
    assert_same_parameters(from_pretrained(tmp_path / "out"), whole)


def test_model_safetensors_is_preferred_to_other_files(tmp_path):
    released.write_tensors(tmp_path, SMALL, 10**6)
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
    ("index", "words"),
    [
        (None, ("tensor 'a'", "x.safetensors", "y.safetensors")),
        ({"b": "y", "c": "x"}, ("tensor 'a'", "x.safetensors", "y.safetensors")),
        ({"a": "y", "b": "x"}, ("tensor 'b'", "x.safetensors", "does not")),
        ({"a": "x", "b": "y", "c": "y"}, ("tensor 'c'", "y.safetensors", "does not")),
    ],
    ids=("no index", "not in the index", "in another file", "in no file"),
)
def test_a_tensor_without_one_place_is_refused(index, words, tmp_path):
    released.refuse(words, TensorFolder, two_files(tmp_path, index))


def test_a_tensor_without_elements_has_no_bytes_after_the_header(tmp_path):
    content = {"none": np.zeros((0, 3), np.float32)}
    released.write_tensors(tmp_path, content, 10**6)
    assert_same(read(tmp_path), content)


# --- broken files -----------------------------------------------------------------------------------------------------


def file(header, data=bytes(8), size=None):
    """The bytes of a file; its header, or the size of the header, may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"one": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
BROKEN = {
    "empty": (b"", "is not a safetensors file: it has 0 bytes"),
    "short": (b"1234567", "is not a safetensors file: it has 7 bytes"),
    "header too long": (file(one(), size=500), "is cut short or not a safetensors file: its header ends after"),
    "header of 2^63 bytes": (file(one(), size=2**63), "is cut short or not a safetensors file: its header ends"),
    "pointer of git lfs": (POINTER, "{} is only a pointer of git-lfs, not the file: run `git lfs pull`"),
    "a name twice": (file(b'{"one": 1, "one": 2}'), "{} is broken: its header has 'one' twice"),
    "not JSON": (file(b"{{{{"), "is not a safetensors file: its header is not JSON"),
    "too deep": (file(b"[" * 100_000), "is not a safetensors file: its header is not JSON"),
    "not text": (file(b"\xff\xfe{}"), "is not a safetensors file: its header is not JSON"),
    "a list": (file([1]), "is not a safetensors file: its header is [1], not an object"),
    "cut short": (file(one(), bytes(7)), "is cut short: tensor 'one' ends after the end of the file"),
    "unknown dtype": (file(one("F8_E4M3")), "tensor 'one' in {} has dtype 'F8_E4M3'; F64, F32, F16, BF16, "),
    "too few bytes": (file(one(shape=(3,))), "is broken: tensor 'one' has 8 bytes, which do not fit its shape (3,)"),
    "too many bytes": (file(one(shape=(1,))), "is broken: tensor 'one' has 8 bytes, which do not fit its shape (1,)"),
    "ends before it starts": (file(one(offsets=(8, 0))), "is broken: tensor 'one' has -8 bytes"),
    "starts in the header": (file(one(offsets=(-8, 0))), "is broken: its header has {{'dtype': 'F32', "),
    "negative shape": (file(one(shape=(-1, -2))), "is broken: its header has {{'dtype': 'F32', 'shape': [-1, -2], "),
    "no whole shape": (file(one(shape=(2.0,))), "is broken: its header has {{'dtype': 'F32', 'shape': [2.0], "),
    "one offset": (file(one(offsets=(0,))), "is broken: its header has {{'dtype': 'F32', "),
    "a dtype that is a list": (file(one(["F32"])), "is broken: its header has {{'dtype': ['F32'], "),
    "no shape": (file({"one": {"dtype": "F32"}}), "is broken: its header has {{'dtype': 'F32'}} for tensor 'one'"),
    "a number for a tensor": (file({"one": 3}), "is broken: its header has 3 for tensor 'one'"),
}


def assert_refused(path, words):
    """The error is one line with these words; ``{}`` in them is the path of the file."""
    with pytest.raises(ValueError, match="safetensors") as caught:
        TensorFolder(path)
    text = str(caught.value)
    assert "\n" not in text
    assert words.format(path / "model.safetensors") in text, text
    assert str(path) in text


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(name, tmp_path):
    content, words = BROKEN[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, words)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00005.safetensors", "tokenizer.model"])
def test_a_pointer_of_git_lfs_is_named_with_what_to_do(name, tmp_path):
    decoder = released.random_decoder(released.CASES["falcon"])
    save_pretrained(decoder, tmp_path / "there", max_file_bytes=40_000)
    (tmp_path / "there" / name).write_bytes(POINTER)
    words = [str(tmp_path / "there" / name), "pointer of git-lfs", "git lfs pull"]
    if name == "tokenizer.model":
        released.refuse(words, save_pretrained, decoder, tmp_path / "copy", like=tmp_path / "there")
        assert not (tmp_path / "copy").exists()
    else:
        released.refuse(words, from_pretrained, tmp_path / "there")


def test_every_file_that_is_cut_is_refused(tmp_path):
    """At any byte: in the size, in the header, and in the tensors."""
    released.write_tensors(tmp_path, SMALL, 10**6)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert_refused(tmp_path, "is not a safetensors file" if size < 8 else "is cut short")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[1]", "must hold an object, found list"),
        ("{", "is not valid JSON"),
        ("{}", "is broken: it has no weight_map"),
        ('{"weight_map": ["a"]}', "is broken: it has no weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names 'gone.safetensors', which does not exist"),
    ],
)
def test_a_broken_index(index, words, tmp_path):
    released.write_tensors(tmp_path, SMALL, 1)
    (tmp_path / INDEX).write_text(index)
    assert_refused(tmp_path, words)


def test_pickles_are_refused(tmp_path):
    released.write_config(tmp_path, released.CASES["gpt2"])
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read at all")
    with pytest.raises(
        ValueError, match=r"a pickle \(pytorch_model.bin\), which can run code when it is read; convert"
    ):
        from_pretrained(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no {tmp_path}/gone/config.json"):
        from_pretrained(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=f"there is no {tmp_path}/config.json"):
        from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/gone has no \*.safetensors file"):
        TensorFolder(tmp_path / "gone")
    released.write_config(tmp_path, released.CASES["gpt2"])
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no \*.safetensors file"):
        from_pretrained(tmp_path)


def test_a_config_that_is_not_an_object_is_refused(tmp_path):
    cases = (
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold an object, found list"),
    )
    for text, words in cases:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"{tmp_path}/config.json {words}"):
            from_pretrained(tmp_path)


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
    with pytest.raises(
        ModuleNotFoundError, match=r"^memory://models/gpt2: .* package fsspec: pip install posjax\[hf\]$"
    ):
        from_pretrained("memory://models/gpt2")


def test_a_file_system_that_caches_copies_is_not_local(memory, tmp_path):
    """The name ``filecache`` contains ``file``, but its paths are those of the file system that it copies from."""
    copies = fsspec.filesystem("filecache", fs=memory, cache_storage=str(tmp_path))
    assert not is_local(copies)
    assert not is_local(memory)
    assert is_local(fsspec.filesystem("file"))
