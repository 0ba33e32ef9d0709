"""Rules with several axes, and the coordinates of text and images."""

from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import cos_sin
from rotations import powers, turn

from posjax.coca import Coca
from posjax.positions import Range
from posjax.rotary import (
    AXIAL_LAYOUTS,
    Axial,
    DynamicNTK,
    MRoPE,
    Plain,
    RoPETie,
    Rotary,
    YaRN,
    grid_coordinates,
    mrope_positions,
    patch_centres,
    tie_positions,
)

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
ONE_D = [
    MRoPE(sections=(2, 3, 3)),
    MRoPE(sections=(3, 3, 2), layout="interleaved", base=5e5),
    RoPETie(rule=YaRN(4.0, 8)),
]
ONE_D = [*ONE_D, RoPETie(num_axes=3), RoPETie(partial_rotary_factor=0.5)]


@pytest.mark.parametrize("name", AXIAL_LAYOUTS)
def test_public_layouts_equal_their_closed_forms(name):
    slot = AXIAL_LAYOUTS[name]
    coordinates = patch_centres(H, W) if name == "dinov3" else GRID
    angles = np.concatenate(CLOSED_FORMS[name], axis=1)[:, None]
    np.testing.assert_allclose(slot.query({}, X, coordinates, head_dim=D), turn(X, angles, slot.pairing), atol=2e-6)


@pytest.mark.parametrize(("name", "place"), [("rope-vit", 0), ("llama4-vision", -1), ("pixtral", 0), ("dinov3", 0)])
def test_a_class_token_is_not_rotated(name, place):
    table = AXIAL_LAYOUTS[name].table({}, np.full((1, 2), place), head_dim=D)
    np.testing.assert_array_equal(np.concatenate(table), np.repeat([[1.0], [0.0]], D // 2, axis=1))


def test_sections_by_hand():
    assert MRoPE().pair_axes(128).tolist() == [0] * 16 + [1] * 24 + [2] * 24
    interleaved = MRoPE(sections=(24, 20, 20), layout="interleaved").pair_axes(128)
    assert interleaved.tolist() == [0, 1, 2] * 20 + [0] * 4
    assert RoPETie().pair_axes(8).tolist() == [0, 1, 0, 1]
    assert Axial(order=(1, 0)).pair_axes(8).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("rule", ONE_D, ids=lambda rule: f"{type(rule).__name__}-{rule.num_axes}")
def test_text_is_one_dimensional_rope_bit_for_bit(rule):
    plain = rule.rule or Plain(rule.base, partial_rotary_factor=rule.partial_rotary_factor)
    expected = plain.table(Range(7, 5), head_dim=D)
    ids = np.arange(7, 12)
    forms = [Range(7, 5), ids, np.stack([ids] * rule.num_axes, axis=1)]
    for form in forms:
        chex.assert_trees_all_equal(rule.table(form, head_dim=D), expected)
    batch = [ids[None], ids[None, :, None], np.stack([ids] * rule.num_axes, axis=1)[None]]
    for form in batch:
        chex.assert_trees_all_equal(rule.table(form, head_dim=D), jax.tree.map(lambda part: part[None], expected))


@pytest.mark.parametrize("rule", [Axial(order=(2, 0, 1)), *ONE_D[:3]], ids=lambda rule: type(rule).__name__)
def test_integer_coordinates_are_exact_and_each_pair_reads_its_axis(rule):
    d = 24 if isinstance(rule, Axial) else D
    rows = np.array([[3, 1_000_003, -(2**31)], [2**31 - 1, -5, 131_071]])[:, : rule.num_axes]
    table = jax.jit(lambda rows: rule.table(rows, head_dim=d))(rows)
    values, which = rule.inverse_frequencies(d), rule.pair_axes(d)
    for t, (value, axis) in enumerate(zip(values, which, strict=True)):
        cos, sin = cos_sin(rows[:, axis], [value])
        np.testing.assert_allclose(table.cos[:, t], rule.table_factor * cos[:, 0], atol=2e-6)
        np.testing.assert_allclose(table.sin[:, t], rule.table_factor * sin[:, 0], atol=2e-6)


@pytest.mark.parametrize("rule", [Axial(), RoPETie()], ids=lambda rule: type(rule).__name__)
def test_scores_depend_on_differences_of_coordinates_alone(rule):
    def scores(coordinates):
        phi, psi = Rotary(rule)(X, X, q_positions=coordinates, kv_positions=coordinates, head_dim=D)
        return jnp.einsum("btnd,bsnd->bnts", phi, psi)

    near = scores(GRID)
    np.testing.assert_allclose(scores(GRID + np.array([1_000_003, -5000])), near, atol=2e-5)
    assert np.abs(scores(GRID * np.array([1, 2])) - near).max() > 0.1


def test_real_coordinates_keep_their_fraction_far_away_and_have_gradients():
    rows = np.array([[65_536.5, 3.25], [-1_000_000.5, 0.0]])
    table = RoPETie().table(rows, head_dim=D)
    angles = rows[:, np.arange(D // 2) % 2] * ALL
    np.testing.assert_allclose(table.cos, np.cos(angles), atol=2e-6)
    slope = jax.grad(lambda p: RoPETie().table(p, head_dim=D).sin[0, 2])(jnp.asarray(rows[:1], jnp.float32))
    np.testing.assert_allclose(slope, [[ALL[2] * np.cos(angles[0, 2]), 0.0]], atol=1e-6)


def test_rules_of_one_axis_bring_their_scaling():
    rule = MRoPE(rule=YaRN(4.0, 8, base=1e6), sections=(2, 3, 3))
    assert (rule.base, rule.table_factor, rule.reads_length) == (1e6, YaRN(4.0, 8).table_factor, False)
    dynamic = MRoPE(rule=DynamicNTK(8), sections=(2, 3, 3))
    assert dynamic.reads_length
    coordinates = mrope_positions([2, (2, 3)]).coordinates
    table = dynamic.table(coordinates, head_dim=D, length=32)
    theta = dynamic.at_length(32, head_dim=D)[0].value
    np.testing.assert_allclose(table.sin, np.sin(coordinates[:, [0, 0, 1, 1, 1, 2, 2, 2]] * theta), atol=2e-6)
    with pytest.raises(ValueError, match="reads the current length"):
        dynamic.table(coordinates, head_dim=D)
    assert (
        rule.to_hf() | {"mrope_section": [2, 3, 3]} == rule.to_hf() == rule.rule.to_hf() | {"mrope_section": [2, 3, 3]}
    )
    assert MRoPE(sections=(3, 3, 2), layout="interleaved").to_hf()["mrope_interleaved"]


def test_other_feature_maps_take_the_rules_too():
    t = np.abs(X[:, :, :, : D // 2])
    psi = Coca("strict", RoPETie()).key({}, t, GRID, head_dim=D)
    angles = (GRID[:, np.arange(D // 2) % 2] * ALL)[:, None]
    np.testing.assert_allclose(psi, np.concatenate([t * np.cos(angles), t * np.sin(angles)], axis=-1), atol=2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axial(order=(0,)), "order must name two axes or more"),
        (lambda: Axial(order=(0, 2)), "order must name every axis once"),
        (lambda: Axial(split="both"), "split: unknown value"),
        (lambda: Axial(offset=0.5), "offset must be a whole number"),
        (lambda: Axial(head_dim=18), "divisible by 4"),
        (lambda: Axial(base=1.0), "base must be greater than 1"),
        (lambda: MRoPE(sections=(16, 24, 23), head_dim=128), "add up to 63 pairs, but a width of 128 has 64"),
        (lambda: MRoPE(sections=(16, 24, 24)).table(Range(0, 2), head_dim=64), "add up to"),
        (lambda: MRoPE(sections=(16, 24, 24)).rotary_dim(64), "add up to"),
        (lambda: MRoPE(sections=(8, 0)), "a section of sections must be positive"),
        (lambda: MRoPE(sections=(8,)), "sections must name two axes"),
        (lambda: MRoPE(sections=(2, 3, 3), layout="interleaved", head_dim=D), "cannot be interleaved"),
        (lambda: MRoPE(layout="striped"), "layout: unknown value"),
        (lambda: MRoPE(rule=RoPETie()), "rule must be a frequency rule of one axis"),
        (lambda: MRoPE(rule=Plain(5e5), base=1e6), "base=1000000.0 but the rule has base=500000.0"),
        (lambda: RoPETie(num_axes=1), "num_axes must be at least 2"),
        (lambda: RoPETie(base=0.5), "base must be greater than 1"),
        (lambda: RoPETie(partial_rotary_factor=1.5), "partial_rotary_factor must be in"),
        (lambda: RoPETie().to_hf(), "RoPETie has no form"),
        (lambda: RoPETie().table(np.zeros((1, 2, 3), int), head_dim=D), r"\[n, 2\] or \[batch, n, 2\], found shape"),
        (lambda: grid_coordinates(3, 0), "grid size must be positive"),
        (lambda: mrope_positions([2, 0]), "number of text tokens must be positive"),
        (lambda: mrope_positions([(2,)]), r"a number of tokens, \(h, w\)"),
        (lambda: tie_positions([(1, 2, 3, 4)], num_axes=4), r"a number of tokens, \(h, w\) or \(t, h, w\), found"),
        (lambda: tie_positions([(1, 2, 3)]), "a grid of 2 axes has 2 sizes"),
        (lambda: tie_positions([3], "even"), "spacing: unknown value"),
    ],
)
def test_bad_rules_and_spans_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_mrope_ids_by_hand():
    ids, end = mrope_positions([2, (2, 3), 1, (4, 1, 1), 1])
    chex.assert_type(ids, np.int32)
    image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    video = [[6, 6, 6], [7, 6, 6], [8, 6, 6], [9, 6, 6]]
    assert ids.tolist() == [[0, 0, 0], [1, 1, 1], *image, [5, 5, 5], *video, [10, 10, 10]]
    assert end == 11
    assert mrope_positions([3], start=end).coordinates[:, 0].tolist() == [11, 12, 13]


@pytest.mark.parametrize("spacing", ["tie", "equal-tokens", "centred"])
@pytest.mark.parametrize("sizes", [(3, 5), (4, 4), (1, 7), (2, 3, 4)])
def test_tie_treats_text_and_image_alike(spacing, sizes):
    """First cell - last text = next text - last cell; the next text at K, reached in equal steps."""
    cells = int(np.prod(sizes))
    ids, end = tie_positions([9, sizes, 2], spacing, num_axes=len(sizes), start=100)
    last, image, following = 108, ids[9 : 9 + cells], ids[9 + cells :]
    np.testing.assert_allclose(image[0] - last, following[0] - image[-1], atol=1e-4)
    text = np.prod(np.array(sizes) + 1) if spacing == "tie" else cells + 1
    np.testing.assert_array_equal(following, [[last + text] * len(sizes), [last + text + 1] * len(sizes)])
    assert end == last + text + 2
    steps = np.diff(image.reshape(*sizes, -1)[(0,) * (len(sizes) - 1)][:, -1])
    expected = {"tie": text // (sizes[-1] + 1), "equal-tokens": text / (sizes[-1] + 1), "centred": 1}[spacing]
    np.testing.assert_allclose(steps, expected, atol=1e-4)
    assert ids.dtype == (np.int32 if spacing == "tie" else np.float32)


def test_tie_of_the_article():
    """w x h patches: s = w + 1, t = h + 1, K = L + (w + 1)(h + 1); v2: beta_1 = (wh - h)/2, beta_2 = (wh - w)/2."""
    h, w, last = 3, 4, 9
    rows, columns = np.mgrid[1 : h + 1, 1 : w + 1].reshape(2, -1)
    expected = np.stack([last + rows * (w + 1), last + columns * (h + 1)], axis=1)
    np.testing.assert_array_equal(tie_positions([last + 1, (h, w)]).coordinates[last + 1 :], expected)
    assert tie_positions([last + 1, (h, w)]).end == last + (w + 1) * (h + 1)
    centred = np.stack([last + (w * h - h) / 2 + rows, last + (w * h - w) / 2 + columns], axis=1)
    np.testing.assert_array_equal(tie_positions([last + 1, (h, w)], "centred").coordinates[last + 1 :], centred)
    assert (centred % 1 == 0.5).any()


def test_text_after_text_and_images_first():
    for place in (mrope_positions, tie_positions):
        assert np.diff(place([3, 4]).coordinates[:, 0]).tolist() == [1] * 6
        ids = place([(2, 2), (2, 2), 1]).coordinates
        assert all((b >= a).all() for a, b in pairwise(ids[[0, 3, 4, 7, 8]]))
        assert ids[0].min() >= 0


@pytest.mark.parametrize("slot", [AXIAL_LAYOUTS["pixtral"], Rotary(RoPETie())], ids=["pixtral", "tie"])
def test_decoding_one_token_at_a_time(slot):
    whole = slot.key({}, X, GRID, head_dim=D)
    step = jax.jit(lambda x, place: slot.key({}, x, place, head_dim=D))
    for i in (0, 5, H * W - 1):
        chex.assert_trees_all_close(step(X[:, i : i + 1], GRID[i : i + 1]), whole[:, i : i + 1], atol=1e-6)
