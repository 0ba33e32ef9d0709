"""Exports a trained run in the layout of released models, for any program that reads those."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posjax.nn import merge_adapters, save_pretrained
from posjax.nn.huggingface import save_adapter
from posjax.nn.huggingface.family import length_value
from posjax.nn.huggingface.files import CONFIG, COPIED, open_location
from posjax.nn.huggingface.hub import file_on_disk
from posjax.nn.huggingface.load import is_released
from posjax.nn.huggingface.save import files_beside
from posjax.scheme import uniform
from train.checkpoint.directory import KEPT
from train.checkpoint.restore import config_of, entry_in_stage, is_run, parameters_in_words, restore
from train.config import Config, SchemeConfig, own_tokenizer
from train.config.settings.checks import check
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.model.build import RELEASED, evaluated_scheme, extension_of, model_length, scheme_of
from train.model.extension import UNSCALED
from train.runtime.lines import in_a_line
from train.runtime.paths import path


def export(
    location: str | Path,
    folder: str,
    overrides: Sequence[str] = (),
    *,
    dtype: str | None = None,
    log: Callable[[str], Any] = print,
) -> None:
    """Writes the model of a run, or a released one, into a folder in the layout of Hugging Face.

    Adapters are merged into their projections. With ``scheme.extend`` the extended model is written, and its options
    are reported. The tokenizer's files are copied; if it is not the released model's, its special tokens replace those
    in ``config.json``. So is a template of conversations that ``data.chat_template`` names. Of a run with ``train.ema``
    the averaged parameters are written, unless ``evaluate.averaged`` is false; that is reported.

    Args:
        location: the run or the released model.
        folder: to be written, local or at a URL.
        overrides: changes of the config.
        dtype: the dtype of the tensors. The default is that of a released model's files, and float32 for a run.
        log: is called with each line of the report.

    Raises FileNotFoundError without a trained run, and ValueError for a model that the layout cannot express.
    """
    config = config_of(location, overrides)
    like = _original(location, config)
    stage, model = restore(location, config)
    model = merge_adapters(model)
    entry, longest = entry_in_stage(config.scheme, config, stage), max(stage.evaluate.lengths)
    options = extension_of(stage, entry, longest)
    nothing = f"scheme.extend changes nothing up to {longest} tokens, the longest of evaluate.lengths"
    check(bool(options) or not entry.extend, f"{nothing}; raise that, or name a factor")
    model = model.with_scheme(evaluated_scheme(stage, entry))
    model.config = dataclasses.replace(model.config, trained_length=_reach(stage, entry, longest))
    save_pretrained(model, folder, like=like, family=config.init.values.get("model_type"), dtype=dtype)
    if config.data.tokenizer not in _tokenizers_of(location, config):
        _replace_tokenizer(config, folder, like)
        try:
            _write_special_tokens(load_tokenizer(config.data), folder)
        except (FileNotFoundError, ValueError) as error:  # the written model is usable without a tokenizer
            log(f"no tokenizer was written, and special tokens are as they were: {in_a_line(error)}")
    if config.data.chat_template:
        _write_chat_template(config.data.chat_template, folder)
    if config.data.tokenizer == "bytes":
        log("no tokenizer was written: the model's tokens are bytes; read it with data.tokenizer=bytes")
    if which := parameters_in_words(stage):
        log(f"written: {which}")
    if entry.extend:
        reached = length_value(model.config)["max_position_embeddings"]
        log(f"extended by {json.dumps(options)}; max_position_embeddings is {reached}")


def export_adapter(location: str | Path, folder: str, overrides: Sequence[str] = ()) -> None:
    """Writes the adapters of a run, or of a released model with ``init.adapter``, into a local folder in peft's layout.

    Other parameters that the run trained are written with them, as whole modules.

    Raises FileNotFoundError without a trained run, and ValueError for a model without adapters, or with another scheme
    than the released one, which an adapter does not store.
    """
    config = config_of(location, overrides)
    stage, model = restore(location, config)
    check(
        model.config.lora is not None,
        "--adapter: the model has no adapters; set model.lora and train it, or leave --adapter out",
    )
    entry = entry_in_stage(config.scheme, config, stage)
    own = entry.name == RELEASED and not entry.options and not entry.extend
    check(
        own, "--adapter: an adapter stores no scheme, and this is not the released one; without it the model is written"
    )
    trained = [pattern for each in config.every_stage for pattern in each.train.trainable]
    family = config.init.values.get("model_type")
    save_adapter(model, folder, family=family, base=config.init.path, trained=trained)


def _reach(config: Config, entry: SchemeConfig, longest: int) -> int:
    """The length of the written model: its own, times the extension's factor if that counts from its own length."""
    own, change = model_length(config), extension_of(config, entry, longest).get("frequencies")
    if not isinstance(change, Mapping) or "factor" not in change or "original_length" in change:
        return own  # a rule with an original length states its own reach
    schemes = uniform(scheme_of(config, entry), config.model.num_layers).kinds
    rules = [each.features.frequencies for each in schemes if each.rotates]
    before = max(1.0 if isinstance(rule, UNSCALED) else getattr(rule, "factor", 1.0) for rule in rules)
    return int(own * change["factor"] / before)


def _tokenizers_of(location: str | Path, config: Config) -> tuple[str, ...]:
    """The paths of the tokenizer that is copied with the released model's other files: in the model, and in the run."""
    if not config.init.path:
        return ()
    return own_tokenizer(config.init.path), str(path(location) / KEPT / "tokenizer.json")


def _original(location: str | Path, config: Config) -> str | None:
    """The released model whose tokenizer and other keys are copied into the export; None without one.

    Raises ValueError if the run did not keep them and the model is no longer where it was.
    """
    kept, original = path(location) / KEPT, config.init.path
    if not original or (is_run(location) and is_released(str(kept))):
        return str(kept) if original else None
    check(
        is_released(original),
        f"init: there is no model at {original}, so its tokenizer cannot be written; set init.path to where it is now",
    )
    return original


def _replace_tokenizer(config: Config, folder: str, like: str | None) -> None:
    """Replaces the released model's tokenizer by the run's own; writes none if the own one is not a tokenizer.json."""
    target, root = open_location(folder)
    for name in files_beside(like) if like else ():
        target.rm_file(f"{root}/{name}")
    if not config.data.tokenizer.endswith(".json"):
        return
    files, source = open_location(file_on_disk(config.data.tokenizer))
    beside = source.rpartition("/")[0]
    names = {"tokenizer.json": source, **{n: f"{beside}/{n}" for n in COPIED if n != "tokenizer.json"}}
    for name, location in names.items():
        if files.isfile(location):
            target.pipe_file(f"{root}/{name}", files.cat_file(location))


def _write_chat_template(template: str, folder: str) -> None:
    """Writes the template of conversations that the model learned, which goes before one of the tokenizer's own."""
    (files, source), (target, root) = map(open_location, (template, folder))
    target.pipe_file(f"{root}/chat_template.jinja", files.cat_file(source))


def _write_special_tokens(tokenizer: Tokenizer, folder: str) -> None:
    """Replaces the special tokens in ``config.json`` by those of a tokenizer; texts may begin without one."""
    target, root = open_location(folder)
    beginning = tokenizer.bos if tokenizer.opening else None
    ids = {"bos_token_id": beginning, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.padding}
    values = json.loads(target.cat_file(f"{root}/{CONFIG}")) | ids
    target.pipe_file(f"{root}/{CONFIG}", json.dumps(values, indent=2).encode())
