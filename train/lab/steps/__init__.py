"""Compares compiled steps of any trainer: what their parts execute and move, and what kernels cost."""
