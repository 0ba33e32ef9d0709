import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.positions import Range
from posjax.rotary import DynamicNTK, Plain, Rotary, YaRN, apply_rotary, inverse_frequencies, rotary_table

Q, K = (jax.random.normal(jax.random.key(seed), (2, 6, heads, 16)) for seed, heads in ((0, 4), (1, 2)))
PLACES = {"q_positions": Range(3, 6), "kv_positions": Range(3, 6), "head_dim": 16}


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_features_are_the_rotated_projections(pairing):
    phi, psi = jax.jit(lambda q, k: Rotary(pairing=pairing)(q, k, **PLACES))(Q, K)
    table = rotary_table(Range(3, 6), inverse_frequencies(16))
    chex.assert_trees_all_close((phi, psi), tuple(apply_rotary(x, table, pairing=pairing) for x in (Q, K)), atol=1e-6)


def test_slot_describes_itself():
    slot = Rotary(YaRN(4.0, 32), precision="hf")
    assert (slot.query_size(16), slot.key_size(16), slot.reads_length, slot.shift_invariant) == (16, 16, False, True)
    assert Rotary(DynamicNTK(32)).reads_length
    assert len({Rotary(), Rotary(Plain(500.0)), Rotary(pairing="interleaved"), Rotary()}) == 3


def test_attention_factor_multiplies_both_sides():
    rule = YaRN(4.0, 32)
    scores = lambda slot: jnp.einsum("btnd,bsnd->bnts", *slot(Q[:, :, :2], K, **PLACES))  # noqa: E731
    ratio = scores(Rotary(rule)) / scores(Rotary(YaRN(4.0, 32, attention_factor=1.0)))
    np.testing.assert_allclose(ratio, rule.table_factor**2, rtol=1e-3)


def test_length_is_required_by_rules_that_read_it():
    slot = Rotary(DynamicNTK(4))
    with pytest.raises(ValueError, match="DynamicNTK reads the current length: pass length="):
        slot(Q, K, **PLACES)
    whole = jax.jit(lambda n: slot(Q, K, **PLACES, length=n))(12)
    chex.assert_trees_all_close(whole, slot(Q, K, **PLACES, length=12), atol=1e-5)
    rows = slot(Q, K, **PLACES, length=jnp.array([12, 4]))
    chex.assert_trees_all_close(rows[0][0], whole[0][0], atol=1e-5)
    chex.assert_trees_all_close(rows[1][1], Rotary()(Q, K, **PLACES)[1][1], atol=1e-5)
    chex.assert_trees_all_equal(Rotary()(Q, K, **PLACES, length=12), Rotary()(Q, K, **PLACES))


@pytest.mark.parametrize("length", [None, 9])
def test_decoding_equals_the_full_forward(length):
    """One query at a time against keys rotated in blocks, at a frozen length."""
    slot = Rotary(Plain() if length is None else DynamicNTK(4))
    phi, psi = slot(Q, K, **PLACES, length=length)
    step = jax.jit(lambda q, k, start: slot(q, k, **_places(start), length=length))
    for i in range(6):
        one = step(Q[:, i : i + 1], K[:, i : i + 1], jnp.int32(3 + i))
        chex.assert_trees_all_close(one, (phi[:, i : i + 1], psi[:, i : i + 1]), atol=1e-6)


def _places(start):
    return {"q_positions": Range(start, 1), "kv_positions": Range(start, 1), "head_dim": 16}


@pytest.mark.parametrize("length", [None, jnp.int32(4096)])
def test_scores_do_not_change_far_away_even_for_a_traced_length(length):
    slot = Rotary(Plain() if length is None else DynamicNTK(32))

    @jax.jit
    def scores(start, length):
        places = {"q_positions": Range(start, 6), "kv_positions": Range(start, 6), "head_dim": 16}
        return jnp.einsum("btnd,bsnd->bnts", *slot(Q[:, :, :2], K, **places, length=length))

    near, far = scores(jnp.int32(0), length), scores(jnp.int32(2**31 - 7), length)
    np.testing.assert_allclose(far, near, atol=2e-5)


def test_left_padding_and_packing_read_positions():
    shifted = Rotary()(Q, K, q_positions=np.array([[0, 0, 0, 1, 2, 3]] * 2), kv_positions=Range(0, 6), head_dim=16)[0]
    plain = Rotary()(Q[:, 2:], K, q_positions=Range(0, 4), kv_positions=Range(0, 6), head_dim=16)[0]
    chex.assert_trees_all_close(shifted[:, 2:], plain, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequencies": 10_000.0}, "frequencies must be a frequency rule such as Plain"),
        ({"pairing": "neox"}, "pairing: unknown value 'neox'"),
        ({"precision": "float32"}, "precision: unknown value 'float32'"),
    ],
)
def test_bad_slots_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rotary(**options)


def test_head_dim_must_fit():
    with pytest.raises(ValueError, match="head_dim=16 but the rule was made for head_dim=8"):
        Rotary(Plain(head_dim=8))(Q, K, **PLACES)
