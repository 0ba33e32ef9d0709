"""Attention kernels for TPUs, measured without a TPU by the compiler's own static schedule.

The TPU compiler (libtpu) runs on any host. It writes the instruction bundles of every kernel. Without stalls one bundle
issues per cycle. So the sum of bundles, times how often each part runs, is an exactly reproducible cost.
"""
