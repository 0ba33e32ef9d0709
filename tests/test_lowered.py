"""A function that is traced when a program is lowered, under the transformations of JAX: against plain ``a**2 * b``."""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax._lowered import Lowered, run


@dataclass(frozen=True)
class Product(Lowered):
    """``a**2 * b``, in which it is linear if it says so."""

    linear: int = 0

    def types(self, a, b):
        return [a]

    def on(self, platform, a, b):
        return [a * a * b]

    def transposed(self, constants, cotangents):
        return [constants[0] ** 2 * cotangents[0]]


def product(a, b, linear=0):
    return run(Product(linear), a, b)[0]


A, B, C = jnp.asarray([2.0, 3.0]), jnp.asarray([5.0, 7.0]), jnp.asarray([0.5, 0.25])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("linear", [0, 1])
def test_derivatives_of_derivatives_in_one_argument_each(first, second, linear):
    """The tangent of a function that is linear in its last arguments may come from the others alone."""

    def slope(function, arguments):
        def moved(x):
            return function(*(x if n == first else other for n, other in enumerate(arguments)))

        return jax.jvp(moved, (arguments[first],), (C,))[1]

    def bend(function):
        def moved(x):
            return slope(function, [x if n == second else other for n, other in enumerate((A, B))])

        return jax.jvp(moved, ((A, B)[second],), (C,))

    found = jax.jit(lambda: bend(lambda a, b: product(a, b, linear)))()
    chex.assert_trees_all_close(found, bend(lambda a, b: a * a * b), rtol=1e-6)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (1, 0)])
def test_the_transpose_of_rows(axes):
    """An argument that all rows share gets the sum of their cotangents."""
    a, b = (A if axis is None else jnp.stack([A, B, C], axis) for axis in axes)
    rows = [jax.vmap(function, axes) for function in (lambda a, b: product(a, b, 1), lambda a, b: a * a * b)]
    found, wanted = (jax.linear_transpose(lambda x, each=each: each(a, x), b)(jnp.ones((3, 2))) for each in rows)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
