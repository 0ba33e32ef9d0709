"""Fixtures that the tests of the modules share."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiles with few optimizations: dozens of programs run once each, so compiling takes most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
