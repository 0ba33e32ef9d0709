"""Writing decoders in the layout of released models: every device's part is written directly into the files."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather, sync_global_devices

from posjax._checks import check, check_no_pointer, check_positive
from posjax.nn.config import DecoderConfig
from posjax.nn.decoder import Decoder
from posjax.nn.huggingface.family import Family, check_same
from posjax.nn.huggingface.files import (
    CONFIG,
    COPIED,
    INDEX,
    SUFFIX,
    FileLayout,
    create,
    is_local,
    lay_out,
    names_in,
    open_location,
    reaching,
    sync,
    writable,
)
from posjax.nn.huggingface.hub import on_disk, pinned
from posjax.nn.huggingface.load import NO_MESH, Stored, check_dtype, constants, is_gguf, read_values, stored
from posjax.nn.huggingface.registry import family_of, fitting_family, read_config, write_config
from posjax.nn.huggingface.views import View, check_fits, overflow

# Keys of `like` that are not copied: other versions of transformers use them for values written here, or they are no
# longer valid.
_STALE = ("rope_scaling", "rope_theta", "rope_parameters", "layer_types", "sliding_window", "torch_dtype", "dtype")
_STALE += ("transformers_version", "quantization_config", "partial_rotary_factor", "rope_local_base_freq")
_STALE += ("auto_map", "original_max_position_embeddings", "rotary_pct", "rotary_emb_base", "sliding_window_pattern")
_STALE += ("per_layer_config",)


_LONGEST_PATH = 4096  # bytes; the name is broadcast as an array of fixed size
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_pretrained(
    decoder: Decoder,
    path: str | Path,
    *,
    like: str | Path | None = None,
    family: str | None = None,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes a decoder in the layout of Hugging Face: ``config.json`` and ``*.safetensors``.

    Every process writes its own devices' parts, so all processes must see the same folder. For a URL the files are
    first written to the temporary folder (``TMPDIR``), which all processes must see and which needs space for the
    model. Files get their final names after everything is written.

    Args:
        decoder: the model.
        path: the folder, local or a URL of fsspec. It must not already hold a model.
        like: a released model, as in ``from_pretrained``; its other files (the tokenizer, ...) and other keys of
            ``config.json`` are copied.
        family: the ``model_type`` to write; when left out that of ``like``, or without ``like`` the first family whose
            layout can store the config.
        dtype: of the tensors; the dtype of the parameters when left out. Numbers that are infinite or NaN stay.
        max_file_bytes: the largest size of a file, unless one tensor is larger.

    Raises:
        ValueError: for a decoder that the layout cannot store (CoCA, ReRoPE, ...), for a number beyond the range of
            ``dtype``, and for a folder that holds a model. Nothing is written then.
    """
    alone = "decoder has adapters, which the layout does not store; merge_adapters makes one without"
    check(decoder.config.lora is None, f"{alone}, save_adapter writes them alone")
    check_positive("max_file_bytes", max_file_bytes)
    check_dtype(dtype)
    like = None if like is None else pinned(like)
    like_values = {} if like is None else read_values(like)
    chosen = _family(decoder.config, family, like_values)
    values = _values(decoder.config, chosen, like_values)
    parameters = stored(chosen, decoder.config, nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    parameters += _constants(chosen, decoder.config, parameters[0].leaf.dtype)
    tensors = _tensors(parameters, dtype)
    values["dtype"] = next(iter(tensors.values()))[0].name
    files, root = open_location(path)
    with reaching(path):
        check(not files.isfile(root), f"{path} is a file; choose a folder")
        _check_empty(path, names_in(files, root))
    _check_range(parameters, dtype)
    layouts = lay_out(tensors, max_file_bytes)
    first = jax.process_index() == 0
    copied = {} if like is None or not first else files_beside(like)
    others = copied | {CONFIG: f"{json.dumps(values, indent=2)}\n".encode()}
    with _partial(files, root) as partial:
        if first:
            _prepare(partial, layouts, others)
        sync_global_devices("save_pretrained: created")
        _write(parameters, layouts, partial)
        sync_global_devices("save_pretrained: written")
        if first:
            _publish(partial, files, root)
        sync_global_devices("save_pretrained: published")


def _constants(family: Family, config: DecoderConfig, dtype: np.dtype) -> list[Stored]:
    """``Family.constants`` as parameters."""
    values = constants(family, config).items()
    return [Stored(jnp.asarray(value, dtype), View(name, "->"), {}, [name], None) for name, value in values]


def _check_empty(path: str | Path, names: Sequence[str]) -> None:
    """Raises ValueError for a folder with a config, an index or tensors."""
    model_files = [name for name in names if name in (CONFIG, INDEX) or name.endswith(SUFFIX)]
    check(not model_files, f"{path} holds a model already; choose another folder (found {', '.join(model_files[:3])})")


def _check_range(parameters: Sequence[Stored], dtype: str | None) -> None:
    """Raises ValueError, on every process, for a number that would be infinite in the dtype."""
    narrowed = [each for each in parameters if dtype and not np.can_cast(each.leaf.dtype, np.dtype(dtype))]
    if not narrowed:
        return
    overflows = {name: 0.0 for parameter in narrowed for name in parameter.tensors}
    for name, _, values in (part for parameter in narrowed for part in _parts(parameter)):
        overflows[name] = max(overflows[name], overflow(values, np.dtype(dtype)))
    everywhere = process_allgather(np.array(list(overflows.values()))).reshape(-1, len(overflows)).max(0)
    for name, largest in zip(overflows, everywhere, strict=True):
        check_fits(name, float(largest), np.dtype(dtype))


def _values(config: DecoderConfig, family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """The new ``config.json``: the keys of ``like`` that are still valid, and those of the decoder.

    Without ``like`` the special tokens are null, because transformers would otherwise use the family's defaults.
    """
    kept = {key: value for key, value in given.items() if key not in (*_STALE, *family.aliases)}
    values = (kept or dict.fromkeys(_TOKENS)) | write_config(config, family)
    check_same(family, config, read_config(values))
    return values


@contextmanager
def _partial(files: Any, root: str) -> Iterator[Path]:
    """A new folder to write into until everything is written: next to the target, or temporary for a URL.

    The folder is removed, also if writing fails; only a killed process leaves it behind.
    """
    parent = Path(root).parent if is_local(files) else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{Path(root).name}.partial-", dir=parent) as folder:
        yield Path(_of_first(folder), "model")


def _of_first(folder: str) -> str:
    """The folder name of the first process."""
    named = broadcast_one_to_all(np.frombuffer(folder.encode().ljust(_LONGEST_PATH), np.uint8))
    return bytes(np.asarray(named, np.uint8)).decode().rstrip()


def _prepare(folder: Path, layouts: list[FileLayout], others: Mapping[str, bytes]) -> None:
    """Creates the folder with all files, with space for the tensors."""
    folder.mkdir()
    create(folder, layouts)
    for name, content in others.items():
        (folder / name).write_bytes(content)


def _family(config: DecoderConfig, name: str | None, like: Mapping[str, Any]) -> Family:
    if name is None and not like:
        return fitting_family(config)
    return family_of({"model_type": name} if name is not None else like)


def _tensors(parameters: Sequence[Stored], dtype: str | None) -> dict[str, tuple]:
    """Dtype and shape of every tensor, in the order of layers."""
    descriptions = {}
    for each in parameters:
        for layer, name in zip(each.layer_of_tensor, each.tensors, strict=True):
            descriptions[name] = (layer, np.dtype(dtype or each.leaf.dtype), each.view.tensor_shape(each.sizes))
    ordered = sorted(descriptions.items(), key=lambda item: (item[1][0], item[0]))
    return {name: (kind, shape) for name, (_, kind, shape) in ordered}


def _write(parameters: Sequence[Stored], layouts: list[FileLayout], folder: Path) -> None:
    """Writes every shard of this process, and waits for the disk."""
    entries = {name: entry for layout in layouts for name, entry in layout.entries.items()}
    with jax.set_mesh(NO_MESH):
        for parameter in parameters:
            for name, index, values in _parts(parameter):
                target = writable(folder, entries[name])
                parameter.view.write(target, parameter.sizes, index, values.astype(target.dtype))
    for layout in layouts:
        sync(folder / layout.file)


def _parts(parameter: Stored) -> Iterator[tuple[str, tuple, np.ndarray]]:
    """For every shard of this process, one layer at a time: tensor name, index in the parameter, and numbers."""
    for shard in parameter.leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        if parameter.layers is None:
            yield parameter.tensors[0], shard.index, np.asarray(shard.data)
            continue
        if parameter.experts is None:
            for row, name in enumerate(parameter.tensors):
                yield name, shard.index[1:], np.asarray(shard.data[row])
            continue
        count = parameter.experts
        for row, expert in np.ndindex(len(parameter.layers), shard.data.shape[1]):
            name = parameter.tensors[row * count + (shard.index[1].start or 0) + expert]
            yield name, shard.index[2:], np.asarray(shard.data[row, expert])


def files_beside(like: str | Path) -> dict[str, bytes]:
    """The tokenizer and similar files, by name, of a released folder or a GGUF file."""
    if is_gguf(like):
        from posjax.nn.huggingface.gguf import GGUF

        return {name: content.encode() for name, content in GGUF(on_disk(like)).tokenizer_files().items()}
    files, root = open_location(on_disk(like))
    contents = {name: files.cat_file(f"{root}/{name}") for name in COPIED if files.isfile(f"{root}/{name}")}
    for name, content in contents.items():
        check_no_pointer(content, f"{root}/{name}")
    return contents


def _publish(partial: Path, files: Any, root: str) -> None:
    """Moves the written files to their target, ``config.json`` last."""
    names = sorted((file.name for file in partial.iterdir()), key=lambda name: name == CONFIG)
    if not is_local(files):
        for name in names:
            files.put_file(str(partial / name), f"{root}/{name}")
        return
    Path(root).mkdir(parents=True, exist_ok=True)
    for name in names:
        (partial / name).replace(Path(root) / name)
