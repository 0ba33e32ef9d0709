"""The tables of differences and of costs."""

from report_rows import text

from train import report


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
    found = table(rows, "Paired differences from rope")
    assert "by 3 seeds" in found.title
    assert found.header == ("scheme", "32 (1x)", "256 (8x)", "512 (16x)")
    assert [row[0] for row in found.rows] == ["alibi", "t5"]
    assert found.rows[0][1:] == ("+0.095 [+0.095, +0.095]",) * 3
    assert found.rows[1][1] == "≈ +0.003 [-0.249, +0.255]"


def test_a_failed_seed_leaves_a_dash():
    rows = seeded("rope", (1, 1, 1)) + seeded("alibi", (1.1, 1.1, 1.1))
    rows = [
        {**row, "window_nll": None} if (row["label"], row["seed"], row["length"]) == ("alibi", 2, 512) else row
        for row in rows
    ]
    assert table(rows, "Paired").rows[0][3] == "-"


def test_one_seed_or_one_scheme_has_no_differences():
    assert table(text("rope", (5.0,)) + text("alibi", (6.0,)), "Paired") is None
    assert table(seeded("rope", (1, 1, 1)), "Paired") is None


def costly(label, speeds, memory=None, **about):
    return [
        row
        for seed, speed in enumerate(speeds)
        for row in text(label, (5.0, 6.0), seed=seed, train_tokens_per_second=speed, peak_memory_bytes=memory, **about)
    ]


def test_costs_that_differ_by_less_than_their_spread_are_alike():
    rows = costly("rope", (100.0, 140.0)) + costly("alibi", (110.0, 120.0)) + costly("t5", (20.0, 30.0))
    found = table(rows, "Cost")
    assert found.header == ("scheme", "training tokens/s")  # no memory was measured
    assert found.rows == (("rope", "120 ±28"), ("alibi", "≈ 115 ±7"), ("t5", "25 ±7"))
    assert "≈ is as good as the best" in found.title


def test_the_least_memory_is_the_best():
    rows = [
        {**row, "peak_memory_bytes": (memory + row["seed"]) * 2**20}
        for label, memory in (("rope", 700), ("alibi", 300), ("t5", 301))
        for row in costly(label, (100.0, 100.0))
    ]
    assert [row[2] for row in table(rows, "Cost").rows] == ["700 ±1", "300 ±1", "≈ 302 ±1"]


def test_single_runs_are_said_to_be_single_and_never_alike():
    found = table(costly("rope", (100.0,)) + costly("alibi", (100.0,)), "Cost")
    assert "single runs" in found.title
    assert [row[1] for row in found.rows] == ["100", "100"]


def test_trainings_that_ran_together_have_no_costs():
    assert table(costly("rope", (None, None), 2**30) + costly("alibi", (None, None), 2**30), "Cost") is None
