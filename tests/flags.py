"""Flags of a compiler that optimises little, for the tests and the processes that they start.

Most of the suite's time is compilation of small programs. Without LLVM's optimisations and XLA's fusion emitters it
takes a third (the gradients of six small decoders: 6.7 s of CPU time, 18.5 s at level 1). In one piece XLA's own part
of that is 1.6 s, not 2.1 s. For AVX, because for the instructions that came after it jax 0.10.2 makes gradients NaN
at level 0 (KERPLE, ALiBi's slopes).
"""

import os
from importlib.metadata import version

# Of jaxlib 0.10; from 0.11.2 on it is unknown, and an unknown flag ends the process.
_WITHOUT_EMITTERS = ("--xla_cpu_use_fusion_emitters=false",) if version("jaxlib").startswith("0.10.") else ()

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *_WITHOUT_EMITTERS,
    "--xla_cpu_max_isa=AVX",
)


def environment(devices: int = 1, **others: str) -> dict[str, str]:
    """What a process that a test starts finds set: so many devices, and kept programs where the config keeps them.

    A folder of kept programs that the environment names would win over the config's, so it is left out.
    """
    here = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    flags = (f"--xla_force_host_platform_device_count={devices}", *QUICK)
    changed = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**here, **changed, **others}
