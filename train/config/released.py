"""What a released model determines in a config that starts from it: shape, scheme, tokenizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from posjax import rotary
from posjax._checks import describe
from posjax.nn import DecoderConfig
from posjax.nn.huggingface import read_config
from posjax.nn.huggingface.family import reach
from posjax.nn.huggingface.hub import pinned
from posjax.nn.huggingface.load import read_values
from posjax.nn.huggingface.peft import read_settings
from posjax.nn.huggingface.registry import family_of
from train.config.settings.checks import check, unknown
from train.config.settings.model import InitConfig, own_tokenizer

_HOW = ("compute_dtype", "remat", "scan_layers", "implementation")
"""Keys of the model that say how it is computed; for these the config takes precedence."""
_NOT_SHAPE = ("scheme", "placement", "lora", *_HOW)


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config's mapping, completed from the model under its ``init``: ``model``, ``scheme`` and ``data.tokenizer``.

    If ``init`` is a name at the hub, it gets the commit of today, so that a saved config names the model's exact state.

    Raises:
        FileNotFoundError: if there is no model.
        OSError: if the hub cannot be reached.
        ValueError: for a model that cannot be read, and for a key of ``model`` that contradicts it; the message names
          the key.
    """
    init = values["init"] if isinstance(values["init"], Mapping) else {"path": values["init"]}
    check(isinstance(init.get("path"), str), f"init: expected a path, found {describe(init.get('path'))}")
    keys = tuple(field.name for field in dataclasses.fields(InitConfig))
    for key in init:
        if key not in keys:
            raise unknown("init", key, keys, "key")
    path, found = pinned(init["path"]), init.get("values")
    check(found is None or isinstance(found, Mapping), f"init.values: expected a config.json, found {describe(found)}")
    found = found or read_values(path)
    shape = model_section(read_config(found))
    given, data = _section(values, "model"), {"special_tokens": "own", **_section(values, "data")}
    adapter = init.get("adapter") or ""
    check(isinstance(adapter, str), f"init.adapter: expected a path, found {describe(adapter)}")
    if adapter and given.get("lora") is None:
        given["lora"] = dataclasses.asdict(read_settings(adapter, family_of(found), read_config(found)))
    shape["trained_length"] = _trained_length(path, found, given.get("trained_length"))
    for key, value in given.items():
        check(
            key in _HOW or key not in shape or _same(value, shape[key]),
            f"model.{key}: {describe(value)} contradicts {path}, which has {describe(shape.get(key))}; leave it out",
        )
    data.setdefault("tokenizer", own_tokenizer(path))
    scheme = values.get("scheme", {})
    return {
        **values,
        "scheme": {"name": "released", **scheme} if isinstance(scheme, Mapping) else scheme,
        "init": {"path": path, "adapter": adapter, "values": found},
        "model": shape | {key: value for key, value in given.items() if key not in shape},
        "data": data,
        **_lengths(values, shape["trained_length"]),
    }


def _trained_length(path: str, values: Mapping[str, Any], given: Any) -> Any:
    """The length a model was made for: `given`, else the length in config.json or the one that its scaling reaches.

    Raises ValueError if neither config.json nor the config gives it.
    """
    config = read_config(values)
    rules = {each.features.frequencies for each in config.layers.kinds if each.rotates}
    scaled = [rule for rule in rules if isinstance(rule, rotary.NTKByParts | rotary.Llama3)]
    stated = config.trained_length
    found = given or max([*(reach(rule, stated) for rule in scaled), stated or 0])
    check(bool(found), f"model.trained_length: config.json of {path} does not say the length it was trained at; set it")
    return found


def _lengths(values: Mapping[str, Any], own: int) -> dict[str, Any]:
    """The sections ``train`` and ``evaluate`` with default lengths: the model's own, and up to four times that.

    If the model is trained, the default evaluation lengths begin at its longest training length.
    """
    train, evaluate = _section(values, "train"), _section(values, "evaluate")
    if "length" not in train:
        train = {"length": own, "batch_tokens": own, **train}
    lengths = [own // 4, own, 2 * own, 4 * own]
    if train.get("steps") == 0:
        stays = f"train.length: nothing is trained, so the model's own length stays {own}, found {train['length']}"
        check(train["length"] == own, f"{stays}; if it was made for another one, set model.trained_length")
    else:
        trained = max(_trained_lengths(train["length"], values.get("stages")), default=own)
        lengths = [trained, *(length for length in lengths if length > trained)]
    evaluate = {"lengths": lengths, **evaluate}
    if isinstance(evaluate["lengths"], list) and all(isinstance(length, int) for length in evaluate["lengths"]):
        longest = max(evaluate["lengths"], default=own)
        evaluate = {"tokens": max(131072, longest), "batch_tokens": longest, **evaluate}
    return {"train": train, "evaluate": evaluate}


def _trained_lengths(length: Any, stages: Any) -> list[int]:
    """The lengths of a training and its stages that are whole numbers; other values are reported elsewhere."""
    listed = [stage.get("train") for stage in stages if isinstance(stage, Mapping)] if _is_list(stages) else []
    found = [length, *(section.get("length") for section in listed if isinstance(section, Mapping))]
    return [each for each in found if type(each) is int]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    check(isinstance(found, Mapping), f"{name}: expected a section of keys, found {describe(found)}")
    return dict(found)


def _same(given: Any, found: Any) -> bool:
    """Whether a key agrees with the model; a section may omit keys, and a YAML list equals a tuple."""
    if isinstance(given, Mapping) and isinstance(found, Mapping):
        return all(key in found and _same(value, found[key]) for key, value in given.items())
    return list(given) == list(found) if _is_list(given) and _is_list(found) else given == found


def model_section(config: DecoderConfig) -> dict[str, Any]:
    """The shape of a decoder as the section ``model`` of a config."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    plain = {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value for name, value in fields.items()
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in plain.items()
        if name not in _NOT_SHAPE
    }
