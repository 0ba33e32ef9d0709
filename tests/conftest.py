"""Settings of the tests: eight virtual CPU devices and a compiler that optimises little, set before JAX starts."""

import gc
import importlib.util
import math
import os
import random
import time

import pytest
from flags import QUICK

END = pytest.StashKey[float]()
"""The monotonic time at which a sample ends."""

FLAGS = ("--xla_force_host_platform_device_count=8", *QUICK)

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests write nothing into the user's cache. A test of the cache enables it for itself or for the processes it starts.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))


def pytest_addoption(parser):
    description = "run tests in an order drawn from SEED until MINUTES are over, and skip the rest"
    parser.addoption("--sample", nargs=2, metavar=("SEED", "MINUTES"), help=description)


def pytest_collection_modifyitems(config, items):
    if config.option.sample:
        # The seed is text, so a commit hash can be one. Every worker gets the same order, as xdist requires.
        random.Random(config.option.sample[0]).shuffle(items)
        config.stash[END] = time.monotonic() + 60 * float(config.option.sample[1])
    else:
        # A worker gets whole files. Slow files go first, so that none runs last while the other workers are idle.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """Excludes all imported objects from garbage collection, which took a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if time.monotonic() > item.config.stash.get(END, math.inf):
        pytest.skip("the time of the sample is over")


def pytest_configure():
    """With POSJAX_REQUIRE_PARITY set, a missing library is an error, not a skipped test."""
    if os.environ.get("POSJAX_REQUIRE_PARITY"):
        required = (
            "torch",
            "transformers",
            "accelerate",
            "safetensors",
            "equinox",
            "gguf",
            "tokenizers",
            "lm_eval",
            "peft",
        )
        missing = [name for name in required if importlib.util.find_spec(name) is None]
        if missing:
            raise pytest.UsageError(f"POSJAX_REQUIRE_PARITY is set, but {' and '.join(missing)} cannot be imported")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Frees a file's programs: each holds memory mappings, and Linux allows a process only 65,530 of them."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
