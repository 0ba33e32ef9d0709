"""Views of tensors against explicit NumPy, whole and in parts, read and written."""

import itertools
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from posjax.nn.huggingface.views import View, check_shape

SIZES = {"vocab": 7, "embed": 6, "heads": 6, "kv_heads": 2, "each": 3, "size": 4, "mlp": 5}
EMBED, HEADS, KV, EACH, SIZE, MLP = 6, 6, 2, 3, 4, 5


class Case(NamedTuple):
    """A pattern, a part, the shape of the tensor, and the function from tensor to parameter in plain NumPy."""

    pattern: str
    part: int | None
    shape: tuple[int, ...]
    wanted: object


def rows(start, count):
    """Reads ``count`` heads from head ``start``, of rows for all queries, then all keys, then all values."""
    return lambda x: x[start * SIZE : (start + count) * SIZE].reshape(count, SIZE, EMBED).transpose(2, 0, 1)


def neox(part):
    """Reads one part of rows in which every head has its query, its key and its value."""
    return lambda x: np.stack([x[(3 * h + part) * SIZE : (3 * h + part + 1) * SIZE].T for h in range(HEADS)], axis=1)


def falcon(columns):
    """Reads rows of groups. Each group has EACH queries, a key and a value; ``columns`` are places in it."""

    def read(x):
        heads = [group * (EACH + 2) + at for group in range(KV) for at in columns]
        return np.stack([x[h * SIZE : (h + 1) * SIZE].T for h in heads], axis=1)

    return read


FUSED = "heads+kv_heads+kv_heads size"
GROUPED = "kv_heads each+1+1 size"
CASES = {
    "as it is": Case("embed -> embed", None, (EMBED,), lambda x: x),
    "turned": Case("mlp embed -> embed mlp", None, (MLP, EMBED), lambda x: x.T),
    "heads": Case("(heads size) embed -> embed heads size", None, (24, EMBED), rows(0, HEADS)),
    "heads of a bias": Case("(heads size) -> heads size", None, (24,), lambda x: x.reshape(HEADS, SIZE)),
    "output": Case(
        "embed (heads size) -> heads size embed", None, (EMBED, 24), lambda x: x.T.reshape(HEADS, SIZE, EMBED)
    ),
    "gate": Case("(2 mlp) embed -> embed mlp", 0, (2 * MLP, EMBED), lambda x: x[:MLP].T),
    "up": Case("(2 mlp) embed -> embed mlp", 1, (2 * MLP, EMBED), lambda x: x[MLP:].T),
    "columns": Case(
        "embed (3 heads size) -> embed heads size",
        2,
        (EMBED, 72),
        lambda x: x[:, 48:].reshape(EMBED, HEADS, SIZE),
    ),
    "neox q": Case("(heads 3 size) embed -> embed heads size", 0, (72, EMBED), neox(0)),
    "neox v": Case("(heads 3 size) embed -> embed heads size", 2, (72, EMBED), neox(2)),
    "sum q": Case(f"({FUSED}) embed -> embed heads size", 0, (40, EMBED), rows(0, HEADS)),
    "sum k": Case(f"({FUSED}) embed -> embed kv_heads size", 1, (40, EMBED), rows(HEADS, KV)),
    "sum v": Case(f"({FUSED}) embed -> embed kv_heads size", 2, (40, EMBED), rows(HEADS + KV, KV)),
    "groups q": Case(f"({GROUPED}) embed -> embed (kv_heads each) size", 0, (40, EMBED), falcon(range(EACH))),
    "groups k": Case(f"({GROUPED}) embed -> embed kv_heads size", 1, (40, EMBED), falcon([EACH])),
    "groups v": Case(f"({GROUPED}) embed -> embed kv_heads size", 2, (40, EMBED), falcon([EACH + 1])),
    "groups q of a bias": Case(
        f"({GROUPED}) -> (kv_heads each) size",
        0,
        (40,),
        lambda x: np.concatenate([x[:12], x[20:32]]).reshape(HEADS, SIZE),
    ),
}


def view_of(case):
    return View("some.{layer}.weight", case.pattern, case.part)


def numbered(shape):
    """A tensor of distinct numbers other than 0."""
    return np.arange(1.0, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def whole(shape):
    return (slice(None),) * len(shape)


def some_index(shape, seed):
    """A random non-empty range of every axis, as shards have them."""
    draw = np.random.default_rng(seed)
    ends = [sorted(draw.choice(size + 1, 2, replace=False)) for size in shape]
    return tuple(slice(int(start), int(stop)) for start, stop in ends)


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_is_what_numpy_makes_of_the_tensor(name):
    case, view = CASES[name], view_of(CASES[name])
    tensor, wanted = numbered(case.shape), case.wanted(numbered(case.shape))
    assert view.tensor_shape(SIZES) == case.shape
    found = view.read(tensor, SIZES, whole(wanted.shape), np.dtype(np.float32))
    np.testing.assert_array_equal(found, wanted)
    assert not np.shares_memory(found, tensor)


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_read_as_that_part_of_the_parameter(name):
    """Random ranges, which cut through heads and groups of heads."""
    case, view = CASES[name], view_of(CASES[name])
    tensor, wanted = numbered(case.shape), case.wanted(numbered(case.shape))
    for seed in range(30):
        index = some_index(wanted.shape, seed)
        found = view.read(tensor, SIZES, index, np.dtype(np.float32))
        np.testing.assert_array_equal(found, wanted[index])


@pytest.mark.parametrize("name", CASES)
def test_a_part_is_written_into_its_place_and_nowhere_else(name):
    case, view = CASES[name], view_of(CASES[name])
    places = case.wanted(np.arange(np.prod(case.shape)).reshape(case.shape))
    for seed in range(30):
        index = some_index(places.shape, seed)
        values = -numbered(places[index].shape)
        tensor, wanted = numbered(case.shape), numbered(case.shape)
        view.write(tensor, SIZES, index, values)
        wanted.reshape(-1)[places[index]] = values
        np.testing.assert_array_equal(tensor, wanted)


def test_parts_of_one_tensor_fill_it_and_none_is_written_twice():
    for patterns in (
        ["neox q", None, "neox v"],
        ["sum q", "sum k", "sum v"],
        ["groups q", "groups k", "groups v"],
        ["gate", "up"],
    ):
        case = CASES[patterns[0]]
        count = np.zeros(case.shape)
        everything = whole(case.wanted(count).shape)
        for part, name in enumerate(patterns):
            view = view_of(CASES[name]) if name else View("", case.pattern, part)
            found = view.read(count, SIZES, everything, np.dtype(np.float32))
            view.write(count, SIZES, everything, found + 1)
        np.testing.assert_array_equal(count, 1)


def test_shards_of_every_split_make_the_whole():
    """Queries of groups of three over 2, 3 and 6 devices: shards of 3, 2 and 1 heads, within and across the groups."""
    case = CASES["groups q"]
    view, tensor = view_of(case), numbered(case.shape)
    wanted = case.wanted(tensor)
    for devices, halves in itertools.product((2, 3, 6), (1, 2)):
        heads, width, back = HEADS // devices, EMBED // halves, np.zeros(case.shape, np.float32)
        for device, half in itertools.product(range(devices), range(halves)):
            index = slice(half * width, (half + 1) * width), slice(device * heads, (device + 1) * heads), slice(None)
            part = view.read(tensor, SIZES, index, np.dtype(np.float32))
            np.testing.assert_array_equal(part, wanted[index])
            view.write(back, SIZES, index, part)
        np.testing.assert_array_equal(case.wanted(back), wanted)


def test_numbers_have_the_requested_dtype():
    case = CASES["heads"]
    found = view_of(case).read(numbered(case.shape), SIZES, whole((6, 6, 4)), np.dtype(np.float16))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, case.wanted(numbered(case.shape)))


LIMITS = [
    # IEEE 754: 65504 is the largest float16, and 65520, half a unit above it, rounds to the even 65536: infinite.
    ("float32", "float16", np.nextafter(np.float32(65520), np.float32(0)), 65520.0),
    ("bfloat16", "float16", 65280.0, 65536.0),
    # The largest bfloat16 is (2 - 2^-7) 2^127; half a unit more, (2 - 2^-8) 2^127, rounds to 2^128.
    ("float32", "bfloat16", np.nextafter(np.float32((2 - 2**-8) * 2.0**127), np.float32(0)), (2 - 2**-8) * 2.0**127),
    ("float64", "float32", float(np.finfo(np.float32).max), 2.0**128),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("wide", "narrow", "fits", "too_large"), LIMITS)
def test_a_number_beyond_the_range_of_the_dtype_is_refused(wide, narrow, fits, too_large, sign):
    view, kinds = View("some", "embed -> embed"), [np.dtype(getattr(ml_dtypes, name, name)) for name in (wide, narrow)]

    def read(number):
        tensor = np.array([0, np.inf, -np.inf, np.nan, 1, sign * number], kinds[0])
        return view.read(tensor, {"embed": 6}, (slice(0, 6),), kinds[1]).astype(np.float64)

    found = read(fits)
    np.testing.assert_array_equal(found[:5], [0, np.inf, -np.inf, np.nan, 1])
    np.testing.assert_allclose(found[5], sign * fits, rtol=2**-8)
    with pytest.raises(ValueError, match=f"tensor 'some' holds .*{narrow}"):
        read(too_large)


def test_a_misshapen_tensor_is_named():
    view = View("some", "(heads size) embed -> embed heads size")
    check_shape(view, SIZES, "some", (24, 6))
    with pytest.raises(ValueError, match=r"tensor 'other' has shape \(6, 24\); by config.json it must have \(24, 6\)"):
        check_shape(view, SIZES, "other", (6, 24))
