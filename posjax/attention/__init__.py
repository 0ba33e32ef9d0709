"""Softmax attention with any scheme of positions, in backends that compute the same function."""

from posjax.attention.entrance import attention

__all__ = ["attention"]
