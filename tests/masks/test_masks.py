"""Masks: each against its one-line definition, what it declares, and what it refuses."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.cases import CASES, COLUMN, FLAGS, IDS, ROW, N
from refusals import refused

from posjax import masks
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
    materialise,
)
from posjax.positions import Range

AT, ROWS = Range(0, N), np.arange(N)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_its_definition_and_declares_its_shift_invariance(name):
    mask, want = CASES[name]
    found = materialise(mask, AT, AT)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape))
    np.testing.assert_array_equal(materialise(~mask, AT, AT), ~found)
    far = materialise(mask, jnp.arange(N) + 1_000_003, jnp.arange(N) + 1_000_003)
    assert mask.shift_invariant == bool((found == far).all())


def test_positions_not_buffer_indices_decide():
    ids = jnp.asarray([[5, 6, 7, 8]])
    found = materialise(Causal() & Chunked(6), ids, ids)[0, 0]
    np.testing.assert_array_equal(found, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]])


def test_padding_sees_nothing_and_is_seen_by_nothing():
    found = materialise(masks.padding(jnp.asarray([[False, True, True]])), jnp.arange(3), jnp.arange(3))
    np.testing.assert_array_equal(found[0, 0], [[0, 0, 0], [0, 1, 1], [0, 1, 1]])


def test_some_of_some_heads_are_counted_from_the_first_of_all():
    mask = Causal() & Dilated(4, (1, 2, 5, 3))
    whole = materialise(mask, AT, AT)
    np.testing.assert_array_equal(materialise(mask.heads(1, 3).heads(1, 2), AT, AT), whole[:, 2:])


CAUSAL = COLUMN <= ROW
FAR = (abs(ROW - COLUMN) % 4 == 0) & (abs(ROW - COLUMN) <= 8)
INSIDE = slice(8, -8)


@pytest.mark.parametrize(
    ("mask", "want", "causal", "of"),
    [
        *((CASES[name][0], CASES[name][1], True, slice(None)) for name in ("causal", "window", "sinks", "chunked")),
        *((CASES[name][0], CASES[name][1], True, slice(None)) for name in ("beyond", "dilated", "lambda")),
        *((CASES[name][0], CASES[name][1], both, INSIDE) for name in ("odd band", "even band") for both in (0, 1)),
        (Window(5), abs(ROW - COLUMN) < 5, False, INSIDE),
        (FirstTokens(3), COLUMN < 3, False, slice(None)),
        (Chunked(8), ROW // 8 == COLUMN // 8, False, slice(None)),
        (GlobalFirst(3), (ROW < 3) | (COLUMN < 3), False, slice(None)),
        (Dilated(3, 4), FAR, False, INSIDE),
        (Dilated(3, (4, 7)), FAR, False, INSIDE),
        (Window(4) & Chunked(3), (ROW - COLUMN < 4) & (ROW // 3 == COLUMN // 3), True, slice(None)),
        (~Window(4), ROW - COLUMN >= 4, True, slice(None)),
        (Window(4) | FirstTokens(2), (ROW - COLUMN < 4) | (COLUMN < 2), True, slice(None)),
    ],
)
def test_counts_of_visible_keys_are_the_rows_of_the_mask(mask, want, causal, of):
    """Exact for queries whose keys are all within the sequence; of heads, that of the smallest dilation."""
    found = mask.visible(jnp.asarray(ROWS + 1 if causal else np.full(N, N)), jnp.arange(N), bool(causal))
    np.testing.assert_array_equal(np.broadcast_to(found, N)[of], (want & CAUSAL if causal else want).sum(-1)[of])


def test_far_keys_that_may_lie_ahead_all_count():
    np.testing.assert_array_equal(Beyond(5).visible(ROWS + 1, ROWS, False), ROWS + 1)


@pytest.mark.parametrize(
    "mask", [Window(5), Band(5), Band(6), Chunked(7), ChunksApart(3, 0, 2), Dilated(3, 4), Dilated(4, (1, 5))]
)
def test_a_causal_query_sees_keys_up_to_the_number_that_a_mask_retains(mask):
    """The last of them is seen by some query."""
    seen = np.asarray(materialise(mask, AT, AT)).reshape(-1, N, N) & CAUSAL
    assert mask.kept_keys == (0, (np.where(seen, ROW - COLUMN, -1)).max() + 1)


def test_what_other_masks_and_several_together_retain():
    """``&`` retains what its smaller part does; ``|`` the larger of each number, or all if one part does."""
    kept = {mask: mask.kept_keys for mask in (Causal(), Beyond(3), ChunksApart(3, 1), Prefix(4), Window(9) | Causal())}
    assert set(kept.values()) == {None}
    assert (FirstTokens(3).kept_keys, GlobalFirst(5).kept_keys) == ((3, 0), (5, 0))
    assert (Window(9) & Window(5)).kept_keys == (Window(5) & Window(9)).kept_keys == (0, 5)
    assert [(Window(9) & Causal()).kept_keys, (Window(9) | Window(5)).kept_keys] == [(0, 9)] * 2
    assert (FirstTokens(2) | Window(5)).kept_keys == (2, 5)


def test_and_hides_keys_ahead_if_one_part_does_and_or_if_all_parts_do():
    near = Window(4)
    causal = [Causal(), Causal() & near, near & Causal(), (near & Causal()) & near, Causal() | (near & Causal())]
    assert all(masks.hides_ahead(mask) for mask in causal)
    assert not any(masks.hides_ahead(mask) for mask in (None, near, near & near, Causal() | near, ~Causal()))


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
    made = getattr(pytest.importorskip("transformers.masking_utils"), name)
    if arguments is not None:
        made = made(*(torch.tensor(each) if isinstance(each, np.ndarray) else each for each in arguments))
    indices = (torch.arange(2)[:, None, None, None], 0, torch.arange(N)[:, None], torch.arange(N))
    wanted = np.broadcast_to(made(*indices).numpy(), (2, 1, N, N))
    tokens = jnp.arange(N) - (PADDING[:, None] if "chunked" in name else 0)
    found = np.broadcast_to(materialise(mask, tokens, tokens), (2, 1, N, N))
    real = IDS >= 0 if "padding_mask" in name else np.ones((2, N), bool)
    for row in range(2):
        np.testing.assert_array_equal(found[row, 0][real[row]], wanted[row, 0][real[row]])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("size", lambda: Window(2**31)),
        ("size", lambda: Window(jnp.int32(-3))),
        ("size", lambda: Chunked(jnp.asarray([1, 2]))),
        ("count", lambda: FirstTokens(jnp.float32(3))),
        ("length", lambda: Prefix(None)),
        ("size", lambda: Beyond(0)),
        ("size", lambda: ChunksApart(0, 1)),
        ("least", lambda: ChunksApart(3, 2.5)),
        ("most", lambda: ChunksApart(4, 2, 1)),
        ("dilation", lambda: Dilated(2**20, 2**12)),
        ("q_flags", lambda: Globals(jnp.asarray(FLAGS)).check(2, 8, 8)),
        ("q_flags", lambda: Globals(jnp.asarray(FLAGS, jnp.int32)).check(2, N, N)),
        ("mask", lambda: Causal() & np.ones((N, N))),
        ("mask", lambda: jnp.ones((N, N)) & Causal()),
        ("Causal", lambda: Window(3) & Causal),
        # ``Causal() and Window(3)`` would be ``Window(3)``.
        ("and", lambda: Causal() and Window(3)),
        ("not", lambda: not Segments(jnp.asarray(IDS))),
        ("or", lambda: bool(Causal() | Window(3))),
    ],
)
def test_bad_input_is_named(name, call):
    refused(name, call)


@pytest.mark.parametrize("other", [True, None, "causal"])
def test_a_mask_composes_with_masks_and_boolean_arrays_only(other):
    """From either side."""
    for join in (operator.and_, operator.or_):
        for pair in ((Causal(), other), (other, Causal())):
            refused("array", lambda join=join, pair=pair: join(*pair))
    assert materialise(jnp.ones((N, N), bool) & Causal(), AT, AT).shape[-2:] == (N, N)
    assert jax.tree.leaves(Causal() & Window(3)) == []
