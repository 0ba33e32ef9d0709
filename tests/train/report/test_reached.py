"""Trainings that end at a loss: their table, survival curves, and the seeds that count in tasks."""

import pytest
from report_rows import task, text

from train.report import reached
from train.report.numbers import tasks
from train.report.page import About, pictures, render


def seeds(label, updates, base=None):
    """Rows of a scheme, with the updates of each seed until the loss: at most 3,000, or None if not reached."""
    rows = []
    for seed, each in enumerate(updates):
        ending = {"stop_loss": 2.0, "updates": 3000, "updates_to_loss": each}
        rows += text(label, [5.0, 6.0], base=base, seed=seed, **ending)
        rows += [{**row, **ending} for row in task("copy", label, [0.9 if each else 0.01, 0.5], seed=seed, base=base)]
    return rows


ROPE, COCA = [None, 1200, None, 2500], [900, 700, 700, 1000]
ROWS = [*seeds("rope", ROPE), *seeds("rope + NTK", ROPE, base="rope"), *seeds("coca", COCA)]


def test_updates_of_trained_schemes():
    assert reached.times(ROWS) == {"rope": ROPE, "coca": COCA}
    assert reached.times(text("rope", [5.0])) == {}


def test_survival_falls_by_one_training_at_a_time():
    assert reached.survival(COCA, 3000) == [(0, 1.0), (700, 0.75), (700, 0.5), (900, 0.25), (1000, 0.0), (3000, 0.0)]
    assert reached.survival(ROPE, 3000) == [(0, 1.0), (1200, 0.75), (2500, 0.5), (3000, 0.5)]
    assert reached.survival([None], 9) == [(0, 1.0), (9, 1.0)]


def test_the_table_has_every_seed_and_the_median_of_all():
    (table,) = reached.updates_to_loss(ROWS)
    assert "below 2 nats per token, of 3,000" in table.title
    assert table.rows == (
        ("rope", "2 of 4", "-", "1200, 2500, -, -"),
        ("coca", "4 of 4", "900", "700, 700, 900, 1000"),
    )
    assert reached.updates_to_loss(text("rope", [5.0])) == []


def test_seeds_that_did_not_reach_the_loss_do_not_count_in_tasks():
    found = tasks(ROWS)["copy"]
    assert {(row["label"], row["seed"]) for row in found if row["label"] != "coca"} == {
        ("rope", 1), ("rope", 3), ("rope + NTK", 1), ("rope + NTK", 3),
    }  # fmt: skip
    assert min(row["accuracy"] for row in found if row["length"] == 32) == 0.9
    assert reached.note(ROWS) == ["Accuracy on tasks is that of trainings whose loss fell below 2: rope 2 of 4."]
    assert reached.note(seeds("coca", COCA)) == []


def test_the_figure_is_on_the_page():
    about = About("title", "text", "model", "config", {})
    drawn = pictures(ROWS, about)
    assert "reached.png" in [picture.name for picture in drawn]
    page = render(ROWS, drawn, about)
    assert "Updates until the loss was below 2" in page
    assert "rope 2 of 4" in page


def test_lines_are_the_steps_of_survival(monkeypatch):
    kept = []
    monkeypatch.setattr(reached.style, "png", lambda figure: kept.append(figure) or b"")
    reached.draw(ROWS)
    lines = {line.get_label(): line for line in kept[0].axes[0].get_lines()}
    assert set(lines) == {"rope", "coca"}
    assert list(lines["coca"].get_xdata()) == [0, 700, 700, 900, 1000, 3000]
    assert lines["rope"].get_ydata()[-1] == pytest.approx(0.5)
