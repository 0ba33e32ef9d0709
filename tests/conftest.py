"""Eight virtual CPU devices and a compiler that optimises little; set before jax starts.

Most of the suite's time is compilation of small programs, and with fewer of LLVM's optimisations it takes about half.
Not without any: at level 0 XLA of jax 0.10.2 miscompiles a gradient through log1p in float64.
"""

import os

FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=1")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
