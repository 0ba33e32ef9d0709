"""A run's directory: what it may hold, whether it belongs to a config, the config that it was made with, and what it
keeps of the released model that it started from: ``config.json`` and the tokenizer."""

import dataclasses
import json
from pathlib import Path

from posjax.nn.huggingface.files import CONFIG, reaching
from posjax.nn.huggingface.save import files_beside
from train import report
from train.checkpoint.steps import finished_steps
from train.config import Config, differences, dump, own_tokenizer, parse_text
from train.runtime.distributed import decided
from train.runtime.lines import Listed
from train.runtime.machine import own_versions
from train.runtime.paths import names_in, write_file

FOUND = "longrope.json"
"""The file in which the command `search` writes its result."""

RESULTS = "results.jsonl"
"""The file with the rows that a comparison, a study or one of its trainings reports."""

KEPT = "released"
"""Where a run keeps the files of the model that it started from."""

LOCAL_MARK = "local.txt"
"""A name that distinguishes the local checkpoints of a run from those of an earlier run in the same directory."""

RUN_FILES = frozenset(
    ("config.yaml", "versions.json", "metrics.jsonl", "metrics", "fit.json", "checkpoints", "evaluation.jsonl", RESULTS)
) | {*report.FILES, FOUND, "tensorboard", "wandb", "profile", "watchdog", KEPT, LOCAL_MARK}
"""What a run directory may hold; a folder with anything else in it is never written into."""


@decided
def check_run(config: Config, directory: Path) -> None:
    """Raises ValueError for a directory that holds a run of another config, naming the differences, or other files."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file; choose another name for the run")
    strange = sorted(path.name for path in directory.glob("*") if path.name not in RUN_FILES)
    if strange and directory.is_dir():
        raise ValueError(f"{directory} has files that are not of a run ({strange[0]}); choose another name")
    if (directory / "config.yaml").exists():
        saved = read_config(directory)
        if is_started(directory):
            refuse_another(saved, config, str(directory))


@decided
def create_run(config: Config, directory: Path) -> bool:
    """Makes the run directory, unless a training has started there; call `check_run` first.

    Returns whether the run is new; otherwise something is saved there that the training resumes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if is_started(directory):
        return False
    write_file(directory / "config.yaml", dump(config))
    write_file(directory / "versions.json", json.dumps(own_versions(), indent=2) + "\n")
    if config.init.path:
        keep_files(config, directory)
    return True


def is_started(directory: Path) -> bool:
    """Whether anything was saved; a run that failed before its first save does not block a corrected one."""
    metrics = directory / "metrics.jsonl"
    return bool(finished_steps(directory / "checkpoints")) or (metrics.exists() and metrics.stat().st_size > 0)


def read_config(directory: Path) -> Config:
    """The config a run directory was made with."""
    path = directory / "config.yaml"
    with reaching(directory):
        found = path.exists()  # is_file answers no at gs:// if access is denied
    if not found:
        raise FileNotFoundError(f"{directory} is no run directory: it has no config.yaml")
    return parse_text(path.read_text(encoding="utf-8"), str(path))


def check_one_run(directory: Path) -> None:
    """Raises `Listed`, with the runs in it, for a folder that only holds runs, such as that of a comparison."""
    with reaching(directory):
        is_folder = directory.is_dir() and not (directory / "checkpoints").exists()
        places = [directory / name for name in (names_in(directory) if is_folder else ())]
        runs = [str(place) for place in places if (place / "config.yaml").exists()]
    if runs:
        raise Listed(f"{directory} is not a run; name one of those in it:", runs)


def refuse_another(saved: Config, found: Config, where: str) -> None:
    changed = differences(saved, found)
    if changed:
        raise ValueError(f"{where} belongs to another config: {'; '.join(changed)}. Choose another name to keep both")


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
