"""The typed configuration of a run: read, written, compared, its stages resolved. Imports neither jax nor posjax."""

from train.config.config import Config
from train.config.differences import differences
from train.config.reading import dump, load, load_values, migrated, parse, parse_saved, parse_text, to_dict
from train.config.settings import (
    CompareConfig,
    ContextConfig,
    DataConfig,
    EvaluateConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    MonitorConfig,
    SchemeConfig,
    StageConfig,
    TrainConfig,
)
from train.config.settings.init import own_tokenizer

__all__ = [
    "CompareConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "EvaluateConfig",
    "InitConfig",
    "MeshConfig",
    "ModelConfig",
    "MonitorConfig",
    "SchemeConfig",
    "StageConfig",
    "TrainConfig",
    "differences",
    "dump",
    "load",
    "load_values",
    "migrated",
    "own_tokenizer",
    "parse",
    "parse_saved",
    "parse_text",
    "to_dict",
]
