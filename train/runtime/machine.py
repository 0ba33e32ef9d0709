"""The machine on which numbers are measured: its processor, the versions of packages, the memory in use."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("posjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
"""Packages whose versions affect measured numbers."""


def processor() -> str:
    """The name of this machine's processor, as far as the system tells it, and how many cores it has."""
    name = platform.processor() or platform.machine()
    details = Path("/proc/cpuinfo")
    if details.exists():
        lines = details.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, of the system, and of those of `packages` that are installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def own_versions() -> dict[str, str]:
    """The versions of everything that affects measured numbers, and the device's name."""
    import jax  # imported here, because the reader of configs must not load it

    return {"device": jax.devices()[0].device_kind, **versions(PACKAGES)}


def resident_peak_bytes() -> int:
    """The most memory this process has held in RAM, its interpreter, libraries and compiler included.

    On Linux that is VmHWM, because ru_maxrss also counts the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
