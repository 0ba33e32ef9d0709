"""Static parts of the library's pytrees as text, for programs that ``jax.export`` writes to bytes.

The text is JSON: numbers, strings and None unchanged, tuples as lists, frozen dataclasses (specs) by name and fields.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import export

from posjax._checks import check, describe


def register(*classes: type) -> None:
    """Lets registered pytree classes be arguments and results of exported programs."""
    for cls in classes:
        if issubclass(cls, tuple):
            export.register_namedtuple_serialization(cls, serialized_name=_name(cls))
            continue
        export.register_pytree_node_serialization(
            cls,
            serialized_name=_name(cls),
            serialize_auxdata=lambda structure: json.dumps(_plain(structure)).encode(),
            deserialize_auxdata=lambda text: _restored(json.loads(text)),
        )


def below(cls: type) -> Iterator[type]:
    """Every dataclass of the library that is a subclass of ``cls``."""
    for derived in cls.__subclasses__():
        if "__dataclass_fields__" in vars(derived) and derived.__module__.startswith("posjax."):
            yield derived
        yield from below(derived)


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    check(
        dataclasses.is_dataclass(value), f"jax.export: {describe(value)} in the structure of a pytree cannot be written"
    )
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class": _name(type(value)), "fields": fields}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_restored, value))
    if not isinstance(value, dict):
        return value
    module, _, name = value["class"].partition(":")
    cls = getattr(importlib.import_module(module), name, None) if module.startswith("posjax.") else None
    check(dataclasses.is_dataclass(cls), f"jax.export: {value['class']} is no dataclass of posjax")
    return cls(**{field: _restored(part) for field, part in value["fields"].items()})
