"""The flash attention kernels for TPUs, in Pallas: ``entry.tpu`` is what ``attention`` calls."""
