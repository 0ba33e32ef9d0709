"""Numbers of a report from rows: means over seeds, intervals, shares and losses, against values computed by hand."""

import math

import numpy as np
import pytest
from report_rows import task, text
from scipy import stats

import posjax as pj
from train.report import numbers
from train.report.numbers import (
    Estimate,
    accuracies,
    at_depth,
    curve,
    difference,
    endings,
    family,
    is_above_chance,
    last_length,
    notes,
    of_shared_texts,
    positions,
    train_length,
    training_length_loss,
    trainings,
    windows,
)


def test_the_loss_at_the_training_length_or_the_next_longer_one():
    rows = text("rope", (4.0, 5.0, 6.0), lengths=(128, 32, 64))
    for length, loss in ((32, math.log(5)), (48, math.log(6)), (256, math.log(6))):
        assert training_length_loss([{**row, "train_length": length} for row in rows]) == loss
    assert training_length_loss(text("rope", (None, 5.0))) == math.inf
    assert training_length_loss([{"label": "rope", "seed": 0, "error": "diverged"}]) == math.inf


def test_lengths_and_how_many_windows_were_scored():
    rows = text("rope", (5.0, None), last_length=64)
    assert (windows(rows[0]), windows(rows[1]), windows({"length": 32})) == (16384 // 32, 0, 0)
    assert (last_length(rows), endings(rows)) == (64, 2048 // 64)
    assert train_length(rows + text("alibi", (None,), train_length=16)) == 32, "rows without numbers do not count"
    assert train_length(rows + text("t5", (5.0,), train_length=16)) is None


def test_a_curve_is_the_mean_over_seeds_where_all_have_a_number():
    rows = text("rope", (4.0, 5.0, 6.0)) + text("rope", (6.0, None, 6.0), seed=1) + text("alibi", (1.0,))
    assert curve(rows, "rope", "window") == {32: Estimate(5.0, pytest.approx(math.sqrt(2))), 128: Estimate(6.0, 0.0)}
    assert curve(rows, "alibi", "last") == {32: Estimate(1.5)}


def by_position(length, ends, losses, **about):
    return text("rope", (5.0,), lengths=(length,), position_ends=ends, position_nll=losses, **about)


def test_losses_by_position_are_of_the_longest_length_with_32_windows_and_256_tokens_a_point():
    short, longest = by_position(32, [8, 32], [3.0, 2.0]), by_position(64, [16, 64], [4.0, 1.0])
    few = by_position(512, [8, 512], [9.0, 9.0], window_tokens=512 * 31)
    assert positions(short + longest + few, "rope") == ((16, 64), [Estimate(4.0), Estimate(1.0)])
    assert positions(by_position(512, [8, 512], [9.0, 8.0], window_tokens=512 * 32), "rope")[0] == (8, 512)
    assert positions(few, "rope") == positions(short, "alibi") == ((), [])
    exact = by_position(64, [4, 7, 64], [4.0, 3.0, 1.0], window_tokens=64 * 64)
    assert positions(exact, "rope") == ((4, 7, 64), [Estimate(4.0), None, Estimate(1.0)])
    assert positions(by_position(64, [3], [4.0], window_tokens=64 * 64), "rope") == ((), [])


def test_losses_in_training_are_those_at_shared_numbers_of_tokens():
    curves = (([8, 16], [5, 4]), ([16, 8], [2, 7]), ([8], [6]))
    rows = [
        row
        for seed, (tokens, losses) in enumerate(curves)
        for row in text("rope", (5.0,), seed=seed, training={"tokens": tokens, "held_out_loss": losses})
    ]
    spread = pytest.approx(math.sqrt(2))
    found = trainings(rows[:2] + text("alibi", (5.0,), training=None))
    assert found == {"rope": {8: Estimate(6, spread), 16: Estimate(3, spread)}}
    assert list(found["rope"]) == [8, 16]
    assert list(trainings(rows)["rope"]) == [8]


def test_cases_of_all_depths_and_seeds_count_together():
    """Three standard errors of 200 cases are 0.106, of 100 cases 0.15."""
    both = [row for depth in (0.0, 1.0) for row in task("needle", "rope", (0.62,), chance=0.5, cases=100, depth=depth)]
    assert [is_above_chance(both[:1]), is_above_chance(both)] == [False, True]


def test_notes_name_the_lengths_without_a_number_once():
    rows = text("rope", (None, 5.0, None)) + text("rope", (None,), seed=1) + text("alibi", (5.0,))
    failed = [{**row, "error": "too long"} for row in task("copy", "rope", (None,), lengths=(64,))]
    assert notes(rows + failed) == ["rope at 32, 128: no memory", "rope, copy at 64: too long"]


def test_accuracies_are_means_over_depths_then_over_seeds():
    rows = [
        row
        for seed, shares in enumerate([(1.0, 0.5), (0.5, 0.0)])
        for depth, share in zip((0.0, 1.0), shares, strict=True)
        for row in task("needle", "rope", (share, None), lengths=(32, 64), depth=depth, seed=seed)
    ]
    assert accuracies(rows, "rope") == {32: Estimate(0.5, pytest.approx(math.sqrt(0.125)))}
    assert at_depth(rows, "rope") == {(0.0, 32): 0.75, (1.0, 32): 0.25}


@pytest.mark.parametrize(
    ("share", "chance", "cases", "clear"),
    [
        (0.56, 0.5, 10_000, True),
        (0.05, None, 10_000, False),  # not more than a twentieth
        (0.54, 0.5, 10_000, False),  # less than a twentieth
        (0.64, 0.5, 100, False),  # three standard errors are 0.15
        (0.29, None, 100, True),  # without a guess, one right answer is the guess: 3 sqrt(0.01 * 0.99 / 100) = 0.03
        (0.5, None, 5, False),  # 3 sqrt(0.2 * 0.8 / 5) = 0.54
    ],
)
def test_an_accuracy_is_above_chance_by_a_twentieth_and_three_errors(share, chance, cases, clear):
    rows = task("copy", "rope", (share,), chance=chance, cases=cases)
    assert is_above_chance(rows + task("copy", "alibi", (None,), cases=cases)) is clear


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_the_interval_is_that_of_the_paired_t_test(seeds):
    def seeded(label, values):
        return [row for seed, value in enumerate(values) for row in text(label, (value,), seed=seed)]

    draws = np.random.default_rng(seeds)
    level = draws.normal(2.0, 0.5, seeds)  # of each seed, shared by both schemes
    first, second = (level + draws.normal(shift, 0.05, seeds) for shift in (0.0, 0.03))
    rope = seeded("rope", np.exp(first).tolist())
    found = difference(rope + seeded("alibi", np.exp(second).tolist())[::-1], "alibi", "rope", 32)
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.mean == pytest.approx((second - first).mean())
    assert found.has_zero == (expected.low <= 0 <= expected.high)
    shorter = rope + seeded("alibi", [math.exp(2), math.exp(2)])
    assert difference(shorter, "alibi", "rope", 32).mean == pytest.approx((2 - first[:2]).mean())
    for values in ((5.0,), (5.0, None)):  # one pair, or a seed without a number
        assert difference(rope + seeded("alibi", values), "alibi", "rope", 32) is None


def test_every_scheme_belongs_to_its_family():
    rotary_bias, windowed = pj.scheme("rope", bias={"name": "alibi"}), pj.scheme("rerope", window=4)
    assert (family(rotary_bias), family(windowed)) == (numbers.BIASES, numbers.WINDOWS)
    names = ["nope", "p-rope", "cope", "coca-slack", "performer", "key-norm"]
    assert [family(pj.scheme(name)) for name in names] == [
        *(numbers.ABSOLUTE, numbers.ROTATIONS, numbers.BIASES),
        *(numbers.COCA, numbers.LINEAR, numbers.OTHER),
    ]


def read(label, losses, length=64, **about):
    """Rows of a study: the loss of the last tokens of every text."""
    return [
        {**row, "text": name, "last_nll": loss, **about}
        for name, loss in losses.items()
        for row in text(label, (5.0,), lengths=(length,))
    ]


def test_texts_are_paired_and_their_losses_are_averaged():
    rows = read("plain", {"a": 3.0, "b": 5.0}) + read("yarn", {"b": 4.4, "a": 2.5})
    assert curve(rows, "plain", "last") == {64: Estimate(math.exp(4.0))}
    found = difference(rows, "yarn", "plain", 64)
    expected = stats.ttest_1samp([-0.5, -0.6], 0).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((-0.55, expected.low, expected.high))
    placed = {"position_ends": [32, 512], "position_nll": [9.0, 2.0]}
    both = [{**row, **placed} for row in rows]
    assert positions(both, "yarn") == ((32, 512), [None, Estimate(2.0)])


def test_means_are_over_the_texts_that_all_schemes_have_read():
    """A length at which no shared text is read by all is left out, and schemes with an error do not count."""
    rows = read("plain", {"a": 3.0, "b": 5.0, "c": 1.0}) + read("yarn", {"a": 2.5, "b": 4.4})
    rows += read("plain", {"a": 3.0, "b": 5.0}, 128) + read("yarn", {"b": 4.4}, 128)
    failed = read("t5", {"a": None}, 128, error="no memory")
    asked = task("copy", "plain", (1.0,), lengths=(256,))
    rows += failed + asked + read("plain", {"a": 3.0}, 256) + read("yarn", {"c": 4.4}, 256)
    kept = [(row["label"], row["length"], row["text"]) for row in of_shared_texts(rows) if row not in failed + asked]
    assert kept == [("plain", 64, "b"), ("yarn", 64, "b"), ("plain", 128, "b"), ("yarn", 128, "b")]
    assert [row for row in of_shared_texts(rows) if row in failed + asked] == failed + asked
