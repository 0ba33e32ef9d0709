"""Low-rank adapters of projections (LoRA)."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax._checks import check
from posjax.nn.parameters import from_heads, to_heads
from posjax.nn.specs import LoRA


class Adapter(nnx.Module):
    """A change of rank r of a projection, ``s B A`` beside its matrix W (Hu et al., arXiv 2106.09685, section 4.1):

        y = W x + s B (A x)

    A is drawn evenly from between ``-1 / sqrt(inputs)`` and ``1 / sqrt(inputs)``, as in the code of the paper and in
    peft, and B is zero: a new adapter changes nothing.

    Attributes:
        a: A, with the projection's axes of inputs, then ``rank``.
        b: B, ``rank``, then the projection's axes of outputs.
        scale: s.

    Args:
        key: of the draw.
        weight: the projection, perhaps stacked: its axes without names are in front of both parts.
        inputs: how many of its axes are those of inputs.
        spec: rank and scale.
    """

    def __init__(self, key: Array, weight: nnx.Param, inputs: int, spec: LoRA):
        axes, shape = weight.get_metadata("logical_axes"), weight.get_value().shape
        stack, own = shape[: len(shape) - len(axes)], shape[len(shape) - len(axes) :]
        bound = math.prod(own[:inputs]) ** -0.5
        drawn = jax.random.uniform(key, (*stack, *own[:inputs], spec.rank), jnp.float32, -bound, bound)
        self.a = nnx.Param(drawn, logical_axes=(*axes[:inputs], "latent"))
        zeros = jnp.zeros((*stack, spec.rank, *own[inputs:]), jnp.float32)
        self.b = nnx.Param(zeros, logical_axes=("rank", *axes[inputs:]))
        self.scale = spec.scale

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """``s B (A x)``, in the dtype of ``x``."""
        a, b = self.a[...], self.b[...]
        return _product(self.scale * _product(x, a, a.ndim - 1), b, 1)

    def change(self) -> Float[Array, "..."]:
        """``s B A``, in the shape of the projection, perhaps stacked; float32."""
        a, b = (part.get_value().astype(jnp.float32) for part in (self.a, self.b))
        stack = a.ndim - len(self.a.get_metadata("logical_axes"))
        product = partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
        for _ in range(stack):
            product = jax.vmap(product)
        return self.scale * product(a, b)


def project(module: nnx.Module, name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``W x`` of a module's projection, without its bias; with its adapter, if it has one, ``W x + s B (A x)``.

    Args:
        module: has the projection and ``adapters``, and in ``PROJECTIONS`` its number of axes of inputs.
        name: of the projection.
        x: its last axes are the inputs.
    """
    out = _product(x, getattr(module, name)[...], module.PROJECTIONS[name])
    adapter = module.adapters.get(name)
    return out if adapter is None else out + adapter(x)


def adapted(module: nnx.Module, name: str) -> Float[Array, "..."]:
    """The matrix of a module's projection, with that of its adapter, if it has one, added."""
    weight, adapter = getattr(module, name)[...], module.adapters.get(name)
    return weight if adapter is None else (weight + adapter.change()).astype(weight.dtype)


def _product(x, weight, inputs: int):
    if inputs == 2:
        return from_heads(x, weight)
    return to_heads(x, weight) if weight.ndim == 3 else x @ weight.astype(x.dtype)


def attach(stacks: Sequence[nnx.Module], spec: LoRA, rngs: nnx.Rngs) -> None:
    """Adds new adapters to the projections of blocks, stacked or not, that ``spec.paths`` match.

    Raises ValueError for a path that matches no projection.
    """
    found = [(name, module) for stack in stacks for block in stack for name, module in projections(block)]
    for path in spec.paths:
        names = sorted({name for name, _ in found})
        check(
            any(fnmatchcase(name, path) for name in names),
            f"lora.paths: {path!r} matches no projection that can have an adapter; these can: {', '.join(names)}"
            f"{_WITHOUT if any(_has_experts(block) for stack in stacks for block in stack) else ''}",
        )
    for name, module in found:
        if any(fnmatchcase(name, path) for path in spec.paths):
            own = name.rpartition("/")[2]
            weight, inputs = getattr(module, own), module.PROJECTIONS[own]
            module.adapters[own] = Adapter(rngs.params(), weight, inputs, spec)


_WITHOUT = ". The experts that a router chooses have none, nor has the router"


def _has_experts(block: nnx.Module) -> bool:
    return hasattr(block.mlp, "router")


def projections(block: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Every projection of a block that can have an adapter: its name, as in ``"attention/q"``, and its module."""
    for path, module in sorted(nnx.iter_modules(block), key=lambda found: found[0]):
        for name in getattr(module, "PROJECTIONS", ()):
            if getattr(module, name) is not None:
                yield "/".join((*path, name)), module
