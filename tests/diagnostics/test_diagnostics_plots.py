"""Plots show the measured data, name their axes with units, and can be saved to a file."""

import io

import numpy as np
from matplotlib.figure import Figure

import posjax as pj
from posjax.diagnostics import Anomaly, Curve, exactness
from posjax.diagnostics.plots import plot_anomaly, plot_decay, plot_entropy, plot_exactness, plot_weights


def check_drawn(axes, x, y):
    assert (axes.get_xlabel(), axes.get_ylabel()) == (x, y)
    file = io.BytesIO()
    axes.figure.savefig(file, dpi=40)
    assert file.getvalue().startswith(b"\x89PNG")


def test_decay_has_a_line_for_each_label_and_one_at_zero_if_a_curve_falls_below_it():
    curves = {"a": np.array([1.0, -0.5, 0.2]), "b": np.array([1.0, 0.5, 0.2])}
    axes = plot_decay(np.arange(3), curves)
    assert [line.get_ydata().tolist() for line in axes.get_lines()[:2]] == [[1.0, -0.5, 0.2], [1.0, 0.5, 0.2]]
    assert list(axes.get_lines()[2].get_ydata()) == [0, 0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    check_drawn(axes, "distance (tokens)", "mean score, as a share of distance 0")
    given = Figure().subplots()
    alone = plot_decay(np.arange(2), {"a": np.array([1.0, 0])}, given)
    assert alone is given
    assert (len(alone.get_lines()), alone.get_legend()) == (1, None), "one curve needs no legend"


def test_weights_have_a_line_for_each_head_or_one_line_if_heads_agree():
    decays = np.exp(-np.arange(1, 9)[:, None] * np.array([3, 0, 1]))
    axes = plot_weights(Curve(np.array([3, 0, 1]), decays, np.log(decays)))
    assert len(axes.get_lines()) == 8
    np.testing.assert_allclose(axes.get_lines()[3].get_ydata(), np.sort(decays[3])[::-1])
    assert axes.get_xlim() == (0, 3)
    assert axes.get_legend().get_texts()[0].get_text() == "head 1"
    np.testing.assert_allclose(axes.get_ylim(), (1e-9, 2))
    check_drawn(axes, "distance (tokens)", "attention weight")
    axes = plot_weights(Curve(np.array([3, 0, 1]), decays, np.log(decays) + 2), logits=True)
    np.testing.assert_allclose([line.get_ydata().max() for line in axes.get_lines()], 0, atol=1e-7)
    check_drawn(axes, "distance (tokens)", "logit, relative to the highest")
    masked = np.broadcast_to(np.where(np.arange(40) < 10, 0.1, 0), (8, 40))
    axes = plot_weights(Curve(np.arange(40), masked, np.zeros((8, 40))))
    assert (len(axes.get_lines()), axes.get_legend()) == (1, None)
    assert np.isfinite(axes.get_lines()[0].get_ydata()).sum() == 10
    np.testing.assert_allclose(axes.get_ylim(), (0.05, 0.2))


def test_the_heat_map_has_a_row_for_each_layer_and_separates_planes_that_complete_no_turn():
    found = Anomaly(*np.random.default_rng(0).random((6, 3, 8)))
    axes = plot_anomaly(found, statistic="zone", turns=np.array([9, 4, 2, 1, 0.9, 0.5, 0.2, 0.1]))
    np.testing.assert_array_equal(axes.collections[0].get_array().reshape(3, 8), found.zone)
    assert axes.get_lines()[0].get_xdata()[0] == 3.5
    assert axes.collections[0].get_clim()[0] == 0
    assert (axes.get_xticks().tolist(), axes.get_yticks().tolist()) == ([*range(8)], [1, 2, 3])
    check_drawn(axes, "plane (fastest first)", "layer")
    for turns in (None, np.full(8, 2), np.full(8, 0.5)):
        assert not plot_anomaly(found, turns=turns).get_lines(), "no border between planes of one kind"


def test_entropy_is_drawn_with_its_bound_and_exactness_has_three_lines():
    axes = plot_entropy(np.array([4, 16]), {"rope": np.array([1.0, 2.0])})
    np.testing.assert_allclose([line.get_ydata() for line in axes.get_lines()], [np.log([4, 16]), [1.0, 2.0]])
    check_drawn(axes, "visible keys", "entropy of attention (nats)")
    found = exactness(pj.rotary.Plain(), head_dim=8, powers=range(4, 8), samples=2)
    axes = plot_exactness(found)
    lines = [line.get_ydata() for line in axes.get_lines()]
    np.testing.assert_array_equal(lines[:3], [found.bfloat16, found.float32, found.exact])
    check_drawn(axes, "position", "largest error of an angle (radians)")
