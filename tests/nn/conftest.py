"""What the tests of the modules share."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Dozens of programs run once each: compiling them with full effort is most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
