"""The tensor ``rope_freqs.weight`` of a GGUF file, by which frequencies are divided, as a rule."""

from typing import Any

import numpy as np
from jaxtyping import Float

from posjax._checks import check
from posjax.rotary import Llama3, Plain

_LLAMA3_LENGTH = 8192  # the original length of every release with Llama 3's rule
_ROUNDING = 1e-5  # relative; the divisors are computed and stored in float32


def scaling_of_divisors(
    divisors: Float[np.ndarray, "size/2"], base: float, head_dim: int, original: int | None, length: int
) -> dict[str, Any] | None:
    """``rope_scaling`` of ``config.json``, or None if nothing is divided.

    llama.cpp writes the result of Llama 3's rule and not its parameters. Those of the releases (factors 1 and 4, an
    original length of 8,192 tokens) are taken if they give the same divisors; the factor is the largest divisor.
    Otherwise the divisors themselves are kept, as the lists of LongRoPE without its temperature, which is the same
    computation.

    Args:
        divisors: the tensor.
        base: of the frequencies.
        head_dim: the number of channels of a head.
        original: the original length that the metadata says, or None.
        length: the length of the model.

    Raises:
        ValueError: for divisors that are not one positive number for each plane.
    """
    fits = divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and (divisors > 0).all()
    check(fits, f"rope_freqs.weight must hold {head_dim // 2} positive numbers, found shape {divisors.shape}")
    if np.all(divisors == 1):
        return None
    if divisors.max() > 1:
        rule = Llama3(float(divisors.max()), original or _LLAMA3_LENGTH, base=base)
        plain, scaled = (each.inverse_frequencies(head_dim) for each in (Plain(base=base), rule))
        if np.allclose(plain / scaled, divisors, rtol=_ROUNDING, atol=0):
            return {key: value for key, value in rule.to_hf().items() if key != "rope_theta"}
    kept = [float(str(np.float32(divisor))) for divisor in divisors]
    lists = {"short_factor": kept, "long_factor": kept}
    longest = {"original_max_position_embeddings": original or length}
    return {"rope_type": "longrope", "attention_factor": 1.0} | lists | longest
