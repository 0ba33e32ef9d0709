"""What the slots of a scheme have in common: parts of their heads, and the widths of projections."""

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import masks
from posjax._slots import Features, OfPairs, OfSomeHeads, OverPairs, is_own, is_own_class, with_head_axis


@dataclasses.dataclass(frozen=True)
class Some(OfSomeHeads):
    """Some heads of ``whole``, which is not used here."""

    whole: Any
    start: int
    size: int


@pytest.mark.parametrize("shape", [(6, 3, 5), (2, 6, 3, 5)])
def test_some_heads_of_a_tile_are_kept(shape):
    tile = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(Some(None, 2, 3).kept(tile), tile[..., 2:5, :, :])


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (2, 1, 3, 5)])
def test_a_tile_without_heads_of_its_own_is_kept_whole(shape):
    tile = np.ones(shape)
    assert Some(None, 2, 3).kept(tile) is tile


def test_some_of_some_heads_are_counted_from_the_first_of_all():
    assert Some("whole", 4, 4).heads(1, 2) == Some("whole", 5, 2)


def test_widths_of_projections_are_shares_of_a_head():
    class Narrow(Features):
        widths = (0.5, 0.25)

    assert (Narrow().query_size(16), Narrow().key_size(16), Narrow().head_dim(4)) == (8, 4, 16)
    assert (Features().num_axes, Features().softmax_scale, Features().shift_invariant) == (1, 1.0, True)
    assert not Features().reads_length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gated(OverPairs):
    """A value per query and one per key, of heads or of all heads, and a part of the same kind."""

    gates: Any
    keys: Any = None
    part: Any = None

    axes: ClassVar = {"gates": ("batch", "heads", "queries"), "keys": ("batch", "keys")}

    def _tile(self, q_positions, kv_positions):
        chex.assert_equal([self.gates.shape[-1], self.keys.shape[-1]], [q_positions.size, kv_positions.size])
        return self.gates[..., None] + self.keys[:, None, None]


def numbers(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(OverPairs):
    """A tile that is computed from positions alone."""

    shape: tuple = dataclasses.field(metadata={"static": True})

    def _tile(self, q_positions, kv_positions):
        return jnp.zeros((*self.shape, q_positions.size, kv_positions.size))

    def _of_heads(self, start, size):
        chex.assert_type(start, jnp.int32)
        return int(start), size


def test_arrays_with_an_axis_of_heads_are_cut_to_some_heads_and_others_stay():
    value = Gated(numbers(2, 4, 5), numbers(2, 3))
    some = value.heads(1, 2)
    np.testing.assert_array_equal(some.gates, value.gates[:, 1:3])
    assert some.keys is value.keys


@pytest.mark.parametrize(
    ("shape", "differs"), [((), False), ((1,), False), ((2, 1), False), ((2,), True), ((1, 3), True)]
)
def test_some_heads_of_a_value_without_such_an_axis_are_chosen_where_they_differ(shape, differs):
    value = Plain(shape)
    assert value.differs_between_heads == differs
    assert value.heads(2, 1) == ((2, 1) if differs else value)


@pytest.mark.parametrize("heads", [1, 4])
def test_whether_heads_differ_is_seen_on_a_tile_of_one_pair(heads):
    assert Gated(numbers(2, heads, 5), numbers(2, 3)).differs_between_heads == (heads == 4)


def test_arrays_must_have_the_axes_that_they_declare():
    good = Gated(numbers(2, 7, 5), numbers(2, 3))
    good.check(2, 5, 3)
    dataclasses.replace(good, part=[good]).check(2, 5, 3)
    for bad, field, wanted, found in (
        (Gated(numbers(2, 7, 5, 1), numbers(2, 3)), "gates", "2, heads, 5", "2, 7, 5, 1"),
        (Gated(numbers(2, 7), numbers(2, 3)), "gates", "2, heads, 5", "2, 7"),
        (Gated(numbers(2, 7, 4), numbers(2, 3)), "gates", "2, heads, 5", "2, 7, 4"),
        (Gated(numbers(2, 7, 5), numbers(1, 3)), "keys", "2, 3", "1, 3"),
        (dataclasses.replace(good, part=[Gated(numbers(2, 7, 5), numbers(2, 4))]), "keys", "2, 3", "2, 4"),
    ):
        with pytest.raises(ValueError, match=rf"^Gated {field} must have shape \({wanted}\), found \({found}\)$"):
            bad.check(2, 5, 3)


def test_an_axis_without_a_name_may_have_any_size():
    class Free(Gated):
        axes: ClassVar = {"gates": ("queries", None)}

    jax.tree_util.register_dataclass(Free, ["gates", "keys", "part"], [])
    Free(numbers(5, 9)).check(2, 5, 3)
    with pytest.raises(ValueError, match=r"Free gates must have shape \(5, any\), found \(4, 9\)"):
        Free(numbers(4, 9)).check(2, 5, 3)


@pytest.mark.parametrize(
    ("axes", "unknown"),
    [({"gates": ("batch", "tokens")}, "tokens"), ({"gate": ("batch",)}, "gate"), ({"gates": (None, "keys")}, None)],
)
def test_axes_have_known_names_for_known_fields(axes, unknown):
    kind = type("Named", (Gated,), {"axes": axes})
    jax.tree_util.register_dataclass(kind, ["gates", "keys", "part"], [])
    if unknown is None:
        kind(numbers(2, 3)).check_names()
        return
    with pytest.raises(ValueError, match=rf"^Named.axes: found \['{unknown}'\]; it must map "):
        kind(numbers(2, 3)).check_names()


class Table(OfPairs):
    """One array over pairs."""

    name = "table"


@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (2, 7, 5, 3)])
def test_an_array_over_pairs_gets_four_axes(shape):
    array = Table.with_four_axes(numbers(*shape))
    chex.assert_shape(array, (1, 1, 1, 1, *shape)[-4:])
    with pytest.raises(ValueError, match=r"^table must broadcast to .*, found shape \(1, 1, 1, 1, 3\)$"):
        Table.with_four_axes(numbers(1, 1, 1, 1, 3))


def test_an_array_over_pairs_broadcasts_to_the_call():
    for shape in ((2, 7, 5, 3), (1, 1, 1, 1), (1, 7, 5, 1)):
        Table(numbers(*shape)).check(2, 5, 3)
    for shape in ((3, 7, 5, 3), (2, 7, 4, 3), (2, 7, 5, 2)):
        with pytest.raises(ValueError, match=r"= \[2, heads, 5, 3\], found shape"):
            Table(numbers(*shape)).check(2, 5, 3)


def test_classes_from_outside_the_library_are_known():
    assert [is_own(x) for x in (Plain(()), Some(Plain(()), 0, 1))] == [True, True]
    assert [is_own(x) for x in (masks.Causal(), Some(masks.Causal(), 0, 1))] == [False, False]
    assert [is_own_class(kind) for kind in (Plain, masks.Causal)] == [True, False]


def test_positions_of_rows_get_an_axis_of_heads():
    assert with_head_axis(one := numbers(4)) is one
    np.testing.assert_array_equal(with_head_axis(numbers(2, 4)), numbers(2, 1, 4))


def test_a_feature_slot_takes_its_properties_from_its_frequency_rule():
    rule = SimpleNamespace(
        num_axes=3, reads_length=True, shift_invariant=False, softmax_scale=0.5, head_dim=8, init=lambda key, size: size
    )

    class OfRule(Features):
        frequencies = rule

        def decay(self, head_dim):
            return np.ones(head_dim)

    names = ("num_axes", "reads_length", "shift_invariant", "softmax_scale", "own_head_dim", "decays")
    assert [getattr(OfRule(), name) for name in names] == [3, True, False, 0.5, 8, True]
    assert [getattr(Features(), name) for name in names] == [1, False, True, 1.0, None, False]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert (OfRule().init(None, **sizes), Features().init(None, **sizes)) == (16, {})
