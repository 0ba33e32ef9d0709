"""The typed configuration of a run: read, written, compared, its stages resolved. Imports neither jax nor posjax."""

from train.config.config import Config
from train.config.differences import differences
from train.config.reading import dump, load, load_values, parse, parse_text, to_dict
from train.config.settings.compare import CompareConfig
from train.config.settings.data import DataConfig
from train.config.settings.evaluate import EvaluateConfig
from train.config.settings.model import InitConfig, ModelConfig, SchemeConfig, StageConfig, own_tokenizer
from train.config.settings.monitor import MonitorConfig
from train.config.settings.train import ContextConfig, MeshConfig, TrainConfig
