"""Plots show the measured data, name their axes with units, and can be saved to a file."""

import io

import numpy as np
import pytest

import posjax as pj
from posjax import masks
from posjax.diagnostics import (
    Anomaly,
    Curve,
    exactness,
    plot_anomaly,
    plot_decay,
    plot_entropy,
    plot_exactness,
    plot_weights,
    weight_curve,
)


def check_drawn(axes, x, y):
    assert (axes.get_xlabel(), axes.get_ylabel()) == (x, y)
    file = io.BytesIO()
    axes.figure.savefig(file, dpi=40)
    assert file.getvalue().startswith(b"\x89PNG")


def legend_and_plot(axes):
    """Where both are drawn."""
    axes.figure.draw_without_rendering()
    return [part.get_window_extent() for part in (axes.get_legend(), axes)]


def test_decay_has_a_line_for_each_label():
    curves = {"a": np.array([1.0, -0.5, 0.2]), "b": np.array([1.0, 0.5, 0.2])}
    axes = plot_decay(np.arange(3), curves)
    assert axes.get_lines()[1].get_ydata().tolist() == [1.0, 0.5, 0.2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    check_drawn(axes, "distance (tokens)", "mean score, as a share of distance 0")


def test_decay_has_a_line_at_zero_behind_curves_that_fall_below_it():
    *curves, zero = plot_decay(np.arange(2), {"a": np.ones(2), "b": np.array([1.0, -0.5])}).get_lines()
    assert len(curves) == 2
    assert list(zero.get_ydata()) == [0, 0]
    assert zero.get_zorder() == 0
    touching = plot_decay(np.arange(2), {"a": np.array([1.0, 0])})
    assert len(touching.get_lines()) == 1
    assert touching.get_legend() is None, "one curve needs no legend"


def test_curves_have_the_colours_of_a_scale_without_its_palest_end():
    from matplotlib import colormaps

    lines = plot_decay(np.arange(2), dict.fromkeys("abc", np.ones(2))).get_lines()
    np.testing.assert_allclose([line.get_color() for line in lines], colormaps["viridis"]([0, 0.425, 0.85]))


def test_weights_of_heads_that_differ_and_of_heads_that_do_not():
    alibi = weight_curve(pj.scheme("alibi"), np.arange(40), num_heads=8, head_dim=8)
    axes = plot_weights(alibi)
    assert len(axes.get_lines()) == 8
    legend, whole = legend_and_plot(axes)
    assert legend.x0 >= whole.x1, "eight names are beside the lines"
    assert abs((legend.y0 + legend.y1) - (whole.y0 + whole.y1)) < 2
    np.testing.assert_allclose(axes.get_lines()[3].get_ydata(), alibi.weights[3], rtol=1e-6)
    assert axes.get_legend().get_texts()[0].get_text() == "head 1"
    check_drawn(axes, "distance (tokens)", "attention weight")
    window = pj.scheme("nope", mask=masks.Window(10))
    axes = plot_weights(weight_curve(window, np.arange(40), num_heads=8, head_dim=8))
    assert len(axes.get_lines()) == 1
    assert axes.get_legend() is None
    assert np.isfinite(axes.get_lines()[0].get_ydata()).sum() == 10
    assert axes.get_xlim() == (0, 39)
    axes = plot_weights(alibi, logits=True)
    np.testing.assert_allclose([line.get_ydata().max() for line in axes.get_lines()], 0, atol=1e-7)
    assert axes.get_yscale() == "linear"
    check_drawn(axes, "distance (tokens)", "logit, relative to the highest")


def test_weights_are_shown_from_half_the_smallest_but_not_below_1e_minus_9():
    axes = plot_weights(Curve(np.arange(2), np.array([[0.5, 0], [0.2, 0.9]]), np.zeros((2, 2))))
    np.testing.assert_allclose(axes.get_ylim(), (0.1, 1.8))
    tiny = Curve(np.array([1, 0]), np.array([[1e-30, 1], [1e-30, 0.999]]), np.zeros((2, 2)))
    axes = plot_weights(tiny)
    assert axes.get_ylim() == (1e-9, 2)
    assert axes.get_xlim() == (0, 1)
    assert [line.get_ydata()[0] for line in axes.get_lines()] == [1, 0.999]


@pytest.mark.parametrize(("count", "inside"), [(5, True), (6, False)])
def test_up_to_five_names_are_on_the_plot(count, inside):
    legend, whole = legend_and_plot(plot_decay(np.arange(2), {str(n): np.full(2, n) for n in range(count)}))
    assert (legend.x0 < whole.x1) == inside


def test_the_heat_map_has_a_row_for_each_layer_and_separates_planes_that_complete_no_turn():
    found = Anomaly(*np.random.default_rng(0).random((6, 3, 8)))
    axes = plot_anomaly(found, statistic="zone", turns=np.array([9, 4, 2, 1, 0.9, 0.5, 0.2, 0.1]))
    np.testing.assert_array_equal(axes.collections[0].get_array().reshape(3, 8), found.zone)
    (border,), (note,) = axes.get_lines(), axes.texts
    assert border.get_xdata()[0] == 3.5
    assert note.xy == (3.5, 0.5)
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 7.5), (3.5, 0.5))
    assert axes.collections[0].get_clim()[0] == 0
    assert (axes.get_xticks().tolist(), axes.get_yticks().tolist()) == ([*range(8)], [1, 2, 3])
    check_drawn(axes, "plane (fastest first)", "layer")
    for turns in (None, np.full(8, 2), np.full(8, 0.5)):
        assert not plot_anomaly(found, turns=turns).get_lines(), "no border between planes of one kind"
    assert plot_anomaly(found, turns=np.array([1] + 7 * [0.5])).get_lines()[0].get_xdata()[0] == 0.5
    many = plot_anomaly(Anomaly(*np.zeros((6, 30, 31))))
    assert many.get_yticks().tolist() == [*range(1, 31, 3)]
    assert many.get_xticks().tolist() == [*range(0, 31, 4)]
    with pytest.raises(ValueError, match="pool the heads"):
        plot_anomaly(Anomaly(*np.zeros((6, 3, 2, 8))))
    with pytest.raises(ValueError, match="statistic"):
        plot_anomaly(found, statistic="zones")


def test_entropy_is_drawn_with_its_bound_and_exactness_has_three_lines():
    axes = plot_entropy(np.array([4, 16]), {"rope": np.array([1.0, 2.0])})
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), np.log([4, 16]))
    assert axes.xaxis.get_transform().base == 2
    assert axes.get_ylim()[0] == 0
    check_drawn(axes, "visible keys", "entropy of attention (nats)")
    found = exactness(pj.rotary.Plain(), head_dim=8, powers=range(4, 8), samples=2)
    axes = plot_exactness(found)
    np.testing.assert_array_equal(axes.get_lines()[2].get_ydata(), found.exact)
    assert axes.texts[0].xy == (found.positions[0], np.pi)
    assert axes.xaxis.get_transform().base == 2
    assert axes.get_ylim()[1] == 20
    check_drawn(axes, "position", "largest error of an angle (radians)")


def test_drawing_into_given_axes():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot_decay(np.arange(2), {"a": np.ones(2)}, axes) is axes
