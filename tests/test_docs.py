"""The documentation: every method has a page, the pages agree with the library, and the examples run."""

import functools
import importlib
import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import posjax as pj
from posjax.nn.huggingface import FAMILIES
from posjax.scheme.registry import SLOTS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
docstrings, formulas, methods, pages, hooks, figures, rooms = map(
    importlib.import_module, ("docstrings", "formulas", "methods", "pages", "hooks", "figures", "rooms")
)
sys.path.pop(0)
PAGES = {method.path: method for method in methods.methods()}
overview = functools.cache(pages.overview)


def test_every_preset_and_every_name_of_a_slot_has_a_page():
    assert [name for name in pj.scheme_names() if f"methods/{name}" not in PAGES] == []
    for slot, names in SLOTS.items():
        for name, kind in names.items():
            page = methods.page_of(slot, name)
            assert kind in methods.documents(page), (slot, name)


def test_every_page_is_in_the_menu_once():
    text = str(hooks.navigation())
    assert [path for path in PAGES if text.count(f"'{path}.md'") != 1] == []


def test_pages_are_complete_and_their_examples_are_the_schemes_of_the_figures():
    for path, method in PAGES.items():
        names = {}
        exec(re.search(r"```python\n(.*?)```", pages.usage(method), re.S)[1], names)
        assert names["scheme"] == method.scheme, path
        text = "\n\n".join([pages.lead(method), pages.facts(method), pages.definitions(method), pages.options(method)])
        assert all(f"\n| {name} | " in text for name in ("source", "touches", "cache", "direction")), path
        assert "``" not in re.sub(r"^```(text)?$", "", text, flags=re.M), path
        assert not re.search(r":\w+:`", text), path


@pytest.mark.parametrize("path", ["methods/nope", "methods/rerope", "rules/yarn"])
def test_a_page_shows_its_figure_and_every_section(path):
    text = pages.page(PAGES[path], "A caption.")
    assert f"]({path.split('/')[1]}.svg)\n\n*A caption.*" in text
    wanted = ["Measured"] * (path != "rules/yarn") + ["Definition"] * (path != "methods/nope")
    assert re.findall(r"^## (.*)$", text, re.M) == [*wanted, "Options", "Composes with", "Use"]


def mean_perplexity(label, length):
    rows = [json.loads(line) for line in (ROOT / "docs" / "zoo.jsonl").read_text().splitlines()]
    seeds = [row for row in rows if (row["label"], row["length"], row.get("trial")) == (label, length, None)]
    return sum(math.exp(row["window_nll"]) for row in seeds) / len(seeds)


@pytest.mark.parametrize(
    ("path", "label"), [("methods/t5", "t5"), ("methods/streaming", "rope + StreamingLLM"), ("methods/rope", "rope")]
)
def test_a_page_and_the_overview_show_what_was_measured(path, label):
    (line,) = (line for line in pages.measurements(PAGES[path]).splitlines() if line.startswith(f"| {label} |"))
    assert line.endswith(f" | {mean_perplexity(label, 2048):.2f} |")
    (row,) = (line for line in overview().splitlines() if f"](../{path}.md)" in line)
    assert f"{mean_perplexity(label, 2048):.2f} |" in row


def test_the_overview_has_every_method_once_with_what_it_can_be_filtered_by():
    lines = [line for line in overview().splitlines() if line.startswith("| ")]
    head, _, *rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
    filters = re.search('data-filters="(.*)" markdown>', overview())[1].split(", ")
    found = {row[0].split("../")[1].split(".md")[0]: [row[head.index(name)] for name in filters] for row in rows}
    assert filters == ["slot", "training", "cache", "TPU", "GPU"]
    assert len(found) == len(rows) == len(PAGES)
    assert found["methods/alibi"] == ["Biases", "yes", "rotated", "kernel", "kernel"]
    assert found["methods/streaming"] == ["Distances remapped", "no", "raw, ring", "kernel", "kernel"]
    assert found["rules/yarn"] == ["Frequency rules", "fine-tuning", "rotated", "kernel", "kernel"]
    linear = "linear in the length"
    assert found["methods/linear-elu"] == ["Linear attention", "yes", "state", linear, linear]


def test_every_option_is_described():
    rows = [(path, row) for path, method in PAGES.items() for row in pages.options(method).splitlines()[2:]]
    assert len(rows) > len(PAGES)
    missing = [f"{path}: {row.split('`')[1]}" for path, row in rows if row.endswith("|  |")]
    assert not missing, missing


def test_formulas_become_latex_and_names_do_not():
    page = "<p><code>|i - j| &lt;= theta_t</code> <code>rope</code></p><pre><code>r = i - j</code></pre>"
    found = formulas.typeset(page, lambda latex, display: f"[{latex}|{display}]")
    assert found == r"<p>[|i-j|\le \theta _{t}|False] <code>rope</code></p><pre><code>r = i - j</code></pre>"
    assert formulas.latex("(i - alpha) / (1 - alpha)").replace(" ", "") == r"\frac{i-\alpha}{1-\alpha}"


def test_the_module_pages_name_what_is_public():
    text = hooks.api("bias")
    for name in pj.bias.__all__:
        assert f"## {name}\n" in text, name


@pytest.mark.parametrize("name", ["index.md", "decoding.md"])
def test_the_examples_of_the_written_pages_run(name):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.S):
        exec(compile(block, name, "exec"), names)
    assert jnp.isfinite(names["logits" if name == "decoding.md" else "out"]).all()


@pytest.fixture
def names_of_slots(monkeypatch):
    """Undoes what a test registers."""
    for slot, names in SLOTS.items():
        monkeypatch.setitem(SLOTS, slot, dict(names))


def test_the_examples_of_own_methods_run(names_of_slots):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-methods.md").read_text(encoding="utf-8"), re.S):
        exec(compile(block, "own-methods.md", "exec", dont_inherit=True), names)
        slopes = jax.tree.leaves(names.get("gradient", 1.0))
        assert all(jnp.isfinite(g).all() and jnp.abs(g).max() > 0 for g in slopes)
        assert jnp.isfinite(names.get("out", 0.0)).all()
    assert {"recency", "strided", "wavelengths", "log-rotary"} <= set().union(*SLOTS.values())


def test_the_table_of_released_models_has_every_family():
    families = (ROOT / "docs/released.md").read_text(encoding="utf-8").partition("\n## Families\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", families, re.M) == ["model_type", *sorted(FAMILIES)]


def test_the_map_of_rooms_has_the_floors_in_order():
    """The floors of the map of packages ("rooms"). Rooms that import each other are an error."""
    order = {"posjax": ("positions", "rotary", "coca", "attention", "scheme", "nn", "diagnostics"),
             "train": ("runtime", "config", "data", "model", "loop", "evaluate", "compare", "lab", "cli")}  # fmt: skip
    for package, wanted in order.items():
        levels = rooms.floors(rooms.imports(package))
        floor = {room: n for n, level in enumerate(levels) for room in level}
        assert sorted(wanted, key=floor.get) == list(wanted), levels
        assert len({floor[room] for room in wanted}) == len(wanted)
    assert [room for room, below in rooms.imports("train").items() if "lab" in below] == ["cli"]
    with pytest.raises(ValueError, match=r"these rooms import each other: \['a', 'b'\]"):
        rooms.floors({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset()})
