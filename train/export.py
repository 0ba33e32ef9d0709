"""A trained run in the layout of released models, for whatever reads those."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from posjax.nn import save_pretrained
from posjax.nn.huggingface.load import is_released
from posjax.nn.huggingface.save import COPIED
from train.config import Config
from train.model import evaluated_scheme
from train.restore import config_of, restore


def export(place: str | Path, folder: str, overrides: Sequence[str] = ()) -> None:
    """Writes the model of a run, or a released one, into a folder in the layout of Hugging Face.

    With ``scheme.extend`` it is written extended. The tokenizer's files go with it.

    Raises FileNotFoundError without a trained run, and ValueError for a model that the layout has no place for.
    """
    config = config_of(place, overrides)
    stage, model = restore(place, config)
    model = model.with_scheme(evaluated_scheme(stage))
    original = config.init.path
    like = original if original and is_released(original) else None
    save_pretrained(model, folder, like=like, family=config.init.values.get("model_type"))
    if like is None:
        _copy_tokenizer(config, Path(folder))


def _copy_tokenizer(config: Config, folder: Path) -> None:
    """The tokenizer of a run that started from no released model, where it is one that others can read."""
    source = Path(config.data.tokenizer)
    if source.suffix == ".json" and source.is_file():
        shutil.copyfile(source, folder / "tokenizer.json")
        for name in COPIED:
            if name != "tokenizer.json" and (source.parent / name).is_file():
                shutil.copyfile(source.parent / name, folder / name)
