"""Every way a Transformer tells position, as pure JAX functions."""

from posjax import bias, masks, positions
from posjax.attention import attention
from posjax.bias import alibi_bias, alibi_slopes

__version__ = "0.1.0"

__all__ = ["alibi_bias", "alibi_slopes", "attention", "bias", "masks", "positions"]
