"""The sections of a config: frozen dataclasses that check their own values and import neither jax nor posjax."""

from train.settings.compare import CompareConfig
from train.settings.data import DataConfig
from train.settings.evaluate import EvaluateConfig
from train.settings.init import InitConfig
from train.settings.model import ModelConfig, SchemeConfig
from train.settings.monitor import MonitorConfig
from train.settings.train import ContextConfig, MeshConfig, TrainConfig

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
    "TrainConfig",
]
