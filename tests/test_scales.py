"""Query scales against closed forms and the numbers of the papers."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from posjax import scales
from posjax.positions import Range
from posjax.rotary import apply_rotary, inverse_frequencies, rotary_table

close = partial(np.testing.assert_allclose, rtol=1e-6)


def ints(*values):
    return np.asarray(values, np.int32)


def test_log_n_values():
    close(scales.log_n(ints(512, 4096), 512), [1, 4 / 3])
    close(scales.log_n(ints(16384), 4096), [7 / 6])
    n = np.arange(16, 5000, 37)
    close(scales.log_n(jnp.asarray(n), 512), np.log(n) / np.log(512))


def test_log_n_counts_fewer_keys_than_its_minimum_as_the_minimum():
    close(scales.log_n(ints(0, 1, 15, 16, 17), 512), np.log([16, 16, 16, 16, 17]) / np.log(512))
    close(scales.log_n(ints(1, 2, 3), 512, minimum=1), np.log([1, 2, 3]) / np.log(512))


@pytest.mark.parametrize("length", [2, 3, 32, 512, 1000, 4096, 131_072])
def test_clipped_log_n_is_exactly_one_up_to_the_training_length(length):
    n = np.unique(np.append(np.arange(1, min(length, 300)), [0, length - 1, length]))
    np.testing.assert_array_equal(scales.clipped_log_n(n, length), 1)
    beyond = length + np.array([1, 100, 1_000_000])
    found = scales.clipped_log_n(beyond, length)
    close(found, np.log(beyond) / np.log(length))
    assert np.all(np.asarray(found)[1:] > 1)


def test_ssmax_with_one_over_log_length_is_log_n():
    n = np.arange(1, 3000, 7, dtype=np.int32)
    found = scales.ssmax(n, np.asarray([1 / math.log(512)], np.float32))[:, 0]
    close(found, scales.log_n(n, 512, minimum=1), rtol=1e-6, atol=1e-7)


def test_ssmax_of_nothing_visible_is_that_of_one_key():
    s, b = jnp.asarray([0.4]), jnp.asarray([1.5])
    close(scales.ssmax(ints(0, 1, 2), s, b)[:, 0], [1.5, 1.5, 1.5 + 0.4 * math.log(2)])


def test_ssmax_does_not_fade():
    """One logit 5 above the n - 1 others: the weight of the largest under softmax, and under SSMax with s = 0.43."""
    n = np.array([10, 100, 1000, 100_000])
    factor = np.asarray(scales.ssmax(jnp.asarray(n), jnp.asarray([0.43], jnp.float32)), np.float64)[:, 0]

    def largest(gap):
        return 1 / (1 + (n - 1) * np.exp(-gap))

    np.testing.assert_allclose(largest(5.0), [0.943, 0.600, 0.129, 0.0015], atol=5e-4)
    np.testing.assert_allclose(largest(5 * factor), [0.940, 0.995, 0.9996, 0.999998], atol=5e-4)
    assert largest(5 * factor)[-1] == pytest.approx(0.999998, abs=5e-7)


@pytest.mark.parametrize(("length", "expected"), [(512, 0.19061), (1024, 0.16847), (2048, 0.15090)])
def test_ssmax_initial(length, expected):
    assert scales.ssmax_initial(length) == pytest.approx(expected, abs=5e-6)
    n = jnp.arange(1, length + 1)
    assert float(scales.ssmax(n, jnp.asarray([scales.ssmax_initial(length)])).mean()) == pytest.approx(1, abs=1e-5)


def test_ssmax_default_is_the_rule_at_1024():
    assert round(scales.ssmax_initial(1024), 3) == scales.SSMAX_INITIAL


def test_ssmax_heads_bias_and_gradient():
    n, s, b = ints(1, 10, 50), jnp.asarray([0.1, 0.5]), jnp.asarray([1.0, -2.0])
    found = scales.ssmax(n, s, b)
    close(found, np.log([[1], [10], [50]]) * [[0.1, 0.5]] + [[1.0, -2.0]])
    ds, db = jax.grad(lambda s, b: scales.ssmax(n, s, b).sum(), argnums=(0, 1))(s, b)
    close(ds, np.full(2, np.log(500.0)))
    close(db, np.full(2, 3.0))


def llama4(p, floor_scale=8192):
    return 1 + 0.1 * math.log((p + 1) // floor_scale + 1)


def test_llama4_steps_fall_on_the_exact_position():
    steps = [k * 8192 + offset for k in (1, 2, 3, 100, 2**17, 2**18 - 1) for offset in (-2, -1, 0, 1)]
    positions = [0, 1, 8190, *steps, 2**31 - 2, 2**31 - 1]
    temperature = jax.jit(scales.llama4_temperature)
    found = temperature(np.asarray(positions, np.int32))
    close(found, [llama4(p) for p in positions], rtol=2e-7)
    chex.assert_trees_all_equal(temperature(np.arange(8191, dtype=np.int32)), np.ones(8191, np.float32))
    assert float(found[positions.index(8191)]) == pytest.approx(1.0693, abs=5e-5)


def test_llama4_padding_and_other_constants():
    close(scales.llama4_temperature(ints(-1, -5000)), [1, 1])
    close(scales.llama4_temperature(ints(-2, -1, 0, 1), floor_scale=1), 1 + 0.1 * np.log([1, 1, 2, 3]))
    close(scales.llama4_temperature(ints(2, 3, 7), floor_scale=4, attn_scale=0.5), 1 + 0.5 * np.log([1, 2, 3]))
    close(scales.llama4_temperature(ints(0, 1, 2, 3), floor_scale=2, attn_scale=0.5), 1 + 0.5 * np.log([1, 2, 2, 3]))


def test_ministral_has_no_shift_by_one():
    close(scales.ministral_temperature(ints(-3, 8191, 8192, 16383, 16384), 8192), 1 + 0.1 * np.log([1, 1, 2, 2, 3]))
    close(scales.ministral_temperature(ints(-1, 0, 1, 2), 1), 1 + 0.1 * np.log([1, 1, 2, 3]))


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
YARN_LOGITS = {2: 1.1434, 4: 1.2965, 8: 1.4591, 16: 1.6314, 32: 1.8133, 40: 1.8739}


@pytest.mark.parametrize("factor", YARN)
def test_yarn_temperature_table(factor):
    assert math.sqrt(scales.yarn_temperature(factor)) == pytest.approx(YARN[factor], abs=6e-6)
    assert scales.yarn_temperature(factor) == pytest.approx(YARN_LOGITS[factor], abs=6e-5)


def test_yarn_temperature_without_extension_and_with_mscale():
    assert scales.yarn_temperature(1.0) == scales.yarn_temperature(0.5) == 1.0
    assert scales.yarn_temperature(40.0, 0.707) == pytest.approx((0.0707 * math.log(40) + 1) ** 2)
    assert scales.YaRNTemperature(40.0, mscale=0.0).value == 1.0


@pytest.mark.parametrize("factor", [4.0, 32.0])
def test_yarn_temperature_on_the_logits_is_its_root_on_both_tables(factor):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 6, 1, 8)).astype(np.float32) for _ in range(2))

    @jax.jit
    def rotated(attention_factor):
        table = rotary_table(Range(0, 6), inverse_frequencies(8), attention_factor=attention_factor)
        return apply_rotary(q, table), apply_rotary(k, table)

    def logits(attention_factor):
        return np.einsum("bmhd,bnhd->mn", *jax.device_get(rotated(attention_factor)))

    root = 0.1 * math.log(factor) + 1
    np.testing.assert_allclose(scales.yarn_temperature(factor) * logits(1.0), logits(root), rtol=1e-5, atol=1e-5)


SPECS = [
    (scales.LogN(512), lambda p, n: np.log(np.maximum(n, 16)) / np.log(512)),
    (scales.LogN(512, minimum=2), lambda p, n: np.log(n) / np.log(512)),
    (scales.ClippedLogN(8), lambda p, n: np.maximum(1, np.log(n) / np.log(8))),
    (scales.SSMax(), lambda p, n: 0.168 * np.log(n)),
    (scales.SSMax(0.5, bias=True), lambda p, n: 0.5 * np.log(n)),
    (scales.Llama4Temperature(floor_scale=8, attn_scale=0.2), lambda p, n: 1 + 0.2 * np.log((p + 1) // 8 + 1)),
    (scales.MinistralTemperature(8), lambda p, n: 1 + 0.1 * np.log(1 + p // 8)),
    (scales.YaRNTemperature(4.0), lambda p, n: np.full(p.shape, (0.1 * np.log(4) + 1) ** 2)),
]
POSITIONS = np.stack([np.arange(3, 27), np.arange(100, 124)]).astype(np.int32)
VISIBLE = POSITIONS % 50 + 2


@pytest.mark.parametrize("shape", ["length", "batch length"])
@pytest.mark.parametrize(("spec", "expected"), SPECS, ids=lambda s: type(s).__name__)
def test_specs(spec, expected, shape):
    p, n = (POSITIONS, VISIBLE) if shape == "batch length" else (POSITIONS[0], VISIBLE[0])
    params = spec.init(jax.random.key(0), 4)
    call = partial(spec.factor, num_heads=4)
    found = call(params, positions=jnp.asarray(p), visible=jnp.asarray(n))
    chex.assert_type(found, jnp.float32)
    assert found.shape[-1] == (4 if params else 1)
    np.testing.assert_allclose(
        np.broadcast_to(found, (2, 24, 4)), np.broadcast_to(expected(p, n)[..., None], (2, 24, 4)), rtol=1e-6
    )
    jitted = jax.jit(call)(params, positions=jnp.asarray(p), visible=jnp.asarray(n))
    chex.assert_trees_all_close(jitted, found, rtol=1e-6)
    chex.assert_type(jax.tree.leaves(params), jnp.float32)
    assert spec == type(spec)(**vars(spec))
    assert isinstance(hash(spec), int)


@pytest.mark.parametrize(("spec", "expected"), SPECS, ids=lambda s: type(s).__name__)
def test_shift_invariance_is_as_declared(spec, expected):
    """A shift of all positions does not change the number of visible keys, so ``visible`` stays the same."""
    params = spec.init(jax.random.key(0), 4)
    call = partial(spec.factor, params, visible=jnp.asarray(VISIBLE), num_heads=4)
    same = np.array_equal(call(positions=jnp.asarray(POSITIONS)), call(positions=jnp.asarray(POSITIONS + 20)))
    assert same == spec.shift_invariant


def test_positions_may_be_a_range():
    for spec in (scales.Llama4Temperature(4), scales.MinistralTemperature(4)):
        pair = [spec.factor({}, positions=p, visible=None, num_heads=1) for p in (Range(3, 9), jnp.arange(3, 12))]
        chex.assert_trees_all_equal(*pair)


def test_init_shapes():
    assert scales.LogN(512).init(jax.random.key(0), 4) == {}
    params = scales.SSMax(bias=True).init(jax.random.key(0), 4)
    chex.assert_trees_all_equal(params, {"s": jnp.full(4, 0.168), "b": jnp.zeros(4)})


def test_vmap_shard_map_and_pmap():
    spec = scales.SSMax(bias=True)
    params = {"s": np.linspace(0.1, 0.8, 4, dtype=np.float32), "b": np.linspace(-1, 1, 4, dtype=np.float32)}
    visible = np.arange(1, 33, dtype=np.int32).reshape(8, 4)

    def factor(params, visible):
        heads = params["s"].shape[0]
        return spec.factor(params, positions=None, visible=visible, num_heads=heads)

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "heads"))
    specs = (PartitionSpec("heads"), PartitionSpec("data"))
    sharded = jax.shard_map(factor, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data", None, "heads"))

    @jax.jit
    def run(params, visible):
        by_vmap = jax.vmap(factor, (None, 0))(params, visible)
        gradients = [jax.grad(lambda p, f=f: (f(p, visible) ** 2).sum())(params) for f in (sharded, factor)]
        return [by_vmap, sharded(params, visible)], factor(params, visible), gradients

    found, whole, gradients = run(params, visible)
    for got in (*found, jax.pmap(factor, in_axes=(None, 0))(params, visible)):
        chex.assert_trees_all_close(got, whole, rtol=1e-6)
    chex.assert_trees_all_close(*gradients, rtol=1e-5)


def test_refusals():
    key = jax.random.key(0)
    at = {"positions": jnp.arange(5), "visible": jnp.arange(1, 6), "num_heads": 3}
    s, with_offset = scales.SSMax(), scales.SSMax(bias=True)
    cases = [
        ("length must be at least 2", lambda: scales.log_n(ints(3), 1)),
        ("minimum must be positive", lambda: scales.log_n(ints(3), 8, minimum=0)),
        ("length must be at least 2", lambda: scales.clipped_log_n(ints(3), 0)),
        ("length must be at least 2", lambda: scales.ssmax_initial(1)),
        ("floor_scale must be positive", lambda: scales.llama4_temperature(ints(3), floor_scale=0)),
        ("length must be positive", lambda: scales.ministral_temperature(ints(3), 0)),
        ("floor_scale must fit in int32", lambda: scales.Llama4Temperature(2**31)),
        ("length must fit in int32", lambda: scales.MinistralTemperature(2**31)),
        ("minimum must fit in int32", lambda: scales.LogN(512, 2**31)),
        ("length must fit in int32", lambda: scales.ClippedLogN(2**31)),
        ("factor must be positive", lambda: scales.yarn_temperature(0.0)),
        ("length must be at least 2", lambda: scales.LogN(1)),
        ("minimum must be positive", lambda: scales.LogN(512, 0)),
        ("length must be at least 2", lambda: scales.ClippedLogN(1)),
        ("floor_scale must be positive", lambda: scales.Llama4Temperature(0)),
        ("length must be positive", lambda: scales.MinistralTemperature(-1)),
        ("extension must be positive", lambda: scales.YaRNTemperature(-2.0)),
        ("params must hold 's': SSMax", lambda: s.factor({}, **at)),
        ("params must hold 's', 'b': SSMax", lambda: with_offset.factor(s.init(key, 3), **at)),
        (r"s must have shape \(3,\), found \(4,\): SSMax\(\.\.\.\)\.init", lambda: s.factor(s.init(key, 4), **at)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parity
def test_ministral_temperature_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    p = np.array([0, 1, 100, 16383, 16384, 40_000, 262_143])
    expected = modeling.get_llama_4_attn_scale(torch.tensor(p[None]), 0.1, 16384).numpy().ravel()
    close(scales.ministral_temperature(jnp.asarray(p), 16384), expected)


@pytest.mark.parametrize(("n", "expected"), [(512, 2.008), (2048, 2.279), (20_000, 2.678)])
def test_gradient_maximal_is_where_the_gradient_is_largest(n, expected):
    found = scales.gradient_maximal(n)
    assert found == pytest.approx(expected, abs=5e-4)
    grid = np.linspace(0.5, 4, 350_001)
    assert found == pytest.approx(grid[np.argmax(grid * (1 - np.exp(grid**2) / n))], abs=2e-5)
    close(scales.GradientMaximal(n).factor({}, positions=None, visible=None, num_heads=4), [[found]])
    assert scales.gradient_maximal(1.001) < 0.05


@pytest.mark.parametrize("n", [1.5, 2, 512, 10**9])
def test_gradient_maximal_is_a_root_to_the_last_digits(n):
    x = scales.gradient_maximal(n) ** 2
    assert x + math.log(1 + 2 * x) == pytest.approx(math.log(n), rel=1e-14)


def test_drope_temperature():
    assert scales.drope_temperature(1) == 1.0
    assert scales.drope_temperature(8) == pytest.approx(1 + 0.412 * math.log(8))
    spec = scales.DroPETemperature(4, slope=scales.DROPE_SMOLLM)
    close(spec.factor({}, positions=None, visible=None, num_heads=2), [[1 + 0.103 * math.log(4)]])
    with pytest.raises(ValueError, match=r"extension must be at least 1, found 0\.5"):
        scales.DroPETemperature(0.5)


def test_cosine_scale_values():
    fixed = scales.CosineScale(512).factor({}, positions=None, visible=ints(1, 2), num_heads=2)
    close(fixed, [[22.18]], rtol=1e-4)
    close(scales.CosineScale(4).factor({}, positions=None, visible=None, num_heads=2), [[4 * math.log(2)]])
    found = scales.CosineScale().factor({}, positions=None, visible=ints(0, 1, 2, 256), num_heads=2)
    close(found, 4 * np.log([[1], [1], [2], [256]]))


def test_qk_norm_initial():
    assert scales.qk_norm_initial(512) == pytest.approx(math.log2(512 * 511))
    spec = scales.LearnedCosineScale(64)
    params = spec.init(jax.random.key(0), 4)
    chex.assert_shape(params["g"], ())
    close(spec.factor(params, positions=None, visible=None, num_heads=4), [[math.log2(64 * 63)]])
    slope = jax.grad(lambda p: spec.factor(p, positions=None, visible=None, num_heads=4).sum())(params)
    chex.assert_trees_all_equal(slope, {"g": jnp.float32(1)})
    with pytest.raises(ValueError, match="params must hold 'g': LearnedCosineScale"):
        spec.factor({}, positions=None, visible=None, num_heads=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scales.CosineScale(3), "length must be at least 4"),
        (lambda: scales.LearnedCosineScale(1), "length must be at least 2"),
        (lambda: scales.GradientMaximal(1), "n must be above 1"),
    ],
)
def test_new_scales_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "spec",
    [scales.CosineScale(8), scales.CosineScale(), scales.LearnedCosineScale(8), scales.DroPETemperature(2)],
)
def test_new_scales_are_shift_invariant_and_hashable(spec):
    assert spec.shift_invariant
    assert spec in {spec}
    params, positions = spec.init(jax.random.key(0), 2), jnp.arange(5)
    factor = jax.jit(lambda p: spec.factor(params, positions=p, visible=positions + 1, num_heads=2))
    chex.assert_trees_all_equal(factor(positions), factor(positions + 1_000_003))
    chex.assert_type(factor(positions), jnp.float32)
