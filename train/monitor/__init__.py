"""What a run tells and watches while it runs; nothing here changes a number of the training.

Every value that is written, and how it is counted, is named in `train.monitor.meter`.
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
