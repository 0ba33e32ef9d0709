"""Adapters in the layout of peft: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written.

A module's adapter is ``lora_A`` [r, inputs] and ``lora_B`` [outputs, r]. Where several of our projections are one
module (queries, keys and values of Phi-3), each of ours has its own rows of B; written, their ranks are added: A of the
module is ours above each other, and B has a block for each. That is the same function.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax._checks import check, check_positive, describe
from posjax.nn.config import DecoderConfig
from posjax.nn.decoder import Decoder
from posjax.nn.huggingface.family import Family
from posjax.nn.huggingface.files import TensorFolder, is_local, lay_out, names_in, open_location, reaching, read_json
from posjax.nn.huggingface.load import Stored, named_parameters, stored
from posjax.nn.huggingface.registry import family_of, fitting_family
from posjax.nn.huggingface.views import View
from posjax.nn.lora import projections
from posjax.nn.specs import LoRA

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")
_RANK = "lora"  # the name of the rank in the patterns of views
_CHANGES_MORE = {
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "velora_config": None,
    "monteclora_config": None,
}
"""Options of peft that change more than ``W x + s B (A x)``, each with the value that is read."""
_ON_OTHER_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that begin so: the adapter belongs to weights that peft changed before training."""


def save_adapter(
    decoder: Decoder, path: str | Path, *, family: str | None = None, base: str = "", trained: Sequence[str] = ()
) -> None:
    """Writes the adapters of a decoder in peft's layout; peft reads them over the same released model.

    Args:
        decoder: with adapters.
        path: the folder, local. It must not already hold an adapter.
        family: the ``model_type`` of the released model; when left out as in ``save_pretrained``.
        base: the name or path of the released model, for ``base_model_name_or_path``.
        trained: patterns of the names of other parameters that differ from those of the released model, as in
            ``"embed"`` or ``"*norm*"``: their modules are written whole (peft's ``modules_to_save``).

    Raises:
        ValueError: for a decoder without adapters, an adapter or a trained parameter that is no module's or part of
            another one, an adapter of an MLP in a model with experts, which peft 0.21 takes for one of experts, and a
            folder that holds an adapter. Nothing is written then.
    """
    check(decoder.config.lora is not None, "decoder has no adapters; save_pretrained writes it")
    files, root = open_location(path)
    check(is_local(files), f"{path}: an adapter is written into a local folder")
    taken = [name for name in names_in(files, root) if name in (SETTINGS, TENSORS)]
    check(not taken, f"{path} holds an adapter already; choose another folder")
    _check_mixture(decoder)
    layout = _layout_of(decoder, family)
    modules = _modules(layout, decoder)
    kept = _whole_modules(layout, trained, modules)
    values = _settings(layout, decoder.config.lora, modules, kept) | {"base_model_name_or_path": base or None}
    embedding, head = _tables(layout.family, decoder.config)
    if decoder.config.tied_head and embedding in kept:
        kept[head] = kept[embedding]
        values["ensure_weight_tying"] = True
    _write(Path(root), values, _arrays(decoder.config.lora, modules) | kept)


def load_adapter(decoder: Decoder, path: str | Path, *, family: str | None = None) -> Decoder:
    """A released model with an adapter that peft wrote.

    Ranks and scales that differ between modules (``rank_pattern``, ``alpha_pattern``) are read: a smaller rank is
    filled with zeros, which stay zero in training, and B has what a scale differs by. Layers that peft left out have
    adapters of zeros. Weights of ``modules_to_save`` replace those of the decoder.

    Args:
        decoder: the model that the adapter was trained on, without adapters.
        path: the folder, local or a URL of fsspec.
        family: the ``model_type`` of the released model; when left out as in ``save_pretrained``.

    Raises:
        FileNotFoundError: if the folder has no adapter.
        ValueError: for another method than LoRA, an option that changes more than ``W x + s B (A x)`` (DoRA, PiSSA,
            biases, ...), and tensors that are no adapter of a projection of the decoder; with their names.
    """
    check(decoder.config.lora is None, "decoder has adapters already; merge_adapters makes one without")
    chosen = _family(decoder.config, family)
    parameters = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    spec, read = read_adapter(path, chosen, decoder.config, parameters)
    config = dataclasses.replace(decoder.config, lora=spec)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, read)
    return nnx.merge(graph, state)


# --- names ------------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The parameters of a decoder without adapters, by their names, with their tensors."""

    family: Family
    parameters: dict[str, Stored]


class _Part(NamedTuple):
    """A projection of one layer as a part of a module: the views of its A and B, with the sizes of their axes.

    ``inputs_first`` says whether the weight is stored as ``[inputs, outputs]``.
    """

    a: View
    b: View
    sizes: dict[str, int]
    inputs_first: bool


def _family(config: DecoderConfig, name: str | None) -> Family:
    return fitting_family(config) if name is None else family_of({"model_type": name})


def _layout_of(decoder: Decoder, family: str | None) -> _Layout:
    config = dataclasses.replace(decoder.config, lora=None)
    named = named_parameters(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    plain = _tree({name: leaf for name, leaf in named if "/adapters/" not in name})
    return _layout(_family(config, family), config, plain)


def _layout(family: Family, config: DecoderConfig, parameters: Any) -> _Layout:
    names = [name for name, _ in named_parameters(parameters)]
    return _Layout(family, dict(zip(names, stored(family, config, parameters), strict=True)))


def _tree(leaves: Mapping[str, Any]) -> dict:
    """Leaves by their paths as a tree of dicts, in the order of their paths."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *inside, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        node = tree
        for part in inside:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _in_memory(family: Family, name: str) -> str:
    """The name of a tensor in a model of transformers."""
    for part, other in family.inside.items():
        name = name.replace(part, other)
    return name


def _module_of(family: Family, tensor: str) -> str:
    """The module of a tensor. Raises ValueError for a tensor that is no module's weight."""
    name = _in_memory(family, tensor)
    check(name.endswith(".weight"), f"{tensor} of {family.model_type} is not the weight of a module, as peft needs")
    return name.removesuffix(".weight")


def _tables(family: Family, config: DecoderConfig) -> tuple[str, str]:
    """The names of the embedding and the head."""
    views = family.tensors(config)
    return _in_memory(family, views["embed"].name), _in_memory(family, views["head"].name)


def _part(parameter: Stored, inputs: int, rank: int) -> _Part:
    """The views of A and B of a projection, from that of its weight.

    The axes of the weight's tensor are those of inputs and those of outputs, in either order.
    """
    left, right = (_groups(side) for side in parameter.view.pattern.split("->"))
    into, out = right[:inputs], right[inputs:]
    of_inputs = [axis for axis in left if _atoms(axis) == _atoms(" ".join(into))]
    fits = len(left) == 2 and len(of_inputs) == 1
    check(fits, f"{parameter.view.name}: its axes are not inputs and outputs, {parameter.view.pattern!r}")
    of_outputs = next(axis for axis in left if axis is not of_inputs[0])
    a = View(parameter.view.name, f"{_RANK} {of_inputs[0]} -> {' '.join(into)} {_RANK}")
    b = View(parameter.view.name, f"{of_outputs} {_RANK} -> {_RANK} {' '.join(out)}", parameter.view.part)
    return _Part(a, b, {**parameter.sizes, _RANK: rank}, left[0] is of_inputs[0])


def _groups(side: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", side)


def _atoms(axis: str) -> list[str]:
    return axis.replace("(", " ").replace(")", " ").split()


def _ends(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """The shortest ends of the names of modules that the name of no other module has, each once."""

    def end(module: str) -> str:
        parts = module.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        return next(each for each in ends if not any(other.endswith(each) for other in others))

    return sorted({end(module) for module in modules})


# --- writing ----------------------------------------------------------------------------------------------------------


def _check_mixture(decoder: Decoder) -> None:
    """Raises ValueError for adapters of MLPs in a model with experts.

    peft 0.21 converts targets named ``gate_proj``, ``up_proj`` and ``down_proj`` of such models to experts.
    """
    mlps = [name.split("/", 3)[-1] for name, _ in _adapted(decoder) if "/mlp/" in name]
    check(
        decoder.config.experts is None or not mlps,
        f"peft takes the adapter of {mlps[0] if mlps else None} for one of the experts beside it; merge the adapters, "
        "or give only attention some, by lora.paths",
    )


class _Written(NamedTuple):
    """The adapter of a projection in one layer: its views, and its arrays."""

    part: _Part
    a: np.ndarray
    b: np.ndarray


def _modules(layout: _Layout, decoder: Decoder) -> dict[str, list[_Written]]:
    """The adapters of every module, by its name."""
    found: dict[str, list[_Written]] = {}
    for name, module in _adapted(decoder):
        own = name.rpartition("/")[2]
        adapter, parameter = module.adapters[own], layout.parameters[name]
        arrays = [np.asarray(leaf.get_value(), np.float32) for leaf in (adapter.a, adapter.b)]
        part = _part(parameter, module.PROJECTIONS[own], decoder.config.lora.rank)
        for row, tensor in enumerate(parameter.tensors):
            written = _Written(part, *(array[row] for array in arrays))
            found.setdefault(_module_of(layout.family, tensor), []).append(written)
    return found


def _adapted(decoder: Decoder) -> Iterator[tuple[str, nnx.Module]]:
    """The paths of the parameters with adapters, and the modules that hold them."""
    for p, stack in enumerate(decoder.stacks):
        for n, block in enumerate(stack):
            for name, module in projections(block):
                if name.rpartition("/")[2] in module.adapters:
                    yield f"stacks/{p}/{n}/{name}", module


def _arrays(spec: LoRA, modules: Mapping[str, Sequence[_Written]]) -> dict[str, np.ndarray]:
    """``lora_A`` and ``lora_B`` of every module."""
    arrays = {}
    for module, parts in modules.items():
        first, rank = parts[0].part, spec.rank
        a = np.zeros((len(parts) * rank, *first.a.tensor_shape(first.sizes)[1:]), np.float32)
        b = np.zeros((*first.b.tensor_shape(first.sizes)[:1], len(parts) * rank), np.float32)
        for number, (part, own_a, own_b) in enumerate(parts):
            rows = slice(number * rank, (number + 1) * rank)
            block = np.zeros(part.b.tensor_shape(part.sizes), np.float32)
            part.a.write(a[rows], part.sizes, _whole(own_a), own_a)
            part.b.write(block, part.sizes, _whole(own_b), own_b)
            b[:, rows] = block
        arrays |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return arrays


def _whole(array: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in array.shape)


def _whole_modules(layout: _Layout, trained: Sequence[str], adapted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All tensors of the modules with parameters that the patterns match."""
    chosen = [
        name
        for name in layout.parameters
        if any(fnmatchcase(name, pattern) and "/adapters/" not in pattern for pattern in trained)
    ]
    tensors = {tensor for name in chosen for tensor in layout.parameters[name].tensors}
    modules = {_in_memory(layout.family, tensor).rpartition(".")[0] for tensor in tensors}
    both = sorted(modules & adapted.keys())
    why = "has an adapter, and is trained itself or has a trained bias, which peft cannot store; merge the adapters"
    check(not both, f"{both[0] if both else None} {why}")
    return {
        name: array
        for parameter in layout.parameters.values()
        for name, array in _tensors(layout.family, parameter, lambda tensor: tensor.rpartition(".")[0] in modules)
    }


def _tensors(family: Family, parameter: Stored, wanted: Callable[[str], bool]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a parameter that are wanted by their names in memory."""
    for row, tensor in enumerate(parameter.tensors):
        name = _in_memory(family, tensor)
        if not wanted(name):
            continue
        alone = parameter.view.part is None and parameter.experts is None
        check(alone, f"{tensor} holds several parameters; only whole modules can be written beside adapters")
        values = np.asarray(parameter.leaf if parameter.layers is None else parameter.leaf[row], np.float32)
        array = np.zeros(parameter.view.tensor_shape(parameter.sizes), np.float32)
        parameter.view.write(array, parameter.sizes, _whole(values), values)
        yield name, array


def _settings(
    layout: _Layout, spec: LoRA, modules: Mapping[str, Sequence[_Written]], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """``adapter_config.json``."""
    every = [
        _in_memory(layout.family, tensor).rpartition(".")[0]
        for parameter in layout.parameters.values()
        for tensor in parameter.tensors
    ]
    whole = sorted({name.rpartition(".")[0] for name in kept})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": spec.rank_stabilized,
        "fan_in_fan_out": any(parts[0].part.inputs_first for parts in modules.values()),
        "target_modules": _ends(list(modules), [module for module in every if module not in modules]),
        "modules_to_save": _ends(whole, [module for module in every if module not in whole]) or None,
    } | _patterns(spec, modules, every)


def _patterns(spec: LoRA, modules: Mapping[str, Sequence[_Written]], every: Sequence[str]) -> dict[str, Any]:
    """The ranks and scales of modules that hold several of our projections."""
    ranks, alphas = {}, {}
    for parts in sorted({len(parts) for parts in modules.values()} - {1}):
        several = [module for module, found in modules.items() if len(found) == parts]
        ends = [re.escape(end) for end in _ends(several, [module for module in every if module not in several])]
        ranks |= dict.fromkeys(ends, parts * spec.rank)
        alphas |= dict.fromkeys(ends, spec.alpha * (parts**0.5 if spec.rank_stabilized else parts))
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _write(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes both files, the settings last."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {f"{_PREFIX}{name}": (array.dtype, array.shape) for name, array in sorted(tensors.items())}
    (layout,) = lay_out(described, most=sum(array.nbytes for array in tensors.values()) + 1)
    with (folder / TENSORS).open("wb") as file:
        file.write(layout.header)
        for name in described:
            file.write(tensors[name.removeprefix(_PREFIX)].tobytes())
    (folder / SETTINGS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- reading ----------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """An adapter's folder: its settings, and its tensors by their names in the model of transformers."""

    path: str | Path
    values: Mapping[str, Any]
    folder: TensorFolder
    names: Mapping[str, str]

    def rank(self, module: str) -> int:
        """The rank of a module's adapter; 0 if it has none."""
        name = self.names.get(f"{module}.lora_A.weight")
        return 0 if name is None else self.folder.entries[name].shape[0]

    def scale(self, module: str) -> float:
        """The factor of ``B A`` of a module."""
        patterns = self.values.get("alpha_pattern") or {}
        fitting = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module))
        pattern = next(fitting, None)
        alpha = self.values.get("lora_alpha") if pattern is None else patterns[pattern]
        check_positive(f"{SETTINGS}: lora_alpha", alpha)
        rank = self.rank(module)
        return alpha / (rank**0.5 if self.values.get("use_rslora") else rank)

    def tensor(self, name: str) -> np.ndarray:
        return np.asarray(self.folder.tensor(self.names[name]), np.float32)


def read_settings(path: str | Path, family: Family, config: DecoderConfig) -> LoRA:
    """The ``LoRA`` of an adapter in peft's layout over a decoder of this config; for errors see `load_adapter`."""
    found = _open(path)
    parameters = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))))
    return _spec(found, _layout(family, config, parameters), _inputs(config))


def read_adapter(
    path: str | Path, family: Family, config: DecoderConfig, parameters: dict
) -> tuple[LoRA, dict[str, Any]]:
    """What an adapter says of itself, and the parameters of a decoder with it; for errors see `load_adapter`."""
    found = _open(path)
    layout, inputs = _layout(family, config, parameters), _inputs(config)
    spec = _spec(found, layout, inputs)
    leaves, used = {name: parameter.leaf for name, parameter in layout.parameters.items()}, set()
    for name, parameter in layout.parameters.items():
        short = name.split("/", 3)[-1]
        if short in spec.paths:
            a, b = _read_pair(found, layout.family, parameter, inputs[name], spec, used)
            *block, own = name.split("/")
            leaves |= {f"{'/'.join(block)}/adapters/{own}/a": a, f"{'/'.join(block)}/adapters/{own}/b": b}
        leaves[name] = _replaced(found, layout.family, parameter, used)
    used |= _checked_tables(found, layout.family, config)
    extra = sorted(found.names.keys() - used)
    check(
        not extra,
        f"{path}: {', '.join(extra[:3])}{f' and {len(extra) - 3} more' if len(extra) > 3 else ''} is no adapter of a "
        f"projection that can have one, nor a weight, of this {family.model_type}",
    )
    return spec, _tree(leaves)


def _open(path: str | Path) -> _Found:
    files, root = open_location(path)
    with reaching(path):
        values = read_json(files, f"{root}/{SETTINGS}")
    method = values.get("peft_type")
    check(method == "LORA", f"{path}: {SETTINGS} is of {describe(method)}; adapters of LORA can be read")
    _check_patterns(path, values)
    for key, plain in _CHANGES_MORE.items():
        value = values.get(key, plain)
        check(value == plain or not value, f"{path}: {SETTINGS} has {key} {describe(value)}, which cannot be read")
    start = values.get("init_lora_weights")
    changed = isinstance(start, str) and start.startswith(_ON_OTHER_WEIGHTS)
    why = "its adapter belongs to weights that peft changed; save it there as plain LoRA first"
    check(not changed, f"{path}: {SETTINGS} has init_lora_weights {describe(start)}: {why}")
    folder = TensorFolder(path)
    names = {name.removeprefix(_PREFIX).replace("modules_to_save.", ""): name for name in folder.entries}
    return _Found(path, values, folder, names)


def _check_patterns(path: str | Path, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a pattern of scales that is no regular expression."""
    for pattern in values.get("alpha_pattern") or {}:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{path}: {SETTINGS} has alpha_pattern {pattern!r}: {error}") from None


def _checked_tables(found: _Found, family: Family, config: DecoderConfig) -> set[str]:
    """The embedding and the head, if an adapter of a model that ties them has both alike.

    Raises ValueError if it has one of them, or if they differ: in peft the other is then as it was.
    """
    tables = {name for name in _tables(family, config) if name in found.names} if config.tied_head else set()
    same = len(tables) != 1 and len({found.tensor(name).tobytes() for name in tables}) < 2
    why = "without the other, though the model ties both; train it with peft's ensure_weight_tying"
    check(same, f"{found.path} has {' and '.join(sorted(tables))} {why}")
    return tables


def _inputs(config: DecoderConfig) -> dict[str, int]:
    """How many axes of inputs the projections have that can have an adapter, by the paths of their parameters."""
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return {
        f"stacks/{p}/{n}/{name}": module.PROJECTIONS[name.rpartition("/")[2]]
        for p, stack in enumerate(decoder.stacks)
        for n, block in enumerate(stack)
        for name, module in projections(block)
    }


def _spec(found: _Found, layout: _Layout, inputs: Mapping[str, int]) -> LoRA:
    """The largest rank, the scale of its module, and the names of the projections."""
    modules = {name: _modules_of(layout.family, layout.parameters[name]) for name in inputs}
    adapted = {name: max(own, key=found.rank) for name, own in modules.items() if any(map(found.rank, own))}
    check(bool(adapted), f"{found.path} has no adapter of a projection of this {layout.family.model_type}")
    first = max(adapted.values(), key=found.rank)
    rank, stabilized = found.rank(first), bool(found.values.get("use_rslora"))
    alpha = found.scale(first) * (rank**0.5 if stabilized else rank)
    return LoRA(rank, alpha, tuple(sorted({name.split("/", 3)[-1] for name in adapted})), stabilized)


def _modules_of(family: Family, parameter: Stored) -> list[str]:
    return [_in_memory(family, tensor).removesuffix(".weight") for tensor in parameter.tensors]


def _read_pair(
    found: _Found, family: Family, parameter: Stored, inputs: int, spec: LoRA, used: set[str]
) -> tuple[jax.Array, jax.Array]:
    """A and B of a projection in all layers."""
    modules = _modules_of(family, parameter)
    used.update(f"{module}.{part}.weight" for module in modules for part in _PARTS)
    pairs = [_read_module(found, parameter, module, inputs, spec) for module in modules]
    return tuple(jnp.asarray(np.stack(parts)) for parts in zip(*pairs, strict=True))


def _read_module(
    found: _Found, parameter: Stored, module: str, inputs: int, spec: LoRA
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a projection in one layer: zeros beyond the module's rank, and B with what its scale differs by."""
    rank = found.rank(module)
    part = _part(parameter, inputs, rank)
    a, b = (
        _read_part(found, f"{module}.{name}.weight", view, part.sizes)
        for name, view in zip(_PARTS, (part.a, part.b), strict=True)
    )
    more = (0, spec.rank - rank)
    a, b = np.pad(a, [(0, 0)] * (a.ndim - 1) + [more]), np.pad(b, [more] + [(0, 0)] * (b.ndim - 1))
    return a, b * np.float32(found.scale(module) / spec.scale if rank else 0)


def _read_part(found: _Found, name: str, view: View, sizes: Mapping[str, int]) -> np.ndarray:
    """A tensor through its view; empty if the adapter does not have it."""
    shape = view.tensor_shape(sizes)
    tensor = found.tensor(name) if name in found.names else np.zeros(shape, np.float32)
    fits = tensor.shape == shape
    check(fits, f"{found.path}: {name} has shape {tensor.shape}; the model needs {shape}")
    whole = (slice(None),) * len(_groups(view.pattern.partition("->")[2]))
    return view.read(tensor, sizes, whole, np.dtype(np.float32))


def _replaced(found: _Found, family: Family, parameter: Stored, used: set[str]) -> Any:
    """A parameter, with the weights that the adapter has in its place."""
    leaf = parameter.leaf
    for row, tensor in enumerate(parameter.tensors):
        name = _in_memory(family, tensor)
        if name not in found.names:
            continue
        used.add(name)
        whole = (slice(None),) * (leaf.ndim - (parameter.layers is not None))
        values = parameter.view.read(found.tensor(name), parameter.sizes, whole, np.dtype(np.float32))
        leaf = leaf.at[... if parameter.layers is None else row].set(values.astype(leaf.dtype))
    return leaf
