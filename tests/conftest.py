"""Eight virtual CPU devices and a compiler that optimises little; set before jax starts."""

import gc
import importlib.util
import math
import os
import random
import time

import pytest
from flags import QUICK

END = pytest.StashKey[float]()
"""When the time of a sample is over."""

FLAGS = ("--xla_force_host_platform_device_count=8", *QUICK)

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests leave nothing in the user's cache; a test of the cache turns it on again for itself, or for what it starts.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))


def pytest_addoption(parser):
    what = "run tests in an order drawn from SEED until MINUTES are over, and skip the rest"
    parser.addoption("--sample", nargs=2, metavar=("SEED", "MINUTES"), help=what)


def pytest_collection_modifyitems(config, items):
    if config.option.sample:
        # Text, so that a commit's name is a seed; the same order in every worker, as xdist wants it.
        random.Random(config.option.sample[0]).shuffle(items)
        config.stash[END] = time.monotonic() + 60 * float(config.option.sample[1])
    else:
        # Files go to the workers whole; one that takes minutes must not be the last, with every other worker idle.
        long = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    """What was imported stays: it is looked through no more when memory is freed, which was a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if time.monotonic() > item.config.stash.get(END, math.inf):
        pytest.skip("the time of the sample is over")


def pytest_configure():
    """Where parity is asked for, a library that it needs and lacks is an error, not a skipped test."""
    if os.environ.get("POSJAX_REQUIRE_PARITY"):
        wanted = ("torch", "transformers", "accelerate", "safetensors", "equinox", "gguf", "tokenizers")
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if missing:
            raise pytest.UsageError(f"POSJAX_REQUIRE_PARITY is set, but {' and '.join(missing)} cannot be imported")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Every program holds pieces of the address space, of which Linux allows a process 65,530; a file's go with it."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
