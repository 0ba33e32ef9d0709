"""Chat templates in the formats of released models, with the tag ``{% generation %}`` around a turn; their tokenizers.

The formats are those of the models' own cards: which tokens are around a message of which role.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

_SAID = "{% generation %}{{ message['content'] + END }}{% endgeneration %}"
_ROLES = "{% for message in messages %}"


@dataclass(frozen=True)
class Format:
    """A template, the special tokens that it writes, and which conversations it takes."""

    template: str
    specials: tuple[str, ...]
    bos: str = ""
    eos: str = ""
    system: bool = True
    tools: bool = False
    spaces: bool = False  # whether its tokenizer writes spaces as U+2581 and begins a text with one
    in_file: bool = False  # chat_template.jinja in place of a key of tokenizer_config.json

    @property
    def plain(self) -> str:
        """The template without its tags."""
        return re.sub("{%-? (end)?generation %}", "", self.template)


def _said(end: str) -> str:
    return _SAID.replace("END", f"'{end}'")


_CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}" + _said("<|im_end|>") + "{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}{% generation %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- endgeneration %}{%- elif message.role == 'assistant' %}{% generation %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endgeneration %}{%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}"
    "{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<start_of_turn>user\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
_PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}"
    "{% if loop.last and not add_generation_prompt %}{{ '\\n' + eos_token }}{% endif %}{% endgeneration %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}\n{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>\\n' }}{% endif %}\n{% endfor %}"
)
_COMMAND = (
    "{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if message['role'] == 'assistant' %}{{ '<|CHATBOT_TOKEN|>' }}"
    "{% generation %}{{ message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}{% endgeneration %}"
    "{% else %}{{ '<|SYSTEM_TOKEN|>' if message['role'] == 'system' else '<|USER_TOKEN|>' }}"
    "{{ message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else 'You are Qwen.' }}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {{- '<|im_start|>system\\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else 'You are Qwen.') }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}{{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_IM = ("<|im_start|>", "<|im_end|>")
_TURN = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")

FORMATS = {
    "chatml": Format(_CHATML, _IM, *_IM),
    "llama-3": Format(
        _LLAMA_3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        tools=True,
        in_file=True,
    ),
    "gemma": Format(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", system=False),
    "mistral": Format(_MISTRAL, (), "<s>", "</s>", system=False, spaces=True),
    "llama-2": Format(_LLAMA_2, (), "<s>", "</s>", spaces=True),
    "phi-3": Format(
        _PHI_3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "<s>", "<|endoftext|>", in_file=True
    ),
    "zephyr": Format(_ZEPHYR, (), "<s>", "</s>", spaces=True),
    "command": Format(_COMMAND, _TURN, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Format(_DEEPSEEK, (), "<|begin|>", "<|finish|>"),
    "qwen": Format(_QWEN, _IM, "", "<|im_end|>", tools=True),
}

_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = Format(_THINKING, _IM, "", "<|im_end|>")
"""One that drops from earlier turns what the assistant thought, as Qwen 3 does."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place, <in> its words",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_USER = {"role": "user", "content": "Why is the sky blue?"}
_FIRST = {"role": "assistant", "content": "Rayleigh"}
_SECOND = {"role": "user", "content": "  And at\n\tdusk, in 日本? 𝄞 "}
_LAST = {"role": "assistant", "content": "Red; the way is longer.\nSo <red>.", "name": None}

CONVERSATIONS = {
    "one turn": {"messages": [_USER, _FIRST]},
    "two turns": {"messages": [_USER, _FIRST, _SECOND, _LAST]},
    "system": {"messages": [_SYSTEM, _USER, _LAST, _SECOND, _FIRST]},
    "tools": {
        "messages": [
            _SYSTEM,
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"sky": "grey"}'},
            _LAST,
        ],
        "tools": [_TOOL],
    },
}
"""Records of a ``.jsonl`` file by what is in them."""


def taken(form: Format) -> dict[str, dict]:
    """The conversations that a format takes."""
    left_out = [*(() if form.tools else ("tools",)), *(() if form.system else ("system", "tools"))]
    return {name: record for name, record in CONVERSATIONS.items() if name not in left_out}


def write_tokenizer(folder: Path, form: Format, template: str) -> Path:
    """Writes a small tokenizer with a chat template; returns the path of its ``tokenizer.json``."""
    tokenizers = pytest.importorskip("tokenizers")
    specials = list(dict.fromkeys([*filter(None, (form.bos, form.eos)), *form.specials, "<pad>"]))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=form.spaces, unk_token=None))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if form.spaces:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        letters = [chr(code) for code in range(33, 127)]
        vocabulary = {word: n for n, word in enumerate([*specials, *bytes_, *letters, "\u2581", "\u2581a", "\u2581R"])}
        merges = [("\u2581", "a"), ("\u2581", "R")]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
        prepend = tokenizers.normalizers.Prepend("\u2581")
        spaces = tokenizers.normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = tokenizers.normalizers.Sequence([prepend, spaces])
        tokenizer.add_special_tokens(specials)
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=len(specials) + 300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
        texts = [message["content"] for each in CONVERSATIONS.values() for message in each["messages"]]
        tokenizer.train_from_iterator(texts * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": form.bos, "eos_token": form.eos, "pad_token": "<pad>"}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: word for name, word in names.items() if word}}
    if form.in_file:
        values["chat_template"] = "a file goes before this key"
        (folder / "chat_template.jinja").write_text(template)
    else:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder / "tokenizer.json"
