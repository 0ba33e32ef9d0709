"""The documentation: every method has a page, the pages agree with the library, and the examples run."""

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
from posjax.scheme.registry import SLOTS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
docstrings, formulas, methods, pages, hooks, figures, rooms = map(
    importlib.import_module, ("docstrings", "formulas", "methods", "pages", "hooks", "figures", "rooms")
)
sys.path.pop(0)
PAGES = {method.path: method for method in methods.methods()}


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


@pytest.mark.parametrize(
    "path", ["methods/nope", "methods/rerope", "methods/gemma3", "rules/yarn", "methods/scale-yarn"]
)
def test_a_page_shows_its_figure_and_every_section(path):
    text = pages.page(PAGES[path], "A caption.")
    assert f"]({path.split('/')[1]}.svg)\n\n*A caption.*" in text
    wanted = ["Measured"] * (path in ("methods/rerope", "methods/nope"))
    wanted += ["Definition"] * (path != "methods/nope") + ["Options", "Composes with", "Use"]
    assert [title for title in re.findall(r"^## (.*)$", text, re.M) if title != "Layers"] == wanted


def mean_perplexity(label, length):
    rows = [json.loads(line) for line in (ROOT / "docs" / "zoo.jsonl").read_text().splitlines()]
    seeds = [row for row in rows if (row["label"], row["length"], row.get("trial")) == (label, length, None)]
    return sum(math.exp(row["window_nll"]) for row in seeds) / len(seeds)


@pytest.mark.parametrize(
    ("path", "label", "trains", "rate"),
    [
        ("methods/t5", "t5", "from the start", "6e-3; positions x 100"),
        ("methods/alibi", "alibi from 4", "from the start", "12e-3"),
        ("methods/streaming", "rope + StreamingLLM", "nothing, on trained rope", ""),
        ("methods/scale-clipped-log-n", "rope + ReRoPE, log n", "nothing, on trained rope", ""),
    ],
)
def test_a_page_shows_what_was_measured_beside_plain_rope(path, label, trains, rate):
    for name, how, at in ((label, trains, rate), ("rope", "from the start", "12e-3")):
        (line,) = (line for line in pages.measurements(PAGES[path]).splitlines() if line.startswith(f"| {name} |"))
        assert line.startswith(f"| {name} | {how} | {at} | ")
        assert line.endswith(f" | {mean_perplexity(name, 2048):.2f} |")
    assert pages.measurements(PAGES["methods/gemma3"]) == ""


def test_the_table_has_every_method_once_with_training_cache_and_kernel():
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in pages.overview().splitlines()[6:]]
    assert len({row[0] for row in rows}) == len(rows) == len(PAGES)
    of = {path: next(row for row in rows if f"(../{path}.md)" in row[0]) for path in PAGES}
    assert of["methods/t5"][7] == f"{mean_perplexity('t5', 128):.2f}, {mean_perplexity('t5', 2048):.2f}"
    assert (of["methods/scale-constant"][3], of["methods/gemma3"][7]) == ("T5; Gemma 4", "")
    found = {path: row[4:7] for path, row in of.items()}
    assert found["methods/alibi"] == ["yes", "rotated", "kernel"]
    assert found["methods/fire"] == ["yes", "rotated", "blockwise"]
    assert found["methods/streaming"] == ["no", "raw, ring", "kernel"]
    assert found["rules/yarn"] == ["fine-tuning", "rotated", "kernel"]
    assert found["methods/linear-elu"] == ["yes", "state", "linear in the length"]


def test_a_refusal_is_quoted_with_its_reason():
    text = pages.composition(PAGES["methods/alibi"])
    assert "“bias does not compose with linear attention, which has no logits to change; leave bias out”" in text
    assert "[elu](../methods/linear-elu.md), [exponential](../methods/linear-exp.md)" in text
    assert "| norm | all |  |" in text
    rows = [line for line in pages.composition(PAGES["methods/rerope"]).splitlines() if line.startswith("| bias")]
    assert "features do not compose with CoPE" in rows[0]
    assert "[alibi](../methods/alibi.md)" in rows[0].split("|")[2]
    assert "[cope](../methods/cope.md)" in rows[0].split("|")[3]


def test_every_option_is_described():
    rows = [(path, row) for path, method in PAGES.items() for row in pages.options(method).splitlines()[2:]]
    assert len(rows) > len(PAGES)
    missing = [f"{path}: {row.split('`')[1]}" for path, row in rows if row.endswith("|  |")]
    assert not missing, missing


def test_what_a_page_says_of_caches_and_directions():
    facts = {name: pages.facts(PAGES[f"methods/{name}"]) for name in ("rope", "coca-strict", "window", "alibi", "fox")}
    assert "keys as the norm and the map of keys leave them |" in facts["rope"]
    assert "half-width `t`" in facts["coca-strict"]
    assert "of the last 32 tokens alone" in facts["window"]
    assert "use ALiBi(symmetric=True) when every token sees both sides" in facts["alibi"]
    assert "| reads | the tokens |" in facts["fox"]
    assert "`bias.w` [512, 8]" in facts["fox"]


def test_examples_are_refused_for_what_they_are_and_not_for_missing_options():
    for slot in SLOTS:
        reasons = "".join(methods.composes(PAGES["methods/rope"].scheme, slot)[1].values())
        assert "missing" not in reasons
        assert "unknown" not in reasons


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("theta_t = base^(-2t/w)", r"\theta_t = \mathrm{base}^{-2t/w}"),
        ("(p_k - alpha p_0) / (1 - alpha)", r"\frac{p_k - \alpha p_0}{1 - \alpha}"),
        ("factor * max(l, L) / L - 1", r"\frac{\mathrm{factor} \cdot \max(l,\;L)}{L} - 1"),
        ("log(t / tau + 1)", r"\log\left(\frac{t}{\tau} + 1\right)"),
        ("sum_j a_ij R_{j-i} v_j", r"\sum_j a_{ij} R_{j-i} v_j"),
        ("|i - j| <= m", r"|i - j| \le m"),
        ("floor(i / G) mod s", r"\left\lfloor \frac{i}{G} \right\rfloor \bmod s"),
        ("0 if r < w, else sqrt(r)", r"0 \text{ if } r < w,\;\text{ else } \sqrt{r}"),
    ],
)
def test_formulas_in_latex(text, wanted):
    found, wanted = (re.sub(r"\{(\w)\}| ", r"\1", each) for each in (formulas.latex(text), wanted))
    assert formulas.is_formula(text)
    assert found == wanted


def test_names_calls_and_values_are_not_formulas():
    for text in (
        "head_dim",
        "length=512",
        "pj.scheme('rope')",
        "query_size(head_dim)",
        "[batch, length]",
        "a/*.txt",
        "->",
    ):
        assert not formulas.is_formula(text), text


def test_formulas_of_a_page_are_typeset_and_its_code_is_not():
    page = "<p><code>r &lt; w</code> <code>rope</code></p><pre><code>r = i - j</code></pre>"
    page += '<div class="formula">\n1 / L\n</div>'
    found = formulas.typeset(page, lambda latex, display: f"[{latex}|{display}]")
    assert found == (
        "<p>[r<w|False] <code>rope</code></p><pre><code>r = i - j</code></pre>"
        r'<p class="formula">[\frac{1}{L}|True]</p>'
    )


def test_docstrings_become_markdown():
    def function(base, factor):
        """Turns ``a|b`` by theta_t * x (Su et al., arXiv 2104.09864; kexue.fm 8265).

            f(x) = base^(-2t)

        * one, see :func:`other`;
        * two.

        factor: of the
            base; or none. base: b.

        Args:
            more: another
                line.

        Returns:
            A number.
        """

    found = docstrings.parse(function)
    paper, article = (
        "[arXiv 2104.09864](https://arxiv.org/abs/2104.09864)",
        "[kexue.fm 8265](https://kexue.fm/archives/8265)",
    )
    assert found.summary == rf"Turns `a|b` by theta\_t \* x (Su et al., {paper}; {article})."
    assert '<div class="formula">\nf(x) = base^(-2t)\n</div>' in found.body
    assert "* one, see `other`;\n* two." in found.body
    assert found.body.endswith("**Returns**: A number.")
    assert found.options == {"factor": "of the base; or none.", "base": "b.", "more": "another line."}
    assert docstrings.sources(found.raw) == [f"Su et al., {paper}; {article}"]


def test_the_module_pages_name_what_is_public():
    text = hooks.api("bias")
    for name in pj.bias.__all__:
        assert f"## {name}\n" in text, name


def test_a_figure_is_drawn():
    drawn, caption = figures.figure(PAGES["methods/sinusoidal"])
    assert drawn.count("<path") > 4
    assert "attention weight" in drawn
    assert caption.startswith("The attention weights of the last of 128 tokens")


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
        assert jax.tree.all(
            jax.tree.map(lambda g: bool(jnp.isfinite(g).all() & (jnp.abs(g).max() > 0)), names.get("gradient", 1.0))
        )
        assert jnp.isfinite(names.get("out", 0.0)).all()
    assert {"recency", "strided", "wavelengths", "log-rotary"} <= set().union(*SLOTS.values())


def test_rooms_only_import_from_lower_floors():
    """The floors of the map of packages ("rooms"). Rooms that import each other are an error."""
    order = {"posjax": ("positions", "rotary", "coca", "attention", "scheme", "nn", "diagnostics"),
             "train": ("runtime", "config", "data", "model", "loop", "evaluate", "compare", "cli")}  # fmt: skip
    for package, wanted in order.items():
        levels = rooms.floors(rooms.imports(package))
        floor = {room: n for n, level in enumerate(levels) for room in level}
        assert sorted(wanted, key=floor.get) == list(wanted), levels
        assert len({floor[room] for room in wanted}) == len(wanted)
        drawn = rooms.draw(package)
        assert all(f">{room}<" in drawn for room in floor)
    with pytest.raises(ValueError, match=r"these rooms import each other: \['a', 'b'\]"):
        rooms.floors({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset()})
    assert rooms.steps({"a": frozenset(), "b": frozenset("a"), "c": frozenset("ab")}) == [("b", "a"), ("c", "b")]
