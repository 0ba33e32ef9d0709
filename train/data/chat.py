"""Conversations as text: a tokenizer's chat template, and the characters of its text that the assistant says.

A template is a program in the language Jinja that comes with the tokenizer. It runs in Jinja's sandbox.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from train.config.settings.checks import check
from train.runtime.lines import in_a_line

ASSISTANT = "assistant"
"""The role of the messages that a model learns to write."""

_TAG = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what the assistant thinks, the usual one first
_PROBE = ({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"})
_REMEDY = "data.chat_template may name a template that marks them: {% generation %} before, {% endgeneration %} after"

Message = Mapping[str, Any]
Turns = tuple[tuple[int, int], ...]


class Rendered(NamedTuple):
    """The text of a conversation, and where in it each turn of the assistant begins and ends, in characters."""

    text: str
    turns: Turns


class ChatTemplate:
    """Renders conversations as ``apply_chat_template`` of transformers does, and finds the assistant's turns.

    A template that has the tag ``{% generation %}`` marks them itself. Of another one, a turn is what the template adds
    to the prompt before it: the text of the messages before the turn with the prompt for an answer must begin the text
    of these and the turn, which must begin the text of the whole conversation. There a turn has no white space after
    the special token at its end, since a model that generates has stopped by then.

    Args:
        sources: templates by name: ``default``, and ``tool_use`` if conversations with tools have their own.
        specials: the names of special tokens that a template may use, as ``eos_token``, and their words.
        ends: the words of all special tokens.

    Raises:
        ValueError: for a template that is not valid.
    """

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str], ends: Sequence[str]):
        listed = ", ".join(sources)
        check("default" in sources, f"data.tokenizer: it has several chat templates, but no default: {listed}")
        self._specials, self._ends = dict(specials), tuple(ends)
        *self._marks, self._end = (f"<{secrets.token_hex(16)}>" for _ in range(3))  # new ones, which no text can hold
        environment = _environment(tuple(self._marks))
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"data.tokenizer: its chat template is not valid: {in_a_line(error)}") from None
        self._tagged = {name for name, source in sources.items() if _TAG.search(source)}
        self.identity = hashlib.sha256(json.dumps([dict(sources), self._specials]).encode()).hexdigest()
        self._sources = dict(sources)

    def source(self, name: str = "default") -> str:
        """The text of a template."""
        return self._sources[name]

    def prompt(self, messages: Sequence[Message], is_open: bool = False) -> str:
        """The text of messages with the prompt for an answer after it; or, if open, up to the end of what the last
        message says, so that it can be continued.

        Raises ValueError if the template refuses the messages.
        """
        given = {"tools": None, "documents": None, **self._specials}
        plain = list(map(_plain, messages))
        text = self._opened(given, plain) if is_open else self._draw("default", given, plain, True)
        return self._between_marks(text).text

    def _opened(self, given: Mapping[str, Any], messages: Sequence[Message]) -> str:
        """The text up to a mark that stands after what the last message says, which may be any part of the template."""
        *before, last = messages
        said, tail = str(last.get("content") or ""), f"{self._end} "
        text = self._draw("default", given, [*before, {**last, "content": said + tail}])
        found = said.strip() in text and self._end in text
        check(found, "the chat template does not write the last message as it is, so it cannot be continued")
        end = text.rindex(self._end)
        # A template that removes the white space at the end of messages has removed that of the mark.
        trimmed = "" if text.startswith(tail, end) else said[len(said.rstrip()) :]
        return text[:end].removesuffix(trimmed)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of a conversation, and the assistant's turns in it.

        Args:
            messages: mappings with ``role``, ``content`` and what else the template reads. Values of None are left out.
            tools: JSON schemas of the tools that the assistant may call.
            options: further variables of the template.

        Raises:
            ValueError: if the template refuses the conversation, or the turns cannot be found, or there are none.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        given = {"tools": tools, "documents": None, **self._specials, **(options or {})}
        messages, draw = list(map(_plain, messages)), partial(self._draw, name, given)
        text = draw(messages)
        found = self._between_marks(text) if name in self._tagged else self._by_prefixes(draw, messages, text)
        check(bool(found.turns), f"the chat template marks no turn of the assistant; {_REMEDY}")
        return found

    def _draw(self, name: str, given: Mapping[str, Any], messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of messages, with the prompt for an answer after it if asked for."""
        try:
            return self._templates[name].render(messages=messages, add_generation_prompt=prompt, **given)
        except Exception as error:  # a template is a program of a stranger, which may fail in any way
            raise _Refused(f"the chat template refuses the conversation: {in_a_line(error, 300)}") from None

    def _between_marks(self, text: str) -> Rendered:
        first, last = self._marks
        parts: list[str] = []
        turns: list[tuple[int, int]] = []
        begins: list[int] = []
        at = 0
        for part in re.split(f"({first}|{last})", text):
            if part == first:
                begins.append(at)
            elif part == last:
                turns.append((begins.pop(), at))
            else:
                parts.append(part)
                at += len(part)
        return Rendered("".join(parts), tuple(turns))

    def _by_prefixes(self, draw: Callable[..., str], messages: Sequence[Message], text: str) -> Rendered:
        stops = [number for number, message in enumerate(messages, start=1) if message.get("role") == ASSISTANT]
        check(bool(stops), "no message is the assistant's, so there is nothing to learn")
        return Rendered(text, tuple(self._turn(draw, messages[:stop], text) for stop in stops))

    def _turn(self, draw: Callable[..., str], messages: Sequence[Message], text: str) -> tuple[int, int]:
        """Where the last of some messages, which begin the conversation, is in its text."""
        prompt, whole = draw(messages[:-1], prompt=True), draw(messages)
        if not text.startswith(whole):  # a template may close the conversation with EOS
            whole = whole.removesuffix(self._specials.get("eos_token", ""))
        where = f"the assistant's turn in message {len(messages)} cannot be told from the rest: the chat template"
        check(whole.startswith(prompt), f"{where} renders the messages before it otherwise as its prompt; {_REMEDY}")
        check(text.startswith(whole), f"{where} renders it otherwise where messages follow; {_REMEDY}")
        bare = whole.rstrip()
        stop = len(bare if bare.endswith(self._ends) else whole)
        check(
            stop > len(prompt), f"the chat template writes nothing for the assistant's turn in message {len(messages)}"
        )
        return len(prompt), stop

    def check_turns(self) -> None:
        """Raises ValueError if the turns of the shortest conversation cannot be found."""
        try:
            self.render(_PROBE)
        except _Refused:  # it may want a system message, or tools; the data will tell
            return


class _Refused(ValueError):
    """A conversation that a template does not render."""


class _Generation(Extension):
    """The tag ``{% generation %}``: the environment's marks around what is rendered up to ``{% endgeneration %}``."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """The block of a tag, which the parser has reached."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        first, last = self.environment.generation_marks
        return f"{first}{caller()}{last}"


def _environment(marks: tuple[str, str]) -> jinja2.Environment:
    """What templates of released tokenizers may use, by the documentation of transformers on writing them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.extend(generation_marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    """JSON as it is; Jinja's own filter writes it for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(message: Message) -> dict[str, Any]:
    """A message without values of None, and with its reasoning under each name that templates read it by."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


class ChatFiles(NamedTuple):
    """What the files of a tokenizer say about chats: templates by name, and words of special tokens by theirs."""

    templates: Mapping[str, str]
    specials: Mapping[str, str]


def named_templates(found: Any) -> dict[str, str]:
    """The value of ``chat_template`` in a ``tokenizer_config.json`` as templates by name: one text, or a list."""
    if isinstance(found, str):
        return {"default": found} if found else {}
    listed = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return {str(each.get("name")): str(each.get("template")) for each in listed}


def words_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a ``tokenizer_config.json`` names, as ``bos_token``, and their words."""
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    found = {f"{name}_token": values.get(f"{name}_token") for name in names}
    words = {name: word.get("content") if isinstance(word, Mapping) else word for name, word in found.items()}
    return {name: word for name, word in words.items() if isinstance(word, str)}
