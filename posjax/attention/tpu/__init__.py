"""The flash attention kernels for TPUs, in Pallas: ``entry`` is called by ``attention``."""
