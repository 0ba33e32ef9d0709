"""Facts about the methods, taken from the library: which exist, the slots they fill, their caches, what composes."""

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import docstrings
import jax

import posjax as pj
from posjax import bias, coca, linear, rotary
from posjax.scheme.presets import PRESETS
from posjax.scheme.registry import SLOTS

TRAINED, EXTENSION = 32, 4
"""In the examples of the pages a model is trained on `TRAINED` tokens and used on `EXTENSION` times as many."""
REACH = TRAINED * EXTENSION

_RULES = SLOTS["frequencies"]
_LAMBDAS = tuple(1 + n / 8 for n in range(32))
OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"max_length": REACH},
    "hierarchical": {"max_length": 12},
    "hope": {"original_length": TRAINED},
    "clex": {"original_length": TRAINED, "max_factor": EXTENSION, "steps": 10},
    "mrope": {"sections": (8, 12, 12)},
    "general": {"generators": (((0, -1.0, 0, 0), (1.0, 0, 0, 0), (0, 0, 0, -0.1), (0, 0, 0.1, 0)),)},
    "fope": {"original_length": TRAINED},
    "coca": {"variant": "strict"},
    "coca-planes": {"planes": (8, 24)},
    "t5": {"max_distance": 24},
    "fire": {"threshold": 16.0},
    "relative": {"extent": 16},
    "shaw": {"extent": 16},
    "inverse-leaky": {"length": TRAINED, "extension": float(EXTENSION)},
    "rerope": {"window": 16},
    "leaky-rerope": {"window": 16, "factor": 8.0},
    "self-extend": {"group": 4, "window": 16},
    "lm-infinite": {"n_local": TRAINED, "n_global": 4},
    "streaming": {"first": 4, "recent": 28},
    "dual-chunk": {"length": TRAINED},
    "string": {"length": TRAINED, "window": 4},
    "window": {"size": TRAINED},
    "chunked": {"size": TRAINED},
    "longformer": {"window": TRAINED, "dilation": (1, 1, 2, 2)},
    "dilated": {"size": 16, "dilation": 2},
    "band": {"size": TRAINED},
    "global-first": {"count": 4},
    "first-tokens": {"count": 4},
    "lambda": {"window": 28, "first": 4},
    "log-n": {"length": TRAINED},
    "clipped-log-n": {"length": TRAINED},
    "llama4": {"floor_scale": TRAINED},
    "ministral": {"length": TRAINED},
    "yarn": {"extension": float(EXTENSION)},
    "drope": {"extension": float(EXTENSION)},
    "gradient-maximal": {"n": REACH},
    "constant": {"value": 2.0},
    "cosine": {"length": TRAINED},
    "learned-cosine": {"length": TRAINED},
    "randomised": {"max_length": 4 * REACH},
    "pose": {"max_length": REACH},
    "performer": {"num_features": 128},
    "gated-delta": {"num_heads": 4, "key_dim": 64},
}
"""The options of a preset or spec in the examples, if it needs some or its defaults do not suit a small model."""
_FACTOR, _LENGTH = {"factor": float(EXTENSION)}, {"original_length": TRAINED}
RULE_OPTIONS: dict[str, dict[str, Any]] = {
    "hope": _LENGTH,
    **dict.fromkeys(("linear", "ntk", "ntk-old", "ntk-fixed", "ntk-mixed"), _FACTOR),
    **dict.fromkeys(("ntk-by-parts", "yarn", "llama3"), _FACTOR | _LENGTH),
    **dict.fromkeys(("dynamic-linear", "dynamic-ntk", "dynamic-yarn"), _LENGTH),
    "longrope": {"short_factor": (1.0,) * 32, "long_factor": _LAMBDAS, "factor": float(EXTENSION)} | _LENGTH,
    **{name: OPTIONS[name] for name in ("clex", "mrope")},
}
RECIPE_OPTIONS: dict[str, dict[str, Any]] = {
    "hwfa": {"num_layers": 6, "length": TRAINED},
    "hwfa2": {"num_layers": 6, "length": TRAINED},
    "gemma3": {"num_layers": 6, "window": 16},
    "llama4": {"num_layers": 4, "chunk": TRAINED, "floor_scale": TRAINED},
    "smollm3": {"num_layers": 4},
    "gpt-oss": {"num_layers": 2, "window": 8, "factor": float(EXTENSION), "original_length": TRAINED},
    "rnope-swa": {"num_layers": 4, "window": TRAINED},
    "qwen3-next": {"num_layers": 4, "num_heads": 4, "key_dim": 64},
}
_ALSO = {
    bias.ALiBi: (bias.alibi_slopes,),
    bias.T5: (bias.t5_bucket,),
    coca.Coca: (coca,),
    linear.GatedDelta: (linear.delta, linear.convolution),
}
"""Functions and modules that define a spec but that its first line does not name."""
_MISSING = ("jax says", "the kernels need jax", "found no GPU", "compute capability")
"""What a refusal says that is about this machine, not about the call."""
_ADDED = {
    *("ntk", "ntk-old", "ntk-fixed", "ntk-mixed", "dynamic-linear", "dynamic-ntk", "dynamic-yarn"),
    *("rerope", "leaky-rerope", "self-extend", "lm-infinite", "streaming", "dual-chunk", "string"),
    *("lambda", "clipped-log-n"),
}
"""Methods that work on a trained model without further training."""
_TUNED = {"linear", "ntk-by-parts", "yarn", "longrope", "llama3", "clex", "pose", "drope"}
"""Methods for which a trained model must be fine-tuned."""
LEADS = {
    "nope": "No slot is filled: only the causal mask tells a decoder where its tokens stand (Kazemnejad et al., "
    "2305.19466).",
    "coca-strict": "CoCA with any queries: the score is ``sum_j t_j (x_j^2 + y_j^2) cos((m - n) theta_j)``, a cosine "
    "of the distance in each plane (Zhu et al., arXiv 2309.08646, equations 4 to 9 and 17).",
    "coca-tied": "CoCA with the constraint ``y = x`` that its paper puts on queries: one number for each plane, "
    "half as wide as a head (Zhu et al., arXiv 2309.08646).",
    "coca-slack": "What the released code of CoCA computes: it adds to the score a part that depends on absolute "
    "positions, so shifting all positions changes it (Zhu et al., arXiv 2309.08646, released code).",
    "coca-relative": "The score of CoCA's released code (slack) without the part that depends on absolute positions.",
}
"""The first paragraphs of pages for which no docstring has one."""
SOURCES = {
    "methods/chunked": "Llama 4",
    "methods/learned-sinks": "gpt-oss",
    "methods/token-sinks": "Inkling 2",
    "methods/drope": "Sakana AI, DroPE",
    "methods/qwen3": "Qwen 3",
    "methods/gemma3": "Gemma 3",
    "methods/llama4": "Llama 4",
    "methods/smollm3": "SmolLM3",
    "methods/gpt-oss": "gpt-oss",
    "methods/qwen3-next": "Qwen3-Next",
    "methods/scale-llama4": "Llama 4",
    "methods/scale-ministral": "Ministral 3",
    "methods/scale-inkling": "Inkling",
    "methods/scale-constant": "T5; Gemma 4",
}
"""The sources of methods that come from a released model and cite no article."""
_SLOT_ORDER = (
    "embedding",
    "linear",
    "remap",
    "sinks",
    "bias",
    "scale",
    "norm",
    "mask",
    "features",
    "training_positions",
)


@dataclass(frozen=True)
class Method:
    """A page: a preset, a frequency rule, or a spec that is in no preset.

    Args:
        path: the path of the page, without its ending.
        name: the name in the library.
        slot: the slot of a rule or spec; None for a preset.
    """

    path: str
    name: str
    slot: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options for ``pj.scheme``: those of the preset, or the slot with the rule or spec."""
        if self.slot is None:
            return (RECIPE_OPTIONS if self.name in RECIPE_OPTIONS else OPTIONS).get(self.name, {})
        return {self.slot: {"name": self.name} | spec_options(self.slot, self.name)}

    @property
    def preset(self) -> str:
        """The preset that the example starts from."""
        return self.name if self.slot is None else "rope"

    @functools.cached_property
    def scheme(self) -> pj.Scheme | pj.Layers:
        """The scheme of the example."""
        return pj.scheme(self.preset, **self.options)

    @property
    def head_dim(self) -> int:
        """The head size in the figure; small if the method's options fix it, so that they are short enough to print."""
        return 4 if self.name == "general" else 64

    @property
    def make(self):
        """The function or class that takes the options of the method."""
        return PRESETS[self.name][0] if self.slot is None else SLOTS[self.slot][self.name]


def spec_options(slot: str, name: str) -> dict[str, Any]:
    """The options of a spec in the examples: those listed under its name that it accepts."""
    known = docstrings.parameters(SLOTS[slot][name])
    found = (RULE_OPTIONS if slot == "frequencies" else OPTIONS).get(name, {})
    return {option: value for option, value in found.items() if option in known}


def parts(scheme: pj.Scheme | pj.Layers) -> Iterator[tuple[str, Any]]:
    """The specs of a scheme with their slots, also specs inside other specs; none for layers that differ."""
    if isinstance(scheme, pj.Layers):
        return
    for slot, spec in touched(scheme).items():
        found = [spec, getattr(spec, "frequencies", None), getattr(spec, "left", None), getattr(spec, "right", None)]
        yield from ((slot, one) for one in found if one is not None and not hasattr(one, "left"))


def touched(scheme: pj.Scheme) -> dict[str, Any]:
    """The filled slots of a scheme, with their specs."""
    return {f.name: getattr(scheme, f.name) for f in fields(scheme) if getattr(scheme, f.name) is not None}


@functools.cache
def homes() -> dict[type, str]:
    """The preset that each type of spec belongs to: the first preset that has it."""
    found = {}
    for name in PRESETS:
        for _, spec in parts(Method(f"methods/{name}", name).scheme):
            found.setdefault(type(spec), name)
    return found


def own(method: Method) -> list[tuple[str, type]]:
    """The specs that a page is about, with their slots: those that belong to it (`homes`), else all but plain RoPE."""
    if method.slot is not None:
        return [(method.slot, method.make)]
    found = [(slot, type(spec)) for slot, spec in parts(method.scheme)]
    at_home = [(slot, kind) for slot, kind in found if homes()[kind] == method.name]
    about = at_home or [(slot, kind) for slot, kind in found if kind not in (rotary.Rotary, rotary.Plain)]
    return sorted(about, key=lambda one: one[1] is not method.make)


def subject(method: Method) -> str:
    """The slot that a method is about; ``"recipe"`` if its layers differ, ``"features"`` if it fills no slot."""
    if isinstance(method.scheme, pj.Layers):
        return "recipe"
    found = [slot for slot, _ in own(method)]
    return min(found, key=(*_SLOT_ORDER, "frequencies").index, default="features")


def documents(method: Method) -> list[Any]:
    """The functions, specs and modules whose docstrings define a method; modules only if they have a single spec."""
    found = [method.make] if inspect.isfunction(method.make) and method.make.__name__ != "<lambda>" else []
    for kind in (kind for _, kind in own(method) if inspect.isclass(kind)):
        module = sys.modules[kind.__module__]
        alone = kind not in _ALSO and sum(other.__module__ == kind.__module__ for other in _kinds()) == 1
        summary = docstrings.parse(kind).summary
        functions = [f for name, f in vars(module).items() if inspect.isfunction(f) and _names(summary, name)]
        described = [*functions, kind] if summary.startswith("Spec of `") else [kind, *functions]
        bases = [base for base in kind.__mro__[1:] if base in _kinds()]
        found += [*([module] if alone else []), *described, *_ALSO.get(kind, ()), *bases]
    return list(dict.fromkeys(found))


def _names(text: str, name: str) -> bool:
    return f"`{name}`" in text or f"`{name}(" in text


@functools.cache
def _kinds() -> frozenset:
    """Every spec that has a page."""
    return frozenset(homes()) | {kind for slot in SLOTS.values() for kind in slot.values() if inspect.isclass(kind)}


@functools.cache
def methods() -> tuple[Method, ...]:
    """Every page: the presets, the frequency rules of no preset, and the specs that no preset's page is about."""
    presets = [Method(f"methods/{name}", name) for name in PRESETS]
    rotations = {kinds[0] for method in presets if len(kinds := _beside_rotary(method)) == 1}
    rules = [
        Method(f"rules/{name}", name, "frequencies")
        for name, kind in _RULES.items()
        if kind not in rotations and name not in PRESETS
    ]
    covered = {kind for method in presets for _, kind in own(method)}
    rest = [
        Method(f"methods/{slot}-{name}", name, slot)
        for slot in SLOTS
        if slot != "frequencies"
        for name, kind in SLOTS[slot].items()
        if kind not in covered
    ]
    return (*presets, *rules, *rest)


def _beside_rotary(method: Method) -> list[type]:
    """The specs of a preset, without the map that holds a frequency rule."""
    return [type(spec) for _, spec in parts(method.scheme) if type(spec) is not rotary.Rotary]


@functools.cache
def page_of(slot: str, name: str) -> Method:
    """The page on which a name of ``SLOTS`` is described."""
    # The frequency rule of a preset is inside the spec of its slot `features`, so it is listed under that slot.
    wanted = ("features" if slot == "frequencies" else slot, SLOTS[slot][name])
    exact = (m for m in methods() if (m.slot, m.name) == (slot, name))
    return next(exact, None) or next(m for m in methods() if m.slot is None and wanted in own(m))


def specs_of(method: Method) -> list[tuple[str, str]]:
    """The slots, with the names in them, that the page of a preset describes."""
    return [(slot, name) for slot, names in SLOTS.items() for name in names if page_of(slot, name) == method]


def composes(scheme: pj.Scheme | pj.Layers, slot: str) -> tuple[list[str], dict[str, str]]:
    """The specs of a slot that go with a scheme, and the others with the reason that the library gives.

    Every spec is put into the scheme: by ``replace``, or by ``extend`` where the layers differ.
    """
    good, refused = [], {}
    change = getattr(scheme, "replace", None) or _distinct(scheme).extend
    for name in SLOTS[slot]:
        try:
            change(**{slot: {"name": name} | spec_options(slot, name)})
            good.append(name)
        except ValueError as error:
            refused[name] = str(error)
    return good, refused


def needs_training(method: Method) -> str:
    """Whether a model must be trained with a method, as its source has it."""
    if method.name in _ADDED:
        return "no"
    return "fine-tuning" if method.name in _TUNED else "yes"


def cost(method: Method, *kernels: str) -> str:
    """How a method is computed: by one of these kernels, blockwise, or linearly in the length."""
    schemes = dict.fromkeys(_each(method.scheme))
    found = [_computed(scheme, method.head_dim, kernels) for scheme in schemes]
    return ", ".join(dict.fromkeys(found))


def _each(scheme: pj.Scheme | pj.Layers) -> tuple[pj.Scheme, ...]:
    return getattr(scheme, "schemes", (scheme,))


def _computed(scheme: pj.Scheme, size: int, kernels: tuple[str, ...]) -> str:
    """`cost` of one scheme."""
    if scheme.linear is not None:
        return "linear in the length"
    return "kernel" if any(_computes(name, scheme, size) for name in kernels) else "blockwise"


def _computes(implementation: str, scheme: pj.Scheme, size: int) -> bool:
    """Whether an implementation takes a causal call of a scheme, found by tracing it.

    It counts too where only the machine is missing.
    """
    q, k, v = (
        jax.ShapeDtypeStruct((1, 256, 4, n), "bfloat16") for n in (scheme.query_size(size), scheme.key_size(size), size)
    )
    x = jax.ShapeDtypeStruct((1, 256, 4 * size), "bfloat16")

    def call(q, k, v, x):
        key = jax.random.key(0)
        params = scheme.init(key, 4, size, model_dim=4 * size) | scheme.init_shared(key, 4, size)
        gates = {"gates": (scheme.prepare(params, x),) * 2} if scheme.reads_tokens else {}
        return scheme.attend(q, k, v, params=params, mask=pj.masks.Causal(), implementation=implementation, **gates)

    try:
        jax.eval_shape(call, q, k, v, x)
    except ValueError as error:
        return any(words in str(error) for words in _MISSING)
    return True


def numbered(layers: pj.Layers) -> dict[pj.Scheme, str]:
    """Each of the schemes once, with the numbers of its layers."""
    found: dict[pj.Scheme, list[str]] = {}
    for number, scheme in enumerate(layers.schemes, start=1):
        found.setdefault(scheme, []).append(str(number))
    return {scheme: ", ".join(numbers) for scheme, numbers in found.items()}


def _distinct(layers: pj.Layers) -> pj.Layers:
    """Each of the schemes once."""
    return pj.Layers(tuple(((scheme,), 1) for scheme in numbered(layers)))


def learned(scheme: pj.Scheme) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one layer with 8 heads of 64, by slot and name."""
    key = jax.random.key(0)
    made = jax.eval_shape(lambda: scheme.init(key, 8, 64, model_dim=512) | scheme.init_shared(key, 8, 64))
    return {f"{slot}.{name}": leaf.shape for slot, tree in made.items() for name, leaf in tree.items()}
