"""The typed configuration of a run: read, written, compared, its stages resolved. Imports neither jax nor posjax."""

from train.config.config import Config
from train.config.differences import chosen, differences
from train.config.reading import dump, load, load_values, parse, parse_text
from train.config.settings.compare import CompareConfig
from train.config.settings.data import DataConfig
from train.config.settings.evaluate import EvaluateConfig
from train.config.settings.model import InitConfig, ModelConfig, SchemeConfig, StageConfig, own_tokenizer
from train.config.settings.train import ContextConfig, MeshConfig, MonitorConfig, TrainConfig
from train.config.typed import to_dict
