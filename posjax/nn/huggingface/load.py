"""Released models as decoders: each device's part is read directly from the files."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from posjax._checks import check, check_choice, describe, nearest
from posjax._mesh import axes_of
from posjax.nn.config import DecoderConfig
from posjax.nn.decoder import Decoder, logical_axes
from posjax.nn.huggingface.family import Family, sizes_of
from posjax.nn.huggingface.files import CONFIG, Entry, TensorFolder, every, open_location, reaching, read_json
from posjax.nn.huggingface.hub import on_disk, pinned
from posjax.nn.huggingface.mxfp4 import Mxfp4, is_packed
from posjax.nn.huggingface.registry import family_of, read_config
from posjax.nn.huggingface.stacked import split_experts
from posjax.nn.huggingface.text_parts import part_of, rename_text, text_values
from posjax.nn.huggingface.views import AxisSizes, View, check_shape

NO_MESH = Mesh(np.empty((), object), ())
"""An empty mesh, for work on arrays of single devices."""
_CHANGES = ("compute_dtype", "remat", "scan_layers", "implementation", "placement")


class Source(Protocol):
    """The tensors of a released model.

    Attributes:
        entries: the tensors, by name.
    """

    entries: Mapping[str, Entry]

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor, memory-mapped if possible."""


def read_values(path: str | Path) -> Mapping[str, Any]:
    """The values of ``config.json`` of a released model, or of the metadata of a GGUF file in the same form.

    Of a release that also sees they are those of its text part, as a model of text alone would have them.

    Raises:
        FileNotFoundError: if the folder or the file does not exist.
        ValueError: for a file that is not JSON, and for a text part that cannot be read.
    """
    if is_gguf(path):
        from posjax.nn.huggingface.gguf import GGUF

        return GGUF(on_disk(path)).values
    return text_values(_read_config_file(path))


def open_source(path: str | Path) -> Source:
    """The tensors of a folder of safetensors files, or of a GGUF file.

    Of a release that also sees they are those of its text part; a warning says what is left out.
    """
    if is_gguf(path):
        from posjax.nn.huggingface.gguf import GGUF

        return GGUF(on_disk(path))
    part = part_of(_read_config_file(path))
    folder = tensor_folder(path)
    if part is None:
        return Mxfp4(folder) if is_packed(folder) else folder
    left_out = f"tensors of {', '.join(part.others)} are left out"
    warnings.warn(f"{path}: only the text part of {part.model_type} is read; {left_out}", stacklevel=3)
    rename_text(folder)
    return folder


def tensor_folder(path: str | Path) -> TensorFolder:
    """The tensors of a folder as they are named in its files, of a release that also sees only those of its text part.

    Of a model at the hub their files are downloaded.
    """
    part = part_of(_read_config_file(path))
    needed = every if part is None else part.has
    return TensorFolder(on_disk(path, needed), needed)


def _read_config_file(path: str | Path) -> dict[str, Any]:
    files, root = open_location(on_disk(path))
    file = f"{root}/{CONFIG}"
    with reaching(path):
        if not files.isfile(file):
            may_be = "a folder with config.json, a GGUF file, or a name at the Hugging Face hub (org/name)"
            raise FileNotFoundError(f"there is no {file}; a released model is {may_be}")
        return read_json(files, file)


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return str(path).endswith(".gguf")


def is_released(path: str | Path) -> bool:
    """Whether a path is a released model: a GGUF file, or a folder with a ``config.json``; or a name at the hub."""
    files, root = open_location(on_disk(path))
    with reaching(path):
        return files.isfile(root if is_gguf(path) else f"{root}/{CONFIG}")


def from_pretrained(
    path: str | Path,
    *,
    dtype: str | None = "float32",
    sharding: Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding] | None = None,
    **changes,
) -> Decoder:
    """A released model as a ``Decoder``.

    Tensors are read one layer at a time, of experts that are apart one expert at a time, and one device's part after
    the other: besides the arrays on the devices, a host needs memory for a device's part of the largest tensor, or for
    the whole tensor if the files are at a URL or packed.

    Args:
        path: a folder in the layout of Hugging Face (``config.json``, ``*.safetensors``), local or a URL of fsspec; a
            local GGUF file; or a name at the Hugging Face hub, ``"org/name"`` or ``"org/name@revision"`` (a branch, a
            tag or a commit), with ``"/file.gguf"`` for a GGUF file there, unless a local path has that name. What is
            needed of it is downloaded into the cache of ``huggingface_hub``. The families are those of
            ``nn.huggingface.FAMILIES``. Of releases that also see (``nn.huggingface.TEXT_PARTS``) the
            text part is read, and a warning says what is left out.
        dtype: of the parameters; None for the dtypes of the files. Numbers of the files that are infinite or NaN stay.
        sharding: computes the sharding of a parameter from the logical names of its axes and its shape; see
            ``logical_axes``. When left out all parameters are on one device.
        changes: fields of ``DecoderConfig`` that do not change the model: ``compute_dtype``, ``remat``,
            ``scan_layers``, ``implementation``, ``placement``. For another scheme use ``Decoder.with_scheme``.

    Raises:
        FileNotFoundError: if the model does not exist.
        PermissionError: for a gated model of the hub, without a token of an account that accepted its licence.
        OSError: if the hub cannot be reached and its cache does not have the model.
        ValueError: for a family or option that ``Decoder`` does not have; for tensors that are missing, unexpected or
            of another shape than in the config, or that hold a number beyond the range of ``dtype``; for a head that
            differs from the embedding although config.json ties them; for pickles.
    """
    for name in changes:
        check_choice("changes", name, _CHANGES)
    check_dtype(dtype)
    path = pinned(path)
    values = read_values(path)
    config = dataclasses.replace(read_config(values), **changes)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    source = open_source(path)
    _split_experts(source, family_of(values), config)
    wanted = _wanted(source, family_of(values), model, dtype, sharding)
    nnx.replace_by_pure_dict(state, read_parameters(source, values, config, wanted))
    return nnx.merge(graph, state)


def read_parameters(source: Source, values: Mapping[str, Any], config: DecoderConfig, wanted: Any) -> Any:
    """The parameters of a decoder from the tensors of a released model.

    Args:
        source: the tensors.
        values: of ``config.json``.
        config: the result of ``read_config(values)``.
        wanted: the tree of parameters as ``jax.ShapeDtypeStruct``, with shardings or without.

    Raises:
        ValueError: for tensors that are missing, unexpected, of another shape or beyond the range of the dtype, and for
            a head that differs from the embedding although config.json ties them.
    """
    family = family_of(values)
    _split_experts(source, family, config)
    parameters = stored(family, config, wanted)
    check_tensors(source, family, config, parameters)
    _check_tied(source, family, config)
    find = partial(_find, source, family, config)

    def read(parameter: Stored) -> jax.Array:
        reader = partial(_read, source, parameter.view, parameter.sizes)
        names = list(map(find, parameter.tensors))
        if parameter.layers is None:
            return reader(parameter.leaf, names[0])
        return (_stacked if parameter.experts is None else _stacked_experts)(reader, parameter.leaf, names)

    with jax.set_mesh(NO_MESH):
        return jax.tree.unflatten(jax.tree.structure(wanted), list(map(read, parameters)))


def _split_experts(source: Source, family: Family, config: DecoderConfig) -> None:
    """Gives stacked experts entries of their own, if the family has a tensor for each."""
    mixtures = [layer for layer in config.every_layer if layer.experts is not None]
    if not mixtures or not isinstance(source, TensorFolder):
        return
    views = family.tensors(mixtures[0])
    if views["block/mlp/up"].of_expert:
        parts = [part for part in ("gate", "up", "down") if f"block/mlp/{part}" in views]
        ends = {part: views[f"block/mlp/{part}"].name.split("{expert}")[1] for part in parts}
        split_experts(source, ends, config.model_dim)


def check_dtype(dtype: str | None) -> None:
    """Raises ValueError for an unsupported dtype of tensors; None is allowed."""
    if dtype is not None:
        check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))


class Stored(NamedTuple):
    """A parameter of a decoder, and the tensors that hold it: one, or one for each of its layers if it is in a stack.

    ``leaf`` is the array of the parameter, or its shape and dtype. ``sizes`` are those of the view's axes. ``layers``
    is None outside a stack. ``experts`` is their number if every expert of a layer has a tensor of its own, or that of
    heads if every head has; the tensors of a layer are then next to each other.
    """

    leaf: Any
    view: View
    sizes: AxisSizes
    tensors: list[str]
    layers: Sequence[int] | None
    experts: int | None = None

    @property
    def layer_of_tensor(self) -> list[int]:
        """The layer of every tensor; -1 outside a stack."""
        return [-1] if self.layers is None else [layer for layer in self.layers for _ in range(self.experts or 1)]


def named_parameters(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of parameters, or of their logical axes, with paths as in ``"stacks/0/0/attention/q"``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, tuple))[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def stored(family: Family, config: DecoderConfig, parameters: Any) -> list[Stored]:
    """Every parameter of a tree with its tensors. Raises ValueError for a parameter without a tensor."""
    described = cache(lambda layer: (family.tensors(layer), sizes_of(layer)))
    stored_parameters = []
    for path, leaf in named_parameters(parameters):
        name, layers = _name_and_layers(path, config)
        views, sizes = described(config.every_layer[0 if layers is None else layers[0]])
        why = f"the layout of {family.model_type} has no tensor for the parameter {path} of shape {leaf.shape}"
        check(name in views, why)
        tensor = views[name].name
        experts = leaf.shape[1] if views[name].of_expert else None
        numbers = [(layer, expert) for layer in layers or () for expert in range(experts or 1)]
        of_layers = [tensor.format(layer=layer, expert=expert, head=expert) for layer, expert in numbers]
        tensors = [tensor] if layers is None else of_layers
        stored_parameters.append(Stored(leaf, views[name], sizes, tensors, layers, experts))
    return stored_parameters


def _name_and_layers(path: str, config: DecoderConfig) -> tuple[str, Sequence[int] | None]:
    """The name in ``Family.tensors`` of the parameter at a path, and its layers if it is in a stack."""
    if not path.startswith("stacks/"):
        return path, None
    _, pattern, number, rest = path.split("/", 3)
    sizes = [(len(layers), repeats) for layers, repeats in config.patterns]
    before = sum(period * repeats for period, repeats in sizes[: int(pattern)])
    period, repeats = sizes[int(pattern)]
    first = before + int(number)
    return f"block/{rest}", range(first, first + period * repeats, period)


def check_tensors(source: Source, family: Family, config: DecoderConfig, parameters: Sequence[Stored]) -> None:
    """Raises ValueError for tensors that are missing, unexpected or of another shape than in the config."""
    used = set()
    for parameter in parameters:
        for name in parameter.tensors:
            written = _find(source, family, config, name)
            entry = source.entries[written]
            check_shape(parameter.view, parameter.sizes, written, entry.shape)
            used.add(entry)
    used |= _constants(source, family, config)
    tied = set(_of_tables(source, family, config)) if config.tied_head else ()
    left = [name for name, entry in source.entries.items() if entry not in used and name not in tied]
    extra = [name for name in left if not (_is_ignored(name, family) or _is_after(name, family, config))]
    check(
        not extra,
        f"unexpected tensors: {', '.join(extra[:3])}{f' and {len(extra) - 3} more' if len(extra) > 3 else ''}; "
        f"config.json of {family.model_type} does not describe them",
    )


def constants(family: Family, config: DecoderConfig) -> dict[str, float]:
    """``Family.constants`` of every layer, by their names."""
    names = family.constants.items()
    return {name.format(layer=n): value for n in range(config.num_layers) for name, value in names}


def _constants(source: Source, family: Family, config: DecoderConfig) -> set[Entry]:
    """The constants in the files, which may leave them out. Raises ValueError for other values, up to bfloat16."""
    found = {_found(source, family, name): value for name, value in constants(family, config).items()}
    found.pop(None, None)
    for name, value in found.items():
        tensor = np.asarray(source.tensor(name), np.float64)
        fits = tensor.shape == () and np.isclose(tensor, value, rtol=0.01, atol=0)
        check(fits, f"tensor {name!r} holds {describe(tensor.tolist())}, but Decoder has the fixed number {value:g}")
    return {source.entries[name] for name in found}


def _check_tied(source: Source, family: Family, config: DecoderConfig) -> None:
    """Raises ValueError for a head that differs from the embedding although the config ties them."""
    names = [name for name in _of_tables(source, family, config) if name] if config.tied_head else []
    if len({source.entries[name] for name in names}) < 2:
        return
    one, other = map(source.tensor, names)
    rows = range(0, len(one), _ROWS)
    same = one.shape == other.shape and all(np.array_equal(one[n : n + _ROWS], other[n : n + _ROWS]) for n in rows)
    check(
        same,
        f"{names[1]} differs from the embedding, though config.json ties them (tie_word_embeddings); set it to false "
        "there to read the model with its own head",
    )


_ROWS = 4096  # rows compared at a time


def _is_ignored(name: str, family: Family) -> bool:
    return any(fnmatchcase(name, end) or fnmatchcase(name, f"*.{end}") for end in family.ignored)


def _is_after(name: str, family: Family, config: DecoderConfig) -> bool:
    """Whether a tensor is of a layer that predicts further tokens."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name) if family.predicts_more else None
    return layer is not None and int(layer[1]) >= config.num_layers


def _of_tables(source: Source, family: Family, config: DecoderConfig) -> list[str | None]:
    """The names in the files of the embedding and the head; None for one that is missing."""
    views = family.tensors(config)
    return [_found(source, family, views[name].name) for name in ("embed", "head")]


def _found(source: Source, family: Family, name: str) -> str | None:
    """The name of a tensor in the files: with the family's prefix, without, or another that files use."""
    in_memory = name
    for part, other in family.inside.items():
        in_memory = in_memory.replace(part, other)
    names = name, name.removeprefix(family.prefix), family.renamed.get(name), in_memory
    return next((each for each in names if each in source.entries), None)


def _find(source: Source, family: Family, config: DecoderConfig, name: str) -> str:
    """The name of a tensor in the files. If the config ties embedding and head, one of the two is enough.

    Raises:
        ValueError: if the tensor is missing.
    """
    written = _found(source, family, name)
    if written is not None:
        return written
    tables = [family.tensors(config)[each].name for each in ("embed", "head")]
    other = next(filter(None, _of_tables(source, family, config)), None) if name in tables else None
    check(
        other is None or config.tied_head,
        f"tensor {name!r} is missing, and config.json does not tie embedding and head; tie_word_embeddings=true there "
        f"would read {other!r} for both",
    )
    check(other is not None, f"tensor {name!r} is missing{nearest(name, tuple(source.entries), 'the files')}")
    return other


def _wanted(source: Source, family: Family, model: Decoder, dtype: str | None, sharding: Callable | None) -> Any:
    """The parameters as ``jax.ShapeDtypeStruct``, with the given dtype or the dtypes of the files, and shardings."""
    abstract = nnx.to_pure_dict(nnx.state(model))
    firsts = [_find(source, family, model.config, each.tensors[0]) for each in stored(family, model.config, abstract)]
    dtypes = jax.tree.unflatten(jax.tree.structure(abstract), [source.entries[first].dtype for first in firsts])

    def struct(leaf: jax.ShapeDtypeStruct, file_dtype: np.dtype, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        leaf_sharding = None if sharding is None else sharding(axes, leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, dtype or file_dtype, sharding=leaf_sharding)

    return jax.tree.map(struct, abstract, dtypes, logical_axes(model))


def _read(
    source: Source, view: View, sizes: AxisSizes, struct: jax.ShapeDtypeStruct, names: str | Sequence[str]
) -> jax.Array:
    """A parameter, or one layer of it, from its tensor; or experts of a layer, one for every shard, from theirs."""
    dtype = np.dtype(struct.dtype)

    def part(index, name=names):
        return dataclasses.replace(view, name=name).read(source.tensor(name), sizes, index, dtype)

    def of_expert(index):
        (name,) = names[index[0]]
        return part(index[1:], name)[None]

    read = part if isinstance(names, str) else of_expert
    return _placed(read, struct.shape, _sharding(struct))


def _placed(read: Callable, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """An array on its devices, of which ``read`` gives the part at an index: each once, and one after the other.

    ``jax.make_array_from_callback`` has the parts of all devices on the host at the same time, also equal ones.
    """
    places = sharding.addressable_devices_indices_map(shape)
    devices: dict[str, list] = {}  # by the part, since indices cannot be keys
    for device, index in places.items():
        devices.setdefault(str(index), []).append(device)
    arrays = []
    for same in devices.values():
        part = read(places[same[0]])
        arrays += jax.block_until_ready([jax.device_put(part, device) for device in same])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _stacked(read: Callable, struct: jax.ShapeDtypeStruct, names: Sequence[str]) -> jax.Array:
    """The layers, written one after the other into one array on the devices."""
    whole = _sharding(struct)
    one = jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype, sharding=_of_layer(whole))
    stack = _zeros(struct, whole)
    put = _put(whole)
    for row, name in enumerate(names):
        stack = put(stack, read(one, name), row, 0)
        # Wait, so that only one layer at a time is on the host: dispatched work keeps its arguments alive.
        jax.block_until_ready(stack)
    return stack


def _stacked_experts(read: Callable, struct: jax.ShapeDtypeStruct, names: Sequence[str]) -> jax.Array:
    """The experts of all layers, written into one array; every device reads one of its own experts at a time."""
    whole = _sharding(struct)
    count = struct.shape[1]
    shards, own = _of_experts(whole)
    each = count // shards
    one = jax.ShapeDtypeStruct((shards, *struct.shape[2:]), struct.dtype, sharding=own)
    stack = _zeros(struct, whole)
    put = _put_experts(whole)
    for row in range(struct.shape[0]):
        of_layer = names[row * count : (row + 1) * count]
        for number in range(each):
            stack = put(stack, read(one, of_layer[number::each]), row, number)
            jax.block_until_ready(stack)  # so that only one expert of a device at a time is on the host
    return stack


def _zeros(struct: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """Zeros that every device makes by itself: ``jnp.zeros`` with a ``device`` copies a shard of the host to each."""
    return jax.jit(partial(jnp.zeros, struct.shape, struct.dtype), out_shardings=sharding)()


def _of_experts(sharding: Sharding) -> tuple[int, Sharding]:
    """Over how many shards experts are split, and the sharding of an array with one expert for each of them."""
    if not isinstance(sharding, NamedSharding):
        return 1, sharding
    layer = _of_layer(sharding)
    return math.prod(layer.mesh.shape[axis] for part in layer.spec[:1] for axis in axes_of(part)), layer


def _put_experts(sharding: Sharding) -> Callable:
    """A program that writes one expert of every shard into a layer's row of a stack."""

    def put(stack, experts, row, number):
        split = stack.reshape(stack.shape[0], len(experts), -1, *stack.shape[2:])
        places = (row, 0, number, *[0] * (experts.ndim - 1))
        return jax.lax.dynamic_update_slice(split, experts[None, :, None], places).reshape(stack.shape)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _put(sharding: Sharding) -> Callable:
    """A program that writes a layer into its row of a stack; JAX compiles it once for every shape and sharding."""
    return jax.jit(jax.lax.dynamic_update_index_in_dim, static_argnums=3, donate_argnums=0, out_shardings=sharding)


def _sharding(struct: jax.ShapeDtypeStruct) -> Sharding:
    if struct.sharding is not None:
        return struct.sharding
    return SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])


def _of_layer(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    layers = sharding.spec[:1]
    rest = sharding.spec[1:]
    whole = all(axis is None for axis in layers)
    check(whole, f"sharding: the axis of layers must be whole on every device, found {sharding.spec}")
    return NamedSharding(sharding.mesh, PartitionSpec(*rest))
