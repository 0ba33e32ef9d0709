"""Flags of the compilers that shorten training steps, by chip.

A compiler reads them from the environment, libtpu from ``LIBTPU_INIT_ARGS`` and XLA for GPUs from ``XLA_FLAGS``, when a
process first asks for its devices, so set them before a run starts. A process with a flag that its compiler does not
know exits at once; the flags here are known to libtpu 0.0.42.1 (jax 0.10.2) and 0.0.50.1 (jax 0.12.0.1), and those for
GPUs to jax 0.11.2.
"""

import os
from collections.abc import Mapping

from train.runtime.chips import CHIPS, GPUS

VARIABLE = "LIBTPU_INIT_ARGS"

_VMEM = "--xla_tpu_scoped_vmem_limit_kib"  # how much fast memory a fusion may use; more means fewer reads of HBM
_PERMUTES = "--xla_max_concurrent_async_collective_permutes=16"  # 5 by default; rings send eight arrays at once
_OVERLAP = "--xla_gpu_enable_while_loop_double_buffering=true"  # a layer's parameters come while the one before runs

RECOMMENDED: Mapping[str, tuple[str, ...]] = {
    "v5e": (f"{_VMEM}=98304",),
    "v5p": (f"{_VMEM}=49152", _PERMUTES),
    "v6e": (f"{_VMEM}=98304", _PERMUTES),
    "7x": (f"{_VMEM}=61440",),
    "h100": (_OVERLAP,),
    "h200": (_OVERLAP,),
}
"""Flags by chip; a flag missing for a chip was not tried there. docs/plans.md says what each one changes.

The limits for v6e and 7x are those of MaxText's recipes.
"""


def variable_of(chip: str) -> str:
    """The environment variable with the flags of the compiler for a chip or a GPU."""
    return "XLA_FLAGS" if chip in GPUS else VARIABLE


def missing(chip: str, given: str) -> str:
    """The recommended flags of a chip that `given` does not set. A flag that `given` sets to another value is
    left out too."""
    names = set(map(_name, given.split()))
    return " ".join(flag for flag in RECOMMENDED.get(chip, ()) if _name(flag) not in names)


def advice(kind: str, devices: int) -> str | None:
    """The hint for a user with so many devices of this kind; None if the environment has all recommended flags, and for
    one GPU, whose step they do not change."""
    chip = next((chip.name for chip in (*CHIPS.values(), *GPUS.values()) if chip.kind == kind), "")
    variable = variable_of(chip)
    present = os.environ.get(variable, "")
    wanted = missing(chip, present)
    if not wanted or (chip in GPUS and devices == 1):
        return None
    return (
        f"{variable} lacks flags of the compiler that are recommended for {chip}. A step is expected to be shorter in "
        f'a run that is started with export {variable}="{f"{present} {wanted}".strip()}"'
    )


def _name(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-")
