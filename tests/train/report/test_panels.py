"""What panels show: seeds, training lengths, and the line that all panels share."""

import pytest
from report_rows import LENGTHS, task, text, zoo

from train import report
from train.report import curves, figure, style

ABOUT = ("Title", "Text.")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn; no files are written."""
    found = []
    monkeypatch.setattr("train.report.style.png", lambda made: found.append(made) or b"")
    return found


def lines(panel, label):
    return [line for line in panel.get_lines() if line.get_label() == label]


def copied(*seeds):
    return [row for seed, shares in enumerate(seeds) for row in task("copy", "rope", shares, seed=seed)]


def test_seeds_that_fall_into_two_groups_are_lines_and_no_band(drawn):
    curves.draw_tasks(copied((1.0, 0.9), (1.0, 0.8), (0.0, 0.0)))
    panel = drawn[0].axes[0]
    assert [list(line.get_ydata()) for line in lines(panel, "_seed")] == [[1.0, 0.9], [1.0, 0.8], [0.0, 0.0]]
    assert len(panel.collections) == 0
    assert list(lines(panel, "rope")[0].get_ydata()) == pytest.approx([2 / 3, 1.7 / 3])


def test_seeds_that_agree_have_a_band_and_no_lines_of_their_own(drawn):
    curves.draw_tasks(copied((1.0, 0.9), (0.95, 0.85)))
    panel = drawn[0].axes[0]
    assert not lines(panel, "_seed")
    assert len(panel.collections) == 1


def test_a_seed_that_explodes_is_a_line(drawn):
    rows = text("rope", (5.0, 6.0)) + text("rope", (5.0, 12.0), seed=1) + text("alibi", (5.0, 6.0))
    figure.draw(rows + text("alibi", (5.1, 6.1), seed=1), *ABOUT)
    for panel in drawn[0].axes:
        assert len(lines(panel, "_seed")) == 2
        assert len(panel.collections) == 1  # the band of alibi


def marked(made):
    return [line.get_xdata()[0] for panel in made.axes for line in lines(panel, "_training length")]


@pytest.mark.parametrize(("train_length", "where"), [(64, [64, 64]), (512, []), (16, [])])
def test_the_training_length_is_marked_where_it_lies_on_the_axis(drawn, train_length, where):
    figure.draw(text("rope", (5.0, 6.0, 7.0), train_length=train_length), *ABOUT)
    assert marked(drawn[0]) == where
    assert drawn[0].axes[0].get_xlabel().endswith(", dotted)") == bool(where)


def test_different_training_lengths_are_not_marked(drawn):
    rows = text("a", (5.0, 6.0), train_length=32) + text("b", (5.0, 6.0), train_length=64)
    figure.draw(rows, *ABOUT)
    assert marked(drawn[0]) == []
    assert drawn[0].axes[0].get_xlabel() == "evaluation length in tokens"
    assert [tick.get_text() for tick in drawn[0].axes[0].get_xticklabels()] == ["32", "64"]
    assert report.tables(rows)[0].header == ("scheme", "32", "64")


def test_many_schemes_share_axes_and_a_grey_line(drawn):
    figure.draw(zoo(seeds=1), *ABOUT)
    panels = [panel for panel in drawn[0].axes if panel.axison]
    assert len({panel.get_ylim() for panel in panels}) == 1
    assert len({panel.get_xlim() for panel in panels}) == 1
    for panel in panels:
        named = [line for line in panel.get_lines() if not line.get_label().startswith("_")]
        assert len(named) <= 8
        assert len({(line.get_color(), str(line._dash_pattern)) for line in named}) == len(named)
        (reference,) = lines(panel, "nope")
        assert [line for line in named if line.get_color() == reference.get_color()] == [reference]
        assert list(reference.get_xdata()) == list(LENGTHS)


def test_groups_of_one_measurement_are_two_in_a_row(drawn):
    rows = [{name: value for name, value in row.items() if "last" not in name} for row in zoo(seeds=1)]
    figure.draw(rows, *ABOUT)
    left, right = drawn[0].axes[:2]
    assert figure.shown_measures(rows) == ["window"]
    assert left.get_position().y0 == pytest.approx(right.get_position().y0)
    assert left.get_title(loc="left") != right.get_title(loc="left")


def test_trainings_of_different_lengths_share_an_axis(drawn):
    def training(n):
        return {"tokens": [1000, 1000 * (n + 2)], "held_out_loss": [3.0, 2.0 - n / 100]}

    curves.draw_training([row for n in range(9) for row in text(f"scheme {n}", (5.0,), training=training(n))])
    first, second = drawn[0].axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] > 10_000
    assert first.get_ylim() == second.get_ylim() == pytest.approx((1.87, 3.05))


def test_the_page_says_which_line_is_grey_where_one_is(drawn):
    about = report.About("", "", "", "", {})
    captions = [report.pictures(rows, about)[0].caption for rows in (zoo(seeds=1), text("nope", (5.0, 6.0)))]
    assert ["Grey, in every panel: nope." in caption for caption in captions] == [True, False]


def test_the_last_tokens_of_few_windows_are_not_drawn(drawn):
    figure.draw(text("rope", (5.0, 6.0), last_tokens=31 * 32), *ABOUT)
    assert [panel.get_title(loc="left") for panel in drawn[0].axes] == ["Whole window"]
    assert drawn[0].get_figwidth() == style.WIDTH


def test_tasks_with_the_accuracy_of_a_guess_are_not_drawn(drawn):
    rows = text("rope", (5.0, 6.0)) + task("copy", "rope", (0.9, 0.5)) + task("mqar", "rope", (0.02, 0.0))
    curves.draw_tasks(rows)
    assert [panel.get_title(loc="left") for panel in drawn[0].axes] == ["Copy"]


def test_no_figure_of_tasks_that_no_scheme_has_learned(drawn):
    about = report.About("", "", "", "", {})
    guesses = [row for depth in (0.0, 1.0) for row in task("induction", "rope", (0.0, 0.02), depth=depth)]
    assert [picture.name for picture in report.pictures(text("rope", (5.0, 6.0)) + guesses, about)] == ["figure.png"]
    learned = [{**row, "accuracy": 0.5} for row in guesses]
    names = [picture.name for picture in report.pictures(text("rope", (5.0, 6.0)) + learned, about)]
    assert names == ["figure.png", "tasks.png", "depths.png"]
