"""Softmax attention with any scheme of positions, in backends that all compute the same function."""

from posjax.attention.api import attention

__all__ = ["attention"]
