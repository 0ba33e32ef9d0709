"""Oracle for angles: cosine and sine of position * frequency in exact rational arithmetic, rounded once at the end."""

from fractions import Fraction

import numpy as np

TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021")
POSITIONS = (0, 1, 257, 8191, 131_071, 1_000_003, 2**31 - 1, -1, -257, -1_000_003, -(2**31))


def cos_sin(positions, frequencies):
    """float64 ``[positions, frequencies]`` of cos and of sin; the frequencies are float64 radians per position."""
    angles = np.array([[_reduced(p, f) for f in np.asarray(frequencies).tolist()] for p in positions])
    return np.cos(angles), np.sin(angles)


def _reduced(position, frequency):
    angle = int(position) * Fraction(frequency)
    return float(angle - round(angle / TWO_PI) * TWO_PI)
