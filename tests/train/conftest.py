"""What tests of training share."""

import pytest


@pytest.fixture
def unpainted(monkeypatch):
    """Figures are drawn and not painted, which would take most of a report's time; tests of reports paint them."""
    monkeypatch.setattr("train.report.style.png", lambda figure: b"")
