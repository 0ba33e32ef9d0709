"""The page of a report, made from rows of numbers alone: its tables, figures and notes."""

import base64
import html
import io
import re
import struct

import pytest
from report_rows import task, text
from rich.console import Console

from train import report

LENGTHS = (32, 64, 256)


def rows_of(label, windows, **about):
    """A scheme with every kind of numbers; of the last 32 tokens too, whose perplexity is 0.5 more."""
    training = {"training": {"tokens": [1024, 2048], "held_out_loss": [3.0, 2.0]}, "updates_to_loss": 6}
    more = {"sliding_tokens": 96, "sliding_perplexity": 3.25, "stop_loss": 2.0, "updates": 9}
    places = {"window_tokens": 2**16, "position_ends": [1, 2, 4], "position_nll": [2.0, None, 1.0]}
    trained = training if "base" not in about else {"training": None, "updates_to_loss": 6}
    return text(label, windows, lengths=LENGTHS, **more, **places, **trained, **about)


ROWS = [
    *rows_of("rope <b>", (5.0, 9.25, 31.0)),
    *rows_of("alibi", (5.1, 4.75, 123456.0)),
    *rows_of("rope + NTK", (5.0, 5.25, 6.0), base="rope <b>"),
    *text("learned", (5.2, None, None), lengths=LENGTHS),
    *task("copy", "alibi", (1.0, 0.5, 0.25), lengths=LENGTHS, chance=0.125, cases=20),
    *task("copy", "rope <b>", (0.75, 0.25), lengths=LENGTHS, chance=0.125, cases=20),
    *(
        row
        for depth, share in ((0.0, 0.1), (0.5, 0.2), (1.0, 0.9))
        for row in task("needle_single", "alibi", (share,), lengths=(256,), depth=depth)
    ),
]
ABOUT = report.About(
    title="Beyond & above 32",
    text="Text of <tests>",
    model="Decoder of 2 layers",
    config="name: quickstart\ntext: '<script>alert(1)</script>'\n",
    versions={"jax": "0.10.2", "cpu": "Some <CPU>"},
)


def found(pattern, page):
    return [html.unescape(each) for each in re.findall(pattern, page, re.DOTALL)]


def tables_of(page):
    """Every table of a page, as rows of cells."""
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    rows = (re.findall(r"<tr>.*?</tr>", table, re.DOTALL) for table in tables)
    return [[found(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in each] for each in rows]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    report.write(directory, ROWS, ABOUT)
    return directory


@pytest.fixture(scope="module")
def page(written):
    return (written / "index.html").read_text(encoding="utf-8")


def test_the_page_carries_every_figure_and_loads_nothing(page, written):
    names = ["figure.png", "training.png", "reached.png", "positions.png", "tasks.png", "depths.png"]
    assert sorted(path.name for path in written.iterdir()) == sorted([*names, "index.html"]) == sorted(report.FILES)
    figures = [(written / name).read_bytes() for name in names]
    loads = found(r"(?:src|href|srcset|data)=\"(.*?)\"", page)
    assert [base64.b64decode(data.removeprefix("data:image/png;base64,")) for data in loads] == figures
    assert struct.unpack(">8sII", figures[0][:8] + figures[0][16:24])[:2] == (b"\x89PNG\r\n\x1a\n", 1800)
    assert not found(r"<(script|link|iframe|object)\b", page)


def test_the_page_has_every_number(page):
    window, last, sliding, costs, needles, copied, *_ = tables_of(page)
    assert window == [
        ["scheme", "32 (1x)", "64 (2x)", "256 (8x)"],
        ["rope <b>", "5.00", "9.25", "31.00"],
        ["alibi", "5.10", "4.75", "1.2e+05"],
        ["rope + NTK", "5.00", "5.25", "6.00"],
        ["learned", "5.20", "-", "-"],
    ]
    assert last[1] == ["rope <b>", "5.50", "9.75", "31.50"]
    assert sliding[1] == ["rope <b>", "3.25", "3.25", "3.25"]
    assert costs[1:] == [[name, "30,000", "700"] for name in ("rope <b>", "alibi", "learned")]  # what was trained
    assert copied[1:] == [["alibi", "100.0", "50.0", "25.0"], ["rope <b>", "75.0", "25.0", "-"]]
    assert needles == [["scheme", "256 (8x)"], ["alibi", "40.0"]]
    for part in ("65,536", "2,048", "96", "20 cases", "12.5", "3 depths"):
        assert part in "".join(found(r"<h2>(.*?)</h2>", page))


def test_the_page_has_config_versions_and_what_was_not_measured(page):
    assert found(r"<pre[^>]*>(.*?)</pre>", page) == [ABOUT.config]
    assert tables_of(page)[-1] == [["part", "version"], ["jax", "0.10.2"], ["cpu", "Some <CPU>"]]
    assert found(r"<h1>(.*?)</h1>", page) == ["Beyond & above 32"]
    assert "learned at 64, 256: no memory" in found(r"<li>(.*?)</li>", page)


def test_pictures_without_numbers_are_left_out_and_old_ones_are_deleted(tmp_path):
    for name in report.FILES:
        (tmp_path / name).write_bytes(b"old")
    report.write(tmp_path, text("rope", (5.0, 6.0)), ABOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "index.html"]
    assert (tmp_path / "figure.png").read_bytes() != b"old"


def test_the_terminal_shows_every_table_and_note():
    console = Console(file=io.StringIO(), width=120)
    report.show([*ROWS, *text("[red]", (5.0,))], console)
    shown = console.file.getvalue()
    for expected in ("rope + NTK", "9.25", "last 32 tokens", "30,000", "no memory", "[red]", "1.2e+05"):
        assert expected in shown
