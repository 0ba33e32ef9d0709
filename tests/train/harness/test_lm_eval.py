"""lm-eval's tasks over a tiny random model: the numbers are those of lm-eval's own adapter of transformers."""

import json
import shutil

import numpy as np
import pytest
from released_models import TEXT, write_released

from train import cli

pytestmark = pytest.mark.parity
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

LENGTH = 48
CHOICES = [
    {"text": "The cat stands on", "choices": [" the wall", " a", " b"], "gold": 0},
    {"text": "The river", "choices": [" stands on the sand", " a", " b", " c"], "gold": 1},
    {"text": TEXT * 3, "choices": [" The", " wall."], "gold": 1},  # longer than the model
]
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity")],
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "the",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_released(folder, trained_length=LENGTH)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHOICES))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
    for name, values in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **files, **values}))
    return folder


def measured(model, tasks, **arguments):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )


def answers(found):
    """What the model answered to every request, task by task, in the order of the documents."""
    return {
        name: [sample["resps"] for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for name, samples in found["samples"].items()
    }


def numbers_of(answer):
    return np.array([[float(score), str(greedy) == "True"] for [(score, greedy)] in answer])


@pytest.fixture(scope="module")
def reference(released, tasks):
    return measured("hf", tasks, pretrained=str(released), device="cpu", dtype="float32", max_length=LENGTH)


def test_numbers_are_those_of_the_adapter_of_transformers(released, tasks, reference):
    import train.harness.model  # noqa: F401  registers the model

    found = measured("posjax", tasks, path=str(released), batch_size=2)
    for name in TASKS:
        for key, value in reference["results"][name].items():
            if isinstance(value, float):
                np.testing.assert_allclose(found["results"][name][key], value, rtol=1e-5, err_msg=f"{name}: {key}")
    ours, theirs = answers(found), answers(reference)
    for one, other in zip(ours["tiny_choice"], theirs["tiny_choice"], strict=True):
        np.testing.assert_allclose(numbers_of(one), numbers_of(other), rtol=1e-5)
    losses = [[float(one[0]) for [one] in each["tiny_rolling"]] for each in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert ours["tiny_generate"] == theirs["tiny_generate"]


@pytest.mark.wide
def test_the_command_runs_an_extension_and_shows_a_table(released, tasks, tmp_path, capsys):
    shutil.copytree(released, tmp_path / "linear")
    values = json.loads((released / "config.json").read_text())
    values["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "linear" / "config.json").write_text(json.dumps(values))
    wanted = measured("hf", tasks, pretrained=str(tmp_path / "linear"), device="cpu", max_length=2 * LENGTH)
    extend = 'scheme.extend={"frequencies": {"name": "linear"}}'
    options = ["--tasks", "tiny_rolling", "--include_path", str(tasks), "--batch_size", "auto"]
    arguments = ["lm_eval", str(released), extend, f"evaluate.lengths=[{2 * LENGTH}]", "--", *options]
    assert cli.main(arguments) == 0
    [row] = [line.split("|") for line in capsys.readouterr().out.splitlines() if "word_perplexity" in line]
    value = wanted["results"]["tiny_rolling"]["word_perplexity,none"]
    np.testing.assert_allclose(float(row[7]), value, rtol=1e-4)


def test_without_its_own_options_the_command_says_what_is_missing(released, capsys):
    assert cli.main(["lm_eval", str(released)]) == cli.WRONG_INPUT
    assert "--tasks" in capsys.readouterr().err
