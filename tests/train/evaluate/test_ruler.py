"""RULER's tasks: texts and scores are those of its code in lm-eval; cases fit their length."""

import importlib
import json
import random
import re

import numpy as np
import pytest
from refusals import refused
from released_models import write_released

from train import cli
from train.config.settings.evaluate import RULER, EvaluateConfig, RulerConfig
from train.evaluate.ruler.scoring import score
from train.evaluate.ruler.sources import Sources, sentences_of
from train.evaluate.ruler.tasks import TASKS, cases_of, check_ruler
from train.runtime.rows import read_rows

pytest.importorskip("wonderwords")


class Chunks:
    """A tokenizer whose tokens are up to four letters of a word, with the space before it, or a sign; and one BOS."""

    def prompt(self, text):
        return np.zeros(1 + len(re.findall(r" ?\w{1,4}|\W", text.decode())), int)


TOKENIZER = Chunks()
WORDS = ("the", "river", "cat", "wall", "bridge", "old", "sand", "stands", "under", "on", "of", "a", "house", "every")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text, and questions in the formats of SQuAD and HotpotQA."""
    folder, drawn = tmp_path_factory.mktemp("ruler"), random.Random(0)

    def sentence():
        return " ".join(drawn.choices(WORDS, k=drawn.randint(3, 12))).capitalize() + drawn.choice(".!?")

    def paragraph():
        return " ".join(sentence() for _ in range(4))

    (folder / "essays.txt").write_text("\n\n".join(paragraph() for _ in range(300)))
    articles = []
    for article in range(20):
        asked = {"question": f"What is {article}?", "answers": [{"text": "the cat"}, {"text": "a cat"}]}
        paragraphs = [
            {
                "context": paragraph(),
                "qas": [{**asked, "is_impossible": False}, {"question": "?", "is_impossible": True}],
            }
            for _ in range(5)
        ]
        articles.append({"title": "", "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    entries = [
        {
            "question": f"Where is {n}?",
            "answer": "on the wall",
            "context": [[f"title {n} {m}", [sentence()]] for m in range(3)],
        }
        for n in range(60)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(entries))
    return folder


def configured(files, **changes):
    named = {"essays": files / "essays.txt", "squad": files / "squad.json", "hotpotqa": files / "hotpotqa.json"}
    return RulerConfig(**{"tasks": RULER, **{key: str(path) for key, path in named.items()}, **changes})


@pytest.fixture(scope="module")
def made(files):
    sources = Sources(configured(files))
    return lambda name, length=3000, count=2: cases_of(name, sources, TOKENIZER, length, count)


@pytest.mark.parametrize("name", RULER)
def test_cases_nearly_fill_their_length_and_hold_their_answers(made, name):
    length = 1500 if name == "qa_2" else 4200  # the paragraphs of a question are few
    for case in made(name, length):
        tokens = len(TOKENIZER.prompt(case.prompt.encode())) + TASKS[name].new
        assert tokens <= length
        assert tokens > 0.6 * length
        if not name.startswith("qa"):
            assert all(answer in case.prompt for answer in case.answers)
    again = [case.prompt for case in made(name, length)]
    assert again == [case.prompt for case in made(name, length)]
    assert len(set(again)) == len(again)


def test_the_text_alone_gives_the_answers(made):
    for name in RULER[:8]:
        for case in made(name):
            needles = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.", case.prompt)
            asked = re.search(r"special magic \w+ for ([\w, -]+) mentioned in the provided text\?", case.prompt)[1]
            keys = re.split(r", (?:and )?", asked)
            assert [value for key in keys for of, value in sorted_by(needles, case.answers) if of == key] == [
                *case.answers
            ]
    for case in made("vt"):
        _, _, text = case.prompt.rpartition("Memorize and track")
        values = {}
        for variable, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            values[variable] = values.get(source, source)
        asked = re.search(r"assigned the value (\d+)", text)[1]
        assert {variable for variable, value in values.items() if value == asked} == {*case.answers}
        assert len(case.answers) == 5
    for case in made("cwe"):
        _, _, text = case.prompt.rpartition("Below is a numbered list")
        words = re.findall(r"\d+\. ([^\d]+?)(?= \d|\n)", text)
        assert {word for word in words if words.count(word) > 1} == {*case.answers}
    for case in made("fwe"):
        words = case.prompt.partition("coded words. ")[2].partition("\n")[0].split()
        counts = sorted({word: words.count(word) for word in words}.items(), key=lambda each: -each[1])
        assert [word for word, _ in counts[:4]] == ["...", *case.answers]


def sorted_by(needles, answers):
    """Needles in the order of their values among the answers; values of one key are asked for in any order."""
    return sorted(needles, key=lambda each: answers.index(each[1]) if each[1] in answers else -1)


def test_scores():
    assert score("niah_multivalue", "They are 12 and\x0034.", ["12", "34", "56", "78"]) == 0.5
    assert score("vt", " abcde FGHIJ", ["ABCDE", "FGHIJ"]) == 1
    assert score("qa_1", "It is THE CAT.", ["a dog", "the cat"]) == 1
    assert score("qa_2", "", ["the cat"]) == 0


def test_what_cannot_be_made_is_refused(files):
    def config(lengths=(3000,), **changes):
        return EvaluateConfig(lengths=lengths, tokens=10**6, batch_tokens=10**6, ruler=configured(files, **changes))

    check_ruler(config(tasks=("niah_single_2", "qa_1")), TOKENIZER)
    refused("evaluate.ruler.essays", lambda: check_ruler(config(tasks=("niah_single_2",), essays=""), TOKENIZER))
    refused("evaluate.ruler.squad", lambda: check_ruler(config(tasks=("qa_1",), squad="none.json"), TOKENIZER))
    refused(
        "evaluate.ruler.hotpotqa",
        lambda: check_ruler(config(tasks=("qa_2",), hotpotqa=str(files / "essays.txt")), TOKENIZER),
    )
    swapped = {"squad": str(files / "hotpotqa.json"), "hotpotqa": str(files / "squad.json")}
    for key, task in (("squad", "qa_1"), ("hotpotqa", "qa_2")):
        refused(f"evaluate.ruler.{key}", lambda task=task: check_ruler(config(tasks=(task,), **swapped), TOKENIZER))
    refused("evaluate.ruler.cases", lambda: check_ruler(config(tasks=("qa_1",), cases=101), TOKENIZER))
    refused("words are too few", lambda: check_ruler(config((400_000,), tasks=("niah_single_3",)), TOKENIZER))
    for name in ("niah_single_1", "vt", "cwe", "fwe", "qa_2"):
        refused(name, lambda name=name: check_ruler(config((150,), tasks=(name,)), TOKENIZER))
    refused("evaluate.ruler.tasks", lambda: config(tasks=("niah",)))


class Counting:
    """The tokenizer of the oracle: what transformers gives for a text, of which it reads the number of ids."""

    def __call__(self, text):
        self.input_ids = TOKENIZER.prompt(text.encode())
        return self


@pytest.fixture
def oracle(monkeypatch):
    """A module of lm-eval's RULER, with its draws from RULER's seed."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(pytest.importorskip("nltk"), "download", lambda name: False)  # no network here

    def loaded(name):
        module = importlib.import_module(f"lm_eval.tasks.ruler.{name}")
        if name == "prepare_niah":  # the sentences of NLTK need that download
            monkeypatch.setattr(module, "cached_sent_tokenize", sentences_of)
        if name == "cwe_utils":  # it draws from its import on
            module = importlib.reload(module)
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002
        return module

    return loaded


@pytest.mark.wide
@pytest.mark.parity
@pytest.mark.parametrize("length", [3000, 12_000])
@pytest.mark.parametrize("name", RULER[:8])
def test_needles_are_those_of_rulers_code(files, made, oracle, name, length):
    niah = oracle("prepare_niah")
    task = TASKS[name]
    kinds = {"words": "words", "numbers": "numbers", "uuids": "uuids"}
    haystack = Sources(configured(files)).essays if task.haystack == "essay" else niah.get_haystack(task.haystack)
    template = importlib.import_module("lm_eval.tasks.ruler.niah_utils").TEMPLATE
    answer = " The special magic {type_needle_v} for {query} mentioned in the provided text are"
    wanted = niah.generate_samples(
        haystack,
        Counting(),
        max_seq_length=length,
        type_haystack=task.haystack,
        type_needle_k=kinds[task.keys],
        type_needle_v=kinds[task.values],
        template=template + answer,
        num_samples=3,
        num_needle_k=task.num_keys,
        num_needle_v=task.num_values,
        num_needle_q=task.num_queries,
    )
    found = made(name, length, 3)
    assert [case.prompt for case in found] == [each["input"] for each in wanted]
    assert [[*case.answers] for case in found] == [each["outputs"] for each in wanted]


@pytest.mark.wide
@pytest.mark.parity
@pytest.mark.parametrize("length", [3000, 12_000])
def test_chains_and_lists_are_those_of_rulers_code(made, oracle, length):
    vt = oracle("vt_utils")
    example = vt.sys_vartrack_w_noise_random(tokenizer=Counting(), num_samples=1, max_seq_length=500, incremental=5)[0]
    wanted = vt.sys_vartrack_w_noise_random(
        tokenizer=Counting(), num_samples=3, max_seq_length=length, icl_example=example
    )
    found = made("vt", length, 3)
    assert [case.prompt for case in found] == [f"{each['input']} {each['gen_prefix']}" for each in wanted]
    assert [[*case.answers] for case in found] == [each["outputs"] for each in wanted]

    cwe = oracle("cwe_utils")
    wanted = cwe.sys_word_pair_random(num_samples=3, max_seq_length=length, tokenizer=Counting())
    found = made("cwe", length, 3)
    texts = [f"{each['input_example']}\n{each['input']} {each['gen_prefix']}" for each in wanted]
    assert [case.prompt for case in found] == texts
    assert [[*case.answers] for case in found] == [each["outputs"] for each in wanted]

    fwe, room = oracle("fwe_utils"), length - TASKS["fwe"].new
    sizes = {"coded_wordlen": 6, "vocab_size": length // 50, "incremental": length // 32}
    _, _, size = fwe.generate_input_output(room, Counting(), **sizes)
    wanted = [fwe.generate_input_output(room, Counting(), num_words=size, **sizes)[:2] for _ in range(3)]
    assert [(case.prompt, [*case.answers]) for case in made("fwe", length, 3)] == wanted


@pytest.mark.wide
@pytest.mark.parity
@pytest.mark.parametrize("length", [900, 2500])
def test_questions_are_those_of_rulers_code(files, made, oracle, monkeypatch, length):
    qa = oracle("qa_utils")
    monkeypatch.setattr(qa, "TEMPLATE", qa.TEMPLATE + " Answer:")
    for name, read, key in (("qa_1", qa.read_squad, "squad"), ("qa_2", qa.read_hotpotqa, "hotpotqa")):
        monkeypatch.setattr(qa, "download_json", lambda _, key=key: json.loads((files / f"{key}.json").read_text()))
        questions, documents = read()
        random.seed(42)
        wanted = qa.generate_samples(
            Counting(), documents, questions, max_seq_length=length, num_samples=3, tokens_to_generate=32
        )
        found = made(name, length, 3)
        assert [case.prompt for case in found] == [each["input"] for each in wanted]
        assert [[*case.answers] for case in found] == [each["outputs"] for each in wanted]


def test_a_released_model_is_measured(files, tmp_path):
    write_released(tmp_path, trained_length=64)
    (tmp_path / "text.txt").write_text("The cat stands on the wall. " * 20)
    ruler = {"tasks": ["fwe"], "lengths": [1200], "cases": 2}
    sizes = ["evaluate.lengths=[32]", "evaluate.tokens=64", "evaluate.batch_tokens=2400", "evaluate.mesh.data=1"]
    data = ["data.source=files", f"data.paths={tmp_path}/*.txt", "data.held_out=0.5"]
    (tmp_path / "more.txt").write_text("The river stands on the sand. " * 20)
    arguments = [str(tmp_path), f"output={tmp_path}/runs", "name=tiny", *sizes, *data]
    assert cli.main(["evaluate", *arguments, f"evaluate.ruler={json.dumps(ruler)}"]) == 0
    rows = [row for row in read_rows(tmp_path / "runs" / "tiny" / "evaluation.jsonl") if "task" in row]
    assert [(row["task"], row["length"], row["cases"], row["error"]) for row in rows] == [("fwe", 1200, 2, None)]
    assert 0 <= rows[0]["accuracy"] <= 1
