"""The tables of trials, which choose a learning rate and a factor for positions."""

from train.report.trials import chosen_rates, tables_of_trials


def trial(label, rate, factor, nlls, *, chosen=False):
    rows = [
        {"length": length, "train_length": 32, "window_nll": nll, "window_perplexity": 2**nll, "error": None}
        for length, nll in zip((32, 64), nlls, strict=False)
    ] or [{"error": "training diverged"}]
    which = {"label": label, "learning_rate": rate, "position_factor": factor, "chosen": chosen}
    return [{**row, **which} for row in rows]


TRIALS = [
    *trial("t5", 1e-3, 1.0, [2.5, 3.0]),
    *trial("t5", 1e-3, 30.0, [2.0, 2.1], chosen=True),
    *trial("t5", 1.0, 30.0, []),
    *trial("rope", 3e-3, 1.0, [2.2, 4.0], chosen=True),
]


def test_the_chosen_trial_is_compared_with_the_second_best():
    (table,) = chosen_rates(TRIALS)
    assert table.rows == (("t5", "0.001", "30", "2.0000", "0.5000", "3"), ("rope", "0.003", "1", "2.2000", "-", "1"))


def test_every_trial_is_shown_with_its_perplexity_at_each_length():
    _, table = tables_of_trials(TRIALS)
    assert table.header == ("scheme", "learning rate", "factor for positions", "32", "64", "")
    assert table.rows == (
        ("t5", "0.001", "1", "5.66", "8.00", ""),
        ("t5", "0.001", "30", "4.00", "4.29", "chosen"),
        ("t5", "1", "30", "-", "-", "training diverged"),
        ("rope", "0.003", "1", "4.59", "16.00", "chosen"),
    )


def test_the_loss_is_that_at_the_training_length():
    """Not at a shorter length that is measured before it."""
    trials = [{**row, "train_length": 64} for row in TRIALS if "length" in row]
    assert chosen_rates(trials)[0].rows[0][3:5] == ("2.1000", "0.9000")


def test_without_trials_there_are_no_tables():
    assert tables_of_trials([]) == chosen_rates([]) == []
