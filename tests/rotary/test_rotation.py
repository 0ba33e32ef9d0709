import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import cos_sin
from jax.sharding import PartitionSpec

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import Plain, Proportional, apply_rotary, permute_projection, rotary_table

PAIRINGS = ("half", "interleaved")
FAR = np.array([257, 8191, 131_071, 1_000_003])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_hand(x, positions, values, pairing):
    """One pair at a time, in float64: x ``[length, size]``."""
    out, (cos, sin) = np.array(x, np.float64), cos_sin(positions, values)
    for t in range(len(values)):
        i, j = (t, t + len(values)) if pairing == "half" else (2 * t, 2 * t + 1)
        a, b = np.float64(x[:, i]), np.float64(x[:, j])
        out[:, i], out[:, j] = a * cos[:, t] - b * sin[:, t], a * sin[:, t] + b * cos[:, t]
    return out


@pytest.mark.parametrize("share", [1.0, 0.75, 0.25])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_the_formula(pairing, share):
    rule = Plain(head_dim=16, partial_rotary_factor=share)
    x = normal(0, 1, 4, 3, 16)
    found = jax.jit(lambda x: apply_rotary(x, rotary_table(FAR, rule.at_length()[0]), pairing=pairing))(x)
    found = np.asarray(found)
    chex.assert_equal_shape([found, x])
    chex.assert_equal(found.dtype, x.dtype)
    for head in range(3):
        expected = by_hand(x[0, :, head], FAR, rule.inverse_frequencies(), pairing)
        np.testing.assert_allclose(found[0, :, head], expected, atol=5e-6)
    chex.assert_trees_all_equal(found[..., rule.rotary_dim() :], x[..., rule.rotary_dim() :])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_norms_are_preserved(pairing):
    x = normal(1, 2, 4, 3, 16)
    found = apply_rotary(x, rotary_table(FAR, rotary.inverse_frequencies(16)), pairing=pairing)
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    chex.assert_trees_all_equal(apply_rotary(x, rotary_table(np.zeros(4, int), rotary.inverse_frequencies(16))), x)


@pytest.mark.parametrize("rule", [Plain(), Plain(partial_rotary_factor=0.5), Proportional(0.75)])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_do_not_change_when_all_positions_shift(pairing, rule):
    q, k = normal(2, 1, 8, 2, 16), normal(3, 1, 8, 2, 16)
    frequencies = rule.at_length(head_dim=16)[0]

    @jax.jit
    def scores(start):
        table = rotary_table(Range(start, 8), frequencies)
        return jnp.einsum("btnd,bsnd->bnts", *(apply_rotary(x, table, pairing=pairing) for x in (q, k)))

    for shift in (-8, 1_000_003, 2**31 - 9, -(2**31)):
        np.testing.assert_allclose(scores(jnp.int32(shift)), scores(jnp.int32(0)), atol=2e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_rounds_only_the_result(pairing):
    x = normal(4, 1, 4, 2, 64).astype(jnp.bfloat16)

    @jax.jit
    def run(x):
        table = rotary_table(FAR, rotary.inverse_frequencies(64))
        cut = jax.tree.map(lambda part: part.astype(jnp.bfloat16), table)
        wide = x.astype(jnp.float32)
        return [apply_rotary(y, t, pairing=pairing) for y, t in ((x, table), (wide, table), (wide, cut))]

    low, high, cut = jax.device_get(run(x))
    chex.assert_type(low, jnp.bfloat16)
    chex.assert_trees_all_equal(low, high.astype(jnp.bfloat16))
    assert np.abs(cut - high).max() > 2e-3


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.ones((1, 4, 2, 16))
        run = jax.jit(lambda x: apply_rotary(x, rotary_table(FAR, rotary.inverse_frequencies(16))))
        chex.assert_type(run(x), jnp.float64)


@pytest.mark.parametrize("rotary_dim", [None, 12, 4])
def test_pairings_are_one_permutation_apart(rotary_dim):
    x = normal(5, 2, 4, 3, 16)
    table = rotary_table(FAR, rotary.inverse_frequencies(rotary_dim or 16))
    options = {"rotary_dim": rotary_dim}
    half = permute_projection(x, "interleaved", "half", **options)
    chex.assert_trees_all_equal(
        permute_projection(apply_rotary(half, table), "half", "interleaved", **options),
        apply_rotary(x, table, pairing="interleaved"),
    )
    chex.assert_trees_all_equal(permute_projection(half, "half", "interleaved", **options), x)
    chex.assert_trees_all_equal(permute_projection(x, "half", "half", **options), x)


def test_permutations_by_hand():
    order = permute_projection(np.arange(8), "interleaved", "half")
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert permute_projection(np.arange(8), "half", "interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    partial = permute_projection(np.arange(8), "interleaved", "half", rotary_dim=4)
    assert partial.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    rows = permute_projection(np.arange(8).reshape(2, 4, 1), "interleaved", "half", axis=1)
    assert rows.ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("share", "rotary_dim", "proportional"), [(1.0, None, False), (0.5, 8, False), (0.25, 4, False), (0.5, None, True)]
)
def test_permuted_weights_give_the_same_scores(share, rotary_dim, proportional):
    """Grouped queries (4 heads on 2), biases and norm weights, full, partial and p-RoPE."""
    size, model = 16, 12
    rule = Proportional(share) if proportional else Plain(partial_rotary_factor=share)
    table = rotary_table(np.arange(6) * 1000, rule.at_length(head_dim=size)[0])
    inputs = normal(6, 2, 6, model)
    weights = [
        {"w": normal(s, model, n, size), "b": normal(s + 2, n, size), "g": normal(s + 4, size)}
        for s, n in ((7, 4), (8, 2))
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def scores(weights, pairing):
        features = []
        for part in weights:
            x = jnp.einsum("btm,mnd->btnd", inputs, part["w"]) + part["b"]
            x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * part["g"]
            features.append(apply_rotary(x, table, pairing=pairing))
        q, k = features
        return jnp.einsum("btngd,bsnd->bngts", q.reshape(2, 6, 2, 2, size), k)

    def permute(leaf):
        return permute_projection(leaf, "interleaved", "half", rotary_dim=rotary_dim)

    permuted = jax.jit(lambda weights: jax.tree.map(permute, weights))(weights)
    np.testing.assert_allclose(scores(permuted, "half"), scores(weights, "interleaved"), atol=1e-4)
    assert np.abs(scores(weights, "half") - scores(weights, "interleaved")).max() > 0.1


def test_gradient_is_the_inverse_rotation():
    x, w = normal(9, 1, 4, 2, 16), normal(10, 1, 4, 2, 16)

    @jax.jit
    def both(x, w):
        forward, backward = (rotary_table(at, rotary.inverse_frequencies(16)) for at in (FAR, -FAR))
        turned = {p: lambda x, p=p: (apply_rotary(x, forward, pairing=p) * w).sum() for p in PAIRINGS}
        return {p: (jax.grad(turned[p])(x), apply_rotary(w, backward, pairing=p)) for p in PAIRINGS}

    for gradient, back in both(x, w).values():
        np.testing.assert_allclose(gradient, back, atol=1e-5)


def rotate(x, positions, frequencies):
    return apply_rotary(x, rotary_table(positions, frequencies))


def test_under_vmap_and_without_a_batch_axis():
    x, positions, frequencies = normal(11, 3, 4, 2, 16), np.arange(12).reshape(3, 4), rotary.inverse_frequencies(16)

    @jax.jit
    def run(*given):
        return rotate(*given), jax.vmap(rotate, in_axes=(0, 0, None))(*given), rotate(x[1], positions[1], frequencies)

    expected, mapped, one = jax.device_get(run(x, positions, frequencies))
    chex.assert_trees_all_close(mapped, expected, atol=1e-6)
    chex.assert_trees_all_close(one, expected[1], atol=1e-6)


@pytest.mark.parametrize("axis", ["batch", "length", "heads"])
def test_under_shard_map(axis):
    """Frequencies enter as a replicated argument; positions are sharded with the tokens, gradients included."""
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(*("devices" if name == axis else None for name in ("batch", "length", "heads")))
    x, w, frequencies = normal(12, 8, 8, 8, 16), normal(13, 8, 8, 8, 16), rotary.inverse_frequencies(16)
    positions = np.arange(64, dtype=np.int32).reshape(8, 8) * 1000

    def loss(x, positions, frequencies, w, sharded):
        f = rotate
        if sharded:
            f = jax.shard_map(
                rotate, mesh=mesh, in_specs=(spec, PartitionSpec(*spec[:2]), PartitionSpec()), out_specs=spec
            )
        return (f(x, positions, frequencies) * w).sum()

    @jax.jit
    def both(*given):
        return [jax.value_and_grad(loss)(*given, sharded) for sharded in (True, False)]

    chex.assert_trees_all_close(*both(x, positions, frequencies, w), rtol=1e-5, atol=1e-5)


def test_under_pmap():
    x, frequencies = normal(14, 8, 1, 4, 2, 16), rotary.inverse_frequencies(16)
    positions = np.arange(32, dtype=np.int32).reshape(8, 1, 4)
    found = jax.pmap(rotate, in_axes=(0, 0, None))(x, positions, frequencies)
    expected = jax.jit(rotate)(x[:, 0], positions[:, 0], frequencies)
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: apply_rotary(x, t, pairing="neox"), "pairing: unknown value 'neox'"),
        (lambda x, t: apply_rotary(x[..., :14], t), "table rotates 16 features but x has head size 14"),
        (lambda x, t: apply_rotary(x[:, :3], t), r"table of shape \(4, 8\) does not fit x of shape \(2, 3, 3, 16\)"),
        (lambda x, t: apply_rotary(x, jax.tree.map(lambda a: jnp.stack([a] * 3), t)), "does not fit"),
        (lambda x, t: apply_rotary(x[0, 0], t), "x must be"),
        (lambda x, t: apply_rotary(x.astype(int), t), "x must be of a floating dtype"),
        (lambda x, t: permute_projection(x, "half", "pairs"), "target: unknown value 'pairs'"),
        (lambda x, t: permute_projection(x, "half", "interleaved", rotary_dim=7), "rotary_dim must be a positive even"),
        (lambda x, t: permute_projection(x, "half", "interleaved", rotary_dim=18), "rotary_dim 18 is larger than"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((2, 4, 3, 16), np.float32), rotary_table(np.arange(4), rotary.inverse_frequencies(16)))
