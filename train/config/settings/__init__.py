"""The sections of a config: frozen dataclasses that check their own values and import neither jax nor posjax."""

from train.config.settings.compare import CompareConfig
from train.config.settings.data import DataConfig
from train.config.settings.evaluate import EvaluateConfig
from train.config.settings.init import InitConfig
from train.config.settings.model import ModelConfig, SchemeConfig
from train.config.settings.monitor import MonitorConfig
from train.config.settings.stage import StageConfig
from train.config.settings.train import ContextConfig, MeshConfig, TrainConfig

__all__ = [
    "CompareConfig",
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
]
