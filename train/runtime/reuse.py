"""What a process uses again: compiled programs, in JAX's persistent cache, and on a CPU the memory of arrays."""

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_LARGEST, _PAD = 2**31 - 1, 2**28


def prepare_process(cache: str) -> None:
    """Call it before anything is compiled: `enable_compilation_cache`, and `keep_memory_on_cpu`."""
    enable_compilation_cache(cache)
    keep_memory_on_cpu()


def keep_memory() -> None:
    """Lets glibc keep the memory of large arrays when they are freed; does nothing with another C library.

    By default glibc gives it back to the system after every step and asks for it again, page by page, which costs a
    small training a quarter of its time. The price is memory that does not leave the process: up to 256 MiB more, and
    gaps between arrays.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _PAD)):
            libc.mallopt(option, value)


def keep_memory_on_cpu() -> None:
    """`keep_memory` if JAX computes on the CPU: beside an accelerator the host's memory is for other things."""
    import jax  # imported here, as below, because a bench measures other libraries alone

    if jax.default_backend() == "cpu":
        keep_memory()


def enable_compilation_cache(setting: str) -> str | None:
    """Turns the cache on as ``monitor.compilation_cache`` says, and returns where it is; None when it is off.

    ``auto`` is `user_cache`, or no cache if that cannot be written; "" is no cache; others are folders or URLs. The
    environment takes precedence: JAX_COMPILATION_CACHE_DIR names a folder, and JAX_ENABLE_COMPILATION_CACHE=false turns
    the cache off. Call it before anything is compiled.

    Raises ValueError for a folder that cannot be written.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

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
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and os.access(folder, os.W_OK):
        return str(folder)
    if setting == "auto":
        return None
    raise ValueError(
        f"monitor.compilation_cache: cannot write into {str(folder)!r}; name another folder, or '' for no cache"
    )
