"""Query scales against closed forms and the numbers of the papers."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import scales
from posjax.positions import Range

close = partial(np.testing.assert_allclose, rtol=1e-6)


def ints(*values):
    return np.asarray(values, np.int32)


def test_log_n_counts_fewer_keys_than_its_minimum_as_the_minimum():
    close(scales.log_n(ints(512, 4096), 512), [1, 4 / 3])
    close(scales.log_n(ints(0, 15, 16, 17), 512), np.log([16, 16, 16, 17]) / np.log(512))
    close(scales.log_n(ints(1, 2, 3), 512, minimum=1), np.log([1, 2, 3]) / np.log(512))


@pytest.mark.parametrize("length", [2, 3, 1000, 131_072])
def test_clipped_log_n_is_exactly_one_up_to_the_training_length(length):
    n = np.unique(np.append(np.arange(1, min(length, 300)), [0, length - 1, length]))
    np.testing.assert_array_equal(scales.clipped_log_n(n, length), 1)
    beyond = length + np.array([1, 100, 1_000_000])
    close(scales.clipped_log_n(beyond, length), np.log(beyond) / np.log(length))


def test_ssmax_does_not_fade():
    """One logit 5 above the n - 1 others: the weight of the largest under softmax, and under SSMax with s = 0.43."""
    n = np.array([10, 100, 1000, 100_000])
    factor = np.asarray(scales.ssmax(jnp.asarray(n), jnp.asarray([0.43], jnp.float32)), np.float64)[:, 0]

    def largest(gap):
        return 1 / (1 + (n - 1) * np.exp(-gap))

    np.testing.assert_allclose(largest(5.0), [0.943, 0.600, 0.129, 0.0015], atol=5e-4)
    np.testing.assert_allclose(largest(5 * factor), [0.940, 0.995, 0.9996, 0.999998], atol=5e-4)


@pytest.mark.parametrize(("length", "expected"), [(512, 0.19061), (1024, 0.16847), (2048, 0.15090)])
def test_the_initial_ssmax_has_a_mean_of_one_over_the_training_length(length, expected):
    initial = scales.ssmax_initial(length)
    assert initial == pytest.approx(expected, abs=5e-6)
    assert float(scales.ssmax(jnp.arange(1, length + 1), jnp.asarray([initial])).mean()) == pytest.approx(1, abs=1e-5)


def test_ssmax_of_heads_with_an_offset_and_its_gradient():
    n, s, b = ints(0, 1, 10, 50), jnp.asarray([0.1, 0.5]), jnp.asarray([1.0, -2.0])
    close(scales.ssmax(n, s, b), np.log([[1], [1], [10], [50]]) * [[0.1, 0.5]] + [[1.0, -2.0]])
    ds, db = jax.grad(lambda s, b: scales.ssmax(n, s, b).sum(), argnums=(0, 1))(s, b)
    close(ds, np.full(2, np.log(500.0)))
    close(db, np.full(2, 4.0))


def test_llama4_steps_fall_on_the_exact_position():
    steps = [k * 8192 + offset for k in (1, 2, 3, 100, 2**17, 2**18 - 1) for offset in (-2, -1, 0, 1)]
    positions = [-5000, -1, 0, 1, 8190, *steps, 2**31 - 2, 2**31 - 1]
    found = jax.jit(scales.llama4_temperature)(np.asarray(positions, np.int32))
    close(found, [1 + 0.1 * math.log(max((p + 1) // 8192, 0) + 1) for p in positions], rtol=2e-7)
    assert float(found[positions.index(8191)]) == pytest.approx(1.0693, abs=5e-5)
    close(scales.llama4_temperature(ints(2, 3, 7), floor_scale=4, attn_scale=0.5), 1 + 0.5 * np.log([1, 2, 3]))
    close(scales.llama4_temperature(ints(0, 1, 2, 3), floor_scale=2, attn_scale=0.5), 1 + 0.5 * np.log([1, 2, 2, 3]))


def test_ministral_has_no_shift_by_one():
    close(scales.ministral_temperature(ints(-3, 8191, 8192, 16383, 16384), 8192), 1 + 0.1 * np.log([1, 1, 2, 2, 3]))


@pytest.mark.parity
def test_ministral_temperature_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    p = np.array([0, 1, 100, 16383, 16384, 40_000, 262_143])
    expected = modeling.get_llama_4_attn_scale(torch.tensor(p[None]), 0.1, 16384).numpy().ravel()
    close(scales.ministral_temperature(jnp.asarray(p), 16384), expected)


ENDS = [-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**24 + 1, 2**31 - 3, 2**31 - 2, 2**31 - 1]
AT_THE_ENDS = {
    "llama4": (lambda p: scales.llama4_temperature(p, floor_scale=1), lambda p: 1 + 0.1 * math.log(max(p + 1, 0) + 1)),
    "llama4, two steps": (
        lambda p: scales.llama4_temperature(p, floor_scale=2**30),
        lambda p: 1 + 0.1 * math.log(max((p + 1) // 2**30, 0) + 1),
    ),
    "llama4, one step": (
        lambda p: scales.llama4_temperature(p, floor_scale=2**31 - 1),
        lambda p: 1 + 0.1 * math.log(max((p + 1) // (2**31 - 1), 0) + 1),
    ),
    "ministral": (lambda p: scales.ministral_temperature(p, 1), lambda p: 1 + 0.1 * math.log(max(p, 0) + 1)),
    "log-n": (lambda n: scales.log_n(n, 512), lambda n: math.log(max(n, 16), 512)),
    "clipped log-n": (lambda n: scales.clipped_log_n(n, 2**31 - 2), lambda n: math.log(max(n, 2**31 - 2), 2**31 - 2)),
    "ssmax": (lambda n: scales.ssmax(n, jnp.ones(1))[..., 0], lambda n: math.log(max(n, 1))),
    "cosine": (scales.cosine_scale, lambda n: 4 * math.log(max(n, 1))),
}


@pytest.mark.parametrize("name", AT_THE_ENDS)
def test_scales_are_right_at_both_ends_of_int32(name):
    """Against Python's integers, which have no end."""
    scale, wanted = AT_THE_ENDS[name]
    close(scale(ints(*ENDS)), list(map(wanted, ENDS)))


YARN = {2: 1.06931, 4: 1.13863, 8: 1.20794, 16: 1.27726, 32: 1.34657, 40: 1.36889}


def test_the_table_of_yarn_s_temperature():
    for factor, root in YARN.items():
        assert math.sqrt(scales.yarn_temperature(factor)) == pytest.approx(root, abs=6e-6)
    assert scales.yarn_temperature(1.0) == scales.yarn_temperature(0.5) == 1.0
    assert scales.yarn_temperature(40.0, 0.707) == pytest.approx((0.0707 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(("n", "expected"), [(512, 2.008), (2048, 2.279), (20_000, 2.678)])
def test_gradient_maximal_is_where_the_gradient_is_largest(n, expected):
    found = scales.gradient_maximal(n)
    assert found == pytest.approx(expected, abs=5e-4)
    grid = np.linspace(0.5, 4, 350_001)
    assert found == pytest.approx(grid[np.argmax(grid * (1 - np.exp(grid**2) / n))], abs=2e-5)


@pytest.mark.parametrize("n", [1.5, 512, 10**9])
def test_gradient_maximal_is_a_root_to_the_last_digits(n):
    x = scales.gradient_maximal(n) ** 2
    assert x + math.log(1 + 2 * x) == pytest.approx(math.log(n), rel=1e-14)


SPECS = [
    (scales.LogN(512), lambda p, n: np.log(np.maximum(n, 16)) / np.log(512)),
    (scales.LogN(512, minimum=2), lambda p, n: np.log(n) / np.log(512)),
    (scales.ClippedLogN(8), lambda p, n: np.maximum(1, np.log(n) / np.log(8))),
    (scales.SSMax(), lambda p, n: 0.168 * np.log(n)),
    (scales.SSMax(0.5, bias=True), lambda p, n: 0.5 * np.log(n)),
    (scales.Llama4Temperature(floor_scale=8, attn_scale=0.2), lambda p, n: 1 + 0.2 * np.log((p + 1) // 8 + 1)),
    (scales.MinistralTemperature(8), lambda p, n: 1 + 0.1 * np.log(1 + p // 8)),
    (scales.InklingTemperature(4, 0.5), lambda p, n: 1 + 0.5 * np.log(np.maximum((p + 1) / 4, 1))),
    (scales.YaRNTemperature(4.0), lambda p, n: np.full(p.shape, (0.1 * np.log(4) + 1) ** 2)),
    (scales.YaRNTemperature(4.0, mscale=0.0), lambda p, n: np.ones(p.shape)),
    (scales.GradientMaximal(512), lambda p, n: np.full(p.shape, scales.gradient_maximal(512))),
    (scales.DroPETemperature(8), lambda p, n: np.full(p.shape, 1 + 0.412 * np.log(8))),
    (scales.DroPETemperature(4, scales.DROPE_SMOLLM), lambda p, n: np.full(p.shape, 1 + 0.103 * np.log(4))),
    (scales.CosineScale(512), lambda p, n: np.full(p.shape, 4 * np.log(256))),
    (scales.CosineScale(4), lambda p, n: np.full(p.shape, 4 * np.log(2))),
    (scales.CosineScale(), lambda p, n: 4 * np.log(n)),
    (scales.LearnedCosineScale(64), lambda p, n: np.full(p.shape, np.log2(64 * 63))),
]
POSITIONS = np.stack([np.arange(3, 27), np.arange(100, 124)]).astype(np.int32)
VISIBLE = POSITIONS % 50 + 2


@pytest.mark.parametrize(("spec", "expected"), SPECS, ids=lambda s: type(s).__name__)
def test_specs_give_their_closed_form_and_declare_their_shift_invariance(spec, expected):
    """A shift of all positions does not change the number of visible keys."""
    params = spec.init(jax.random.key(0), 4)
    factor = jax.jit(lambda params, p, n: spec.factor(params, positions=p, visible=n, num_heads=4))
    rows, one = factor(params, POSITIONS, VISIBLE), factor(params, Range(3, 24), VISIBLE[0])
    chex.assert_type([rows, one, *jax.tree.leaves(params)], jnp.float32)
    want = np.broadcast_to(expected(POSITIONS, VISIBLE)[..., None], (2, 24, 4))
    close(np.broadcast_to(rows, want.shape), want)
    close(np.broadcast_to(one, want.shape[1:]), want[0])
    same = np.array_equal(rows, factor(params, POSITIONS + 20, VISIBLE))
    assert same == spec.shift_invariant
    assert spec in {type(spec)(**vars(spec))}


def test_parameters_of_scales_are_one_for_each_head_or_one_for_all():
    chex.assert_trees_all_equal(scales.SSMax(bias=True).init(None, 4), {"s": jnp.full(4, 0.168), "b": jnp.zeros(4)})
    spec = scales.LearnedCosineScale(64)
    params = spec.init(jax.random.key(0), 4)
    slope = jax.grad(lambda p: spec.factor(p, positions=None, visible=None, num_heads=4).sum())(params)
    chex.assert_trees_all_equal(slope, {"g": jnp.float32(1)})
