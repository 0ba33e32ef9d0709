"""Plots show the measured data, name their axes with units, and can be saved to a file."""

import io

import numpy as np
import pytest

import posjax as pj
from posjax import masks
from posjax.diagnostics import (
    Anomaly,
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


def test_decay_has_a_line_for_each_label():
    curves = {"a": np.array([1.0, -0.5, 0.2]), "b": np.array([1.0, 0.5, 0.2])}
    axes = plot_decay(np.arange(3), curves)
    assert axes.get_lines()[1].get_ydata().tolist() == [1.0, 0.5, 0.2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    check_drawn(axes, "distance (tokens)", "mean score, as a share of distance 0")


def test_decay_has_a_line_at_zero_behind_curves_that_fall_below_it():
    *curves, zero = plot_decay(np.arange(2), {"a": np.array([1.0, -0.5])}).get_lines()
    assert len(curves) == 1
    assert list(zero.get_ydata()) == [0, 0]
    assert zero.get_zorder() == 0
    assert len(plot_decay(np.arange(2), {"a": np.array([1.0, 0.5])}).get_lines()) == 1


def test_weights_of_heads_that_differ_and_of_heads_that_do_not():
    alibi = weight_curve(pj.scheme("alibi"), np.arange(40), num_heads=8, head_dim=8)
    axes = plot_weights(alibi)
    assert len(axes.get_lines()) == 8
    axes.figure.draw_without_rendering()
    legend, whole = (part.get_window_extent() for part in (axes.get_legend(), axes))
    assert legend.x0 >= whole.x1, "eight names are beside the lines"
    assert abs((legend.y0 + legend.y1) - (whole.y0 + whole.y1)) < 2
    np.testing.assert_allclose(axes.get_lines()[3].get_ydata(), alibi.weights[3], rtol=1e-6)
    check_drawn(axes, "distance (tokens)", "attention weight")
    window = pj.scheme("nope", mask=masks.Window(10))
    axes = plot_weights(weight_curve(window, np.arange(40), num_heads=8, head_dim=8))
    assert len(axes.get_lines()) == 1
    assert np.isfinite(axes.get_lines()[0].get_ydata()).sum() == 10
    assert axes.get_xlim() == (0, 39)
    check_drawn(plot_weights(alibi, logits=True), "distance (tokens)", "logit, relative to the highest")


def test_the_heat_map_has_a_row_for_each_layer_and_separates_planes_that_complete_no_turn():
    found = Anomaly(*np.random.default_rng(0).random((6, 3, 8)))
    axes = plot_anomaly(found, statistic="zone", turns=np.array([9, 4, 2, 1, 0.9, 0.5, 0.2, 0.1]))
    np.testing.assert_array_equal(axes.collections[0].get_array().reshape(3, 8), found.zone)
    assert axes.get_lines()[0].get_xdata()[0] == 3.5
    check_drawn(axes, "plane (fastest first)", "layer")
    with pytest.raises(ValueError, match="pool the heads"):
        plot_anomaly(Anomaly(*np.zeros((6, 3, 2, 8))))
    with pytest.raises(ValueError, match="statistic"):
        plot_anomaly(found, statistic="zones")


def test_entropy_is_drawn_with_its_bound_and_exactness_has_three_lines():
    axes = plot_entropy(np.array([4, 16]), {"rope": np.array([1.0, 2.0])})
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), np.log([4, 16]))
    check_drawn(axes, "visible keys", "entropy of attention (nats)")
    found = exactness(pj.rotary.Plain(), head_dim=8, powers=range(4, 8), samples=2)
    axes = plot_exactness(found)
    np.testing.assert_array_equal(axes.get_lines()[2].get_ydata(), found.exact)
    check_drawn(axes, "position", "largest error of an angle (radians)")


def test_drawing_into_given_axes():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot_decay(np.arange(2), {"a": np.ones(2)}, axes) is axes
