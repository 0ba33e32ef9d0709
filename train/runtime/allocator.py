"""How the C library keeps memory between the steps of a training on a CPU."""

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_LARGEST, _PAD = 2**31 - 1, 2**28


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
    import jax  # imported here, because a bench measures other libraries alone

    if jax.default_backend() == "cpu":
        keep_memory()
