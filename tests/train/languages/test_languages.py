"""Formal languages on strings and grids: answers against plain Python, positions, and a whole run."""

import itertools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.training_positions import Randomised
from train.config import SchemeConfig, load, parse
from train.languages import LanguagesConfig, run
from train.languages.generators import COLOUR_COUNT, DIRECTIONS, FIRST, LANGUAGES, PAD, SLOT, VOCABULARY_SIZE
from train.languages.trainer import build, check_fit, positions_of

CONFIG = Path(__file__).parents[3] / "configs" / "languages.yaml"
KEY = jax.random.key(0)
STRINGS = [name for name, language in LANGUAGES.items() if language.level != "grid"]


def walk(steps):
    place = 0
    for step in steps:
        place = (place + step - 1) % 5
    return [place]


def hidden(symbols):
    place, half = symbols.index(2), len(symbols) // 2
    assert all(a == b or 2 in (a, b) for a, b in zip(symbols, symbols[half:], strict=False))
    return [symbols[(place + half) % len(symbols)]]


ANSWERS = {
    "even pairs": lambda s: [sum(a != b for a, b in itertools.pairwise(s)) % 2],
    "parity": lambda s: [s.count(1) % 2],
    "cycle navigation": walk,
    "reverse string": lambda s: s[::-1],
    "bucket sort": sorted,
    "missing duplicate": hidden,
}

SYMBOLS = {
    "even pairs": 2,
    "parity": 2,
    "cycle navigation": 3,
    "reverse string": 2,
    "bucket sort": 5,
    "missing duplicate": 3,
}
"""How many kinds of symbols the strings have."""


def decode(example, row):
    """The symbols and the answer of one row; the slots hold the answer and padding follows."""
    tokens, asked = (np.asarray(x[row]) for x in (example.tokens, example.weights))
    assert (tokens[asked] == SLOT).all()
    assert (tokens < VOCABULARY_SIZE).all()
    used = np.flatnonzero(tokens != PAD).max() + 1
    assert asked[:used].nonzero()[0].tolist() == list(range(used - asked.sum(), used))
    symbols, answers = tokens[: used - asked.sum()] - FIRST, np.asarray(example.targets[row])[asked] - FIRST
    return symbols.tolist(), answers.tolist()


@pytest.mark.parametrize("shorter", [False, True])
@pytest.mark.parametrize("name", STRINGS)
def test_answers_on_strings(name, shorter):
    language = LANGUAGES[name]
    batch = language.sample(KEY, 64, 8, shorter)
    chex.assert_shape([batch.tokens, batch.targets, batch.weights], (64, language.size(8)))
    chex.assert_type([batch.tokens, batch.targets], jnp.int32)
    chex.assert_trees_all_equal(batch, language.sample(KEY, 64, 8, shorter))
    rows = [decode(batch, row) for row in range(64)]
    assert all(answer == ANSWERS[name](symbols) for symbols, answer in rows)
    assert {answer for _, answers in rows for answer in answers} == set(range(language.classes))
    assert {symbol for symbols, _ in rows for symbol in symbols} == set(range(SYMBOLS[name]))
    even = name == "missing duplicate"
    lengths = set(range(2 if even else 1, 9, 2 if even else 1)) if shorter else {8}
    assert {len(symbols) for symbols, _ in rows} == lengths


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
    with pytest.raises(ValueError, match="strings have one axis"):
        check_fit(LANGUAGES["even pairs"], SchemeConfig("axial"), config)


def test_a_run_learns_and_reports(tmp_path, capsys):
    sizes = {"train_length": 3, "test_lengths": [3, 5], "num_layers": 1, "model_dim": 32, "num_heads": 2}
    values = {"languages": ["reverse string"], "schemes": [{"name": "sinusoidal", "label": "waves"}], **sizes}
    rows = run(parse(values | {"steps": 150, "learning_rate": 2e-2, "output": str(tmp_path)}, LanguagesConfig))
    assert [(row["label"], row["length"]) for row in rows] == [("waves", 3), ("waves", 5)]
    assert rows[0]["accuracy"] > 0.75, "guessing gets half of it"
    assert 0.2 < rows[1]["accuracy"] < rows[0]["accuracy"]
    output = capsys.readouterr().out
    assert "reverse string (DCF): accuracy in %, guessing 50, trained up to length 3" in output
    assert f"{100 * rows[0]['accuracy']:.1f}" in output
    saved = [json.loads(line) for line in (tmp_path / "languages" / "results.jsonl").read_text().splitlines()]
    assert saved == rows
    assert (tmp_path / "languages" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"languages": ["even pair"]}, "did you mean 'even pairs'"),
        ({"languages": ["parity"], "schemes": []}, "no scheme for 'parity'"),
        ({"steps": 0}, "steps must be positive"),
        ({"test_lengths": []}, "test_lengths must all be positive"),
    ],
)
def test_mistakes_in_a_config(values, message):
    with pytest.raises(ValueError, match=message):
        parse({"schemes": ["rope"], "grid_schemes": ["axial"]} | values, LanguagesConfig)


def test_too_few_ids_are_refused_before_anything_is_trained():
    entry = {"name": "rope", "training_positions": {"name": "randomised", "max_length": 32}}
    config = parse({"languages": ["parity"], "schemes": [entry], "test_lengths": [10, 40]}, LanguagesConfig)
    with pytest.raises(ValueError, match="length 41 is above max_length=32"):
        run(config)


def test_the_config_of_the_checkout():
    config = load(CONFIG, ["num_layers=1"], LanguagesConfig)  # all layers are alike
    for name in config.languages:
        for entry in config.entries(LANGUAGES[name]):
            check_fit(LANGUAGES[name], entry, config)
    assert sum(LANGUAGES[name].level != "grid" for name in config.languages) >= 3
