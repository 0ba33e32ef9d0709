"""Released models by their names at the Hugging Face hub: a name becomes a folder in the cache of ``huggingface_hub``.

That package downloads the files and keeps them. It reads its usual variables: ``HF_HOME`` (where the cache is),
``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from posjax._checks import check
from posjax.nn.huggingface.files import CONFIG, COPIED, INDEX, WHOLE, open_location, read_json

_NAME = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")


def is_name(path: str | Path) -> bool:
    """Whether a location is ``org/name`` or ``org/name@revision`` and not a file or folder of this machine."""
    if not isinstance(path, str) or path.endswith(".gguf") or not _NAME.fullmatch(path):
        return False
    return not Path(path).exists()


def short_name(name: str) -> str:
    """The part of a name after the organisation, without the revision."""
    return name.partition("@")[0].partition("/")[2]


def pinned(path: str | Path) -> str | Path:
    """``org/name@commit`` for a name: the commit that its revision is now. Any other location stays as it is.

    So a model that changes at the hub while it is read, or after a training has begun, stays one model.

    Raises:
        ModuleNotFoundError: if huggingface_hub is not installed.
        OSError: if the model, the revision or the permission is missing, or the hub cannot be reached; one line.
    """
    if not is_name(path):
        return path
    model, revision = _parts(path)
    if revision is not None and _COMMIT.fullmatch(revision):
        return path
    return f"{model}@{_download(path, CONFIG).parent.name}"


def on_disk(path: str | Path, tensors: Callable[[str], bool] | None = None) -> str | Path:
    """The folder in the cache for a name; any other location stays as it is.

    Args:
        path: a name, or a location.
        tensors: says by its name whether a tensor is needed; then its file is downloaded too. When left out only
            ``config.json`` and the tokenizer's files are.

    Raises as `pinned`, and FileNotFoundError for a model without safetensors.
    """
    if not is_name(path):
        return path
    name = pinned(path)
    folder = _download(name, CONFIG).parent
    for file in COPIED:
        _has(name, file)
    if tensors is not None:
        _download_tensors(name, folder, tensors)
    return folder


def file_on_disk(path: str) -> str:
    """The file in the cache for ``org/name/file`` or ``org/name@revision/file``; any other path stays as it is."""
    name, _, file = path.rpartition("/")
    return f"{on_disk(name)}/{file}" if is_name(name) and file in COPIED and not Path(path).exists() else path


def _download_tensors(name: str, folder: Path, needed: Callable[[str], bool]) -> None:
    """Downloads what `TensorFolder` reads: ``model.safetensors``, or the index and the files with needed tensors."""
    if _has(name, WHOLE):
        return
    if not _has(name, INDEX):
        raise FileNotFoundError(f"{name} has neither {WHOLE} nor {INDEX} at the hub; other formats are not read")
    files, root = open_location(folder)
    file_of = read_json(files, f"{root}/{INDEX}").get("weight_map")
    check(isinstance(file_of, dict), f"{name}: {INDEX} is broken: it has no weight_map of tensors to files")
    for file in sorted({str(file) for tensor, file in file_of.items() if needed(tensor)}):
        check(_has(name, file), f"{name}: {INDEX} names {file}, which the hub does not have")


def _has(name: str, file: str) -> bool:
    """Downloads a file of a commit, unless the cache has it. Returns False if the model has no such file.

    The cache remembers that too. With HF_HUB_OFFLINE a file that is not in the cache is taken to be absent: ``hf
    download`` fetches what there is, and does not note what there is not.
    """
    hub = _library(name)
    model, commit = _parts(name)
    known = hub.try_to_load_from_cache(model, file, revision=commit)
    if known is not None:
        return isinstance(known, str)
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        _download(name, file)
    except _NoSuchFile:
        return False
    return True


class _NoSuchFile(FileNotFoundError):
    """The model exists, and has no such file."""


def _download(name: str, file: str) -> Path:
    """The path in the cache of a file, downloaded if necessary. Raises OSError, in one line that begins with `name`."""
    hub = _library(name)
    model, revision = _parts(name)
    try:
        if hub.try_to_load_from_cache(model, file, revision=revision) is None:
            # Asks once. Without a network the download itself would try for half a minute, with a warning each time.
            with suppress(hub.errors.EntryNotFoundError):  # the download notes in the cache that there is no such file
                hub.get_hf_file_metadata(hub.hf_hub_url(model, file, revision=revision))
        return Path(hub.hf_hub_download(model, file, revision=revision, library_name="posjax"))
    except Exception as error:  # OSError, and the classes of the HTTP library, which depend on the version
        raise _plain(hub, error, name, file) from error


def _plain(hub: ModuleType, error: Exception, name: str, file: str) -> OSError:
    """An error of huggingface_hub in one line that says what was asked for and what would work."""
    errors = hub.errors
    (model, revision), endpoint = _parts(name), hub.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        account = "set a token of that account (HF_TOKEN, or `hf auth login`)"
        return PermissionError(f"{name} is gated: accept its licence at {endpoint}/{model}, then {account}")
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "if it is private, set a token (HF_TOKEN, or `hf auth login`)"
        return FileNotFoundError(f"{name}: there is no such path here, and no such model at {endpoint}; {private}")
    if isinstance(error, errors.RevisionNotFoundError):
        works = "a branch, a tag or a whole commit works"
        return FileNotFoundError(f"{name}: {model} at {endpoint} has no revision {revision!r}; {works}")
    if hub.constants.HF_HUB_OFFLINE:
        lacks = f"{name}: there is no such path here, and its {file} is not in {hub.constants.HF_HUB_CACHE}"
        return FileNotFoundError(f"{lacks}; HF_HUB_OFFLINE is set, so nothing is downloaded")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return _NoSuchFile(f"{name}: the model at {endpoint} has no {file}")
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return OSError(
        f"{name}: there is no such path here, and {file} cannot be downloaded from {endpoint} ({reason}); without a "
        "network HF_HUB_OFFLINE=1 reads what was downloaded before"
    )


def _parts(name: str) -> tuple[str, str | None]:
    """The model, and the revision if the name has one."""
    model, revision = _NAME.fullmatch(name).group("model", "revision")
    return model, revision


def _library(name: str) -> ModuleType:
    try:
        import huggingface_hub.constants  # only needed for names
        import huggingface_hub.errors
    except ModuleNotFoundError:
        how = 'a model of the hub needs the package huggingface_hub: pip install -e ".[hf]"'
        raise ModuleNotFoundError(f"{name}: there is no such path here; {how}") from None
    return huggingface_hub
