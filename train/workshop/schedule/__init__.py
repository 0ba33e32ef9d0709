"""Attention kernels for TPUs, measured without a TPU by the compiler's own static schedule.

The TPU compiler (libtpu) runs on any host. It writes down the instruction bundles of every kernel. One bundle issues
per cycle when nothing stalls, so counting them by how often each part runs gives a cost that repeats exactly.
"""
