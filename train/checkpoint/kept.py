"""What a run keeps of the released model that it started from: its config.json and its tokenizer."""

import dataclasses
import json
from pathlib import Path

from posjax.nn.huggingface.load import CONFIG
from posjax.nn.huggingface.save import files_beside
from train.config import Config, own_tokenizer

KEPT = "released"
"""Where a run keeps the files of the model that it started from."""


def keep_files(config: Config, directory: Path) -> None:
    """Copies ``config.json`` and the tokenizer of the model under ``init`` into a run.

    So the run can be used and exported without the model.
    """
    folder = directory / KEPT
    folder.mkdir(parents=True, exist_ok=True)
    own = config.data.tokenizer == own_tokenizer(config.init.path)
    beside = files_beside(config.init.path) if own else {}
    files = {**beside, CONFIG: json.dumps(dict(config.init.values), indent=2).encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)


def with_moved_tokenizer(saved: Config, found: Config) -> Config:
    """``found``; if the run used the model's own tokenizer, with the tokenizer of the model that ``init`` names now."""
    own = bool(found.init.path) and saved.data.tokenizer == own_tokenizer(saved.init.path) == found.data.tokenizer
    return _with_tokenizer(found, own_tokenizer(found.init.path)) if own else found


def with_kept_tokenizer(config: Config, directory: Path) -> Config:
    """The config of a run with the tokenizer that `keep_files` kept, unless the run has another one."""
    kept = directory / KEPT / "tokenizer.json"
    own = bool(config.init.path) and config.data.tokenizer == own_tokenizer(config.init.path)
    return _with_tokenizer(config, str(kept)) if own and kept.is_file() else config


def _with_tokenizer(config: Config, location: str) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=location))
