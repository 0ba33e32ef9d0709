"""The text of the pages of methods: pure functions from a ``Method`` to Markdown."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any

import measured
import yaml
from docstrings import inline, parameters, parse, sources
from methods import (
    LEADS,
    REACH,
    SOURCES,
    TRAINED,
    Method,
    composes,
    cost,
    documents,
    learned,
    methods,
    needs_training,
    numbered,
    page_of,
    specs_of,
    subject,
    touched,
)

import posjax as pj
from posjax.scheme.registry import SLOTS

GROUPS = {
    "embedding": "Embeddings",
    "features": "Maps of queries and keys",
    "frequencies": "Frequency rules",
    "bias": "Biases",
    "remap": "Distances remapped",
    "mask": "Masks",
    "sinks": "Sinks",
    "scale": "Scales",
    "norm": "Norms",
    "training_positions": "Positions of training",
    "linear": "Linear attention",
    "recipe": "Layer recipes",
}
FILTERS = ("slot", "training", "cache", "TPU", "GPU")
"""The columns of the table of all methods that it can be filtered by: each has few values."""
_CACHES = {
    "rotated": "keys as the norm and the map of keys leave them",
    "raw": "keys before their map, which is taken whenever they are read",
    "half-width": "the half-width `t` of each key, mapped whenever it is read",
    "state": "one state of fixed size for each head, whatever the length",
}


def page(method: Method, caption: str) -> str:
    """The page of a method, with a figure of the same name beside it."""
    recipe = isinstance(method.scheme, pj.Layers)
    tried = "Every spec of the library was put beside this scheme when this page was made."
    extended = "A recipe takes no further slots when it is built. This is what `extend` puts into all of its layers."
    sections = {
        "Layers": layers(method.scheme) if recipe else "",
        "Measured": measurements(method),
        "Definition": definitions(method),
        "Options": options(method),
        "Composes with": f"{extended if recipe else tried}\n\n{composition(method)}",
        "Use": usage(method),
    }
    figure = f"![Weight against distance]({method.path.split('/')[-1]}.svg)\n\n*{caption}*"
    top = [f"# {method.name}", lead(method), facts(method), figure]
    return "\n\n".join([*top, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)])


def overview() -> str:
    """The table of all methods, each once; ``tables.js`` makes it sortable, and filterable by some of its columns."""
    near, far = f"at {measured.LENGTHS[0]}", f"at {measured.LENGTHS[-1]:,}"
    about = (
        f"{len(methods())} methods, by the slot that they are about. *Training*: whether a model must be trained with "
        "the method. *Cache*: what decoding keeps ([decoding](../decoding.md)). *TPU* and *GPU* (H100): whether a "
        "flash attention kernel computes it (on a GPU one of cuDNN or of posjax, in half precision), or else "
        f"blocks of XLA's own operations, all in linear memory. *{near.capitalize()}* and *{far}*: perplexity per byte "
        "of small decoders over so many bytes, of which the first is the length of training "
        "([What was measured](../results.md#the-zoo)); the page of a method says whether it was trained or put "
        "on trained RoPE."
    )
    head = ("method", "slot", "what it is", "source", "training", "cache", "TPU", "GPU", near, far)
    rows = [
        (
            link(m),
            title,
            lead(m),
            source(m),
            needs_training(m),
            kinds(m.scheme),
            cost(m, "tpu"),
            cost(m, "cudnn", "gpu"),
            *measured.ends(m),
        )
        for slot, title in GROUPS.items()
        for m in members(slot)
    ]
    shown = f'<div class="choosable" data-filters="{", ".join(FILTERS)}" markdown>\n\n{table(rows, *head)}\n\n</div>'
    return "\n\n".join(["# Methods", about, shown])


def members(slot: str) -> list[Method]:
    """The methods of a group."""
    return [method for method in methods() if subject(method) == slot]


def lead(method: Method) -> str:
    """The first paragraph of the page of a method."""
    if method.name in LEADS:
        return inline(LEADS[method.name])
    return parse(documents(method)[0]).summary


def source(method: Method) -> str:
    """Where a method comes from: what its docstrings cite, or else a released model."""
    texts = [*filter(None, [LEADS.get(method.name)]), *(parse(thing).raw for thing in documents(method))]
    cited = sources("\n\n".join(text.split("\n\n")[0] for text in texts)) or sources("\n\n".join(texts))
    return "; ".join(cited) or SOURCES.get(method.path, "posjax")


def facts(method: Method) -> str:
    """The table at the top of a page."""
    scheme = method.scheme
    reads = [name for name in ("length", "tokens") if getattr(scheme, f"reads_{name}", False)]
    rows = [
        ("source", source(method)),
        ("touches", filled(scheme)),
        ("cache", cache(scheme)),
        ("direction", direction(scheme)),
        ("shifting all positions", "changes nothing" if scheme.shift_invariant else "changes the result"),
        *([("reads", {"length": "the current length", "tokens": "the tokens"}[name]) for name in reads]),
    ]
    if method.slot is None and (specs := specs_of(method)):
        rows.append(("in other schemes", ", ".join(f"`{slot}={{'name': {name!r}, ...}}`" for slot, name in specs)))
    if isinstance(scheme, pj.Scheme):
        shapes = [f"`{name}` {list(shape)}" for name, shape in learned(scheme).items()]
        rows.append(("learns", ", ".join(shapes) + " with 8 heads of 64" if shapes else "nothing"))
    return table(rows, "", "")


def filled(scheme: pj.Scheme | pj.Layers) -> str:
    """The slots that a scheme fills, and with what."""
    if isinstance(scheme, pj.Layers):
        return f"{slots(scheme)}; by layer"
    return "<br>".join(f"{_slot(name, spec)}: `{show(spec)}`" for name, spec in touched(scheme).items()) or "nothing"


def _slot(slot: str, spec: Any) -> str:
    """The name of a slot, with a link to the page of the spec that fills it."""
    names = [name for name, kind in SLOTS[slot].items() if kind is type(spec)]
    return link(page_of(slot, names[0]), slot) if names else slot


def slots(scheme: pj.Scheme | pj.Layers) -> str:
    """The names of the slots that a scheme fills."""
    return ", ".join(dict.fromkeys(slot for one in _schemes(scheme) for slot in touched(one))) or "none"


def kinds(scheme: pj.Scheme | pj.Layers) -> str:
    """What decoding caches, in keywords."""
    return ", ".join(dict.fromkeys(one.caches + ", ring" * (one.kept_keys is not None) for one in _schemes(scheme)))


def _schemes(scheme: pj.Scheme | pj.Layers) -> tuple[pj.Scheme, ...]:
    return getattr(scheme, "schemes", (scheme,))


def cache(scheme: pj.Scheme | pj.Layers) -> str:
    """What decoding caches, in full."""
    if isinstance(scheme, pj.Layers):
        return "; ".join(dict.fromkeys(map(cache, scheme.schemes)))
    kept = [_CACHES[scheme.caches]]
    if scheme.kept_keys is not None:
        first, recent = scheme.kept_keys
        kept.append((f"of the first {first} and" if first else "of") + f" the last {recent} tokens alone")
    if scheme.gated:
        kept.append("the gates of every token")
    elif scheme.bias is not None and scheme.bias.reads_keys:
        kept.append("the states of every token")
    return ", ".join(kept)


def direction(scheme: pj.Scheme | pj.Layers) -> str:
    """Whether a scheme fits bidirectional attention; if not, the error of the library."""
    try:
        for one in _schemes(scheme):
            one.check_direction(causal=False)
    except ValueError as error:
        return inline(str(error))
    return "causal and bidirectional attention"


def layers(scheme: pj.Layers) -> str:
    """The table of the slots that every layer of a recipe fills."""
    return table([(numbers, filled(one)) for one, numbers in numbered(scheme).items()], "layers", "touches")


def definitions(method: Method) -> str:
    """The docstrings that define a method, each under the name of its object, without the lead of the page."""
    made = []
    for thing in documents(method):
        name = thing.__name__ if inspect.ismodule(thing) else f"{thing.__module__}.{thing.__qualname__}"
        name = f"posjax.scheme({method.name!r})" if "._" in name else name
        body = parse(thing).body if made else parse(thing).body.removeprefix(lead(method)).strip()
        made += [f"### {name}\n\n{body}"] if body else []
    return "\n\n".join(made)


def options(method: Method) -> str:
    """The table of options with their defaults and their descriptions from docstrings."""
    descriptions = {}
    make = getattr(method.make, "func", method.make)  # a partial has no docstring of its own
    for thing in (make, *documents(method)):
        for one in reversed(inspect.getmro(thing)) if inspect.isclass(thing) else (thing,):
            descriptions |= parse(one).options
    rows = [
        (f"`{name}`", "needed" if one.default is one.empty else f"`{show(one.default)}`", descriptions.get(name, ""))
        for name, one in parameters(method.make).items()
    ]
    return table(rows, "option", "default", "what it is") if rows else "None."


def measurements(method: Method) -> str:
    """The measurements with small decoders, beside plain RoPE; empty for a method that was not measured."""
    found = measured.rows(method)
    if not found:
        return ""
    about = (
        "Perplexity per byte of small decoders over whole windows, trained on rows of 128 bytes, mean of four seeds, "
        "each scheme at the learning rate that its trials chose, and at the factor of that rate for its position "
        "parameters, where some were tried ([What was measured](../results.md#the-zoo))."
    )
    lengths = (f"{length:,}" for length in measured.LENGTHS)
    return f"{about}\n\n{table(found, 'scheme', 'trains', 'learning rate', *lengths)}"


def composition(method: Method) -> str:
    """Which specs of the other slots go with a method, tried one by one, and why the others do not."""
    rows = []
    taken = touched(method.scheme) if isinstance(method.scheme, pj.Scheme) else ()
    for slot in (slot for slot in SLOTS if slot not in taken):
        good, refused = composes(method.scheme, slot)
        alike: dict[str, list[str]] = {}
        for name, why in refused.items():
            alike.setdefault(alike_in(why, SLOTS[slot][name].__name__), []).append(name)
        reasons = [f"{links(slot, names)}: “{inline(short(refused[names[0]]))}”" for names in alike.values()]
        rows.append((slot, links(slot, good) or "none" if refused else "all", "<br>".join(reasons)))
    return table(rows, "slot", "composes with", "refused, because")


def usage(method: Method) -> str:
    """The example in Python and in a config."""
    arguments = "".join(f", {name}={value!r}" for name, value in method.options.items())
    entry = {"scheme": {"name": method.preset} | plain(method.options)}
    config = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10_000)[1:-2]
    return (
        f"As in the figure, for a model that was trained on {TRAINED} tokens and is used on {REACH}:\n\n"
        f"```python\nimport posjax as pj\n\nscheme = pj.scheme({method.preset!r}{arguments})\n```\n\n"
        f"In a config of the trainer:\n\n```yaml\n{config}\n```"
    )


def table(rows: Sequence[tuple[str, ...]], *head: str) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ("---",) * len(head), *rows])


def links(slot: str, names: Sequence[str]) -> str:
    """Links to the pages of some names of a slot."""
    return ", ".join(link(page_of(slot, name), name) for name in names)


def link(method: Method, name: str = "") -> str:
    """A link to the page of a method, from a page in a folder."""
    return f"[{name or method.name}](../{method.path}.md)"


def show(spec: Any) -> str:
    """A spec as code, with only the fields that differ from their defaults."""
    if not dataclasses.is_dataclass(spec):
        return " ".join(repr(spec).split())
    values = [(field, getattr(spec, field.name)) for field in dataclasses.fields(spec)]
    shown = [f"{field.name}={show(value)}" for field, value in values if repr(value) != repr(field.default)]
    return f"{type(spec).__name__}({', '.join(shown)})"


def short(reason: str) -> str:
    """A reason without the arguments of long reprs."""
    within = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))"
    return re.sub(rf"\b([A-Z]\w+)\({within}{{30,}}\)", r"\1(...)", reason)


def alike_in(reason: str, name: str) -> str:
    """A reason without names, arguments and shapes, so that it is equal for specs that are refused for one reason."""
    return re.sub(r"\{.*?\}", "", short(reason).replace(name, "").replace("(...)", ""))


def plain(value: Any) -> Any:
    """The value as YAML has it, with lists for tuples."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple) else value
