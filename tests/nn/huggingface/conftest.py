"""What the tests of released models share."""

import logging

import pytest


@pytest.fixture(scope="module")
def quiet_transformers():
    """transformers without its progress bars and reports."""
    log = pytest.importorskip("transformers").utils.logging
    level = log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity(logging.ERROR)
    yield
    log.enable_progress_bar()
    log.set_verbosity(level)
