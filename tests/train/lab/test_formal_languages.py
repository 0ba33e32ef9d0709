"""Formal languages on strings and grids: answers against plain Python, positions, and a whole run."""

import itertools
import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from refusals import refused

from posjax.training_positions import Randomised
from train.config import SchemeConfig, load, parse
from train.lab.formal_languages import LanguagesConfig, run
from train.lab.formal_languages.generators import COLOUR_COUNT, DIRECTIONS, FIRST, LANGUAGES, PAD, SLOT, VOCABULARY_SIZE
from train.lab.formal_languages.trainer import build, check_fit, positions_of

CONFIG = Path(__file__).parents[3] / "configs" / "languages.yaml"
KEY = jax.random.key(0)


def walk(steps):
    place = 0
    for step in steps:
        place = (place + step - 1) % 5
    return [place]


LANGUAGES_OF_STRINGS = {
    "even pairs": (2, lambda s: [sum(a != b for a, b in itertools.pairwise(s)) % 2]),
    "cycle navigation": (3, walk),
    "bucket sort": (5, sorted),
}
"""The number of symbols of every language, and the answer to a string."""


def decode(example, row):
    """The symbols and the answer of one row; the slots hold the answer and padding follows."""
    tokens, asked = (np.asarray(x[row]) for x in (example.tokens, example.weights))
    assert (tokens[asked] == SLOT).all()
    assert (tokens < VOCABULARY_SIZE).all()
    used = np.flatnonzero(tokens != PAD).max() + 1
    assert asked[:used].nonzero()[0].tolist() == list(range(used - asked.sum(), used))
    symbols, answers = tokens[: used - asked.sum()] - FIRST, np.asarray(example.targets[row])[asked] - FIRST
    return symbols.tolist(), answers.tolist()


@pytest.mark.lab
@pytest.mark.parametrize("shorter", [False, True])
@pytest.mark.parametrize("name", LANGUAGES_OF_STRINGS)
def test_answers_on_strings(name, shorter):
    kinds, right = LANGUAGES_OF_STRINGS[name]
    language = LANGUAGES[name]
    batch = language.sample(KEY, 64, 8, shorter)
    chex.assert_shape([batch.tokens, batch.targets, batch.weights], (64, language.size(8)))
    rows = [decode(batch, row) for row in range(64)]
    assert all(answer == right(symbols) for symbols, answer in rows)
    assert {answer for _, answers in rows for answer in answers} == set(range(language.classes))
    assert {symbol for symbols, _ in rows for symbol in symbols} == set(range(kinds))
    assert {len(symbols) for symbols, _ in rows} == (set(range(1, 9)) if shorter else {8})


@pytest.mark.lab
@pytest.mark.parametrize("shorter", [False, True])
def test_answers_on_grids(shorter):
    batch = LANGUAGES["grid neighbours"].sample(KEY, 64, 4, shorter)
    chex.assert_shape(batch.grid, (64, 17, 2))
    sides, colours = set(), set()
    for tokens, targets, asked, grid in zip(*map(np.asarray, batch), strict=True):
        cells = {tuple(at): token for at, token in zip(grid[1:], tokens[1:], strict=True) if token != PAD}
        height, width = map(max, zip(*cells, strict=True))
        assert sorted(cells) == [(r, c) for r in range(1, height + 1) for c in range(1, width + 1)] == list(cells)
        rows, columns = DIRECTIONS[tokens[0] - FIRST - COLOUR_COUNT]
        expected = [cells.get((r + rows, c + columns), 0) for r, c in cells]
        assert targets[1 : len(cells) + 1].tolist() == expected
        assert ((targets > 0) == asked).all()
        sides.add((height, width))
        colours |= set(cells.values())
    assert colours == set(range(FIRST, FIRST + COLOUR_COUNT))
    assert max(map(max, sides)) == 4
    assert (len(sides) == 9) if shorter else (sides == {(4, 2), (4, 3), (4, 4), (3, 4), (2, 4)})


@pytest.mark.lab
def test_short_strings_get_ids_of_the_whole_range():
    """A string of n symbols gets a uniform random subset of n + 1 ids, independent of the size of the buffer."""
    batch = LANGUAGES["even pairs"].sample(KEY, 4000, 7, True)
    ids = np.asarray(positions_of(Randomised(40), KEY, batch, True)["positions"])
    used = np.asarray((batch.tokens != PAD).sum(1))
    for count in (2, 5, 8):
        rows = ids[used == count][:, :count]
        assert (np.diff(rows, axis=1) > 0).all()
        mean = np.arange(1, count + 1) * 41 / (count + 1) - 1
        np.testing.assert_allclose(rows.mean(0), mean, atol=4 * 12 / len(rows) ** 0.5)
    tested = positions_of(Randomised(40), KEY, batch, False)["positions"]
    np.testing.assert_array_equal(tested, Randomised(40).evaluate(8).positions)


@pytest.mark.lab
def test_grids_have_two_axes_or_three():
    config = LanguagesConfig(grid_schemes=(SchemeConfig("axial"),), schemes=(SchemeConfig("rope"),))
    batch = LANGUAGES["grid neighbours"].sample(KEY, 2, 3)
    placed = {}
    for entry in (SchemeConfig("axial"), SchemeConfig("mrope", options={"sections": (2, 3, 3)}), SchemeConfig("rope")):
        _, rule = build(entry, config)
        placed[entry.name] = positions_of(rule, KEY, batch, True)
    assert placed["rope"] == {}
    np.testing.assert_array_equal(placed["axial"]["coordinates"], batch.grid)
    time, *grid = np.moveaxis(np.asarray(placed["mrope"]["coordinates"]), -1, 0)
    np.testing.assert_array_equal(np.stack(grid, -1), batch.grid)
    np.testing.assert_array_equal(time, (np.asarray(batch.tokens) != PAD) & (np.arange(10) > 0))


def test_a_run_learns_and_reports(tmp_path, capsys):
    sizes = {"train_length": 3, "test_lengths": [3, 5], "num_layers": 1, "model_dim": 32, "num_heads": 2, "batch": 16}
    values = {"languages": ["bucket sort"], "schemes": [{"name": "sinusoidal", "label": "waves"}], **sizes}
    rows = run(parse(values | {"steps": 100, "learning_rate": 2e-2, "output": str(tmp_path)}, LanguagesConfig))
    assert [(row["label"], row["length"]) for row in rows] == [("waves", 3), ("waves", 5)]
    assert rows[0]["accuracy"] > 0.75, "guessing gets a fifth of it"
    assert 0.2 < rows[1]["accuracy"] < rows[0]["accuracy"]
    assert f"{100 * rows[0]['accuracy']:.1f}" in capsys.readouterr().out
    saved = [json.loads(line) for line in (tmp_path / "languages" / "results.jsonl").read_text().splitlines()]
    assert saved == rows
    assert (tmp_path / "languages" / "figure.png").read_bytes().startswith(b"\x89PNG")


def read(**values):
    return parse({"schemes": ["rope"], "grid_schemes": ["axial"]} | values, LanguagesConfig)


def few_ids():
    drawn = {"name": "rope", "training_positions": {"name": "randomised", "max_length": 32}}
    run(read(languages=["even pairs"], schemes=[drawn], test_lengths=[10, 40]))


REFUSED = [
    ("languages", lambda: read(languages=["even pair"])),
    ("languages", lambda: read(languages=[])),
    ("schemes", lambda: read(languages=["even pairs"], schemes=[])),
    ("schemes", lambda: read(schemes=["rope", "rope"])),
    ("extension", lambda: read(schemes=[{"name": "rope", "extend": {"remap": {"name": "rerope"}}}])),
    ("steps", lambda: read(steps=0)),
    ("seed", lambda: read(seed=-1)),
    ("test_lengths", lambda: read(test_lengths=[])),
    ("axis", lambda: check_fit(LANGUAGES["even pairs"], SchemeConfig("axial"), read())),
    ("max_length=32", few_ids),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[name for name, _ in REFUSED])
def test_mistakes_are_refused_before_anything_is_trained(name, call):
    refused(name, call)


@pytest.mark.lab
def test_the_config_of_the_checkout():
    """One language of strings and one of grids; a scheme fits all of a kind or none."""
    config = load(CONFIG, ["num_layers=1"], LanguagesConfig)  # all layers are alike
    for language in {LANGUAGES[name].level == "grid": LANGUAGES[name] for name in config.languages}.values():
        for entry in config.entries(language):
            check_fit(language, entry, config)
