"""The peak of memory, for devices with known statistics."""

from types import SimpleNamespace

import jax
import pytest

from train.monitor import meter
from train.monitor.meter import peak_memory_bytes


@pytest.mark.parametrize(
    ("statistics", "peak"),
    [
        ([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9}, {"peak_bytes_in_use": 7}], 9),
        ([None, {"peak_bytes_in_use": 4}, {"bytes_limit": 8}], 4),
        ([None, {"bytes_limit": 8}], 3),
    ],
)
def test_the_peak_is_that_of_the_fullest_device_or_of_the_process(monkeypatch, statistics, peak):
    devices = [SimpleNamespace(memory_stats=lambda each=each: each) for each in statistics]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(meter, "resident_peak_bytes", lambda: 3)
    assert peak_memory_bytes() == peak
