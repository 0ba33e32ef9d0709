"""Docstrings as Markdown: prose, indented formulas, options and sources, as this library writes them."""

import functools
import html
import inspect
import re
import textwrap
from typing import NamedTuple

from formulas import is_display

_SECTIONS = ("Args:", "Returns:", "Raises:")
_CODE = re.compile(r"``(.+?)``|:\w+:`~?(.+?)`", re.S)
_PAPER = re.compile(r"(?:arXiv[: ]\s*)?\b([12]\d{3}\.\d{5})(?!\d)")
_ARTICLE = re.compile(r"kexue\.fm(?:/archives/| )(\d+)")
_FIELD = re.compile(r"^(\w+(?:, \w+)*): ")


class Docstring(NamedTuple):
    """A docstring in parts, all Markdown but ``raw``."""

    raw: str
    summary: str
    """The first paragraph."""
    body: str
    """All paragraphs, formulas and lists, and the sections on results and errors."""
    options: dict[str, str]
    """The description of each argument or field, by name."""


@functools.cache
def parse(thing) -> Docstring:
    """The docstring of a function, class or module in parts; empty ones without a docstring."""
    raw = inspect.getdoc(thing) or ""
    names = () if inspect.ismodule(thing) else parameters(thing)
    body, options = [], {}
    for block in re.split(r"\n\s*\n", raw):
        markdown, described = _block(block, names)
        body += markdown
        options |= described
    return Docstring(raw, inline(raw.split("\n\n")[0]), "\n\n".join(body), options)


def _block(block: str, names) -> tuple[list[str], dict[str, str]]:
    """The Markdown of a block of lines without a blank line, and the descriptions of options in it."""
    head, _, rest = block.partition("\n")
    if head in _SECTIONS:
        if head == "Args:":
            return [], _fields(textwrap.dedent(rest), ())[1]
        return [f"**{head[:-1]}**: {inline(textwrap.dedent(rest))}"], {}
    if all(line.startswith("    ") for line in block.splitlines()):
        shown = textwrap.dedent(block).replace("``", "")
        if is_display(shown):
            return [f'<div class="formula">\n{html.escape(shown)}\n</div>'], {}
        return [f"```text\n{shown}\n```"], {}
    if block.startswith("* "):
        return ["\n".join("* " + inline(item) for item in re.split(r"\n?^\* ", block, flags=re.M)[1:])], {}
    if (match := _FIELD.match(block)) and match[1].split(", ")[0] in names:
        prose, options = _fields(block, names)
        return ([inline(prose)] if prose else []), options
    return [inline(block)] if block else [], {}


def _fields(text: str, names) -> tuple[str, dict[str, str]]:
    """The lines that describe no field, and the descriptions of fields by name.

    A field is ``name: description``. Its further lines are indented, and a line may have several fields.
    """
    prose, options, current = [], {}, None
    for line in text.splitlines():
        parts = re.split(rf"(?<=[.;] )(?=(?:{'|'.join(names)}): )", line) if names else [line]
        for part in parts:
            if match := _FIELD.match(part):
                current, part = match[1], part[match.end() :]
            elif not line.startswith(" "):
                current = None
            (prose if current is None else options.setdefault(current, [])).append(part.strip())
    descriptions = {name: inline(" ".join(found)) for names, found in options.items() for name in names.split(", ")}
    return "\n".join(prose), descriptions


def inline(text: str) -> str:
    """A paragraph as one line of Markdown: code spans, links to papers, and all other text shown literally."""
    text, made, end = " ".join(text.split()), [], 0
    for match in _CODE.finditer(text):
        made += [_plain(text[end : match.start()]), f"`{match[1] or match[2]}`"]
        end = match.end()
    return "".join([*made, _plain(text[end:])])


def _plain(text: str) -> str:
    text = re.sub(r"([\\`*_{}\[\]|])", r"\\\1", html.escape(text, quote=False))
    text = _PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return _ARTICLE.sub(r"[kexue.fm \1](https://kexue.fm/archives/\1)", text)


def sources(raw: str) -> list[str]:
    """The papers and articles that a docstring cites, each once, in the words of the citation's brackets."""
    flat, found = " ".join(raw.split()), {}
    brackets = [match[1] for match in re.finditer(r"\(([^()]*)\)", flat)]
    for words in [*brackets, *(match[0] for pattern in (_PAPER, _ARTICLE) for match in pattern.finditer(flat))]:
        keys = _PAPER.findall(words) + _ARTICLE.findall(words) or re.findall(r"\b[A-Za-z]\w*, (?:19|20)\d\d\b", words)
        if len(words) < 90 and keys and keys[0] not in found:
            found |= dict.fromkeys(keys, inline(words.rstrip(".")))
    return list(dict.fromkeys(found.values()))


def parameters(thing) -> dict[str, inspect.Parameter]:
    """The arguments of a function or class by name; empty if it has no signature."""
    try:
        return dict(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return {}
