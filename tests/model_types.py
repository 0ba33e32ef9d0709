"""How transformers reads rope settings, type by type: ``python tests/model_types.py`` writes the table of ``from_hf``.

It makes the configuration of every model type, once as it is and once with a key changed, and measures the inverse
frequencies of the type's own rotary module. ``tests/rotary/test_model_types.py`` compares ``from_hf`` with the same
modules.
"""

import copy
import importlib
import inspect
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
ROPE_KEYS += ("rotary_dim", "rope_local_base_freq", "local_rope_theta", "global_rope_theta", "compress_rope_theta")
"""The keys of a configuration that say how it rotates."""
DERIVED = ("per_layer_config", "layer_rope_theta")
"""Keys that a configuration computes from its sizes when it is made."""
SWITCHES = {
    "falcon": ("alibi", False),
    "granitemoehybrid": ("position_embedding_type", "rope"),
    "zamba2": ("use_mem_rope", True),
    "esm": ("position_embedding_type", "rotary"),
}
"""Options at which a type rotates, with the value for that."""
REASONS = {
    **dict.fromkeys(("efficientloftr", "eomt_dinov3", "llama4_vision_model", "neomme"), "positions have two axes"),
    "ernie4_5_vl_moe_text": "the frequencies of three axes are in an order of their own",
    "dots3_note_text": "the widths of its layer types are computed from per_layer_config",
}
"""Types that rotate, but not by a rule that ``from_hf`` can give, with the reason."""
ABSTRACT = ("blt", "cohere_compass_text")
"""Types whose default configuration makes no rotary module."""
SIZES = {
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "musicflamingo": {"text_config": None},
}
"""Sizes for types whose own defaults have no even rotary width, and no other model inside."""


def quiet() -> None:
    """Silences the warnings of transformers about settings that it guesses."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()


def config_classes(words: str = "") -> dict[str, type]:
    """transformers' configuration class of every model type, from files that have one of the words.

    Larger models have a type for each of their parts.
    """
    import transformers

    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if not re.search(words, path.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and getattr(cls, "model_type", ""):
                found.setdefault(cls.model_type, cls)
    return found


def _modeling(cls: type) -> Iterator[Any]:
    """The modules of a configuration's models, also those of another type whose model the type uses."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    folders, name = [cls.__module__.split(".")[2]], MODEL_MAPPING_NAMES.get(cls.model_type)
    if isinstance(name, str) and hasattr(transformers, name):
        folders.append(getattr(transformers, name).__module__.split(".")[2])
    for folder in dict.fromkeys(folders):
        for path in sorted((Path(transformers.__file__).parent / "models" / folder).glob("modeling_*.py")):
            with suppress(ImportError):  # a library that the type needs is not installed
                yield importlib.import_module(f"transformers.models.{folder}.{path.stem}")


def rotary_module(cls: type) -> type | None:
    """The class of a type's rotary embeddings: the one for its configuration, else another of the same file."""
    import torch

    found = []
    for module in _modeling(cls):
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, torch.nn.Module) and "Rotary" in name:
                wanted = inspect.signature(value.__init__).parameters.get("config")
                vision = "Vision" in name
                if wanted is not None:
                    found.append(
                        (wanted.annotation is not cls, vision, value.__module__ != module.__name__, name, value)
                    )
    return min(found, key=lambda item: item[:-1])[-1] if found else None


Rotations = dict[str | None, tuple[np.ndarray, float]]


def make(cls: type, values: Mapping[str, Any]) -> Any:
    """A configuration of transformers from copies of the values, which it would change."""
    return cls(**copy.deepcopy({key: value for key, value in values.items() if key != "model_type"}))


def rotations(cls: type, values: Mapping[str, Any]) -> Rotations:
    """(inverse frequencies, attention factor) of transformers by layer type; all layers under None."""
    module, found = rotary_module(cls)(make(cls, values)), {}
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            layer = name.removesuffix("inv_freq").removesuffix("_")
            factor = getattr(module, f"{layer}_attention_scaling" if layer else "attention_scaling", 1.0)
            found[layer or None] = (buffer.numpy().astype(np.float64), factor)
        elif name == "embed_positions":  # GPT-J: the sines of every position, then the cosines
            sin, cos = np.split(buffer[1].numpy().astype(np.float64), 2)
            found[None] = (np.arctan2(sin, cos), 1.0)
    return found


def sizes(cls: type, model_type: str) -> dict[str, Any]:
    """A type's default configuration without rope settings, at which it rotates."""
    kept = {key: value for key, value in cls().to_dict().items() if key not in (*ROPE_KEYS, *DERIVED)}
    key, value = SWITCHES.get(model_type, ("model_type", model_type))
    return kept | SIZES.get(model_type, {}) | {"model_type": model_type, key: value}


def rotary_types() -> dict[str, type]:
    """The configuration classes of the types that have a rotary module of one axis."""
    found = {}
    for name, cls in config_classes("rope_parameters|rotary_dim|rope_theta").items():
        rotates = "rope_parameters" in inspect.signature(cls).parameters or name in ("gptj", "codegen", "esm")
        one_axis = getattr(cls, "default_rope_type", "default") == "default"
        if rotates and one_axis and name not in (*REASONS, *ABSTRACT) and rotary_module(cls) is not None:
            found[name] = cls
    return found


# --- writing the table ------------------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta", "local_rope_theta", "rope_local_base_freq")
BASES += ("compress_rope_theta",)
HEAD = ("head_dim", "hidden_size", "num_attention_heads")
OTHER = 123_456.0


def row(cls: type, model_type: str) -> dict[str, Any]:
    """A type's row of the table: its keys with their defaults, and which layer types they are for."""
    plain = sizes(cls, model_type)
    before, config = rotations(cls, plain), cls()
    parameters = getattr(config, "rope_parameters", None)
    found = _head(cls, plain)
    if parameters is None:
        found |= _fixed(cls, plain, before)
    elif None in before:
        found |= _flat(cls, plain, before, parameters)
    else:
        found |= _layers(cls, plain, before, parameters)
    if getattr(config, "is_heterogeneous", False):
        size = 2 * len(before["full_attention"][0])
        found |= {"global_head_dim": size} if size != found["head_dim"] else {}
    if model_type in SWITCHES:
        key, value = SWITCHES[model_type]
        found["switch"] = {key: (value, getattr(config, key))}
    if any("mscale_all_dim" in inspect.getsource(module) for module in _modeling(cls)):
        found["scales_softmax"] = True
    return found


def tried(cls: type, values: Mapping[str, Any]) -> Rotations:
    """The rotations at some values, none where transformers cannot read them."""
    try:
        return rotations(cls, values)
    except Exception:
        return {}


def _config(cls: type, values: Mapping[str, Any]) -> Any:
    """The configuration at some values, None where transformers refuses them."""
    try:
        return make(cls, values)
    except Exception:
        return None


def _changed(before: Rotations, after: Rotations) -> list[str | None]:
    """The layer types whose frequencies differ."""
    return [
        key for key in sorted(before, key=str) if key in after and not np.array_equal(before[key][0], after[key][0])
    ]


def _resized(before: Rotations, after: Rotations) -> bool:
    """Whether the width of a layer type differs."""
    return any(key in after and len(after[key][0]) != len(before[key][0]) for key in before)


def _head(cls: type, plain: dict[str, Any]) -> dict[str, Any]:
    """Where the size of a head is written, and its default; None if it has to be written."""
    names = {key: name for key, name in (cls.attribute_map or {}).items() if key in HEAD and key != name}
    found = {"names": names} if names else {}
    if "qk_rope_head_dim" in plain:
        return found | {"qk_rope_head_dim": plain["qk_rope_head_dim"]}
    key, size, heads = (names.get(name, name) for name in HEAD)
    free = {name: value for name, value in plain.items() if name not in (key, "per_layer_config")}
    default = _size(cls, free, key)
    if size not in plain or default is None:
        return found
    fixed = _size(cls, free | {size: plain[size] // 2}, key) == default
    if fixed or default != plain[size] // plain[heads]:
        found[key] = default if fixed else None
    return found


def _size(cls: type, values: Mapping[str, Any], key: str) -> int | None:
    """The value of a key that a configuration computes, None if it has none."""
    config = _config(cls, values)
    return None if config is None else config.to_dict().get(key)


def _fixed(cls: type, plain: dict[str, Any], before: Rotations) -> dict[str, Any]:
    """The keys of a type without rope_parameters."""
    reads_base = _changed(before, tried(cls, plain | {"rope_theta": OTHER}))
    width = getattr(cls(), "rotary_dim", None)
    unread = ["rope_parameters"] if reads_base else ["rope_parameters", "rope_theta"]
    return {"unread": unread} | ({} if width is None else {"rotary_dim": width})


def _flat(cls: type, plain: dict[str, Any], before: Rotations, parameters: dict[str, Any]) -> dict[str, Any]:
    """The keys of a type with one rule for all layers."""
    sections = {name: value for name, value in parameters.items() if name.startswith("mrope")}
    bare = plain | {"rope_parameters": {"rope_type": "default"} | sections}
    configs = {key: _config(cls, bare | {key: OTHER}) for key in BASES}
    read = [key for key, config in configs.items() if config and config.rope_parameters["rope_theta"] == OTHER]
    base = _config(cls, bare).rope_parameters["rope_theta"]
    found = {} if (read, base) == (["rope_theta"], 10_000.0) else {(read or ["rope_theta"])[0]: base}
    implied = {name: value for name, value in parameters.items() if name not in ("type", *sections)}
    if read and _changed(before, tried(cls, plain | {read[0]: OTHER})) and implied["rope_theta"] == base:
        del implied["rope_theta"]  # the base stands outside, also beside implied settings
    found |= {} if read else {"unread": ["rope_theta"]}
    share = implied.get("partial_rotary_factor", 1.0)
    without = round(share * len(tried(cls, bare)[None][0]) / len(before[None][0]), 6)
    if share != without or implied.keys() - {"partial_rotary_factor"} != {"rope_type"}:
        found["rope_parameters"] = implied
    return found | ({} if "qk_rope_head_dim" in plain else _share(cls, bare, without))


def _share(cls: type, bare: dict[str, Any], default: float) -> dict[str, Any]:
    """The keys that set the rotated part of a head, none if a type rotates whole heads."""
    whole, inner = tried(cls, bare), {**bare["rope_parameters"], "partial_rotary_factor": default / 2}
    if not _resized(whole, tried(cls, bare | {"rope_parameters": inner})):
        return {}
    outer = ("partial_rotary_factor", "rotary_pct")
    read = [key for key in outer if _resized(whole, tried(cls, bare | {key: 0.1}))]
    found = {read[-1] if read else outer[0]: default} | ({} if read else {"unread": [outer[0]]})
    return found | ({"rotary_dim": None} if _resized(whole, tried(cls, bare | {"rotary_dim": 32})) else {})


def _layers(cls: type, plain: dict[str, Any], before: Rotations, parameters: dict[str, Any]) -> dict[str, Any]:
    """The keys of a type whose layer types have rules of their own."""
    parameters = dict(sorted(parameters.items()))  # some types order them by a set
    latent = ("partial_rotary_factor",) if "qk_rope_head_dim" in plain else ()
    found = {"rope_parameters": {layer: inner and _short(inner, latent) for layer, inner in parameters.items()}}
    bases = {layer: key for key in BASES for layer in _changed(before, tried(cls, plain | {key: OTHER}))}
    found |= {"bases": bases} if bases else {}
    halves = {layer: inner and {**inner, "partial_rotary_factor": 0.25} for layer, inner in parameters.items()}
    if "qk_rope_head_dim" not in plain and _resized(before, tried(cls, plain | {"rope_parameters": halves})):
        bare = {layer: inner and {"rope_type": "default", "rope_theta": 1e4} for layer, inner in parameters.items()}
        after = tried(cls, plain | {"rope_parameters": bare})
        layer = next(layer for layer in before if parameters[layer]["rope_type"] == "default")
        share = parameters[layer].get("partial_rotary_factor", 1.0) * len(after[layer][0]) / len(before[layer][0])
        found |= {"partial_rotary_factor": round(share, 6), "unread": ["partial_rotary_factor"]}
    scaled = _changed(before, tried(cls, plain | {"rope_scaling": dict(LINEAR)}))
    if scaled:
        after = _config(cls, plain | {"rope_scaling": dict(YARN)}).rope_parameters
        implied = {layer: after[layer].get("attention_factor") for layer in scaled}
        found["scaled"] = {key: {} if value is None else {"attention_factor": value} for key, value in implied.items()}
    return found


def _short(inner: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    """Settings without the rope type if it is the default one, and without some keys."""
    return {
        key: value for key, value in inner.items() if key not in dropped and (key, value) != ("rope_type", "default")
    }


def without_rotary() -> list[str]:
    """The language models that have no rotary positions: their files name neither a base nor a rotary module."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    names |= {*auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    found, rotary = [], rotary_types()
    for name, cls in config_classes().items():
        folder = Path(transformers.__file__).parent / "models" / cls.__module__.split(".")[2]
        text = "".join(path.read_text() for path in folder.glob("m*ing_*.py"))
        plain = set(cls.sub_configs) <= {"attn_config"} and not re.search("rotary|rope_theta|apply_rot", text, re.I)
        if name in names and name not in rotary and plain:
            found.append(name)
    return sorted(found)


HEADER = '''"""Rope settings that a Hugging Face model type implies. ``python tests/model_types.py`` writes it.

Read from transformers {version}. A row holds what a type assumes where its configuration says nothing: the keys of
``config.json`` that it reads, with their defaults. ``rope_theta`` is 10,000 and not repeated. Besides these keys:

bases: by layer type, the key of its base.
scaled: the layer types that a rope_scaling for the whole model is for, with what it implies there.
names: the type's names of hidden_size, num_attention_heads and head_dim.
unread: keys that the type does not read, or that it reads only in rope_parameters.
switch: an option, its value at which the type rotates, and its default.
scales_softmax: the type multiplies the logits by DeepSeek's factor of mscale_all_dim.
"""

from typing import Any

'''


def main() -> None:
    """Writes ``posjax/rotary/model_types.py``."""
    import transformers

    quiet()
    rows = {name: row(cls, name) for name, cls in sorted(rotary_types().items())}
    text = HEADER.format(version=transformers.__version__)
    text += f"MODEL_TYPES: dict[str, dict[str, Any]] = {rows!r}\n\n"
    text += f'UNREADABLE: dict[str, str] = {REASONS!r}\n"""Types that rotate as no rule does, with the reason."""\n\n'
    text += f'NO_ROTARY = frozenset({without_rotary()!r})\n"""Language models without rotary positions."""\n'
    path = Path(__file__).parent.parent / "posjax/rotary/model_types.py"
    path.write_text(text)
    subprocess.run(("ruff", "format", "-q", path), check=True)


if __name__ == "__main__":
    main()
