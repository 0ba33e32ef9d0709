"""Digests of arrays."""

import jax
import numpy as np
import pytest

from train.checkpoint import digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool", "uint32"])
def test_a_digest_changes_with_a_bit_an_exchange_and_a_shape(dtype):
    draw = np.random.default_rng(0).integers(0, 2, (6, 10))

    def digest_of(values):
        return int(digest.digests({"x": jax.numpy.asarray(values, dtype)})[0])

    other = draw.copy()
    other[3, 4] ^= 1
    exchanged = draw.copy()
    exchanged[[0, 1]] = draw[[1, 0]]
    found = [digest_of(each) for each in (draw, other, exchanged, draw[::-1], draw.T, draw.reshape(10, 6), draw[:-1])]
    assert len(set(found)) == len(found)
