"""Numbers of a report from rows, against values computed by hand."""

import math

import pytest
from report_rows import task, text

from train.report.numbers import (
    FEW_TOKENS,
    Estimate,
    accuracies,
    at_depth,
    curve,
    depths,
    endings,
    estimate,
    is_above_chance,
    labels,
    last_length,
    lengths,
    measures,
    notes,
    positions,
    tasks,
    train_length,
    training_length_loss,
    trainings,
    windows,
)


def test_an_estimate_has_a_spread_from_two_values_on():
    assert estimate([3.0]) == Estimate(3.0)
    assert estimate([1.0, 3.0]) == Estimate(2.0, pytest.approx(math.sqrt(2)))
    assert estimate([1.0, None]) is None
    assert estimate([]) is None


def test_the_loss_at_the_training_length_or_the_next_longer_one():
    rows = text("rope", (4.0, 5.0, 6.0), lengths=(128, 32, 64))
    assert training_length_loss(rows) == math.log(5)
    assert training_length_loss([{**row, "train_length": 48} for row in rows]) == math.log(6)
    assert training_length_loss([{**row, "train_length": 256} for row in rows]) == math.log(6), "the last one"
    assert training_length_loss(text("rope", (None, 5.0))) == math.inf
    assert training_length_loss(task("copy", "rope", (1, 1)) + text("rope", (5.0,))) == math.log(5)


def test_a_training_that_diverged_has_no_length_and_an_infinite_loss():
    assert training_length_loss([{"label": "rope", "seed": 0, "error": "diverged"}]) == math.inf


def test_trainings_that_missed_their_loss_have_no_tasks():
    missed, reached = ({"stop_loss": 2.0, "updates_to_loss": n} for n in (None, 7))
    [row], [other] = task("copy", "rope", (0.5,), lengths=(32,)), task("passkey", "alibi", (0.5,), lengths=(32,))
    assert tasks([row | missed, other | reached]) == {"passkey": [other | reached]}
    assert tasks([row, *text("rope", (5.0,))]) == {"copy": [row]}


def test_sliding_windows_are_shown_if_any_row_has_them():
    rows = text("rope", (5.0, 6.0))
    assert measures(rows) == ["window", "last"]
    assert measures([rows[0], {**rows[1], "sliding_tokens": 9}]) == ["window", "last", "sliding"]


def test_lengths_of_rows():
    rows = text("rope", (5.0, 6.0), lengths=(64, 32)) + text("alibi", (None,), train_length=16)
    assert lengths(rows) == [32, 64]
    assert labels(rows) == ["rope", "alibi"]
    assert train_length(rows) == 32, "rows without numbers do not count"
    assert train_length(text("alibi", (None,), train_length=16)) == 16
    assert train_length(rows + text("t5", (5.0,), train_length=16)) is None


def test_how_many_windows_and_ends_were_scored():
    rows = text("rope", (5.0, None), last_length=64)
    assert (windows(rows[0]), windows(rows[1])) == (16384 // 32, 0)
    assert windows({"length": 32}) == 0
    assert (last_length(rows), endings(rows)) == (64, 2048 // 64)
    unscored = [{**rows[0], "last_tokens": None, "last_length": None}]
    assert (last_length(unscored), endings(unscored)) == (32, 0)


def test_a_curve_is_the_mean_over_seeds_where_all_have_a_number():
    rows = text("rope", (4.0, 5.0, 6.0)) + text("rope", (6.0, None, 6.0), seed=1) + text("alibi", (1.0,))
    assert curve(rows, "rope", "window") == {32: Estimate(5.0, pytest.approx(math.sqrt(2))), 128: Estimate(6.0, 0.0)}
    assert curve(rows, "alibi", "last") == {32: Estimate(1.5)}


def by_position(length, ends, losses, **about):
    return text("rope", (5.0,), lengths=(length,), position_ends=ends, position_nll=losses, **about)


def test_losses_by_position_are_those_of_the_longest_length_with_enough_windows():
    short, longest = by_position(32, [8, 32], [3.0, 2.0]), by_position(64, [16, 64], [4.0, 1.0])
    few = by_position(512, [8, 512], [9.0, 9.0], window_tokens=512 * 31)
    assert positions(short + longest + few, "rope") == ((16, 64), [Estimate(4.0), Estimate(1.0)])
    assert positions(by_position(512, [8, 512], [9.0, 8.0], window_tokens=512 * 32), "rope")[0] == (8, 512)
    assert positions(few, "rope") == ((), [])
    assert positions(short, "alibi") == ((), [])


def test_a_position_needs_256_tokens():
    exact = by_position(64, [4, 7, 64], [4.0, 3.0, 1.0], window_tokens=64 * 64)
    assert FEW_TOKENS == 64 * 4
    assert positions(exact, "rope") == ((4, 7, 64), [Estimate(4.0), None, Estimate(1.0)])
    assert positions(by_position(64, [3], [4.0], window_tokens=64 * 64), "rope") == ((), [])


def test_losses_in_training_are_those_at_shared_numbers_of_tokens():
    first, second = (
        {"tokens": tokens, "held_out_loss": loss} for tokens, loss in (([8, 16], [5, 4]), ([16, 8], [2, 7]))
    )
    rows = text("rope", (5.0,), training=first) + text("rope", (5.0,), seed=1, training=second)
    found = trainings(rows + text("alibi", (5.0,), training=None))
    assert found == {
        "rope": {8: Estimate(6, pytest.approx(math.sqrt(2))), 16: Estimate(3, pytest.approx(math.sqrt(2)))}
    }
    assert list(found["rope"]) == [8, 16]
    third = text("rope", (5.0,), seed=2, training={"tokens": [8], "held_out_loss": [6]})
    assert list(trainings(rows + third)["rope"]) == [8]


def test_accuracies_are_means_over_depths_then_over_seeds():
    rows = [
        row
        for seed, shares in enumerate([(1.0, 0.5), (0.5, 0.0)])
        for depth, share in zip((0.0, 1.0), shares, strict=True)
        for row in task("needle", "rope", (share, None), lengths=(32, 64), depth=depth, seed=seed)
    ]
    assert accuracies(rows, "rope") == {32: Estimate(0.5, pytest.approx(math.sqrt(0.125)))}
    assert depths(rows) == [0.0, 1.0]
    assert depths(task("copy", "rope", (1,))) == []
    assert at_depth(rows, "rope") == {(0.0, 32): 0.75, (1.0, 32): 0.25}


@pytest.mark.parametrize(
    ("share", "chance", "cases", "clear"),
    [
        (0.56, 0.5, 10_000, True),
        (0.54, 0.5, 10_000, False),  # less than a twentieth
        (0.64, 0.5, 100, False),  # three standard errors are 0.15
        (0.66, 0.5, 100, True),
        (0.2, None, 100, True),
        (0.05, None, 10_000, False),  # not more than a twentieth
        (0.29, None, 100, True),  # without a guess, one right answer is the guess: 3 sqrt(0.01 * 0.99 / 100) = 0.03
        (0.5, None, 5, False),  # 3 sqrt(0.2 * 0.8 / 5) = 0.54
        (0.6, None, 5, True),
    ],
)
def test_an_accuracy_is_above_chance_by_a_twentieth_and_three_errors(share, chance, cases, clear):
    rows = task("copy", "rope", (share,), chance=chance, cases=cases)
    assert is_above_chance(rows) is clear
    assert is_above_chance(rows + task("copy", "alibi", (None,), cases=cases)) is clear
    assert is_above_chance(rows + task("copy", "t5", (chance or 0.0,), chance=chance, cases=cases)) is clear


def test_cases_of_all_depths_and_seeds_count_together():
    """Three standard errors of 200 cases are 0.106, of 100 cases 0.15."""
    both = [row for depth in (0.0, 1.0) for row in task("needle", "rope", (0.62,), chance=0.5, cases=100, depth=depth)]
    assert not is_above_chance(both[:1])
    assert is_above_chance(both)


def test_notes_name_the_lengths_without_a_number_once():
    rows = text("rope", (None, 5.0, None)) + text("rope", (None,), seed=1) + text("alibi", (5.0,))
    failed = [{**row, "error": "too long"} for row in task("copy", "rope", (None,), lengths=(64,))]
    assert notes(rows + failed) == ["rope at 32, 128: no memory", "rope, copy at 64: too long"]
