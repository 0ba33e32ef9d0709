"""Attention as one JAX operation: derivatives and transformations against ``dense``, and what lowering traces."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from posjax.attention import attention
from posjax.attention.rows import ATTENDED
from posjax.bias import ALiBi
from posjax.masks import Causal, Mask, Segments, Window

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
    "forward over reverse": lambda f, at: jax.jvp(gradients(f), at, directions(at)),
    "forward over forward": lambda f, at: jax.jvp(lambda *x: jax.jvp(f, x, directions(at))[1], at, directions(at)),
    "of a single argument": lambda f, at: jax.jvp(lambda v: f(*at[:2], v, *at[3:]), at[2:3], directions(at[2:3])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    at = jax.tree.map(jnp.asarray, values())
    got, want = (jax.jit(partial(DERIVATIVES[name], partial(loss, way)))(at) for way in ("blockwise", "dense"))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "axes",
    [pytest.param((0, 0, 0, None, None), marks=pytest.mark.wide), (None, None, None, 0, 0)],
    ids=["rows", "slopes"],
)
def test_vmap_and_gradients_on_either_side(axes):
    at = [np.stack([x, x * 0.5]) if axis is not None else x for x, axis in zip(values(), axes, strict=True)]

    def results(way):
        mapped = jax.vmap(partial(loss, way), axes)
        inside = jax.vmap(gradients(partial(loss, way)), axes)(*at)
        return inside, jax.grad(lambda *x: mapped(*x).sum(), argnums=ALL)(*at)

    got, want = (jax.jit(results, static_argnums=0)(way) for way in ("blockwise", "dense"))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_on_a_mesh_of_two_rows():
    """Inside a checked ``shard_map``; slopes and soft cap are the same on both devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, at = P("data"), jax.tree.map(jnp.asarray, values())

    def total(q, k, v, slopes, softcap, ids, implementation="blockwise"):
        options = {"bias": ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS), "softcap": softcap}
        out = attention(q, k, v, mask=Causal() & Segments(ids), implementation=implementation, **options)
        return jnp.square(out).sum()

    def sharded(*x):
        specs = (rows, rows, rows, P(), P(), rows)
        each = jax.shard_map(lambda *x: jax.lax.psum(total(*x), "data"), mesh=mesh, in_specs=specs, out_specs=P())
        return each(*x, IDS)

    one_device = partial(total, ids=IDS, implementation="dense")
    got, want = (jax.jit(partial(DERIVATIVES["forward over reverse"], f))(at) for f in (sharded, one_device))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def test_what_is_kept_by_name_is_not_computed_again():
    """If a checkpoint policy saves the results of attention, the backward pass has no second forward pass."""
    at = jax.tree.map(jnp.asarray, values())
    keep = jax.checkpoint_policies.save_only_these_names(ATTENDED)
    counts = []
    for policy in (keep, jax.checkpoint_policies.nothing_saveable):
        program = jax.make_jaxpr(gradients(jax.checkpoint(partial(loss, "blockwise"), policy=policy)))(*at)
        counts.append(str(program).count(ATTENDED))
    assert 0 < counts[0] < counts[1]


def test_equal_calls_one_by_one_are_compiled_once(caplog):
    q, k, v, *_ = map(jnp.asarray, values())

    def run(q):
        jax.grad(lambda q: attention(q, k, v, bias=ALiBi(), mask=Causal(), implementation="blockwise").sum())(q)

    other = q + 1
    run(q)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run(other)
        assert not [record for record in caplog.records if "Compiling" in record.message]
        attention(q[:, :9], k[:, :9], v[:, :9], implementation="blockwise")
    assert [record for record in caplog.records if "Compiling" in record.message], "a new shape is compiled"


def test_an_array_of_numpy_may_change_after_the_call():
    """For example a buffer that is reused for every batch. The gradient uses the values at the time of the call."""
    q, k, v, *_ = map(jnp.asarray, values())

    def run(q, ids, implementation):
        return attention(q, k, v, mask=Causal() & Segments(ids), implementation=implementation)

    ids = np.zeros((2, TOKENS), np.int32)
    out, back = jax.vjp(lambda q: run(q, ids, "blockwise"), q)
    dense = jax.jit(lambda q, ids: jax.vjp(lambda q: run(q, ids, "dense"), q)[1](out)[0])
    want = dense(q, ids.copy())
    ids[:] = IDS
    chex.assert_trees_all_close(back(out)[0], want, atol=1e-5)
    assert not np.allclose(want, dense(q, IDS), atol=1e-3), "the gradient depends on the documents"


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

    @jax.jit
    def within(reach):
        return attention(q, k, v, mask=Causal() & Window(reach), implementation="dense")

    def tiles(kind):
        return attention(q, k, v, mask=Own(kind), implementation="blockwise")

    def results():
        return [tiles(kind) for kind in (1, 1.0, True)]

    for run in (results, jax.jit(results)):
        chex.assert_trees_all_close(run(), [within(reach) for reach in (60, 20, 5)], atol=1e-6)
    for reach[0] in (3, 30):
        chex.assert_trees_all_close(tiles(lambda: reach[0]), within(reach[0]), atol=1e-6)


def test_no_rows():
    q, k, v, *_ = values()
    ids = np.zeros((0, TOKENS), np.int32)
    found = attention(q[:0], k[:0], v[:0], mask=Segments(ids), implementation="blockwise")
    chex.assert_shape(found, (0, TOKENS, HEADS, SIZE))
