"""Names at the ends of lines do not overlap, and have the order of the lines."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.text import Text
from report_rows import text, zoo

from train import report
from train.report import curves, ends, figure

ABOUT = ("Title", "Text.")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, with their names placed; no files are written."""
    found = []

    def keep(made):
        ends.place(made)
        found.append(made)
        return b""

    monkeypatch.setattr("train.report.style.png", keep)
    return found


def names(panel):
    return [each for each in panel.texts if each.get_gid() == ends._GID]


def check(made):
    """No name overlaps another one of its panel, or is outside the figure."""
    made.draw_without_rendering()
    whole = made.bbox
    for panel in made.axes:
        boxes = {name.get_text(): Text.get_window_extent(name) for name in names(panel)}
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            assert not a.overlaps(b), (panel.get_title(loc="left"), one, other)
        for name, box in boxes.items():
            assert whole.x0 <= box.x0 < box.x1 <= whole.x1, name
            assert panel.bbox.y0 - 3 <= box.y0 < box.y1 <= panel.bbox.y1 + 3, name


def test_no_two_names_of_forty_schemes_overlap(drawn):
    rows = zoo(seeds=1)
    figure.draw(rows, *ABOUT)
    (made,) = drawn
    check(made)
    assert all(0 < len(names(panel)) <= 8 for panel in made.axes if panel.axison)


def test_no_two_names_overlap_by_position_or_where_three_panels_share_a_row(drawn):
    places = {"position_ends": [8, 16, 32], "position_nll": [2.0, 1.5, 1.4]}
    rows = [{**row, **places} for n in range(8) for row in text(f"a scheme with a long name {n}", (5.0,) * 5)]
    curves.draw_by_position(rows)
    figure.draw([{**row, "sliding_tokens": 96, "sliding_perplexity": 5.0} for row in rows], *ABOUT)
    for made in drawn:
        check(made)


def test_a_line_that_leaves_the_panel_is_named_at_its_edge(drawn):
    figure.draw(text("rope", (5.0, 6.0)) + text("sinusoidal", (5.0, 9e5)), *ABOUT)
    (made,) = drawn
    check(made)
    left = {name.get_text(): name.get_position()[1] for name in names(made.axes[0])}
    assert left.keys() == {"rope", "sinusoidal ↑"}
    assert left["sinusoidal ↑"] > 0.9 > left["rope"]


def test_names_that_have_room_stay_at_their_lines():
    assert ends.spread([0.2, 0.8, 0.5], 0.1) == [0.2, 0.8, 0.5]
    assert ends.spread([], 0.1) == []


def test_names_that_crowd_are_spread_around_their_mean():
    assert ends.spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert ends.spread([0.52, 0.5], 0.1) == pytest.approx([0.56, 0.46])


@pytest.mark.parametrize("seed", range(20))
def test_names_keep_their_order_and_distance_within_the_panel(seed):
    draws = np.random.default_rng(seed)
    wanted = draws.choice([0.0, 0.01, 0.03, 0.5, 0.97, 1.0], size=8) + draws.uniform(0, 1e-3, 8)
    found = ends.spread(wanted.tolist(), 0.1)
    ordered = [found[n] for n in np.argsort(wanted)]
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
    assert 0.05 - 1e-9 <= min(found) < max(found) <= 0.95 + 1e-9


def test_a_distance_that_does_not_fit_shrinks():
    found = sorted(ends.spread([0.9] * 20, 0.1))
    assert found == pytest.approx([(n + 0.5) / 20 for n in range(20)])


def test_names_are_darker_than_their_lines():
    assert ends.darker("#0080ff") == "#0060bf"


def test_a_figure_without_names_is_painted_as_it_is():
    assert report.pictures(text("rope", (None,)), report.About("", "", "", "", {}))[0].png.startswith(b"\x89PNG")
