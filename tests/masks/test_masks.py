"""Masks: each against its one-line definition, what it declares, and what it refuses."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.cases import CASES, COLUMN, FLAGS, IDS, ROW, N

from posjax import masks, positions
from posjax._axes import narrowed, sizes_of
from posjax.attention.padding import lengthened
from posjax.masks import (
    Band,
    Beyond,
    Causal,
    Chunked,
    ChunksApart,
    Dilated,
    FirstTokens,
    GlobalFirst,
    Globals,
    Prefix,
    Segments,
    Window,
)

cases = pytest.mark.parametrize("name", CASES)


@cases
def test_materialised_mask_is_its_definition(name):
    mask, want = CASES[name]
    got = masks.materialise(mask, positions.Range(0, N), positions.Range(0, N))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def test_dilation_of_one_is_a_window():
    tokens = positions.Range(0, N)
    one, window = (masks.materialise(mask, tokens, tokens) for mask in (Dilated(5, 1), Window(5)))
    np.testing.assert_array_equal(one, window)


def test_positions_not_buffer_indices_decide():
    ids = jnp.asarray([[5, 6, 7, 8]])
    got = masks.materialise(Causal() & Chunked(6), ids, ids)[0, 0]
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]])


def test_padding_sees_nothing_and_is_seen_by_nothing():
    got = masks.materialise(masks.padding(jnp.asarray([[False, True, True]])), jnp.arange(3), jnp.arange(3))
    np.testing.assert_array_equal(got[0, 0], [[0, 0, 0], [0, 1, 1], [0, 1, 1]])


@cases
def test_shift_invariance_is_declared_truly(name):
    mask, _ = CASES[name]
    here, there = (masks.materialise(mask, jnp.arange(N) + s, jnp.arange(N) + s) for s in (0, 1_000_003))
    assert mask.shift_invariant == bool((here == there).all())


def test_masks_are_pytrees_and_position_masks_are_hashable():
    mask = Causal() & (Window(4) | FirstTokens(2))
    assert hash(mask) == hash(Causal() & (Window(4) | FirstTokens(2)))
    assert jax.tree.leaves(mask) == []
    assert len(jax.tree.leaves(mask & Segments(jnp.asarray(IDS)))) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(0),
        lambda: Window("8"),
        lambda: Window(2.5),
        lambda: Chunked(-1),
        lambda: FirstTokens(0),
        lambda: Prefix(None),
        lambda: Band(0),
        lambda: Beyond(0),
        lambda: ChunksApart(0, 1),
        lambda: Dilated(0, 1),
        lambda: Dilated(4, (1, 0)),
        lambda: GlobalFirst(-1),
    ],
)
def test_sizes_must_be_positive(make):
    with pytest.raises(ValueError, match="must be positive"):
        make()


def test_other_refusals():
    with pytest.raises(ValueError, match="dilation is empty"):
        Dilated(4, ())
    with pytest.raises(ValueError, match="least <= most, found 2 and 1"):
        ChunksApart(4, 2, 1)
    with pytest.raises(ValueError, match=r"Globals q_flags must have shape \(2, 8\), found \(2, 24\)"):
        Globals(jnp.asarray(FLAGS)).check(2, 8, 8)
    with pytest.raises(ValueError, match="Globals q_flags must be boolean, found int32"):
        Globals(jnp.asarray(FLAGS, jnp.int32)).check(2, N, N)


@pytest.mark.parametrize("make", [lambda: Segments(jnp.asarray(IDS)), lambda: Globals(jnp.asarray(FLAGS))])
def test_masks_of_tokens_can_be_sliced_and_padded(make):
    mask, tokens = make(), positions.Range(0, N)
    whole = masks.materialise(mask, tokens, tokens)
    part = jax.jit(lambda mask: narrowed(mask, queries=(4, 8), keys=(3, 5), batch=(1, 1)))(mask)
    got = masks.materialise(part, positions.Range(4, 8), positions.Range(3, 5))
    np.testing.assert_array_equal(got, whole[1:, :, 4:12, 3:8])
    longer = lengthened(mask, queries=(N, N + 2), keys=(N, N + 3))
    got = masks.materialise(longer, positions.Range(0, N + 2), positions.Range(0, N + 3))
    np.testing.assert_array_equal(got[..., :N, :N], whole)
    chex.assert_shape(got, (2, 1, N + 2, N + 3))
    assert sizes_of(mask, "batch") == {2}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (True, "True$"),
        (3, "3$"),
        (None, "None$"),
        ([[True]], r"\[\[True\]\]$"),
        (Causal, r"the class Causal: write Causal\(...\)$"),
        ("causal", "'causal'$"),
    ],
)
def test_a_mask_composes_with_masks_and_arrays_only(other, found):
    """From either side."""
    for join in (operator.and_, operator.or_):
        for pair in ((Causal(), other), (other, Causal())):
            with pytest.raises(ValueError, match=f"or a boolean array, found {found}"):
                join(*pair)


@pytest.mark.parametrize("make", [np.ones, jnp.ones])
def test_a_mask_composes_with_boolean_arrays_only(make):
    """For an array of numbers, the error says how to convert it."""
    for pair in ((Causal(), make((N, N))), (make((N, N)), Causal())):
        with pytest.raises(ValueError, match=r"mask must be boolean, .*convert it with mask != 0"):
            operator.and_(*pair)


@pytest.mark.parametrize(
    "read",
    [
        bool,
        lambda mask: mask and Window(3),
        lambda mask: mask or Window(3),
        lambda mask: Window(3) and mask and mask,
        lambda mask: not mask,
        lambda mask: "seen" if mask else "hidden",
        lambda mask: all([mask]),
    ],
    ids=["bool", "and", "or", "several and", "not", "if", "all"],
)
@cases
def test_a_mask_has_no_truth_value(name, read):
    """``Causal() and Window(3)`` would be ``Window(3)``."""
    with pytest.raises(ValueError, match=r"neither true nor false; write & for `and`, \| for `or`, ~ for `not`"):
        read(CASES[name][0])


BOTH_WAYS = ["window", "odd band", "even band"]


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        *((name, True) for name in ("causal", "window", "causal window", "sinks", "chunked", "beyond", "dilated")),
        *((name, True) for name in ("odd band", "even band", "lambda")),
        *((name, False) for name in BOTH_WAYS),
    ],
)
def test_counts_of_visible_keys_are_the_rows_of_the_mask(name, causal):
    mask, want = CASES[name]
    allowed = np.broadcast_to(want & (COLUMN <= ROW) if causal else want, (N, N))
    tokens = jnp.arange(N)
    got = mask.visible(tokens + 1 if causal else jnp.full(N, N), tokens, causal)
    inner = slice(None) if causal else slice(4, -4)
    np.testing.assert_array_equal(got[inner], allowed.sum(-1)[inner])


@pytest.mark.parametrize(
    ("mask", "want", "whole"),
    [
        (FirstTokens(3), COLUMN < 3, slice(None)),
        (Chunked(8), ROW // 8 == COLUMN // 8, slice(None)),
        (Dilated(3, 4), (abs(ROW - COLUMN) % 4 == 0) & (abs(ROW - COLUMN) <= 8), slice(8, -8)),
        (Dilated(3, (4, 7)), (abs(ROW - COLUMN) % 4 == 0) & (abs(ROW - COLUMN) <= 8), slice(8, -8)),
    ],
)
def test_counts_of_keys_on_both_sides(mask, want, whole):
    """Exact for queries whose keys are all within the sequence; of heads, that of the smallest dilation."""
    got = mask.visible(jnp.full(N, N), jnp.arange(N), False)
    np.testing.assert_array_equal(np.broadcast_to(got, N)[whole], want.sum(-1)[whole])


def test_counts_of_far_keys():
    """If they may also lie ahead of the query, their number is not known, so all count."""
    counts = jnp.arange(N) + 1
    np.testing.assert_array_equal(Beyond(5).visible(counts, jnp.arange(N), True), np.maximum(np.arange(N) - 4, 0))
    np.testing.assert_array_equal(Beyond(5).visible(counts, jnp.arange(N), False), counts)


def test_counts_of_both_masks():
    got = (Window(4) & Chunked(3)).visible(jnp.arange(N) + 1, jnp.arange(N), True)
    np.testing.assert_array_equal(got, np.arange(N) % 3 + 1)


@pytest.mark.parametrize(
    "mask",
    [
        Window(5),
        Band(5),
        Band(6),
        Chunked(7),
        ChunksApart(3, 0, 2),
        Dilated(3, 4),
        Dilated(4, (1, 5)),
    ],
)
def test_a_causal_query_sees_keys_up_to_the_number_of_recent_ones_that_a_mask_retains(mask):
    """The last of them is seen by some query."""
    distance = np.where(COLUMN <= ROW, ROW - COLUMN, -1)
    seen = np.asarray(masks.materialise(mask, positions.Range(0, N), positions.Range(0, N))).reshape(-1, N, N)
    assert mask.kept_keys == (0, max(distance[head].max() for head in seen) + 1)


def test_masks_without_a_limit_retain_all_keys():
    assert [mask.kept_keys for mask in (Causal(), Beyond(3), ChunksApart(3, 1))] == [None] * 3


def test_counts_of_what_a_mask_hides():
    got = (~Window(4)).visible(jnp.arange(N) + 1, jnp.arange(N), True)
    np.testing.assert_array_equal(got, np.maximum(np.arange(N) - 3, 0))


def test_counts_of_global_tokens_and_dilated_heads():
    tokens = jnp.arange(N)
    np.testing.assert_array_equal(GlobalFirst(3).visible(jnp.full(N, N), tokens, False), [N] * 3 + [3] * (N - 3))
    mask, want = CASES["dilated heads"]
    counts = (want & (COLUMN <= ROW)).sum(-1)[0]
    np.testing.assert_array_equal(mask.visible(tokens + 1, tokens, True), counts[0])
    np.testing.assert_array_equal(counts[:, 15:], 4)


def test_counts_of_a_union_are_exact_where_its_parts_do_not_overlap():
    mask = Window(4) | FirstTokens(2)
    got = mask.visible(jnp.arange(N) + 1, jnp.arange(N), True)
    np.testing.assert_array_equal(got, np.minimum(np.arange(N) + 1, 6))


PADDING = np.array([0, 5])
PACKED = np.array([[0] * 9 + [1] * 15, [0] * 3 + [4] * 11 + [7] * 10])


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "arguments", "mask"),
    [
        ("causal_mask_function", None, Causal()),
        ("sliding_window_causal_mask_function", (5,), Causal() & Window(5)),
        ("sliding_window_bidirectional_mask_function", (5,), Window(6)),
        ("chunked_causal_mask_function", (7, PADDING), Causal() & Chunked(7)),
        ("packed_sequence_mask_function", (PACKED,), Segments(jnp.asarray(PACKED))),
        ("padding_mask_function", (IDS >= 0,), masks.padding(jnp.asarray(IDS >= 0))),
    ],
)
def test_mask_functions_of_transformers(name, arguments, mask):
    """They read indices; posjax reads positions, which start after the padding. Their window includes both ends."""
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.masking_utils")
    made = getattr(functions, name)
    if arguments is not None:
        made = made(*(torch.tensor(each) if isinstance(each, np.ndarray) else each for each in arguments))
    indices = (torch.arange(2)[:, None, None, None], 0, torch.arange(N)[:, None], torch.arange(N))
    wanted = np.broadcast_to(made(*indices).numpy(), (2, 1, N, N))
    tokens = jnp.arange(N) - (PADDING[:, None] if "chunked" in name else 0)
    found = np.broadcast_to(masks.materialise(mask, tokens, tokens), (2, 1, N, N))
    real = IDS >= 0 if "padding_mask" in name else np.ones((2, N), bool)
    for row in range(2):
        np.testing.assert_array_equal(found[row, 0][real[row]], wanted[row, 0][real[row]])


def test_first_keys_are_all_that_a_mask_of_the_first_positions_retains():
    assert (FirstTokens(3).kept_keys, GlobalFirst(5).kept_keys, Prefix(4).kept_keys) == ((3, 0), (5, 0), None)


def test_and_hides_keys_ahead_if_one_part_does_and_or_if_all_parts_do():
    near = Window(4)
    causal = [Causal(), Causal() & near, near & Causal(), (near & Causal()) & near, Causal() | (near & Causal())]
    assert all(masks.hides_ahead(mask) for mask in causal)
    assert not any(masks.hides_ahead(mask) for mask in (None, near, near & near, Causal() | near, ~Causal()))
