"""Compiler flags that optimise little, for the tests and the processes that they start.

Most of the suite's time is compilation of small programs. Without LLVM's optimisations and XLA's fusion emitters, it
takes a third of the time (the gradients of six small decoders: 6.7 s of CPU time; at level 1, 18.5 s). Of the 6.7 s,
XLA's own part is 1.6 s; it is 2.1 s if code generation is split for parallel compilation. Instructions newer than AVX
are off: with them, jax 0.10.2 computes NaN gradients at level 0 (KERPLE, ALiBi's slopes).

YNNPACK is off from jaxlib 0.11 on: with it, 0.11.2 sums some products of bfloat16 in bfloat16, on CPUs only. A gradient
over 4,096 tokens is then wrong by 7% (``tests/nn/test_sums.py``); jaxlib 0.10.2 computes it well.
"""

import os
from importlib.metadata import version

# jaxlib 0.11.2 and later do not know the first of these flags, and an unknown flag aborts the process.
_OF_THE_VERSION = (
    "--xla_cpu_use_fusion_emitters=false"
    if version("jaxlib").startswith("0.10.")
    else "--xla_cpu_experimental_ynn_fusion_type="
)

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    _OF_THE_VERSION,
    "--xla_cpu_max_isa=AVX",
)


def environment(devices: int = 1, **others: str) -> dict[str, str]:
    """Environment variables for a process that a test starts: the number of devices, and an enabled compilation cache.

    JAX_COMPILATION_CACHE_DIR is removed, because it would override the cache folder of the config.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    flags = (f"--xla_force_host_platform_device_count={devices}", *QUICK)
    changed = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**inherited, **changed, **others}
