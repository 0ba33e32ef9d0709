"""One call of a package of kernels: inputs, and the results that tests compare with float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles

from posjax import masks
from posjax._shapes import grouped
from posjax.attention.api import result_of
from posjax.attention.call import Call, RemappedPair
from posjax.attention.dense import dense
from posjax.bias import T5, FoX
from posjax.positions import Range, as_array

TOKENS = 300
"""Three tiles of 128 along each axis, the last one not full."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: lengths, heads and slots."""

    name: str
    bias: object = None
    mask: object = None
    softcap: float | None = None
    sinks: bool = False
    remap: tuple = ()
    queries: int = TOKENS
    keys: int = TOKENS
    q_positions: object = None
    kv_positions: object = None
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    size: int = 32
    value_size: int = 48
    dtype: object = jnp.float32
    factor: float = 1.0  # of scaled queries, in the kernel; times it they are exact in the dtype


def inputs(case: Case) -> dict:
    """Everything that has a gradient, by name. Queries are float32; scaled, they are exact in the dtype of the case."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.standard_normal((case.batch, *shape)).astype(np.float32).astype(case.dtype)

    scaled = normal(case.queries, case.heads, case.size) * 2.0 ** -round(np.log2(case.size) / 2)
    values = {
        "q": scaled.astype(np.float32) * np.float32(case.size**0.5 / case.factor),
        "k": normal(case.keys, case.kv_heads, case.size),
        "v": normal(case.keys, case.kv_heads, case.value_size),
    }
    for n in range(len(case.remap)):
        values[f"q{n}"] = np.float32(2.0 ** (1 - n)) * values["q"][..., ::-1]
        values[f"k{n}"] = (0.7 * values["k"].astype(np.float32) ** 2).astype(case.dtype)
    if case.sinks:
        values["sinks"] = np.linspace(-1, 2, case.heads, dtype=np.float32)
    if isinstance(case.bias, FoX):
        for name, length in (("q_gates", case.queries), ("kv_gates", case.keys)):
            steps = rng.uniform(size=(case.batch, case.heads, length)).astype(np.float32)
            values[name] = np.cumsum(-0.05 * steps, axis=-1, dtype=np.float32)
    elif case.bias is not None and (params := case.bias.init(jax.random.key(7), case.heads)):
        times = 30 if isinstance(case.bias, T5) else 1
        values["bias"] = jax.tree.map(lambda x: np.float32(times) * np.asarray(x), params)
    return values


def bound(case: Case, values: dict):
    gates = {name: values[name] for name in ("q_gates", "kv_gates") if name in values}
    return case.bias and case.bias.bind(values.get("bias"), num_heads=case.heads, **gates)


def places(case: Case) -> dict:
    """Everything that has no gradient: masks and positions. Their arrays are traced."""
    q_positions = Range(0, case.queries) if case.q_positions is None else case.q_positions
    kv_positions = Range(0, case.keys) if case.kv_positions is None else case.kv_positions
    return {"mask": case.mask, "where": case.remap, "q_positions": q_positions, "kv_positions": kv_positions}


def call(case: Case, backend, values: dict, placed: dict) -> tuple:
    """Output and log-sum-exp, sinks included, ``[batch, tokens, heads, ...]``."""
    scale, slots = case.size**-0.5, dict(placed)
    where = slots.pop("where")
    arguments = Call(
        grouped(scale * values["q"], case.kv_heads),
        jnp.moveaxis(values["k"], 1, 2),
        jnp.moveaxis(values["v"], 1, 2),
        bias=bound(case, values),
        remap=tuple(
            RemappedPair(grouped(scale * values[f"q{n}"], case.kv_heads), jnp.moveaxis(values[f"k{n}"], 1, 2), mask)
            for n, mask in enumerate(where)
        ),
        softcap=case.softcap,
        **slots,
    )
    return result_of(backend(arguments), values.get("sinks"), True)


def loss_of(result: tuple):
    """A scalar that depends on every output and every finite log-sum-exp."""
    out, lse = result
    weights = jnp.asarray(np.random.default_rng(3).standard_normal(out.shape), out.dtype)
    return (out * weights).sum(dtype=lse.dtype) + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum()


def outputs_and_gradients(case: Case, backend, values: dict):
    """Output, log-sum-exp and the gradients of every input, from one compiled program."""

    def run(values, placed):
        return loss_of(found := call(case, backend, values, placed)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(values, places(case))
    return *found, gradients


def pairs(case: Case, values: dict, placed: dict) -> tuple:
    """The values of bias, mask and branches for every pair of tokens."""
    at = placed["q_positions"], placed["kv_positions"]
    tokens = [p if p.ndim == 1 else p[:, None] for p in map(as_array, at)]
    where = [masks.materialise(mask, *at) for mask in placed["where"]]
    return (
        bound(case, values).values(*tokens) if case.bias else None,
        None if placed["mask"] is None else masks.materialise(placed["mask"], *at),
        [w if w.ndim == 4 else w[None, None] for w in where],
    )


def oracle(case: Case, values: dict) -> tuple:
    bias, allowed, where = jax.device_get(jax.jit(partial(pairs, case))(values, places(case)))
    return oracles.attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        allowed=allowed,
        softcap=case.softcap,
        sinks=values.get("sinks"),
        remap=[(values[f"q{n}"], values[f"k{n}"], w) for n, w in enumerate(where)],
    )


def as_float64(values: dict) -> dict:
    return jax.tree.map(lambda x: x.astype(np.float64), values)


def close(got, want, tolerance: float) -> None:
    """Every leaf, relative to its own largest number."""

    def check(path, got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want)
        assert np.isfinite(got).all(), jax.tree_util.keystr(path)
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)} is off by {error:.1e} of its largest number"

    jax.tree_util.tree_map_with_path(check, got, want)


def check_case(case: Case, backend, unread=(), values=None) -> None:
    """Forward against the oracle, every gradient against ``dense``; the kernel finds NaN in what it must not read.

    ``unread`` names arrays of the keys and slices of their tokens. ``values``: other inputs than those of the case.
    """
    values = inputs(case) if values is None else values
    poisoned = {name: values[name].copy() for name, _ in unread}
    for name, tokens in unread:
        poisoned[name][:, tokens] = np.nan
    out, lse, gradients = outputs_and_gradients(case, backend, values | poisoned)
    with jax.enable_x64(True):
        want_out, want_lse = oracle(case, as_float64(values))
        _, _, want = outputs_and_gradients(case, dense, as_float64(values))
    coarse = case.dtype != jnp.float32
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    blind = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.asarray(out, np.float64)[blind], 0)
    np.testing.assert_array_equal(np.asarray(gradients["q"], np.float64)[blind], 0)
    close(np.where(blind, 0, lse), np.where(blind, 0, want_lse), 2e-6)
    close(out, want_out, 1e-2 if coarse else 2e-6)
    close(gradients, want, 2e-2 if coarse else 2e-5)
    assert jax.tree.map(jnp.result_type, gradients) == jax.tree.map(jnp.result_type, values)
