"""Cases of attention over a mesh, and a check that compares them with one device."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import posjax as pj
from posjax import masks
from posjax.attention.sharded import Placement, attend_on_mesh
from posjax.layout import Layout
from posjax.positions import from_segments

ROWS, LENGTH, HEADS, SIZE = 4, 48, 4, 8
MESHES = {"2x4": (2, 4), "4x2": (4, 2), "2x2x2": (2, 2, 2)}
"""Devices along batch, context and heads."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One representative of a class of slots.

    Args:
        scheme: what is computed.
        kv_heads: of the keys.
        causal: whether queries see no later keys.
        packed: whether rows hold documents, which may span several shards, and padding at the end.
        restart: whether positions of packed rows restart with every document.
        softcap: see ``attention``.
        array_positions: whether positions are an array, although a range would do.
        length: tokens of a row.
        rows: of the batch.
    """

    scheme: pj.Scheme
    kv_heads: int = 2
    causal: bool = True
    packed: bool = False
    restart: bool = True
    softcap: float | None = None
    array_positions: bool = False
    length: int = LENGTH
    rows: int = ROWS


ALIBI, WINDOW = pj.bias.ALiBi(learned=True), masks.Window(5)
CASES = {
    "rope, packed": Case(pj.Scheme(features=pj.rotary.Rotary(), norm=pj.norms.QKNorm()), packed=True),
    "alibi, soft cap": Case(pj.Scheme(bias=ALIBI), softcap=3.0),
    "t5, packed": Case(pj.Scheme(bias=pj.bias.T5(8, 12)), packed=True, restart=False),
    "fox, packed": Case(pj.Scheme(bias=pj.bias.FoX()), packed=True, restart=False),
    "ssmax": Case(pj.Scheme(scale=pj.scales.SSMax(bias=True), features=pj.rotary.Rotary()), kv_heads=4),
    "log-n, key norm, packed": Case(
        pj.Scheme(scale=pj.scales.LogN(16), norm=pj.norms.KeyNorm(), features=pj.rotary.Rotary()), packed=True
    ),
    "learned sinks, first tokens": Case(
        pj.Scheme(sinks=pj.sinks.LearnedSinks(), bias=ALIBI, mask=WINDOW | masks.FirstTokens(3))
    ),
    "rerope": Case(pj.Scheme(features=pj.rotary.Rotary(), remap=pj.remap.ReRoPE(7))),
    "coca": Case(pj.Scheme(features=pj.coca.Coca("strict"))),
    "two sides": Case(pj.Scheme(bias=pj.bias.T5(8, 12, bidirectional=True)), causal=False, packed=True),
}
WINDOWS = {
    "window": Case(pj.Scheme(bias=ALIBI, mask=WINDOW)),
    "window, packed": Case(pj.Scheme(features=pj.rotary.Rotary(), mask=WINDOW), packed=True),
    "window on two sides": Case(pj.Scheme(bias=pj.bias.ALiBi(symmetric=True), mask=WINDOW), causal=False),
    # The widest: with two shards, the window reaches the same chunk from both sides, and its first key is sent twice.
    "wide window on two sides": Case(pj.Scheme(mask=masks.Window(25)), causal=False, array_positions=True),
    "fox in a window": Case(pj.Scheme(bias=pj.bias.FoX(), mask=WINDOW), packed=True, restart=False),
}
WHOLE_ROWS = {
    "cope, packed": Case(pj.Scheme(bias=pj.bias.CoPE(8)), packed=True, restart=False),
    "path, packed": Case(pj.Scheme(bias=pj.bias.PaTH(3)), packed=True, restart=False),
}
PER_HEAD = {
    "dilated heads": Case(pj.Scheme(mask=masks.Dilated(4, (1, 1, 2, 3)), features=pj.rotary.MixedRotary())),
    "kerple": Case(pj.Scheme(bias=pj.bias.Kerple("weighted-power"), features=pj.pope.PoPE())),
    "fire": Case(pj.Scheme(bias=pj.bias.FIRE(4), features=pj.rotary.Rotary())),
    "scale-invariant": Case(pj.Scheme(bias=pj.bias.ScaleInvariant(), sinks=pj.sinks.LearnedSinks())),
    "xpos": Case(pj.Scheme(features=pj.rotary.XPos())),
    "rope-pp": Case(pj.Scheme(features=pj.rotary.RoPEPP(), scale=pj.scales.SSMax(), sinks=pj.sinks.LearnedSinks())),
    "relative, sinks by token": Case(
        pj.Scheme(bias=pj.bias.Relative(6, scaled=True), sinks=pj.sinks.TokenSinks(), scale=pj.scales.SSMax()),
        packed=True,
    ),
    "shaw": Case(pj.Scheme(bias=pj.bias.Shaw(6), norm=pj.norms.QKNorm(), features=pj.rotary.Rotary())),
}


def placement(mesh: str, strategy: str, kind: str) -> Placement:
    """The placement over a named mesh, with groups of two for ``"ring-ulysses"``."""
    heads = "heads" if len(MESHES[mesh]) == 3 else None
    return Placement(("batch",), "context", heads, strategy, Layout(kind, MESHES[mesh][1]), ulysses=2)


@cache
def device_mesh(name: str):
    """The device mesh with this name."""
    shape = MESHES[name]
    return jax.make_mesh(shape, ("batch", "context", "heads")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


@cache
def inputs(case: Case) -> dict[str, Any]:
    """Differentiable inputs, which differ by row, token and head; in NumPy, so on no mesh."""
    draw, scheme = np.random.default_rng(7), case.scheme
    tokens = np.arange(case.length)[None, :, None, None] / case.length
    rows = np.arange(case.rows)[:, None, None, None] / case.rows

    def projection(heads, size):
        code = np.sin(5 * tokens + rows + np.arange(heads)[:, None])
        return (draw.normal(size=(case.rows, case.length, heads, size)) + code).astype(np.float32)

    made = {
        "q": projection(HEADS, scheme.query_size(SIZE)),
        "k": projection(case.kv_heads, scheme.key_size(SIZE)),
        "v": projection(case.kv_heads, SIZE) + 3 * tokens.astype(np.float32),
        # Not the initial values, which are often equal for all heads.
        "params": jax.tree.map(lambda a: a + 0.1 * draw.random(a.shape, np.float32), initial(case)),
    }
    if scheme.gated:
        made["gates"] = {"bias": -draw.random((case.rows, HEADS, case.length), np.float32).cumsum(-1)}
    elif scheme.reads_tokens and scheme.bias.reads_keys:
        made["gates"] = {"bias": 0.5 * draw.random((case.rows, case.kv_heads, case.length, SIZE + 1), np.float32)}
    elif scheme.reads_tokens:
        states = (case.rows, HEADS, case.length, scheme.bias.size)
        made["gates"] = {"bias": draw.random(states, np.float32), "sinks": draw.random(states[:3], np.float32)}
    return made


def initial(case: Case) -> dict[str, Any]:
    """Initial parameters of the scheme, in NumPy."""

    @jax.jit
    def init(key):
        own = case.scheme.init(key, HEADS, SIZE, num_kv_heads=case.kv_heads, model_dim=SIZE)
        return own | case.scheme.init_shared(jax.random.fold_in(key, 1), HEADS, SIZE)

    return jax.device_get(init(jax.random.key(7)))


def segments(rows: int, length: int) -> np.ndarray:
    """Documents of different lengths in every row, with padding after the last one."""
    draw = np.random.default_rng(3)
    ids = np.sort(draw.integers(0, 5, (rows, length)), axis=-1)
    ids[:, length - 3 :] = -1
    return ids.astype(np.int32)


def token_arguments(case: Case) -> dict[str, Any]:
    """The arguments of ``Scheme.attend`` that belong to tokens, without their projections."""
    if not case.packed:
        ascending = np.tile(np.arange(3, case.length + 3, dtype=np.int32), (case.rows, 1))
        return {"positions": ascending} if case.array_positions else {}
    ids = jnp.asarray(segments(case.rows, case.length))
    positions = from_segments(ids)
    found = {"mask": masks.Segments(ids), "visible": positions + 1}
    return found | {"positions": positions} if case.restart else found


def terms(case: Case, out, lse):
    """The terms of the loss: output and log-sum-exp, times random cotangents."""
    draw = np.random.default_rng(11)
    heads = HEADS * case.scheme.copies
    d_out = draw.normal(size=(case.rows, case.length, heads, SIZE)).astype(np.float32)
    d_lse = draw.normal(size=(case.rows, case.length, heads)).astype(np.float32)
    return out * d_out, lse * d_lse


def loss(case: Case, attend):
    """A function from ``inputs`` to ``(loss, (output, log-sum-exp))``. The loss depends on both."""

    def run(made):
        out, lse = attend(made)
        return sum(part.sum() for part in terms(case, out, jnp.where(jnp.isneginf(lse), 0, lse))), (out, lse)

    return run


@cache
def per_query_norms(case: Case):
    """The norm, over queries, of their contributions to the gradient of every parameter.

    Contributions have both signs, so the rounding error of a gradient is relative to their norm, not to their sum:
    the multiplier of FIRE has a gradient of .016 and a norm of .30.
    """
    made = inputs(case)

    def run(params):
        out, lse = whole_rows(case, made | {"params": params})
        of_out, of_lse = terms(case, out, jnp.where(jnp.isneginf(lse), 0, lse))
        return of_out.sum((-2, -1)) + of_lse.sum(-1)

    added = jax.jit(jax.jacrev(run))(made["params"])
    return jax.tree.map(lambda a: np.sqrt(np.square(a).sum((0, 1))).max(initial=0), added)


def attend(case: Case, implementation: str | None, placement: Placement | None, params, projected, rows):
    """``Scheme.attend`` with the options of a case, for whole rows or inside a mesh."""
    given = dict(rows)
    positions, gates = given.pop("positions", None), given.pop("gates", None)
    return case.scheme.attend(
        *projected,
        params=params,
        q_positions=positions,
        kv_positions=positions,
        gates=None if gates is None else (gates, gates),
        causal=case.causal,
        softcap=case.softcap,
        implementation=implementation,
        placement=placement,
        return_residuals=True,
        **given,
    )


def whole_rows(case: Case, made):
    """The plain formula on one device."""
    rows = token_arguments(case) | ({"gates": made["gates"]} if "gates" in made else {})
    return attend(case, "dense", None, made["params"], [made["q"], made["k"], made["v"]], rows)


@cache
def on_one_device(case: Case):
    """Loss, results and gradients of the whole rows."""
    run = loss(case, lambda made: whole_rows(case, made))
    return jax.device_get(jax.jit(jax.value_and_grad(run, has_aux=True))(inputs(case)))


def on_a_mesh(case: Case, mesh: str, where: Placement, implementation: str | None):
    """The same over a mesh. Tokens are reordered for the layout, and the outputs are put back in order."""
    layout, made = where.layout, inputs(case)

    def run(made):
        projected = [layout.apply(made[name], 1) for name in "qkv"]
        rows = jax.tree.map(layout.apply, token_arguments(case))
        rows |= {"gates": jax.tree.map(partial(layout.apply, axis=2), made["gates"])} if "gates" in made else {}

        def inside(*parts):
            return attend(case, implementation, where, *parts)

        found = attend_on_mesh(inside, where, made["params"], projected, rows)
        return tuple(layout.restore(array, 1) for array in found)

    with jax.set_mesh(device_mesh(mesh)):
        return jax.device_get(jax.jit(jax.value_and_grad(loss(case, run), has_aux=True))(made))


def largest(results):
    """The largest finite number of every array."""
    return jax.tree.map(lambda a: np.abs(a[np.isfinite(a)]).max(initial=1e-3), results)


def errors_above(found, wanted, sizes, tolerance: float) -> dict[str, Any]:
    """The errors above the tolerance, in units of ``sizes``, by the names of their arrays."""
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), jax.tree.leaves(sizes), strict=True)
    errors = {
        jax.tree_util.keystr(path): np.abs(np.subtract(got, want, where=got != want, out=np.zeros_like(want))).max()
        / size
        for (path, got), want, size in leaves
    }
    return {name: error for name, error in errors.items() if not error <= tolerance}


def check(case: Case, mesh: str, where: Placement, implementation: str | None = "dense", tolerance: float = 1e-5):
    """Asserts that loss, output, log-sum-exp and every gradient are those of one device."""
    found, wanted = on_a_mesh(case, mesh, where, implementation), on_one_device(case)
    (_, results), gradients = largest(wanted)
    # The loss sums terms of both signs, so its rounding error is relative to their norm, not to their sum.
    out, lse = wanted[0][1]
    added = terms(case, out, np.where(np.isneginf(lse), 0, lse))
    sizes = (np.sqrt(sum(np.square(part).sum() for part in added)), results), gradients
    errors = errors_above(found, wanted, sizes, tolerance)
    if errors and all("['params']" in name for name in errors):
        gradients["params"] = jax.tree.map(max, gradients["params"], per_query_norms(case))
        errors = errors_above(found, wanted, sizes, tolerance)
    assert not errors, errors
