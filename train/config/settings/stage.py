"""A stage of a curriculum."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from train.config.settings.model import SchemeConfig


@dataclass(frozen=True)
class StageConfig:
    """What a stage changes: keys of ``train`` and ``data``, the scheme, or options of the current scheme."""

    name: str = ""
    train: Mapping = field(default_factory=dict)
    data: Mapping = field(default_factory=dict)
    scheme: SchemeConfig | None = None
    extend: Mapping = field(default_factory=dict)
