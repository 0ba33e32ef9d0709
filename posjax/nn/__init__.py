"""Flax NNX modules for any scheme. With Flax Linen, use the pure functions."""

from posjax.nn.adapters import add_adapters, merge_adapters
from posjax.nn.attention import Attention
from posjax.nn.block import Block
from posjax.nn.config import DecoderConfig
from posjax.nn.decoder import Decoder, DecoderCache, logical_axes
from posjax.nn.delta import DeltaMixer
from posjax.nn.generation import Generated, Sampling, choose, generate, stream
from posjax.nn.huggingface import from_pretrained, save_pretrained
from posjax.nn.latent import LatentAttention
from posjax.nn.mlp import MLP
from posjax.nn.norms import LayerNorm, RMSNorm
from posjax.nn.specs import Experts, Latent, LoRA, Norm, Residual, Router

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "DeltaMixer",
    "Experts",
    "Generated",
    "Latent",
    "LatentAttention",
    "LayerNorm",
    "LoRA",
    "Norm",
    "RMSNorm",
    "Residual",
    "Router",
    "Sampling",
    "add_adapters",
    "choose",
    "from_pretrained",
    "generate",
    "logical_axes",
    "merge_adapters",
    "save_pretrained",
    "stream",
]
