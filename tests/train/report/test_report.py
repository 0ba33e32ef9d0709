"""The report, made from rows of numbers alone; tests parse its page and do not search its text."""

import base64
import io
import math
import struct
from html.parser import HTMLParser

import pytest
from rich.console import Console

from train import report
from train.report import figure, numbers, style

LENGTHS = (32, 64, 256)


def row(label, length, window, last, *, base=None, seed=0, error=None):
    trained = base is None
    return {
        "label": label, "base": base, "seed": seed, "length": length, "train_length": 32,
        "window_perplexity": window, "window_tokens": 4096 if window else 0,
        "window_nll": window and math.log(window),
        "last_perplexity": last, "last_tokens": 2048 if last else 0,
        "tokens_per_second": 50_000.0 if window else None, "error": error,
        "train_tokens_per_second": 30_000.0 if trained else None,
        "peak_memory_bytes": 700 * 2**20 if trained else None,
    }  # fmt: skip


def rows_of(label, windows, **options):
    return [row(label, length, value, value and value - 0.5, **options) for length, value in zip(LENGTHS, windows)]  # noqa: B905


ROWS = [
    *rows_of("rope <b>", (5.0, 9.25, 31.0)),
    *rows_of("alibi", (5.1, 4.75, 4.5)),
    *rows_of("rope + dynamic NTK", (5.0, 5.25, 6.0), base="rope <b>"),
    row("learned", 32, 5.2, 4.9),
    row("learned", 64, None, None, error="no row for length 64"),
    row("learned", 256, None, None, error="no row for length 256"),
]
ABOUT = report.About(
    title="Beyond & above 32",
    text="Text of <tests>",
    model="Decoder of 2 layers",
    config="name: quickstart\ntext: '<script>alert(1)</script>'\n",
    versions={"jax": "0.10.2", "cpu": "Some <CPU>"},
)


class Page(HTMLParser):
    """Collects tables as lists of rows, the text of <pre>, and every attribute that could load something."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.loads, self.text, self.open = [], [], [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        self.text[inside] = self.text.get(inside, "") + data
        if inside in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    report.write(directory, ROWS, ABOUT)
    return directory


@pytest.fixture(scope="module")
def page(written):
    return Page((written / "index.html").read_text(encoding="utf-8"))


def test_the_figure_is_a_png_of_the_promised_size(written):
    data = (written / "figure.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24])[0] == 1800


def test_the_page_carries_the_figure_and_loads_nothing(page, written):
    assert len(page.loads) == 1
    kind, _, data = page.loads[0].partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == (written / "figure.png").read_bytes()
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.open == []


def test_the_page_has_every_perplexity(page):
    window, last, costs, _ = page.tables
    assert window[0] == ["scheme", "32 (1x)", "64 (2x)", "256 (8x)"]
    assert window[1:] == [
        ["rope <b>", "5.00", "9.25", "31.00"],
        ["alibi", "5.10", "4.75", "4.50"],
        ["rope + dynamic NTK", "5.00", "5.25", "6.00"],
        ["learned", "5.20", "-", "-"],
    ]
    assert last[2] == ["alibi", "4.60", "4.25", "4.00"]
    assert costs == [
        ["scheme", "training tokens/s", "training peak MiB"],
        *([name, "30,000", "700"] for name in ("rope <b>", "alibi", "learned")),  # what was trained
    ]


def test_the_page_has_config_versions_and_the_number_of_tokens(page):
    assert page.text["pre"] == ABOUT.config
    assert page.tables[-1] == [["part", "version"], ["jax", "0.10.2"], ["cpu", "Some <CPU>"]]
    assert "4,096 tokens scored at each length" in page.text["h2"]
    assert "the same 2,048 at each length" in page.text["h2"]
    assert "Beyond & above 32" in page.text["h1"]


def test_what_was_not_measured_is_named_with_its_reason(page):
    assert page.text["li"].endswith("learned at 64, 256: no row for length 64")


def test_several_seeds_give_mean_and_standard_deviation():
    rows = [*rows_of("rope", (4.0, 8.0, 16.0)), *rows_of("rope", (6.0, 8.0, 18.0), seed=1)]
    window = report.tables(rows)[0]
    assert window.rows == (("rope", "5.00 ±1.41", "8.00 ±0.00", "17.00 ±1.41"),)
    assert "over 2 seeds" in report.render(rows, [], ABOUT)


def test_a_seed_without_a_number_leaves_no_mean():
    assert report.estimate([4.0, None]) is None
    assert report.estimate([4.0]) == report.Estimate(4.0)


def test_an_explosion_does_not_set_the_scale_and_is_named():
    rows = [*rows_of("alibi", (5.0, 4.75, 4.5)), *rows_of("sinusoidal", (5.0, 40.0, 2.5e6))]
    low, top = figure._limits(rows)
    assert low < 4.0 < 160 == top
    assert figure._clipped(rows) == ["Above the top of the figure: sinusoidal 2.5e+06 at 256."]
    assert figure.draw(rows, "Title", "Text.").startswith(b"\x89PNG")


def test_nothing_is_said_to_be_clipped_when_all_fits():
    assert figure._clipped(ROWS) == []


def test_an_extension_shares_the_colour_of_what_was_trained_and_is_dashed():
    styles = style.lines(ROWS)
    assert styles["rope + dynamic NTK"].colour == styles["rope <b>"].colour
    assert styles["rope + dynamic NTK"].dashes
    assert styles["rope <b>"].dashes is None
    assert len({styles[label].colour for label in ("rope <b>", "alibi", "learned")}) == 3


def test_many_schemes_keep_distinct_looks():
    rows = [line for index in range(20) for line in rows_of(f"scheme {index}", (5.0, 6.0, 7.0))]
    assert len(set(style.lines(rows).values())) == 20


def test_the_terminal_shows_every_table_and_note():
    console = Console(file=io.StringIO(), width=120)
    report.show([*ROWS, row("[red]", 32, 123456.0, 250.0)], console)
    text = console.file.getvalue()
    for expected in (
        "rope + dynamic NTK",
        "9.25",
        "last 32 tokens",
        "30,000",
        "no row for length 64",
        "[red]",
        "1.2e+05",
    ):
        assert expected in text


def sliding(rows):
    """The same rows with sliding windows, NLL by position, and losses during training."""
    training = {"tokens": [1024, 2048], "held_out_loss": [3.0, 2.0]}
    rows = [{**row, "training": None if row["base"] else training} for row in rows]
    more = {
        "window_tokens": 2**16,
        "sliding_tokens": 96,
        "position_ends": [1, 2, 4],
        "position_nll": [2.0, None, 1.0],
        "last_length": 16,
    }
    return [{**row, **more, "sliding_perplexity": row["window_perplexity"] and 3.25} for row in rows]


def task(name, label, length, accuracy, *, depth=None, seed=0, base=None, chance=None, error=None):
    about = {"label": label, "base": base, "seed": seed, "train_length": 32, "task": name, "length": length}
    return {**about, "depth": depth, "accuracy": accuracy, "chance": chance, "cases": 20, "error": error}


TASKS = [
    *(task("copy", "alibi", length, share, chance=0.125) for length, share in ((32, 1.0), (64, 0.5), (256, 0.25))),
    *(task("copy", "rope <b>", length, share, chance=0.125) for length, share in ((32, 0.75), (64, 0.25))),
    task("copy", "rope <b>", 256, None, chance=0.125, error="the logits are not finite"),
    *(task("needle_single", "alibi", 256, share, depth=depth) for depth, share in ((0.0, 0.1), (0.5, 0.2), (1.0, 0.9))),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    ending = {"stop_loss": 2.0, "updates": 9, "updates_to_loss": 6}
    report.write(directory, [{**row, **ending} for row in sliding(ROWS)] + TASKS, ABOUT)
    return directory


def test_the_page_carries_every_figure(whole):
    page = Page((whole / "index.html").read_text(encoding="utf-8"))
    names = ["figure.png", "training.png", "reached.png", "positions.png", "tasks.png", "depths.png"]
    assert sorted(path.name for path in whole.iterdir()) == sorted([*names, "index.html"]) == sorted(report.FILES)
    assert [base64.b64decode(data.partition(",")[2]) for data in page.loads] == [
        (whole / name).read_bytes() for name in names
    ]
    assert page.open == []


def test_the_loss_while_training_is_a_mean_over_seeds():
    both = ((0, [3.0, 2.0]), (1, [5.0, 2.5]))
    curves = {seed: {"tokens": [10, 20], "held_out_loss": losses} for seed, losses in both}
    rows = [{**row("rope", 32, 5.0, 4.0, seed=seed), "training": curve} for seed, curve in curves.items()]
    rows.append({**row("alibi", 32, 5.0, 4.0), "training": None})
    found = numbers.trainings(rows)
    assert list(found) == ["rope"]
    assert {tokens: value.mean for tokens, value in found["rope"].items()} == {10: 4.0, 20: 2.25}


def test_sliding_windows_get_a_panel_and_a_table(whole):
    page = Page((whole / "index.html").read_text(encoding="utf-8"))
    assert page.tables[2][1] == ["rope <b>", "3.25", "3.25", "3.25"]
    assert "sliding windows (the same 96 tokens at each length)" in page.text["h2"]
    assert "last 16 tokens" in page.text["h2"]
    assert struct.unpack(">II", (whole / "figure.png").read_bytes()[16:24])[0] == 1800


def test_tasks_have_tables_of_accuracy_over_all_depths(whole):
    page = Page((whole / "index.html").read_text(encoding="utf-8"))
    needles, copied = page.tables[4:6]  # in the order of the documentation
    assert copied[1:] == [["alibi", "100.0", "50.0", "25.0"], ["rope <b>", "75.0", "25.0", "-"]]
    assert needles == [["scheme", "256 (8x)"], ["alibi", "40.0"]]
    assert "Copy: right answers in % (20 cases at each length; a guess has 12.5)" in page.text["h2"]
    assert "Needle single: right answers in % (20 cases at each of 3 depths of each length)" in page.text["h2"]
    assert "rope <b>, copy at 256: the logits are not finite" in page.text["li"]


def test_pictures_without_numbers_are_left_out_and_old_ones_are_deleted(whole, tmp_path):
    for name in report.FILES:
        (tmp_path / name).write_bytes(b"old")
    report.write(tmp_path, ROWS + TASKS[:6], ABOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "index.html", "tasks.png"]
    assert (tmp_path / "figure.png").read_bytes() != b"old"


def test_accuracy_is_the_mean_over_depths_of_each_seed_and_then_over_seeds():
    rows = [
        task("copy", "rope", 64, share, depth=depth, seed=seed)
        for seed, shares in ((0, (0.0, 1.0)), (1, (0.5, 0.75)))
        for depth, share in zip((0.0, 1.0), shares, strict=True)
    ]
    (found,) = numbers.accuracies(rows, "rope").values()
    assert found == report.Estimate(0.5625, pytest.approx(0.125 / math.sqrt(2)))
    assert numbers.at_depth(rows, "rope") == {(0.0, 64): 0.25, (1.0, 64): 0.875}


def test_a_depth_without_a_number_leaves_no_mean():
    rows = [task("copy", "rope", 64, share, depth=depth) for depth, share in ((0.0, None), (1.0, 0.5))]
    assert numbers.accuracies(rows, "rope") == {}
    assert numbers.at_depth(rows, "rope") == {(1.0, 64): 0.5}


def test_positions_are_those_of_the_longest_length_that_has_numbers():
    rows = sliding(ROWS)
    rows[0] = {**rows[0], "position_nll": [9.0, 9.0, 9.0]}  # of length 32
    assert numbers.positions(rows, "rope <b>") == ((1, 2, 4), [report.Estimate(2.0), None, report.Estimate(1.0)])
    assert numbers.positions(ROWS, "alibi") == ((), [])


def test_positions_need_enough_windows_and_tokens():
    rows = [{**row, "window_tokens": 64 * row["length"], "position_ends": [1, 4, 12]} for row in sliding(ROWS)]
    measured = [{**row, "position_nll": [9.0, 2.0, 1.0]} for row in rows]  # parts of 1, 3 and 8 positions in 64 windows
    assert numbers.positions(measured, "alibi") == ((1, 4, 12), [None, None, report.Estimate(1.0)])
    assert numbers.positions([{**row, "position_ends": [1, 2, 4]} for row in measured], "alibi") == ((), [])
    longest = [{**row, "window_tokens": 31 * 256, "position_nll": [9.0, 9.0, row["length"]]} for row in measured]
    assert numbers.positions(longest, "alibi") == ((1, 4, 12), [None, report.Estimate(9.0), report.Estimate(64)])
