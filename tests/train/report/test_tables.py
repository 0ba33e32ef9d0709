"""The tables of a report, and the findings that its page states in sentences."""

import pytest
from report_rows import task, text

from train import report
from train.report.tables import findings


def table(rows, start):
    return next((found for found in report.tables(rows) if found.title.startswith(start)), None)


def seeded(label, ratios, **about):
    """Seeds whose perplexities are in these ratios to the first scheme's."""
    levels = (5.0, 6.0, 7.0)
    return [
        row
        for seed, (level, ratio) in enumerate(zip(levels, ratios, strict=False))
        for row in text(label, [level * ratio] * 5, seed=seed, **about)
    ]


def test_differences_are_from_the_first_trained_scheme_at_the_training_length_and_the_longest_ones():
    rows = seeded("rope", (1, 1, 1)) + seeded("alibi", (1.1, 1.1, 1.1)) + seeded("t5", (0.9, 1.1, 1.02))
    rows[-1]["window_nll"] = None
    found = table(rows, "Paired differences from rope")
    assert found.header == ("scheme", "32 (1x)", "256 (8x)", "512 (16x)")
    assert found.rows[0] == ("alibi", *("+0.095 [+0.095, +0.095]",) * 3)
    assert found.rows[1] == ("t5", *("≈ +0.003 [-0.249, +0.255]",) * 2, "-")
    assert table(text("rope", (5.0,)) + text("alibi", (6.0,)), "Paired") is None


def costly(label, speeds, memories):
    return [
        {**row, "train_tokens_per_second": speed, "peak_memory_bytes": memory and memory * 2**20}
        for seed, (speed, memory) in enumerate(zip(speeds, memories, strict=True))
        for row in text(label, (5.0, 6.0), seed=seed)
    ]


def test_costs_are_means_with_their_spread():
    rows = costly("rope", (100.0, 140.0), (700, 701)) + costly("alibi", (110.0, 120.0), (300, 301))
    found = table([*rows, *costly("t5", (20.0, 30.0), (301, 302))], "Cost")
    assert found.rows == (
        ("rope", "120 ±28", "700 ±1"),
        ("alibi", "115 ±7", "300 ±1"),
        ("t5", "25 ±7", "302 ±1"),
    )
    single = table(costly("rope", (100.0,), (None,)) + costly("alibi", (100.0,), (None,)), "Cost")
    assert single.rows == (("rope", "100"), ("alibi", "100"))  # no memory was measured
    assert table(costly("rope", (None,), (700,)), "Cost") is None  # trainings that ran together


def test_the_time_of_training_is_shown_by_kind():
    seconds = {"steps": 6.0, "input": 2.0}, {"steps": 2.0, "input": 2.0}
    rows = [row for seed, each in enumerate(seconds) for row in text("rope", (5.0,), seed=seed, train_seconds=each)]
    found = table(rows, "Time")
    assert (found.header, found.rows) == (("scheme", "steps", "input"), (("rope", "62.5", "37.5"),))


def ending(label, updates, **about):
    """Rows of a scheme, with the updates of each seed until the loss, or None."""
    return [
        row
        for seed, each in enumerate(updates)
        for row in text(label, [5.0, 6.0], seed=seed, stop_loss=2.0, updates=3000, updates_to_loss=each, **about)
    ]


def test_updates_to_a_loss_have_every_seed_and_the_median_of_all():
    rows = [
        *ending("rope", [None, 1200, None, 2500]),
        *ending("rope + NTK", [None, 1200, None, 2500], base="rope"),
        *ending("coca", [900, 700, 700, 1000]),
    ]
    (found,) = report.updates_to_loss(rows)
    assert found.rows == (
        ("rope", "2 of 4", "-", "1200, 2500, -, -"),
        ("coca", "4 of 4", "900", "700, 700, 900, 1000"),
    )
    page = report.render(rows, [], report.About("", "", "", "", {}))
    assert "rope 2 of 4." in page  # a note, because the others' tasks do not count
    missed, hit = ({"stop_loss": 2.0, "updates_to_loss": n} for n in (None, 7))
    [row], [other] = task("copy", "rope", (0.25,), seed=0), task("copy", "rope", (0.75,), seed=1)
    assert table([*rows, row | missed, other | hit], "Copy").rows == (("rope", "75.0"),)
    assert report.updates_to_loss(text("rope", [5.0])) == []


def trial(label, rate, factor, nlls, *, chosen=False):
    rows = [
        {"length": length, "train_length": 32, "window_nll": nll, "window_perplexity": 2**nll, "error": None}
        for length, nll in zip((32, 64), nlls, strict=False)
    ] or [{"error": "training diverged"}]
    which = {"label": label, "learning_rate": rate, "position_factor": factor, "chosen": chosen}
    return [{**row, **which} for row in rows]


def test_trials_are_shown_and_the_chosen_one_is_compared_with_the_second_best():
    trials = [
        *trial("t5", 1e-3, 1.0, [2.5, 3.0]),
        *trial("t5", 1e-3, 30.0, [2.0, 2.1], chosen=True),
        *trial("t5", 1.0, 30.0, []),
        *trial("rope", 3e-3, 1.0, [2.2, 4.0], chosen=True),
    ]
    (choice,) = report.chosen_rates(trials)
    assert choice.rows == (("t5", "0.001", "30", "2.0000", "0.5000", "3"), ("rope", "0.003", "1", "2.2000", "-", "1"))
    assert report.chosen_rates([]) == []


FINDINGS = [
    # The best and the worst at the longest length that several schemes reach.
    (text("rope", (5.0, 20.7)) + text("alibi", (5.1, 5.43)) + text("t5", (5.2, 7.0)), "64", ["alibi", "5.43", "20.70"]),
    (text("rope", (5.0, 6.0, 7.0)) + text("learned", (5.5, 5.9, None)), "64", ["learned has", "5.90"]),
    (text("rope", (5.001,)) + text("alibi", (5.002,)) + text("t5", (7.0,)), "32", ["rope and alibi have", "7.00"]),
    (text("rope", (5.0, 6.0, 31.0)), "128", ["31.00", "5.00 at 32"]),
    (text("a", (5.0, 6.0), train_length=32) + text("b", (5.0, 7.0), train_length=64), "At 64 tokens a has", []),
    # Seeds tell whether the best is separated from the second.
    (seeded("rope", (1, 1, 1)) + seeded("alibi", (1.2, 1.21, 1.19)), "512", ["is ahead of", "0.182 nats"]),
    (seeded("rope", (1, 1, 1)) + seeded("alibi", (0.99, 1.0, 1.02)), "512", ["within the noise"]),
]


@pytest.mark.parametrize(("rows", "length", "parts"), FINDINGS)
def test_the_best_and_the_worst_are_named_with_their_numbers(rows, length, parts):
    (found,) = findings(rows)
    assert all(part in found for part in [length, *parts]), found


def test_curves_of_too_few_windows_and_guessed_tasks_are_named():
    places = {"position_ends": [32], "position_nll": [2.0]}
    rows = text("rope", (5.0, 6.0), window_tokens=512, last_tokens=31 * 32, **places)
    assert [part in findings(rows)[1] for part in ("31 windows", "by position")] == [True, True]
    assert len(findings(text("rope", (5.0, 6.0), window_tokens=32 * 32, last_tokens=32 * 32, **places))) == 1
    assert findings(text("rope", (None, None))) == []
    rows = text("rope", (5.0, 6.0))
    assert "Copy" in findings(rows + task("copy", "rope", (0.24, 0.1), chance=0.1))[1]
    assert len(findings(rows + task("copy", "rope", (0.25, 0.1), chance=0.1))) == 1
    assert len(findings(rows + task("copy", "rope", (None, None), chance=0.1))) == 1  # listed as not measured
