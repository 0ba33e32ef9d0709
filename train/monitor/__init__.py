"""What a run reports and watches while it runs; nothing here changes a number of the training.

`train.monitor.meter` names every metric and how it is computed.
"""

from train.monitor.cache import enable_compilation_cache
from train.monitor.logs import MetricsLog, read_metrics
from train.monitor.meter import Meter, peak_memory_bytes
from train.monitor.monitor import Monitor, check_monitor
from train.monitor.trace import Trace
from train.monitor.watchdog import Watchdog

__all__ = [
    "Meter",
    "MetricsLog",
    "Monitor",
    "Trace",
    "Watchdog",
    "check_monitor",
    "enable_compilation_cache",
    "peak_memory_bytes",
    "read_metrics",
]
