"""Figures that can be read: a line for each scheme, names that do not overlap, axes with titles, few lines a panel."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from report_rows import EXTENSIONS, FAMILIES, task, text, zoo

from train.report import figures
from train.report.figures import groups

ABOUT = ("Title", "Text.")


@pytest.fixture
def drawn(monkeypatch):
    """The finished figures; none is painted."""
    found = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: found.append(self))
    return found


def lines(panel, label):
    return [line for line in panel.get_lines() if line.get_label() == label]


def named(panel):
    return [line for line in panel.get_lines() if not line.get_label().startswith("_")]


def names(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


def check_names(made):
    """Every line has one name, in the order of the ends of lines, and names are inside the figure and beside panels."""
    made.draw_without_rendering()
    panels = [panel for panel in made.axes if panel.axison]
    for panel in panels:
        box = panel.get_legend().get_window_extent()
        ends = {line.get_label(): -line.get_ydata()[-1] for line in named(panel)}
        assert [name.strip(" ↑↓") for name in names(panel)] == sorted(ends, key=ends.get)
        assert made.bbox.x0 <= box.x0 < box.x1 <= made.bbox.x1
        assert made.bbox.y0 <= box.y0 < box.y1 <= made.bbox.y1
        assert not any(box.overlaps(other.bbox) for other in panels)
    for one, other in combinations(panels, 2):
        assert not one.get_legend().get_window_extent().overlaps(other.get_legend().get_window_extent())


def test_many_schemes_share_axes_and_a_line_and_have_names_that_do_not_overlap(drawn):
    rows = [row for n in range(12) for row in text(f"scheme {n}", [5.0 + k * (n % 3) ** 3 / 50 for k in range(5)])]
    figures.draw_by_length(rows, *ABOUT)
    (made,) = drawn
    check_names(made)
    panels = [panel for panel in made.axes if panel.axison]
    assert len({panel.get_ylim() for panel in panels}) == len({panel.get_xlim() for panel in panels}) == 1
    shown = [[line.get_label() for line in named(panel)] for panel in panels[::2]]
    assert [names[0] for names in shown] == ["scheme 0", "scheme 0"]
    assert sorted(shown[0] + shown[1][1:]) == sorted({row["label"] for row in rows})
    for panel in panels:
        looks = {(line.get_color(), str(line._dash_pattern)) for line in named(panel)}
        assert len(looks) == len(named(panel)) <= 8


def test_names_do_not_overlap_by_position_or_beside_panels_of_three_measurements(drawn):
    places = {"position_ends": [8, 16, 32], "position_nll": [2.0, 1.5, 1.4]}
    rows = [{**row, **places} for n in range(8) for row in text(f"a scheme with a long name {n}", (5.0,) * 5)]
    figures.draw_by_position(rows)
    figures.draw_by_length([{**row, "sliding_tokens": 96, "sliding_perplexity": 5.0} for row in rows], *ABOUT)
    for made in drawn:
        check_names(made)
    (line, *_) = named(drawn[0].axes[0])
    assert list(line.get_xdata()) == pytest.approx(np.sqrt([1 * 8, 9 * 16, 17 * 32]))
    assert list(line.get_ydata()) == pytest.approx(np.exp([2.0, 1.5, 1.4]))


def test_an_explosion_does_not_set_the_scale_and_its_name_has_an_arrow(drawn):
    figures.draw_by_length(text("rope", (5.0, 6.0)) + text("sinusoidal", (5.0, 9e5)), *ABOUT)
    (made,) = drawn
    check_names(made)
    assert made.axes[0].get_ylim()[1] == 200
    assert names(made.axes[0]) == ["sinusoidal ↑", "rope"]


def copied(*seeds):
    return [row for seed, shares in enumerate(seeds) for row in task("copy", "rope", shares, seed=seed)]


def test_seeds_that_fall_into_two_groups_are_lines_and_others_a_band(drawn):
    figures.draw_tasks(copied((1.0, 0.9), (1.0, 0.8), (0.0, 0.0)))
    figures.draw_tasks(copied((1.0, 0.9), (0.95, 0.85)))
    apart, alike = (made.axes[0] for made in drawn)
    assert [list(line.get_ydata()) for line in lines(apart, "_seed")] == [[1.0, 0.9], [1.0, 0.8], [0.0, 0.0]]
    assert list(lines(apart, "rope")[0].get_ydata()) == pytest.approx([2 / 3, 1.7 / 3])
    assert [len(panel.collections) for panel in (apart, alike)] == [0, 1]
    assert not lines(alike, "_seed")
    assert lines(alike, "_guess")[0].get_ydata()[0] == 0.01


@pytest.mark.parametrize(("train_length", "where"), [(64, [64, 64]), (512, [])])
def test_axes_have_titles_ticks_and_the_training_length(drawn, train_length, where):
    figures.draw_by_length(text("rope", (5.0, 6.0, 7.0), train_length=train_length), *ABOUT)
    panels = drawn[0].axes
    assert [line.get_xdata()[0] for panel in panels for line in lines(panel, "_training length")] == where
    assert panels[0].get_xlabel().startswith("evaluation length in tokens")
    assert panels[0].get_xlabel().endswith(", dotted)") == bool(where)
    assert panels[0].get_ylabel() == "perplexity per token"
    assert [tick.get_text().split("\n")[0] for tick in panels[0].get_xticklabels()] == ["32", "64", "128"]


def test_trainings_that_end_at_a_loss_are_steps_of_survival(drawn):
    about = {"stop_loss": 2.0, "updates": 3000}
    rows = [row for seed, n in enumerate([900, None]) for row in text("coca", (5.0,), seed=seed, updates_to_loss=n)]
    figures.draw_reached([{**row, **about} for row in rows])
    (line,) = named(drawn[0].axes[0])
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0, 1.0), (900, 0.5), (3000, 0.5)]


def test_maps_show_the_share_at_every_depth_and_length(drawn):
    rows = [row for depth in (0.0, 1.0) for row in task("needle_single", "rope", (0.9, None, depth), depth=depth)]
    figures.draw_depths(rows)
    (panel,) = drawn[0].axes
    assert [cell.get_text() for cell in panel.texts] == ["90", "-", "0", "90", "-", "100"]


def test_what_says_nothing_is_not_drawn(drawn):
    """The last tokens of few windows, and tasks with the accuracy of a guess."""
    few = text("rope", (5.0, 6.0), last_tokens=31 * 32)
    figures.draw_by_length(few, *ABOUT)
    figures.draw_tasks(task("copy", "rope", (0.9, 0.5)) + task("mqar", "rope", (0.02, 0.0)))
    titles = [[panel.get_title(loc="left") for panel in made.axes] for made in drawn]
    assert titles == [["Whole window"], ["Copy"]]


def test_the_zoo_is_forty_schemes_in_panels_of_one_family():
    family = {label: name for name, labels in FAMILIES.items() for label in labels}
    rows = list(reversed(zoo(seeds=1)))
    found = groups(rows)
    assert {label for group in found for label in group.labels} == {row["label"] for row in rows}
    for group in found:
        assert len(group.labels) == len(set(group.labels)) <= 8
        assert group.labels[0] == group.reference
    shown = [
        {family[label.partition(" + ")[0]] for label in group.labels if label != group.reference} for group in found
    ]
    assert all(len(each) == 1 for each in shown)
    order = [list(FAMILIES).index(*each) for each in shown]
    assert all(one <= other for one, other in pairwise(order))
    for root in ("coca-strict", "inverse-leaky", "hwfa2"):
        extended = {f"{root} + {name}" for name in EXTENSIONS[root]}
        assert any({root, *extended} <= set(group.labels) for group in found)
