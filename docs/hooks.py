"""The hooks that MkDocs calls: they make the pages of methods and modules, from their docstrings, and the menu."""

import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import jax
import rooms
from docstrings import parse
from figures import draw_ahead, figure
from formulas import typeset
from methods import methods
from pages import GROUPS, members, overview, page

import posjax as pj

_GUIDES = ("choosing.md", "released.md", "own-model.md", "own-methods.md", "decoding.md")
_TRAINING = ("training.md", "launching.md", "gpus.md", "checkpoints.md", "plans.md")
_MEASURING = ("comparing.md", "evaluation.md", "long-context.md")
_RESULTS = ("results.md", "studies.md")
_PROJECT = ("contributing.md", "changelog.md")
MODULES = tuple(found.name for found in pkgutil.iter_modules(pj.__path__) if not found.name.startswith("_"))


def on_config(config):
    """Hook of MkDocs: sets the menu."""
    config.nav = navigation()
    return config


def on_files(files, config):
    """Hook of MkDocs: adds the generated pages and figures."""
    from mkdocs.structure.files import File

    for path, content in generated():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(html, page, config, files):
    """Hook of MkDocs: typesets the formulas of a page."""
    from latex2mathml.converter import convert

    return typeset(html, lambda text, display: convert(text, display="block" if display else "inline"))


@functools.cache
def generated() -> list[tuple[str, str]]:
    """Every generated file: its path and its content."""
    # Each figure is compiled once and run once, so only the time of compilation matters.
    jax.config.update("jax_disable_most_optimizations", True)
    draw_ahead(methods())
    found = [("methods/index.md", overview()), ("studies.md", studies())]
    found += [(f"rooms-{package}.svg", rooms.draw(package)) for package in ("posjax", "train")]
    found += [(f"api/{name}.md", api(name)) for name in MODULES]
    for method in methods():
        drawn, caption = figure(method)
        found += [(f"{method.path}.md", page(method, caption)), (f"{method.path}.svg", drawn)]
    return found


def navigation() -> list[Any]:
    """The menu: guides, the methods by the slot they are about, training, results, and the reference of the modules."""
    groups = [{title: [{m.name: f"{m.path}.md"} for m in members(slot)]} for slot, title in GROUPS.items()]
    modules = [{f"posjax.{name}": f"api/{name}.md"} for name in MODULES]
    return [
        {"Start": "index.md"},
        {"Guides": list(_GUIDES)},
        {"Methods": [{"All methods": "methods/index.md"}, *groups]},
        {"Train on a pod": list(_TRAINING)},
        {"Measure": list(_MEASURING)},
        {"Results": list(_RESULTS)},
        {"Modules": modules},
        {"Project": list(_PROJECT)},
    ]


def studies() -> str:
    """RESULTS.md of the checkout as a page, with links relative to this folder."""
    text = (Path(__file__).parent.parent / "RESULTS.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("# Results\n", "# Studies\n", 1)


def api(name: str) -> str:
    """The page of a module: its docstring, and the public functions and classes with theirs."""
    module = importlib.import_module(f"posjax.{name}")
    public = getattr(module, "__all__", None) or [
        n for n, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__ and n[0] != "_"
    ]
    things = [getattr(module, n) for n in public]
    described = [entry(t, 2) for t in things if inspect.isclass(t) or inspect.isfunction(t)]
    return "\n\n".join([f"# posjax.{name}", parse(module).body, *described])


def entry(thing: Any, level: int) -> str:
    """One function or class with its public methods."""
    described = parse(thing)
    options = "\n".join(f"* `{name}`: {text}" for name, text in described.options.items())
    members = vars(thing).items() if inspect.isclass(thing) else ()
    inner = [entry(m, level + 1) for n, m in members if inspect.isfunction(m) and n[0] != "_" and m.__doc__]
    try:
        call = f"```text\n{signature(thing)}\n```"
    except ValueError:
        call = ""
    return "\n\n".join([f"{'#' * level} {thing.__name__}", call, described.body, options, *inner])


def signature(thing: Any) -> str:
    """Name and arguments as code, with the shapes of arrays."""
    text = f"{thing.__name__}{inspect.signature(thing)}"
    text = re.sub(r"jaxtyping\.(\w+)\[[\w.]*\bArray, '([^']*)'\]", r"\1[\2]", text)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)
    return re.sub(r"(?<=[(,]) ?(?=[*\w]+(?:[:,=]|\)))", "\n    ", text) if len(text) > 100 else text
