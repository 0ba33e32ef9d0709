"""docs/own-model.md: its examples run, and its tables of derivatives agree with JAX."""

import re
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import pytest

import posjax as pj
from posjax.attention.sharded import Placement, attend_on_mesh

TEXT = (Path(__file__).parent.parent / "docs/own-model.md").read_text(encoding="utf-8")
START, *REST = re.split(r"^## (.*)$", TEXT, flags=re.M)
SECTIONS = dict(zip(REST[::2], REST[1::2], strict=True))


def run(text, names):
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "own-model.md", "exec", dont_inherit=True), names)
    return names


@pytest.fixture(scope="module")
def started():
    return run(START, {})


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.parity] * (title == "Equinox")) for title in SECTIONS]
)
def test_the_examples_run(title, started):
    if title == "Equinox":
        pytest.importorskip("equinox")
    names = run(SECTIONS[title], dict(started))
    found = jax.tree.leaves(names["gradient"]) if title in ("Equinox", "Flax linen", "Flax NNX") else []
    assert all(jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0 for leaf in found)


def table(first):
    """The rows of the table whose first header is this, as lists of cells; the header is the first row."""
    lines = TEXT[TEXT.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]


def squared(attend):
    return lambda x: jnp.square(attend(x)).sum()


def transformed(attend):
    """The gradient through a checkpoint in a scan, mapped over an axis."""

    def twice(x):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(attend)(x), None), x, length=2)[0].sum()

    return lambda x: jax.vmap(jax.grad(twice))(x[None])


def along(function):
    """The derivative of a function, in forward mode."""
    return lambda x: jax.jvp(function, (x,), (x,))[1]


def reverse(function):
    return jax.grad(lambda x: function(x).sum())


DERIVATIVES = {
    "reverse mode: `jax.grad`": lambda f: jax.grad(squared(f)),
    "the same under `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.checkpoint`": transformed,
    "forward mode: `jax.jvp`": along,
    "forward over reverse: `jax.jvp` of `jax.grad`": lambda f: along(jax.grad(squared(f))),
    "reverse over reverse: `jax.grad` of `jax.grad`": lambda f: reverse(jax.grad(squared(f))),
}
METHODS = {
    '`"dense"`': ("rope", "dense", 4),
    '`"blockwise"`': ("rope", "blockwise", 4),
    '`"tpu"`': ("alibi", "tpu", 128),
    "CoPE": ("cope", "blockwise", 4),
    "linear attention": ("linear-elu", None, 4),
    "a ring": ("rope", "dense", 4),
}


def attending(name, implementation):
    """Self-attention with a preset."""
    scheme = pj.scheme(name)

    @jax.jit
    def attend(x):
        params = scheme.init(jax.random.key(0), num_heads=1, head_dim=x.shape[3])
        chosen = {} if implementation is None else {"implementation": implementation}
        return scheme.attend(x, x, x, params=params, **chosen)

    return attend


def around(name, implementation, strategy="ring"):
    """``attending`` with the tokens split over the devices of a mesh."""
    scheme, placement = pj.scheme(name), Placement(context="tensor", strategy=strategy)

    def local(params, projected, per_row):
        return scheme.attend(*projected, params=params, placement=placement, implementation=implementation)

    return lambda x: attend_on_mesh(local, placement, {}, (x, x, x), {})


def error_of(function, x, platform="cpu"):
    """JAX's error when it lowers a function for a platform; None if it succeeds."""
    try:
        jax.jit(function).trace(x).lower(lowering_platforms=(platform,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def named(error):
    """Whether the table of errors lists an error."""
    return any(error.startswith(quoted.strip("`")) for quoted, _ in table("the error")[1:])


@pytest.mark.parametrize("method", METHODS)
def test_the_table_of_derivatives(method):
    header, *rows = table("derivative")
    assert header[1:] == list(METHODS)
    assert [row[0] for row in rows] == list(DERIVATIVES)
    name, implementation, size = METHODS[method]
    ring, x = method == "a ring", jnp.ones((1, size, 1, size))
    attend = (around if ring else attending)(name, implementation)
    platform = "tpu" if implementation == "tpu" else "cpu"
    for row in rows:
        with jax.set_mesh(meshes.mesh("auto")) if ring else nullcontext():
            error = error_of(DERIVATIVES[row[0]](attend), x, platform)
        expected = dict(zip(header, row, strict=True))[method]
        assert (error is None) == (expected == "yes"), (row[0], error)
        assert error is None or named(error), error


def test_a_gather_has_the_derivative_that_a_ring_lacks():
    twice = DERIVATIVES["reverse over reverse: `jax.grad` of `jax.grad`"](around("rope", "dense", "all-gather"))
    with jax.set_mesh(meshes.mesh("auto")):
        assert error_of(twice, jnp.ones((1, 4, 1, 4))) is None
