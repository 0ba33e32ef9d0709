"""Flax NNX modules for any scheme. Linen users have the pure functions."""

from posjax.nn.config import DecoderConfig
from posjax.nn.decoder import Decoder, DecoderCache, logical_axes
from posjax.nn.modules import MLP, Attention, Block, RMSNorm

__all__ = ["MLP", "Attention", "Block", "Decoder", "DecoderCache", "DecoderConfig", "RMSNorm", "logical_axes"]
