"""The findings that the page states in sentences."""

import pytest
from report_rows import task, text

from train.report.findings import findings


def seeded(label, values, seeds=3, noise=0.0):
    signs = (-1, 0, 1, 0.5)
    return [
        row
        for seed in range(seeds)
        for row in text(label, [value * (1 + noise * signs[seed]) for value in values], seed=seed)
    ]


def test_the_best_and_the_worst_at_the_longest_length():
    rows = text("rope", (5.0, 20.7)) + text("alibi", (5.1, 5.43)) + text("t5", (5.2, 7.0))
    expected = (
        "At 2 times the training length (64 tokens) alibi has the lowest perplexity (5.43), rope the highest (20.70)."
    )
    assert findings(rows) == [expected]


def test_schemes_that_tie_are_best_together():
    rows = text("rope", (5.001,)) + text("alibi", (5.002,)) + text("t5", (7.0,))
    (found,) = findings(rows)
    assert found == (
        "At the training length (32 tokens) rope and alibi have the lowest perplexity (5.00), t5 the highest (7.00)."
    )
    assert findings(rows[:2]) == ["At the training length (32 tokens) all schemes have the same perplexity (5.00)."]


def test_seeds_tell_whether_the_best_is_separated_from_the_second():
    apart = seeded("rope", (5.0,)) + seeded("alibi", (6.0,), noise=0.01) + seeded("t5", (9.0,))
    (found,) = findings(apart)
    assert "; rope is ahead of the second, alibi, by more than the noise of the seeds (0.182 nats per token" in found
    close = seeded("rope", (5.0,)) + seeded("alibi", (5.02,), noise=0.01) + seeded("t5", (9.0,))
    (found,) = findings(close)
    assert "; between rope and the second, alibi, the difference is within the noise of the seeds (0.004 nats" in found


def test_a_length_that_only_one_scheme_reaches_is_not_compared():
    rows = text("rope", (5.0, 6.0, 7.0)) + text("learned", (5.5, 5.9, None))
    assert findings(rows)[0].startswith("At 2 times the training length (64 tokens) learned has the lowest")


def test_a_single_scheme_is_compared_with_its_shortest_length():
    assert findings(text("rope", (5.0, 6.0, 31.0))) == [
        "At 4 times the training length (128 tokens) rope has a perplexity of 31.00, 5.00 at 32 tokens."
    ]


def test_lengths_are_no_multiples_without_one_training_length():
    rows = text("a", (5.0, 6.0), train_length=32) + text("b", (5.0, 7.0), train_length=64)
    assert findings(rows)[0].startswith("At 64 tokens a has")


def test_nothing_is_found_in_rows_without_numbers():
    assert findings(text("rope", (None, None))) == []


def test_curves_of_too_few_windows_are_named():
    places = {"position_ends": [32], "position_nll": [2.0]}
    rows = text("rope", (5.0, 6.0), window_tokens=512, last_tokens=31 * 32, **places)
    assert findings(rows)[1:] == [
        "No curve is shown of the last 32 tokens (31 windows, of which the table has the numbers) and perplexity by "
        "position: too few windows were measured (a curve takes 32, and a point by position 256 tokens)."
    ]
    assert len(findings(text("rope", (5.0, 6.0), window_tokens=32 * 32, last_tokens=32 * 32, **places))) == 1


@pytest.mark.parametrize(
    ("shares", "chance", "cases", "is_told"),
    [
        ((0.0, 0.02), 0.01, 40, True),
        ((0.24, 0.1), 0.1, 40, True),  # the standard error of a guess is 0.0474
        ((0.25, 0.1), 0.1, 40, False),
        ((0.04, 0.0), 0.01, 10_000, True),  # no noise, but not worth a figure
        ((0.07, 0.0), 0.01, 10_000, False),
        ((0.3, 0.0), None, 40, False),
        ((None, None), 0.1, 40, False),  # it is listed as not measured
    ],
)
def test_a_task_that_no_scheme_has_learned_is_named(shares, chance, cases, is_told):
    rows = text("rope", (5.0, 6.0)) + task("copy", "rope", shares, chance=chance, cases=cases)
    expected = ["Copy: no scheme is above a guess by more than noise, so there is no figure."]
    assert findings(rows)[1:] == (expected if is_told else [])
