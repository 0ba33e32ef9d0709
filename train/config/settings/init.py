"""The released model that a run starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InitConfig:
    """A released model: a folder in the layout of Hugging Face, at a path or URL, or a GGUF file.

    In a config ``init: PATH`` is enough. `values` are those of its ``config.json``, filled in when the config is read.
    """

    path: str = ""
    values: Mapping = field(default_factory=dict)


def own_tokenizer(path: str) -> str:
    """The path of the tokenizer of a released model."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}/tokenizer.json"
