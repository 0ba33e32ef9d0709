"""JAX's persistent cache of compiled programs, so that a resumed run starts at once."""

import os
import sys
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def enable_compilation_cache(setting: str) -> str | None:
    """Turns the cache on as ``monitor.compilation_cache`` says, and returns where it is; None when it is off.

    ``auto`` is `user_cache`, or no cache if that cannot be written; "" is no cache; others are folders or URLs. The
    environment takes precedence: JAX_COMPILATION_CACHE_DIR names a folder, and JAX_ENABLE_COMPILATION_CACHE=false turns
    the cache off. Call it before anything is compiled.

    Raises ValueError for a folder that cannot be written.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = os.environ.get(_VARIABLE) or _folder_of(setting)
    if folder != jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # JAX decides once per process where the cache is
    return folder


def user_cache() -> Path:
    """``posjax/xla`` in the user's cache folder: XDG_CACHE_HOME, ~/Library/Caches on macOS, or ~/.cache."""
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "posjax" / "xla"


def _folder_of(setting: str) -> str | None:
    if not setting or "://" in setting:
        return setting or None
    folder = user_cache() if setting == "auto" else Path(setting).absolute()
    if _writable(folder):
        return str(folder)
    if setting == "auto":
        return None
    raise ValueError(
        f"monitor.compilation_cache: cannot write into {str(folder)!r}; name another folder, or '' for no cache"
    )


def _writable(folder: Path) -> bool:
    """Whether the folder exists or could be created, and files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
