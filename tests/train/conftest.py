"""Fixtures of the tests of training."""

import pytest


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are not rendered as PNG, which takes most of a report's time. Only tests of reports render them."""
    monkeypatch.setattr("train.report.style.png", lambda figure: b"")
