"""Oracle for rotations: pairs of features as complex numbers times e^{i angle}, in NumPy and float64."""

import numpy as np


def turn(x, angles, pairing="half"):
    """``x [..., length, heads, d]`` rotated by ``angles``, which broadcast to ``[..., length, heads, d/2]``."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * np.asarray(angles))
    if pairing == "half":
        return np.concatenate([z.real, z.imag], axis=-1)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def powers(base, width):
    """base^(-2t/width) for t = 0 .. width/2 - 1."""
    return base ** -(2 * np.arange(width // 2) / width)
