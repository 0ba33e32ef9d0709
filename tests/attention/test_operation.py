"""Attention as one JAX operation: derivatives and transformations against ``dense``, and what lowering traces."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from posjax._lowered import PLATFORMS
from posjax.attention import api, attention
from posjax.attention.backends import Backend
from posjax.attention.rows import ATTENDED
from posjax.attention.tpu import entry
from posjax.bias import ALiBi
from posjax.masks import Causal, Mask, Segments

TOKENS, HEADS, KV_HEADS, SIZE = 70, 4, 2, 8
IDS = np.sort(np.random.default_rng(1).integers(-1, 3, (2, TOKENS))).astype(np.int32)


def values(batch=2):
    """Queries, keys, values, slopes, and a soft cap."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(batch, TOKENS, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v, np.array([0.5, 0.2, 0.1, 0.05], np.float32), np.float32(3)


def loss(implementation, q, k, v, slopes, softcap):
    """A loss of output and log-sum-exp, for a causal call with packed rows, padding, learned slopes and a soft cap."""
    options = {"bias": ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS), "softcap": softcap}
    mask = Causal() & Segments(IDS[: len(q)])
    out, lse = attention(q, k, v, mask=mask, return_residuals=True, implementation=implementation, **options)
    seen = jnp.isfinite(lse)
    return jnp.square(out).sum() + jnp.sin(jnp.where(seen, lse, 0)).sum()


ALL = (0, 1, 2, 3, 4)


def directions(at):
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), at)


def gradients(function):
    return jax.grad(function, argnums=ALL)


DERIVATIVES = {
    "reverse": lambda f, at: gradients(f)(*at),
    "forward": lambda f, at: jax.jvp(f, at, directions(at)),
    "linearized": lambda f, at: jax.linearize(f, *at)[1](*directions(at)),
    "forward over reverse": lambda f, at: jax.jvp(gradients(f), at, directions(at)),
    "forward over forward": lambda f, at: jax.jvp(lambda *x: jax.jvp(f, x, directions(at))[1], at, directions(at)),
    "of a single argument": lambda f, at: jax.jvp(lambda v: f(*at[:2], v, *at[3:]), at[2:3], directions(at[2:3])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    at = jax.tree.map(jnp.asarray, values())
    got, want = (jax.jit(partial(DERIVATIVES[name], partial(loss, way)))(at) for way in ("blockwise", "dense"))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_the_error_for_a_second_reverse_derivative_names_alternatives():
    at = jax.tree.map(jnp.asarray, values())
    twice = jax.grad(lambda q: jnp.square(jax.grad(partial(loss, "blockwise"))(q, *at[1:])).sum())
    with pytest.raises(ValueError, match="needs implementation='dense'; forward over reverse"):
        twice(at[0])


MAPPED = {
    "rows of two batches": ((0, 0, 0, None, None), lambda x: x),
    "slopes alone": ((None, None, None, 0, None), lambda x: x),
    "keys by their last axis": ((None, -1, -1, None, None), lambda x: np.moveaxis(x, 0, -1)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients_on_either_side(name):
    axes, moved = MAPPED[name]
    at = [moved(np.stack([x, x * 0.5])) if axis is not None else x for x, axis in zip(values(), axes, strict=True)]

    def results(way):
        mapped = jax.vmap(partial(loss, way), axes)
        inside = jax.vmap(gradients(partial(loss, way)), axes)(*at)
        return inside, jax.grad(lambda *x: mapped(*x).sum(), argnums=ALL)(*at)

    got, want = (jax.jit(results, static_argnums=0)(way) for way in ("blockwise", "dense"))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_vmap_within_vmap_of_slopes():
    q, k, v, slopes, softcap = values()
    many = jnp.stack([slopes, slopes * 2])[:, None] * jnp.array([1.0, 0.5, 0.1])[:, None]

    def results(way):
        one = jax.grad(partial(loss, way), argnums=(0, 3))
        return jax.vmap(jax.vmap(lambda own: one(q, k, v, own, softcap)))(many)

    got, want = (jax.jit(results, static_argnums=0)(way) for way in ("blockwise", "dense"))
    chex.assert_shape(got[1], (2, 3, HEADS))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["reverse", "forward", "forward over reverse"])
def test_on_a_mesh_of_two_rows(name):
    """Inside a checked ``shard_map``; slopes and soft cap are the same on both devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, at = P("data"), jax.tree.map(jnp.asarray, values())

    def sharded(*x):
        def each(q, k, v, slopes, softcap, ids):
            options = {"bias": ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS), "softcap": softcap}
            out = attention(q, k, v, mask=Causal() & Segments(ids), implementation="blockwise", **options)
            return jax.lax.psum(jnp.square(out).sum(), "data")

        specs = (rows, rows, rows, P(), P(), rows)
        return jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P())(*x, IDS)

    def one_device(q, k, v, slopes, softcap):
        options = {"bias": ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS), "softcap": softcap}
        return jnp.square(attention(q, k, v, mask=Causal() & Segments(IDS), implementation="dense", **options)).sum()

    got, want = (jax.jit(partial(DERIVATIVES[name], f))(at) for f in (sharded, one_device))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_what_is_kept_by_name_is_not_computed_again():
    """If a checkpoint policy saves the results of attention, the backward pass has no second forward pass."""
    at = jax.tree.map(jnp.asarray, values())
    keep = jax.checkpoint_policies.save_only_these_names(ATTENDED)
    counts = {}
    for name, policy in {"kept": keep, "lost": jax.checkpoint_policies.nothing_saveable}.items():
        program = jax.make_jaxpr(gradients(jax.checkpoint(partial(loss, "blockwise"), policy=policy)))(*at)
        counts[name] = str(program).count("function=_Forward(")
    assert counts == {"kept": 1, "lost": 2}


def test_only_the_platform_of_the_program_is_traced(monkeypatch):
    """A kernel that raises an error when traced does so only in programs for TPUs."""

    def fails(x, given=None):
        raise RuntimeError("the kernel was traced")

    monkeypatch.setattr(entry, "attend", fails)
    monkeypatch.setattr(api, "TILE_ELEMENTS", 1)
    q, k, v, *_ = values()
    program = jax.jit(lambda *x: attention(*x, mask=Causal())).trace(q, k, v)
    for platform in PLATFORMS[:-1]:
        program.lower(lowering_platforms=(platform,))
    with pytest.raises(RuntimeError, match="the kernel was traced"):
        program.lower(lowering_platforms=("tpu",))


def test_equal_calls_one_by_one_are_compiled_once(monkeypatch):
    traced = []
    backend = api.BACKENDS["blockwise"]
    recorder = Backend(lambda x: traced.append("forward") or backend.compute(x),
                   lambda x, rows: traced.append("backward") or backend.gradients(x, rows))  # fmt: skip
    monkeypatch.setitem(api.BACKENDS, "blockwise", recorder)
    q, k, v, *_ = map(jnp.asarray, values())
    for factor in (1, 2, 3):
        jax.grad(lambda q: attention(q, k, v, bias=ALiBi(), mask=Causal(), implementation="blockwise").sum())(
            q * factor
        )
    assert traced == ["forward", "backward"]


def of_packed_rows(ids):
    """The outputs of ``blockwise`` and of ``dense``."""
    q, k, v, *_ = map(jnp.asarray, values())
    return [attention(q, k, v, mask=Causal() & Segments(ids), implementation=way) for way in ("blockwise", "dense")]


def test_an_array_of_numpy_may_change_after_the_call():
    """For example a buffer that is reused for every batch. The gradient uses the values at the time of the call."""
    ids = np.zeros((2, TOKENS), np.int32)
    of_packed_rows(ids)
    q, k, v, *_ = map(jnp.asarray, values())
    out, back = jax.vjp(lambda q: attention(q, k, v, mask=Causal() & Segments(ids), implementation="blockwise"), q)
    want = jax.vjp(lambda q: attention(q, k, v, mask=Causal(), implementation="dense"), q)[1](out)
    ids[:] = IDS
    chex.assert_trees_all_close(back(out), want, atol=1e-5)
    got, want = of_packed_rows(ids)
    chex.assert_trees_all_close(got, want, atol=1e-6)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class Own(Mask):
    """A user's mask, whose static field determines how far a query sees."""

    kind: object

    def pairs(self, i, j):
        reach = self.kind if callable(self.kind) else {bool: 5, float: 20}.get(type(self.kind), 60)
        return (i >= j) & (i - j < (reach() if callable(reach) else reach))


def test_equal_static_fields_may_mean_different_masks():
    """``1 == 1.0 == True``, in separate calls and in one program; and a function whose result changes."""
    q, k, v, *_ = map(jnp.asarray, values())
    reach = [3]

    def results(way):
        return [attention(q, k, v, mask=Own(kind), implementation=way) for kind in (1, 1.0, True)]

    for run in (results, jax.jit(results, static_argnums=0)):
        chex.assert_trees_all_close(run("blockwise"), run("dense"), atol=1e-6)
    mask = Own(lambda: reach[0])
    for reach[0] in (3, 30):
        got, want = (attention(q, k, v, mask=mask, implementation=way) for way in ("blockwise", "dense"))
        chex.assert_trees_all_close(got, want, atol=1e-6)


def test_traced_values_must_be_fields_and_not_in_closures():
    q, k, v, *_ = values()
    run = jax.jit(lambda reach: attention(q, k, v, mask=Own(lambda: reach), implementation="blockwise"))
    with pytest.raises(ValueError, match=r"Own\.allowed reads an array of the function that is being traced"):
        run(7)


def test_settings_of_jax_are_those_of_the_call():
    q, k, v, *_ = map(jnp.asarray, values())

    def precise(q):
        with jax.default_matmul_precision("highest"):
            return attention(q, k, v, mask=Causal(), implementation="blockwise").sum()

    text = jax.jit(jax.grad(precise)).lower(q).as_text()
    assert text.count("stablehlo.dot_general") == text.count("precision = [HIGHEST, HIGHEST]") > 4

    def wide(q, k, v):
        with jax.enable_x64(True):
            return attention(*(x.astype(jnp.float64) for x in (q, k, v)), mask=Causal(), implementation="blockwise")

    assert jax.jit(wide)(q, k, v).dtype == jnp.float64


def test_blockwise_works_with_jit_disabled():
    q, k, v, *_ = values()
    want = attention(q, k, v, mask=Causal(), implementation="dense")
    with jax.disable_jit():
        got = attention(q, k, v, mask=Causal(), implementation="blockwise")
    chex.assert_trees_all_close(got, want, atol=1e-6)


def test_no_rows():
    q, k, v, *_ = values()
    ids = np.zeros((0, TOKENS), np.int32)
    found = attention(q[:0], k[:0], v[:0], mask=Segments(ids), implementation="blockwise")
    chex.assert_shape(found, (0, TOKENS, HEADS, SIZE))
