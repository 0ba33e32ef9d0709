"""Rules with several axes, and the coordinates of text and images: closed forms, and ids counted by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import cos_sin
from rotations import powers, turn

from posjax.positions import Range
from posjax.rotary import AXIAL_LAYOUTS, Axial, DynamicNTK, MRoPE, Plain, RoPETie, YaRN
from posjax.rotary.coordinates import grid_coordinates, mrope_positions, patch_centres, tie_positions

H, W, D = 3, 4, 16
GRID = grid_coordinates(H, W)
X = np.asarray(jax.random.normal(jax.random.key(0), (2, H * W, 2, D)))
ROW, COLUMN = (np.arange(H * W)[:, None] // W, np.arange(H * W)[:, None] % W)
QUARTER, ALL = powers(100.0, D // 2), powers(10_000.0, D)
CLOSED_FORMS = {
    "rope-vit": [COLUMN * QUARTER, ROW * QUARTER],
    "llama4-vision": [(COLUMN + 1) * powers(10_000.0, D // 2), (ROW + 1) * powers(10_000.0, D // 2)],
    "pixtral": [ROW * ALL[0::2], COLUMN * ALL[1::2]],
    "dinov3": [2 * np.pi * ((2 * place + 1) / size - 1) * QUARTER for place, size in ((ROW, H), (COLUMN, W))],
}
CLASS_TOKEN = {"llama4-vision": -1}


@pytest.mark.parametrize("name", AXIAL_LAYOUTS)
def test_public_layouts_equal_their_closed_forms(name):
    slot = AXIAL_LAYOUTS[name]
    coordinates = patch_centres(H, W) if name == "dinov3" else GRID
    angles = np.concatenate(CLOSED_FORMS[name], axis=1)[:, None]
    np.testing.assert_allclose(slot.query({}, X, coordinates, head_dim=D), turn(X, angles, slot.pairing), atol=2e-6)
    unturned = slot.query({}, X[:, :1], np.full((1, 2), CLASS_TOKEN.get(name, 0)), head_dim=D)
    np.testing.assert_array_equal(unturned, X[:, :1])


def test_sections_by_hand():
    assert MRoPE().pair_axes(128).tolist() == [0] * 16 + [1] * 24 + [2] * 24
    interleaved = MRoPE(sections=(24, 20, 20), layout="interleaved").pair_axes(128)
    assert interleaved.tolist() == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.parametrize(
    "rule", [MRoPE(sections=(3, 3, 2), layout="interleaved", base=5e5), RoPETie(rule=YaRN(4.0, 8)), RoPETie(num_axes=3)]
)
def test_text_is_one_dimensional_rope_bit_for_bit(rule):
    ids, axes = np.arange(7, 12), rule.num_axes
    expected = (rule.rule or Plain(rule.base)).table(Range(7, 5), head_dim=D)
    for form in (Range(7, 5), ids, np.stack([ids] * axes, axis=1)):
        chex.assert_trees_all_equal(rule.table(form, head_dim=D), expected)
    for form in (ids[None], ids[None, :, None], np.stack([ids] * axes, axis=1)[None]):
        chex.assert_trees_all_equal(rule.table(form, head_dim=D), jax.tree.map(lambda part: part[None], expected))


@pytest.mark.parametrize(
    ("rule", "size", "axes"),
    [
        (Axial(order=(2, 0, 1)), 12, [2, 2, 0, 0, 1, 1]),
        (MRoPE(sections=(2, 3, 3)), 16, [0, 0, 1, 1, 1, 2, 2, 2]),
        (RoPETie(), 8, [0, 1, 0, 1]),
    ],
)
def test_integer_coordinates_are_exact_and_each_pair_reads_its_axis(rule, size, axes):
    rows = np.array([[3, 1_000_003, -(2**31)], [2**31 - 1, -5, 131_071]])[:, : rule.num_axes]
    table = jax.jit(lambda rows: rule.table(rows, head_dim=size))(rows)
    for t, axis in enumerate(axes):
        cos, sin = cos_sin(rows[:, axis], rule.inverse_frequencies(size)[t : t + 1])
        np.testing.assert_allclose(table.cos[:, t], cos[:, 0], atol=2e-6)
        np.testing.assert_allclose(table.sin[:, t], sin[:, 0], atol=2e-6)


def test_real_coordinates_keep_their_fraction_far_away_and_have_gradients():
    rows = np.array([[65_536.5, 3.25], [-1_000_000.5, 0.0]])
    angles = rows[:, np.arange(D // 2) % 2] * ALL
    np.testing.assert_allclose(RoPETie().table(rows, head_dim=D).cos, np.cos(angles), atol=2e-6)
    slope = jax.grad(lambda p: RoPETie().table(p, head_dim=D).sin[0, 2])(jnp.asarray(rows[:1], jnp.float32))
    np.testing.assert_allclose(slope, [[ALL[2] * np.cos(angles[0, 2]), 0.0]], atol=1e-6)


def test_rules_of_one_axis_bring_their_scaling():
    rule = MRoPE(rule=YaRN(4.0, 8, base=1e6), sections=(2, 3, 3))
    assert (rule.base, rule.table_factor, rule.reads_length) == (1e6, YaRN(4.0, 8).table_factor, False)
    assert rule.to_hf() == rule.rule.to_hf() | {"mrope_section": [2, 3, 3]}
    assert MRoPE(sections=(3, 3, 2), layout="interleaved").to_hf()["mrope_interleaved"]
    coordinates = mrope_positions([2, (2, 3)]).coordinates
    table = MRoPE(rule=DynamicNTK(8), sections=(2, 3, 3)).table(coordinates, head_dim=D, length=32)
    theta = 1 / (10_000 * 4 ** (D / (D - 2))) ** (np.arange(D // 2) / (D // 2))
    np.testing.assert_allclose(table.sin, np.sin(coordinates[:, [0, 0, 1, 1, 1, 2, 2, 2]] * theta), atol=2e-6)


def test_cells_are_in_row_major_order_and_their_centres_fill_a_square():
    assert grid_coordinates(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_coordinates(2, 1, 2).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert patch_centres(2, 4)[3:5].tolist() == [[-0.5, 0.75], [0.5, -0.75]]


def test_mrope_ids_by_hand():
    ids, end = mrope_positions([2, (2, 3), 1, (4, 1, 1), 1])
    chex.assert_type(ids, np.int32)
    image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    video = [[6, 6, 6], [7, 6, 6], [8, 6, 6], [9, 6, 6]]
    assert ids.tolist() == [[0, 0, 0], [1, 1, 1], *image, [5, 5, 5], *video, [10, 10, 10]]
    assert end == 11
    assert mrope_positions([3], start=end).coordinates[:, 0].tolist() == [11, 12, 13]
    assert mrope_positions([], start=7).end == 7


@pytest.mark.parametrize("spacing", ["tie", "equal-tokens", "centred"])
def test_tie_ids_are_those_of_the_articles(spacing):
    """Steps down and across h rows and w columns: w + 1 and h + 1; (hw + 1) / (h + 1) and (hw + 1) / (w + 1); or 1."""
    h, w, last = 3, 4, 9
    rows, columns = np.mgrid[1 : h + 1, 1 : w + 1].reshape(2, -1)
    cells = {
        "tie": (rows * (w + 1), columns * (h + 1)),
        "equal-tokens": (rows * (h * w + 1) / (h + 1), columns * (h * w + 1) / (w + 1)),
        "centred": (rows + (w * h - h) / 2, columns + (w * h - w) / 2),
    }[spacing]
    ids, end = tie_positions([last + 1, (h, w), 2], spacing)
    text = last + (20 if spacing == "tie" else h * w + 1)
    np.testing.assert_allclose(ids[last + 1 : -2], last + np.stack(cells, axis=1), rtol=1e-7)
    assert ids[last].tolist() == [last] * 2
    assert ids[-2:].tolist() == [[text] * 2, [text + 1] * 2]
    assert (end, ids.dtype) == (text + 2, np.int32 if spacing == "tie" else np.float32)


@pytest.mark.parametrize(
    ("spacing", "places", "end"),
    [("tie", (5, 14, 23, 32), 33), ("equal-tokens", (5, 8, 11, 14), 15), ("centred", (5, 9, 10, 14), 15)],
)
def test_a_cube_of_two_cells_on_every_axis(spacing, places, end):
    """After text at 5: steps of 9 to 5 + 27; steps of 9/3 to 5 + 9; steps of 1 from 5 + 1 + (8 - 2)/2 to 5 + 9."""
    ids = tie_positions([1, (2, 2, 2), 1], spacing, num_axes=3, start=5)
    assert ids.coordinates[[0, 1, 8, 9]].tolist() == [[place] * 3 for place in places]
    assert ids.end == end
