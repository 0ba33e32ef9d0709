import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin

from posjax import absolute
from posjax.absolute import Hierarchical, Learned, Sinusoidal, hierarchical, learned, sinusoidal
from posjax.positions import Range

SIZE = 12


def reference(positions, convention, base=10_000.0):
    half = SIZE // 2
    denominator = half - 1 if convention == "tensor2tensor" else half
    cos, sin = cos_sin(positions, base ** -(np.arange(half) / denominator))
    if convention == "interleaved":
        return np.stack([sin, cos], -1).reshape(-1, SIZE)
    return np.concatenate([sin, cos], -1)


compiled = jax.jit(sinusoidal, static_argnames=("model_dim", "convention"))


@pytest.mark.parametrize("convention", absolute.CONVENTIONS)
def test_sinusoidal_is_exact_at_every_position(convention):
    found = compiled(np.array(POSITIONS), model_dim=SIZE, convention=convention)
    chex.assert_shape(found, (len(POSITIONS), SIZE))
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, reference(POSITIONS, convention), atol=2e-6)


def test_sinusoidal_gives_the_values_of_the_papers():
    """Position 1 of size 4: sin 1, cos 1, sin .01, cos .01; tensor2tensor ends at frequency 1/base."""
    found = jax.jit(lambda one: [sinusoidal(one, 4, convention=name)[0] for name in absolute.CONVENTIONS])(
        np.array([1])
    )
    found = dict(zip(absolute.CONVENTIONS, found, strict=True))
    np.testing.assert_allclose(found["interleaved"], [0.84147098, 0.54030231, 0.00999983, 0.99995000], atol=1e-7)
    np.testing.assert_allclose(found["concatenated"], [0.84147098, 0.00999983, 0.54030231, 0.99995000], atol=1e-7)
    np.testing.assert_allclose(found["tensor2tensor"], [0.84147098, 1e-4, 0.54030231, 1.0], atol=1e-7)


def test_sinusoidal_is_interleaved_by_default():
    """Called without ``jit``, so every operation runs by itself."""
    np.testing.assert_allclose(sinusoidal(np.array([1]), 4)[0, :2], [0.84147098, 0.54030231], atol=1e-7)


@pytest.mark.parametrize("convention", absolute.CONVENTIONS)
def test_sinusoidal_inner_product_depends_on_the_difference(convention):
    p = np.asarray(compiled(np.array([0, 5, 1_000_000, 1_000_005]), 64, convention=convention))
    products = p @ p.T
    np.testing.assert_allclose(np.diag(products), 32.0, atol=1e-4)
    np.testing.assert_allclose(products[0, 1], products[2, 3], atol=1e-4)


def test_sinusoidal_refuses():
    for message, size, options in [
        ("model_dim must be a positive even number, found 7", 7, {}),
        ("convention: unknown value 'interleave'; did you mean 'interleaved'", 8, {"convention": "interleave"}),
        ("model_dim must be at least 4", 2, {"convention": "tensor2tensor"}),
        ("base must be greater than 1", 8, {"base": 1.0}),
    ]:
        with pytest.raises(ValueError, match=message):
            sinusoidal(Range(0, 3), size, **options)
    with pytest.raises(ValueError, match="convention"):
        Sinusoidal("paper")


@pytest.mark.parametrize("convention", absolute.CONVENTIONS)
def test_sinusoidal_at_real_positions(convention):
    positions = np.array([[0.0, 0.25, 3.5], [-1.75, 63.999, 1000.5]])
    frequencies = 10_000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2 - (convention == "tensor2tensor")))
    angle = positions[..., None] * frequencies
    want = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    if convention == "interleaved":
        want = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(2, 3, SIZE)
    for dtype in (np.float32, np.float64):
        found = np.asarray(compiled(positions.astype(dtype), SIZE, convention=convention))
        chex.assert_type(found, jnp.float32)
        np.testing.assert_allclose(found, want, atol=1e-6)
    whole = compiled(np.arange(5, dtype=np.float32), SIZE, convention=convention)
    np.testing.assert_allclose(whole, compiled(Range(0, 5), SIZE, convention=convention), atol=1e-6)


def test_sinusoidal_of_real_positions_has_a_slope():
    slope = jax.jit(jax.grad(lambda p: sinusoidal(p, SIZE, convention="concatenated")[0, 0]))(np.float32([0.3]))
    np.testing.assert_allclose(slope, np.cos([0.3]), rtol=1e-6)
    with pytest.raises(ValueError, match="positions must be integers or float32, found bfloat16"):
        sinusoidal(np.zeros(3, jnp.bfloat16), SIZE)


look_up = jax.jit(learned)


def test_learned_looks_up_rows():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(learned(table, Range(1, 3)), table[1:])
    rows = look_up(table, np.array([[0, 3], [2, 2]]))
    chex.assert_shape(rows, (2, 2, 3))
    np.testing.assert_array_equal(rows, table[[[0, 3], [2, 2]]])
    chex.assert_type(look_up(table.astype(jnp.bfloat16), Range(0, 2)), jnp.float32)


def test_learned_gives_nan_where_indexing_would_clamp():
    table = np.ones((4, 3), np.float32)
    found = np.asarray(look_up(table, np.array([3, 4, 1000, -1, -9])))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, True, True]
    late = look_up(table, Range(jnp.int32(2), 4))
    assert np.isnan(late).all(axis=1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("positions", [Range(2, 3), Range(-1, 2)])
def test_learned_refuses_static_positions_outside_the_table(positions):
    with pytest.raises(ValueError, match="outside the learned table of max_length 4"):
        learned(np.ones((4, 3), np.float32), positions)


def test_learned_gradient_reaches_the_rows_in_use():
    gradient = jax.jit(jax.grad(lambda table: learned(table, np.array([1, 1, 3])).sum()))(np.zeros((4, 2), np.float32))
    np.testing.assert_array_equal(gradient, [[0, 0], [2, 2], [0, 0], [1, 1]])


def hierarchical_oracle(table, position, alpha):
    """alpha u_a + (1 - alpha) u_c with position = a n + c and u = (p - alpha p_0) / (1 - alpha), in float64."""
    p = np.asarray(table, np.float64)
    u = (p - alpha * p[0]) / (1 - alpha)
    a, c = divmod(position, len(p))
    return alpha * u[a] + (1 - alpha) * u[c]


@pytest.mark.parametrize("alpha", [0.4, 0.1, 0.7])
def test_hierarchical_is_its_formula_and_the_learned_rows_at_first(alpha):
    table = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    found = np.asarray(jax.jit(lambda t: hierarchical(t, Range(0, 36), alpha=alpha))(table))
    chex.assert_shape(found, (36, 5))
    np.testing.assert_allclose(found, [hierarchical_oracle(table, p, alpha) for p in range(36)], atol=2e-6)
    np.testing.assert_array_equal(found[:6], table)
    assert len({tuple(row) for row in found.round(4)}) == 36


def test_hierarchical_ends_at_the_square():
    table = np.ones((4, 3), np.float32)
    found = np.asarray(jax.jit(hierarchical)(table, np.array([[0, 15, 16], [-1, 2**31 - 1, 7]])))
    assert np.isnan(found).all(-1).tolist() == [[False, False, True], [True, True, False]]
    assert not np.isnan(found[0, 1]).any()
    for positions in (Range(14, 3), Range(-1, 2)):
        with pytest.raises(ValueError, match=r"outside the 4\^2 positions that a table of max_length 4 encodes"):
            hierarchical(table, positions)


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0, -0.4])
def test_hierarchical_refuses_alpha(alpha):
    with pytest.raises(ValueError, match=r"alpha must be between 0 and 1 and not 0\.5"):
        hierarchical(np.ones((4, 3), np.float32), Range(0, 2), alpha=alpha)
    with pytest.raises(ValueError, match="alpha must be"):
        Hierarchical(4, alpha=alpha)


def test_hierarchical_takes_the_parameters_of_learned():
    @jax.jit
    def run(key):
        params, own = Learned(6).init(key, 4), Hierarchical(6).init(key, 4)
        gradient = jax.grad(lambda p: Hierarchical(6).embed(p, Range(9, 1), 4).sum())(params)
        rows = Hierarchical(6).embed(params, Range(0, 12), 4), Learned(6).embed(params, Range(0, 6), 4)
        return params, own, *rows, gradient["embedding"][:, 0]

    params, own, long, short, gradient = jax.device_get(run(jax.random.key(1)))
    chex.assert_trees_all_equal(own, params)
    chex.assert_trees_all_equal(long[:6], short)
    np.testing.assert_allclose(long[9], hierarchical_oracle(params["embedding"], 9, 0.4), atol=1e-7)
    np.testing.assert_allclose(gradient, [-2 / 3, 2 / 3, 0, 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("spec", [Sinusoidal(), Sinusoidal("tensor2tensor", base=500.0), Learned(40), Hierarchical(5)])
def test_specs_fill_the_embedding_slot(spec):
    @jax.jit
    def run(key, positions):
        params = spec.init(key, SIZE)
        mapped = jax.vmap(lambda p: spec.embed(params, p, SIZE))(positions)
        return spec.embed(params, Range(0, 8), SIZE), spec.embed(params, positions, SIZE), mapped

    flat, rows, mapped = jax.device_get(run(jax.random.key(0), np.arange(16, dtype=np.int32).reshape(2, 8)))
    chex.assert_shape([flat, rows], [(8, SIZE), (2, 8, SIZE)])
    chex.assert_type([flat, rows], jnp.float32)
    chex.assert_trees_all_close(rows[0], flat)
    chex.assert_trees_all_close(mapped, rows, atol=1e-6)
    assert not spec.shift_invariant
    assert not np.allclose(flat[0], flat[1])
    hash(spec)


def test_learned_spec_init_and_checks():
    spec = Learned(4000, stddev=0.5)
    table = spec.init(jax.random.key(0), 16)["embedding"]
    np.testing.assert_allclose(np.std(table), 0.5, rtol=0.02)
    with pytest.raises(ValueError, match="embedding must have shape \\(4000, 8\\), found \\(4000, 16\\)"):
        spec.embed({"embedding": table}, Range(0, 3), 8)
    with pytest.raises(ValueError, match="max_length must be positive"):
        Learned(0)


def test_embeddings_on_a_mesh():
    mesh = jax.make_mesh((8,), ("length",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("length")
    positions = np.arange(32, dtype=np.int32)
    table = np.random.default_rng(0).standard_normal((32, SIZE)).astype(np.float32)
    both = lambda p, t: (sinusoidal(p, SIZE), learned(t, p))  # noqa: E731
    sharded = jax.shard_map(both, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    found, want = jax.jit(lambda *x: (sharded(*x), both(*x)))(positions, table)
    chex.assert_trees_all_close(found, want, atol=1e-6)


@pytest.mark.parity
def test_parity_with_transformers():
    pytest.importorskip("transformers")
    import torch
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
    from transformers.models.whisper.modeling_whisper import sinusoids

    positions = Range(0, 64)
    create_sinusoidal_embeddings(64, 32, interleaved := torch.zeros(64, 32))
    np.testing.assert_allclose(sinusoidal(positions, 32), interleaved.numpy(), atol=1e-5)
    found = sinusoidal(positions, 32, convention="concatenated")
    np.testing.assert_allclose(found, create_sinusoidal_positions(64, 32).numpy(), atol=1e-5)
    found = sinusoidal(positions, 32, convention="tensor2tensor")
    np.testing.assert_allclose(found, sinusoids(64, 32).numpy(), atol=1e-5)
