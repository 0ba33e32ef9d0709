"""The public API: promised names, what an import loads, docstrings, and which modules may import which."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import posjax as pj

SOURCES = Path(pj.__file__).parent
NAMES = """
positions.Range positions.as_array positions.arange positions.from_mask positions.from_segments
rotary.inverse_frequencies rotary_table RotaryTable apply_rotary rotary.Plain.at_length rotary.YaRN.to_hf rotary.from_hf
alibi_slopes alibi_bias bias.ALiBi bias.T5 bias.Kerple
masks.Causal masks.Window masks.FirstTokens masks.Chunked masks.Prefix masks.Segments
attention coca_attention coca.features
Scheme scheme scheme_names Layers nn.Attention nn.Block nn.Decoder nn.DecoderConfig nn.logical_axes
"""

# Lowest floor first. A room is a module or package of posjax; it imports rooms of lower floors. Rooms of one floor do
# not import each other, except for a method that is built on another (BUILT_OF).
FLOORS = [
    {"_checks"},
    {"_numbers", "_serial", "_shapes"},
    {"positions"},
    {"_axes"},
    {"_slots", "_angles", "training_positions", "layout", "_lowered"},
    {"absolute", "rotary", "coca", "pope", "bias", "masks", "scales", "norms", "sinks", "remap", "linear"},
    {"attention"},
    {"scheme"},
    {"nn"},
    {"diagnostics"},
]
BUILT_OF = {("coca", "rotary"), ("pope", "rotary"), ("remap", "masks"), ("remap", "rotary"), ("linear", "rotary")}
NUMERICS = {"jax", "numpy", "jaxtyping"}


@pytest.mark.parametrize("name", NAMES.split())
def test_public_name_exists(name):
    found = pj
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_all_lists_only_names_that_exist():
    assert set(pj.__all__) <= {*vars(pj), "nn", "diagnostics"}
    with pytest.raises(AttributeError, match="has no attribute 'rope'"):
        pj.rope  # noqa: B018


def test_importing_posjax_needs_jax_alone():
    program = "import sys, posjax; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"flax", "matplotlib", "train", "optax", "yaml", "torch"} & set(done.stdout.split())


def modules():
    names = [info.name for info in pkgutil.walk_packages([str(SOURCES)], "posjax.")]
    return [importlib.import_module(name) for name in names] + [sys.modules["posjax"]]


def public_objects(module):
    """Functions and classes that a module defines, or promises in ``__all__``."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    for name in sorted({*own, *getattr(module, "__all__", ())}):
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            yield name, value


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_everything_public_has_a_docstring(module):
    assert module.__doc__, module.__name__
    for name, value in public_objects(module):
        # A dataclass without one gets its signature as docstring.
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), name
        methods = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
        for method_name, method in methods:
            if not method_name.startswith("_") and method.__module__.startswith("posjax"):
                assert inspect.getdoc(getattr(value, method_name)), f"{name}.{method_name}"


def room(path):
    return path.relative_to(SOURCES).parts[0].removesuffix(".py")


def imports(path):
    """Full names of the modules that a file imports anywhere; ``from posjax import bias`` imports ``posjax.bias``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floors"
            yield from (f"{node.module}.{a.name}" for a in node.names) if node.module == "posjax" else [node.module]


def allowed(importer, imported):
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    same_room, below = importer == imported, floor[imported] < floor[importer]
    return same_room or below or (importer, imported) in BUILT_OF


FILES = [path for path in sorted(SOURCES.rglob("*.py")) if path != SOURCES / "__init__.py"]


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} == set().union(*FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_imports_go_down(path):
    for name in imports(path):
        package, _, inside = name.partition(".")
        if package == "posjax":
            assert allowed(room(path), inside.partition(".")[0]), name
        else:
            known = package in sys.stdlib_module_names or package in NUMERICS
            extra = {"nn": {"flax"}, "diagnostics": {"matplotlib"}}.get(room(path), set())
            extra |= {"fsspec", "gguf"} if path.parent.name == "huggingface" else set()
            assert known or package in extra, name
