"""Flags of the TPU compiler that shorten training steps, by chip.

libtpu reads them from ``LIBTPU_INIT_ARGS`` when a process first asks for its TPUs, so set them before a run starts. A
process with a flag that libtpu does not know exits at once; the flags here are known to libtpu 0.0.42.1 (jax 0.10.2)
and 0.0.50.1 (jax 0.12.0.1).
"""

import os
from collections.abc import Mapping

from train.runtime.chips import CHIPS

VARIABLE = "LIBTPU_INIT_ARGS"

_VMEM = "--xla_tpu_scoped_vmem_limit_kib"  # how much fast memory a fusion may use; more means fewer reads of HBM
_PERMUTES = "--xla_max_concurrent_async_collective_permutes=16"  # 5 by default; rings send eight arrays at once

RECOMMENDED: Mapping[str, tuple[str, ...]] = {
    "v5e": (f"{_VMEM}=98304",),
    "v5p": (f"{_VMEM}=49152", _PERMUTES),
    "v6e": (f"{_VMEM}=98304", _PERMUTES),
    "7x": (f"{_VMEM}=61440",),
}
"""Flags by chip; a flag missing for a chip was not tried there. docs/plans.md says what each one changes.

The limits for v6e and 7x are those of MaxText's recipes.
"""


def missing(chip: str, given: str) -> str:
    """The recommended flags of a chip that `given` does not set. A flag that `given` sets to another value is
    left out too."""
    names = set(map(_name, given.split()))
    return " ".join(flag for flag in RECOMMENDED.get(chip, ()) if _name(flag) not in names)


def advice(kind: str) -> str | None:
    """The hint for a user with devices of this kind; None if the environment has all recommended flags."""
    chip = next((chip.name for chip in CHIPS.values() if chip.kind == kind), "")
    present = os.environ.get(VARIABLE, "")
    wanted = missing(chip, present)
    if not wanted:
        return None
    return (
        f"{VARIABLE} lacks flags of the compiler that are recommended for {chip}. A step is expected to be shorter in "
        f'a run that is started with export {VARIABLE}="{f"{present} {wanted}".strip()}"'
    )


def _name(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-")
