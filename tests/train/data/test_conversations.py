"""Conversations as tokens with the assistant's turns marked, against transformers; what cannot be marked is refused."""

import json

import numpy as np
import pytest
from chat_templates import CONVERSATIONS, FORMATS, THINKING, taken, write_tokenizer
from documents import training_rows
from refusals import refused

from train.config import DataConfig, parse
from train.data.chat import ChatTemplate
from train.data.learned import ids_of, labels_of
from train.data.tokenizer import load_tokenizer
from train.evaluate.windows import whole_windows

pytest.importorskip("tokenizers")


def encoded(path, record, **data):
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(path), **data))
    [tokens] = tokenizer.encode_conversations([tokenizer.chat.render(**record)])
    return ids_of(tokens), labels_of(tokens) >= 0


def reference(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def expected(folder, record):
    """Ids, and which of them the assistant says, by transformers."""
    tokenizer = reference(folder)
    found = tokenizer.apply_chat_template(
        record["messages"], tools=record.get("tools"), return_assistant_tokens_mask=True, return_dict=True
    )
    return np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parity
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_masks_are_those_of_transformers(tmp_path, name):
    """Without the tag, a turn is found where the tags would mark it."""
    form = FORMATS[name]
    tagged = write_tokenizer(tmp_path / "tagged", form, form.template)
    plain = write_tokenizer(tmp_path / "plain", form, form.plain)
    for record in taken(form).values():
        ids, learned = expected(tagged.parent, record)
        assert learned.any()
        assert not learned.all()
        for path in (tagged, plain):
            found, turns = encoded(path, record)
            np.testing.assert_array_equal(found, ids)
            np.testing.assert_array_equal(turns, learned, err_msg=f"{path.parent.name}: {record}")


@pytest.mark.parity
def test_prompts_are_those_of_transformers(tmp_path):
    for name, form in FORMATS.items():
        path = write_tokenizer(tmp_path / name, form, form.template)
        chat, theirs = load_tokenizer(DataConfig(tokenizer=str(path))).chat, reference(path.parent)
        messages = CONVERSATIONS["two turns"]["messages"]
        for some, is_open in ((messages[:-1], False), (messages, True)):
            options = {"continue_final_message": True} if is_open else {"add_generation_prompt": True}
            wanted = theirs.apply_chat_template(some, tokenize=False, **options)
            assert chat.prompt(some, is_open) == wanted, name
        for said in ("end", "Answer: "):  # a part of some marks, and white space, which some templates remove
            some = [*messages[:-1], {"role": "assistant", "content": said}]
            wanted = theirs.apply_chat_template(some, tokenize=False, continue_final_message=True)
            assert chat.prompt(some, True) == wanted, (name, said)


@pytest.mark.parity
def test_rows_predict_the_assistants_turns_alone(tmp_path):
    """Beside plain text, of which every token is predicted."""
    form = FORMATS["chatml"]
    path = write_tokenizer(tmp_path / "model", form, form.template)
    records = [CONVERSATIONS[name] for name in ("one turn", "two turns", "system")]
    chats = write_lines(
        tmp_path / "chats.jsonl", [*records * 3, {"messages": []}, {"messages": records[0]["messages"][:1]}]
    )
    text = write_lines(tmp_path / "text.jsonl", [{"text": f"{n}: the sky over Cologne is blue"} for n in range(29)])
    mixture = [{"paths": [chats], "messages_key": "messages"}, {"paths": [text]}]
    data = {"source": "files", "mixture": mixture, "tokenizer": str(path), "held_out": 0.0, "bad_records": 0.2}
    rows = training_rows(parse({"data": {**data, "packing": "best-fit"}, "train": {"length": 256}}))
    batch = rows.batch(np.arange(len(rows)))
    wanted = [
        np.where(mask, ids, -1)[1:].tolist() for ids, mask in (expected(path.parent, each) for each in records * 3)
    ]
    chat_rows = len(rows.parts[0].packing)
    found = []
    for row, (tokens, segments, labels) in enumerate(zip(batch.tokens, batch.segment_ids, batch.labels, strict=True)):
        for segment in range(segments.max() + 1):
            inside = segments == segment
            if row < chat_rows:
                found.append(labels[inside][:-1].tolist())
            else:
                np.testing.assert_array_equal(labels[inside][:-1], tokens[inside][1:])
    assert sorted(found) == sorted(wanted)
    assert batch.tokens.min() >= 0


def test_evaluation_scores_the_assistants_turns_alone(tmp_path):
    form = FORMATS["chatml"]
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(write_tokenizer(tmp_path, form, form.plain))))
    [tokens] = tokenizer.encode_conversations([tokenizer.chat.render(**CONVERSATIONS["two turns"])])
    windows = whole_windows([tokens], len(tokens) - 1)
    np.testing.assert_array_equal(windows.tokens[0], ids_of(tokens))
    np.testing.assert_array_equal(windows.weights[0], tokens[1:] >= 0)


def test_a_template_of_ones_own_replaces_the_tokenizers(tmp_path):
    form = FORMATS["zephyr"]
    path = write_tokenizer(tmp_path / "with", form, form.template)
    (tmp_path / "own.jinja").write_text(form.plain)
    without = write_tokenizer(tmp_path / "without", form, "")
    own = encoded(without, CONVERSATIONS["system"], chat_template=str(tmp_path / "own.jinja"))
    for found, wanted in zip(own, encoded(path, CONVERSATIONS["system"]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(without)))
    refused("data.chat_template", lambda: tokenizer.chat)
    missing = load_tokenizer(DataConfig(tokenizer=str(without), chat_template=str(tmp_path / "none.jinja")))
    refused("data.chat_template", lambda: missing.chat, FileNotFoundError)


def template(source, **named):
    return ChatTemplate({"default": source, **named}, {"eos_token": "</s>"}, ["</s>"])


def test_turns_that_cannot_be_told_are_refused():
    one, two = (CONVERSATIONS[name]["messages"] for name in ("one turn", "two turns"))
    thinking = template(THINKING.plain)
    assert (
        thinking.render(one).text[slice(*thinking.render(one).turns[0])]
        == "<think>\n\n</think>\n\nRayleigh<|im_end|>\n"
    )
    refused("generation", lambda: thinking.render(two))
    alike = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    refused("data.chat_template", lambda: template(alike).check_turns())
    refused(
        "generation", lambda: template("{% if false %}{% generation %}{% endgeneration %}{% endif %}").check_turns()
    )
    refused("chat template", lambda: template("{% for message in messages %}"))
    refused("assistant", lambda: thinking.render(one[:1]))
    refused("alternate", lambda: template(FORMATS["gemma"].plain).render(one[1:]))


def test_a_template_runs_in_a_sandbox():
    reach = template("{{ messages.__class__.__mro__ }}")
    refused("refuses", lambda: reach.render(CONVERSATIONS["one turn"]["messages"]))
    changes = template("{{ messages.append(1) }}")
    refused("refuses", lambda: changes.render(CONVERSATIONS["one turn"]["messages"]))


def test_conversations_with_tools_may_have_a_template_of_their_own():
    both = template(FORMATS["chatml"].plain, tool_use=FORMATS["qwen"].plain)
    text = both.render(**CONVERSATIONS["tools"]).text
    assert "# Tools" in text
    assert "# Tools" not in both.render(CONVERSATIONS["one turn"]["messages"]).text


@pytest.mark.parametrize(
    ("named", "data"),
    [
        ("data.messages_key", {"tokenizer": "bytes"}),
        ("data.messages_key", {"paths": "a.txt"}),
        ("data.messages_key", {"source": "stdlib", "paths": []}),
        ("data.messages_key=messages", {"messages_key": "message"}),
        ("text", {"messages_key": "text"}),
        ("model.causal", {}),
        ("model.vocab_size", {}),
    ],
)
def test_what_has_no_conversations_is_refused(tmp_path, named, data):
    form = FORMATS["chatml"]
    path = write_tokenizer(tmp_path, form, form.template)
    (tmp_path / "a.txt").write_text("text")
    write_lines(tmp_path / "a.jsonl", [{**CONVERSATIONS["two turns"], "text": "a"}] * 20)
    values = {"source": "files", "paths": "a.jsonl", "messages_key": "messages", "tokenizer": str(path), **data}
    values["paths"] = str(tmp_path / values["paths"]) if values["paths"] else []
    shape = {"vocab_size": 20} if named == "model.vocab_size" else {"causal": named != "model.causal"}
    refused(named, lambda: training_rows(parse({"data": values, "train": {"length": 64}, "model": shape})))
