"""``python -m train.lab.schedule FILE.py:FACTORY CHIP``: the bundles of every kernel of a function, part by part.

FACTORY() returns a function and a list of its abstract arguments (`jax.ShapeDtypeStruct`).
"""

import argparse
import sys
from pathlib import Path

from train.lab.schedule.compiling import compile_for
from train.lab.schedule.kernels import Kernel
from train.runtime.chips import CHIPS


def describe(kernel: Kernel) -> str:
    """One line for every loop and conditional; nested ones are indented and not counted in the outer one."""
    slots = list(kernel.parts[0].slots)
    lines = [f"{kernel.name}: {kernel.bundles} bundles"]
    if kernel.resident:
        lines.append(f"  moved into VMEM whole, before it starts: {', '.join(kernel.resident)}")
    lines.append(f"  {'part':24}{'bundles':>8}{'cycles':>8}" + "".join(f"{name:>7}" for name in slots))
    for part in kernel.parts:
        name = "  " * part.depth + part.kind + (f" x {part.trips}" if part.trips else "")
        numbers = "".join(f"{part.slots.get(slot, 0):7}" for slot in slots)
        lines.append(f"{'*' if part.is_hot else ' '} {name:24}{part.bundles:8}{part.cycles:8}{numbers}")
    return "\n".join(lines)


def main() -> int:
    """Compiles and prints; returns 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m train.lab.schedule", description=__doc__.splitlines()[0])
    parser.add_argument("factory", metavar="FILE.py:FACTORY", help="returns a function and its abstract arguments")
    parser.add_argument("chips", metavar="CHIP", nargs="+", help=f"one or several of {', '.join(CHIPS)}")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="where to leave the compiler's dump")
    parser.add_argument("--traceback", action="store_true", help="show where compiling failed")
    options = parser.parse_args()
    try:
        for chip in options.chips:
            compiled = compile_for(chip, options.factory, keep=options.keep and options.keep / chip)
            print(f"== {chip}: {compiled.temp_bytes / 2**20:.1f} MiB of HBM beside arguments and outputs")
            print(*(describe(kernel) for kernel in compiled.kernels if kernel.is_custom), sep="\n")
            others = [f"{kernel.name} ({kernel.bundles})" for kernel in compiled.kernels if not kernel.is_custom]
            print(f"XLA's own fusions, in bundles: {', '.join(others) or 'none'}")
    except ValueError as error:
        if options.traceback:
            print(getattr(error, "details", ""), file=sys.stderr)
        print("error:", error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
