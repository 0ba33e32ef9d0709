"""Fixtures that the tests of released models share."""

import logging

import pytest


@pytest.fixture(scope="module")
def quiet_transformers():
    """transformers without progress bars and reports, on one thread: models are tiny, other tests run in parallel."""
    torch, log = pytest.importorskip("torch"), pytest.importorskip("transformers").utils.logging
    level, threads = log.get_verbosity(), torch.get_num_threads()
    torch.set_num_threads(1)
    log.disable_progress_bar()
    log.set_verbosity(logging.ERROR)
    yield
    log.enable_progress_bar()
    log.set_verbosity(level)
    torch.set_num_threads(threads)
