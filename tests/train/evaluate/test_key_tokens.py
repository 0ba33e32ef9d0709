"""LongPPL of a tiny random model, against its definition over the losses of transformers."""

import json
import shutil

import numpy as np
import pytest
from refusals import refused
from released_models import GPT2, TEXT, VOCABULARY, write_released, write_tokenizer

from train import cli
from train.config.settings.evaluate import EvaluateConfig, LongPPLConfig
from train.evaluate.decoder import predictor_of
from train.evaluate.key_tokens import Judge, KeyTokens
from train.evaluate.windows import whole_windows
from train.runtime.rows import read_rows

SIZES = LongPPLConfig(short=7, step=4, alpha=0.02, beta=-5.7)  # a random model hardly tells contexts apart


@pytest.mark.parity
def test_key_tokens_and_their_loss_are_those_of_the_definition(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    models = [write_released(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))]
    documents = [np.random.default_rng(seed).integers(0, VOCABULARY, 31) for seed in range(3)]
    windows, losses = whole_windows(documents, 30), {}
    for name in ("a", "b"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)

        def loss(tokens, theirs=theirs):
            """Of every token but the first."""
            given = torch.tensor(tokens)[None]
            with torch.no_grad():
                return torch.nn.functional.cross_entropy(theirs(given).logits[0, :-1], given[0, 1:], reduction="none")

        losses[name] = [
            (target, loss(tokens)[target - 1].item(), loss(tokens[first : first + 7 + 4])[target - first - 1].item())
            for tokens in documents
            for first in range(0, 31 - 7, 4)
            for target in range(first + 7, min(first + 7 + 4, 31))
        ]
    keys = {
        name: [short - long > SIZES.alpha and -long > SIZES.beta for _, long, short in found]
        for name, found in losses.items()
    }
    assert 5 < sum(keys["a"]) < len(keys["a"]) / 2
    assert keys["a"] != keys["b"]
    own, other = map(predictor_of, models, (0, 0))
    for judge, judged_by in ((None, "a"), (Judge(*other), "b")):
        [found] = KeyTokens(SIZES, 64, judge).losses(own[0], [own[1]], windows)
        wanted = [long for (_, long, _), is_key in zip(losses["a"], keys[judged_by], strict=True) if is_key]
        assert (found.tokens, found.compared) == (len(wanted), 3 * (31 - 7))
        np.testing.assert_allclose(found.nll, np.mean(wanted), rtol=1e-5)


def test_an_evaluation_has_it_at_the_lengths_above_the_short_one(tmp_path, capsys):
    write_released(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(TEXT * 4)
    longppl = {"short": 20, "step": 8, "alpha": 0.001, "beta": -9, "evaluator": str(tmp_path)}
    sizes = {"lengths": [16, 64], "tokens": 256, "batch_tokens": 64, "mesh": {"data": 1}, "longppl": longppl}
    data = ["data.source=files", f"data.paths={tmp_path}/*.txt", "data.held_out=0.5"]
    arguments = [str(tmp_path), f"output={tmp_path}/runs", "name=tiny", *data]
    assert cli.main(["evaluate", *arguments, f"evaluate={json.dumps(sizes)}"]) == 0
    short, long = read_rows(tmp_path / "runs" / "tiny" / "evaluation.jsonl")
    assert short["key_perplexity"] is None
    assert 0 < long["key_tokens"] < long["key_compared"]
    np.testing.assert_allclose(long["key_perplexity"], np.exp(long["key_nll"]))
    shutil.copytree(tmp_path, tmp_path / "other", ignore=shutil.ignore_patterns("runs"))
    write_tokenizer(tmp_path / "other", "quite another text", VOCABULARY)
    sizes["longppl"]["evaluator"] = str(tmp_path / "other")
    assert cli.main(["evaluate", *arguments, f"evaluate={json.dumps(sizes)}"]) == cli.WRONG_INPUT
    assert "evaluate.longppl.evaluator" in capsys.readouterr().err
    write_released(tmp_path / "short", **GPT2)
    sizes["longppl"]["evaluator"] = str(tmp_path / "short")
    assert cli.main(["evaluate", *arguments, f"evaluate={json.dumps(sizes)}"]) == cli.WRONG_INPUT
    assert "evaluate.longppl.evaluator: rows of 64 tokens" in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_refused():
    def config(**sizes):
        return EvaluateConfig(lengths=(32, 64), batch_tokens=64, longppl=LongPPLConfig(**sizes))

    for name, sizes in (
        ("evaluate.longppl", {"short": 8, "step": 0}),
        ("evaluate.longppl.short", {"short": 64}),
        ("evaluate.batch_tokens", {"short": 60}),
    ):
        refused(name, lambda sizes=sizes: config(**sizes))
