"""Softmax attention with any scheme of positions, in backends that compute the same function."""

from posjax.attention.api import attention, coca_attention

__all__ = ["attention", "coca_attention"]
