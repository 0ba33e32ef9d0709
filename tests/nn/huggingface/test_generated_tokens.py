"""Generated tokens against transformers: greedy after prompts of different lengths, and what may be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.huggingface import released
from nn.huggingface.theirs import TOKENS, random_model, torch, transformers

from posjax.nn import Sampling, choose, from_pretrained, generate

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_transformers")]

COLUMNS, NEW, PAD = 8, 12, 0
LEFT = np.arange(COLUMNS) >= np.array([[0], [5]])  # transformers pads on the left


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.wide)])
def test_greedy_tokens_are_those_of_transformers_up_to_the_stop_token(name, tmp_path):
    model = random_model(released.CASES[name])
    model.save_pretrained(tmp_path)
    prompts = np.where(LEFT, TOKENS[:, :COLUMNS], PAD)

    def theirs(stop):
        given = {"attention_mask": torch.tensor(LEFT).long(), "do_sample": False, "pad_token_id": PAD}
        found = model.generate(torch.tensor(prompts), max_new_tokens=NEW, eos_token_id=stop, **given)
        return found[:, COLUMNS:].numpy()

    stop = int(theirs(-1)[0, 5])
    wanted = theirs(stop)
    found, counts = generate(from_pretrained(tmp_path), prompts, NEW, valid=LEFT, stop={stop})
    assert counts[0] <= 5
    np.testing.assert_array_equal(np.where(found < 0, PAD, found)[:, : wanted.shape[1]], wanted)


@pytest.mark.wide
@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8), Sampling(0.9, top_k=12, top_p=0.6)], ids=str
)
def test_shares_of_drawn_tokens_are_the_probabilities_of_transformers(sampling):
    """Within five standard deviations of the binomial distribution."""
    kinds = transformers.generation.logits_process
    logits, draws = np.random.default_rng(1).normal(0, 2, (1, 40)).astype(np.float32), 50_000
    scores = kinds.TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits))
    scores = kinds.TopKLogitsWarper(sampling.top_k)(None, scores) if sampling.top_k else scores
    scores = kinds.TopPLogitsWarper(sampling.top_p)(None, scores)
    wanted = torch.softmax(scores, -1)[0].numpy()
    drawn = choose(jax.random.key(0), jnp.tile(logits, (draws, 1)), sampling)
    shares = np.bincount(drawn, minlength=40) / draws
    assert (np.abs(shares - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / draws)).all()
