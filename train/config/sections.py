"""Descriptions of the sections of a config, from their docstrings, for the command line's help."""

import dataclasses
import inspect
import typing
from typing import Any

from train.config.config import Config


def about_sections() -> dict[str, str]:
    """The sections of a config by name, each with the first line of its dataclass's docstring as plain text."""
    kinds = {name: _kind(hint) for name, hint in typing.get_type_hints(Config).items()}
    return {name: _first_line(kind) for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def keys_beside_sections() -> list[str]:
    """The keys of a config that are not sections."""
    return [field.name for field in dataclasses.fields(Config) if field.name not in about_sections()]


def _kind(hint: Any) -> Any:
    """The type of a key; for a list the type of its items."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _first_line(kind: type) -> str:
    return inspect.getdoc(kind).partition("\n")[0].replace("`", "")
