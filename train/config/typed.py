"""Converts plain values, as YAML gives them, to the typed sections of a config and back."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from train.config.settings.checks import check, unknown
from train.config.settings.model import InitConfig, SchemeConfig, StageConfig

Section = TypeVar("Section")


def section(values: Any, kind: type[Section], path: str) -> Section:
    """The dataclass `kind` from a mapping."""
    check(isinstance(values, Mapping), f"{path}: expected a section of keys, found {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise _unknown_key(key, hints, path)
    prefix = f"{path}." if path else ""
    return kind(**{key: _convert(value, hints[key], prefix + key) for key, value in values.items()})


def _unknown_key(key: Any, hints: Mapping[str, Any], path: str) -> ValueError:
    """The error for an unknown key: it names the sections inside that have the key, or else the nearest key."""
    where, prefix = path or "config", f"{path}." if path else ""
    sections = [name for name, kind in hints.items() if dataclasses.is_dataclass(kind)]
    owners = [f"{prefix}{name}.{key}" for name in sections if key in typing.get_type_hints(hints[name])]
    if not owners:
        return unknown(where, key, list(hints), "key")
    return ValueError(f"{where}: unknown key {key!r}; there is {', '.join(owners)}")


def changed(values: Section, changes: Mapping[str, Any], path: str) -> Section:
    """A section with some keys changed, also keys of the sections inside it."""
    merged = to_dict(values)
    for key, change in changes.items():
        sections = isinstance(change, Mapping) and dataclasses.is_dataclass(getattr(values, key, None))
        merged[key] = {**merged[key], **change} if sections else change
    return section(merged, type(values), path)


def scheme(values: Any, path: str) -> SchemeConfig:
    """A scheme entry: a name, or a mapping with a name; keys that are not its fields are options of the scheme."""
    if isinstance(values, str):
        return SchemeConfig(values)
    check(
        isinstance(values, Mapping) and "name" in values,
        f"{path}: expected a scheme's name or {{name: ..., option: value}}, found {values!r}",
    )
    known = {key: _convert(values[key], str, f"{path}.{key}") for key in ("name", "label", "stage") if key in values}
    inner = {key: _convert(values.get(key, {}), Mapping, f"{path}.{key}") for key in ("extend", "train")}
    options = {key: value for key, value in values.items() if key not in (*known, *inner)}
    for key in (*options, *inner["extend"], *inner["train"]):
        check(isinstance(key, str), f"{path}: expected the name of an option, found {key!r}")
    return SchemeConfig(**known, **inner, options=options)


def _convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as the annotated type `kind`, or a ValueError that names `path`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is SchemeConfig:
        return scheme(value, path)
    if kind is InitConfig and isinstance(value, str):
        return InitConfig(value)
    if kind is StageConfig and isinstance(value, Mapping) and "name" in value:
        value = {**value, "name": str(value["name"])}
    if dataclasses.is_dataclass(kind):
        return section(value, kind, path)
    if origin in (types.UnionType, typing.Union):  # the second, for a Literal or None
        of_lists = (one for one in arguments if typing.get_origin(one) is tuple and isinstance(value, list | tuple))
        return None if value is None else _convert(value, next(of_lists, arguments[0]), path)
    if origin is tuple:
        value = [value] if isinstance(value, str) and arguments[0] is str else value
        check(isinstance(value, list | tuple), f"{path}: expected a list, found {value!r}")
        return tuple(_convert(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise unknown(path, value, arguments, "value")
        return value
    if kind is Mapping:
        check(isinstance(value, Mapping), f"{path}: expected a section of keys, found {value!r}")
        return dict(value)
    return _scalar(value, kind, path)


def _scalar(value: Any, kind: type, path: str) -> Any:
    """An int, float, bool or str. A whole number also counts as a float; a bool never counts as a number."""
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    accepted = (int, float) if kind is float else kind
    right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    check(right, f"{path}: expected {wanted}, found {value!r}")
    check(kind is not float or math.isfinite(value), f"{path}: expected a finite number, found {value!r}")
    return kind(value)


def to_dict(value: Any) -> Any:
    """The plain value of a section or a whole config, with every default spelled out: what `section` reads."""
    if isinstance(value, SchemeConfig):
        extend = {"extend": to_dict(value.extend)} if value.extend else {}
        extend |= {"stage": value.stage} if value.stage else {}
        extend |= {"train": to_dict(value.train)} if value.train else {}
        return {"name": value.name, "label": value.label, **extend, **to_dict(value.options)}
    if isinstance(value, StageConfig):
        return {key: found for key, item in vars(value).items() if (found := to_dict(item))}
    if dataclasses.is_dataclass(value):
        return {item.name: to_dict(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    return [to_dict(item) for item in value] if isinstance(value, list | tuple) else value
