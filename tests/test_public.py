"""The public API: promised names, what an import loads, docstrings, and which modules may import which."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

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
    {"_numbers", "_serial", "_shapes", "_triangular"},
    {"positions"},
    {"_axes"},
    {"_slots", "_angles", "training_positions", "layout", "_lowered", "_mesh"},
    {"absolute", "rotary", "coca", "pope", "bias", "masks", "scales", "norms", "sinks", "remap", "linear"},
    {"attention"},
    {"scheme"},
    {"nn"},
    {"diagnostics"},
]
BUILT_OF = {("coca", "rotary"), ("pope", "rotary"), ("remap", "masks"), ("remap", "rotary"), ("linear", "rotary")}
NUMERICS = {"jax", "numpy", "jaxtyping"}


def test_promised_names_exist():
    for name in NAMES.split():
        found = pj
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), name
    assert set(pj.__all__) <= {*vars(pj), "nn", "diagnostics"}


def test_importing_posjax_needs_jax_alone():
    program = "import sys, posjax; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"flax", "matplotlib", "train", "optax", "yaml", "torch"} & set(done.stdout.split())


def undocumented(module):
    """The names of public functions, classes and methods of a module that have no docstring of their own."""
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    for name in own | set(getattr(module, "__all__", ())):
        value = getattr(module, name)
        if name.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        # A dataclass without one gets its signature as docstring.
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):
            yield name
        methods = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
        for method, function in methods:
            ours = not method.startswith("_") and function.__module__.startswith("posjax")
            if ours and not inspect.getdoc(getattr(value, method)):
                yield f"{name}.{method}"


def test_everything_public_has_a_docstring():
    names = ["posjax", *(info.name for info in pkgutil.walk_packages([str(SOURCES)], "posjax."))]
    for module in map(importlib.import_module, names):
        assert module.__doc__, module.__name__
        assert list(undocumented(module)) == [], module.__name__


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


def test_imports_go_down():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    files = [path for path in SOURCES.rglob("*.py") if path != SOURCES / "__init__.py"]
    assert set(map(room, files)) == set(floor)
    for path in files:
        here = room(path)
        extra = {"nn": {"flax"}, "diagnostics": {"matplotlib"}}.get(here, set())
        extra |= {"fsspec", "gguf", "huggingface_hub"} if path.parent.name == "huggingface" else set()
        extra |= {"jaxlib"} if path.name == "mosaic.py" else set()
        for name in imports(path):
            package, _, inside = name.partition(".")
            there = inside.partition(".")[0]
            if package == "posjax":
                assert here == there or floor[there] < floor[here] or (here, there) in BUILT_OF, (path, name)
            else:
                assert package in sys.stdlib_module_names or package in NUMERICS | extra, (path, name)
