"""Measures one cell of a study: the loss of a text under an extension, or whether a pass key is found; time and
memory."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.compare.study.cells import TEXT, Cell
from train.config import Config
from train.data.tokenizer import load_tokenizer
from train.evaluate.decoder import predictor_of
from train.evaluate.mesh import on, whole
from train.evaluate.perplexity import position_ends
from train.evaluate.predictor import Predictor, best, hidden_at, next_nll
from train.evaluate.tasks import Vocabulary
from train.evaluate.tasks.passkey import QUESTION, Prompt, passkey
from train.model.build import scheme_of
from train.runtime.lines import in_a_line

_SEED = 7


def measure(config: Config, model: nnx.Module, cell: Cell, mesh: Mesh | None = None) -> dict[str, Any]:
    """The numbers of a cell. A ValueError of the model or the scheme becomes the ``error``.

    If the model is sharded over a mesh, the devices of the mesh compute together.
    """
    if cell.refusal:
        return {"error": cell.refusal}
    try:
        scheme = scheme_of(config, cell.entry).extend(**cell.extend)
        predictor, parameters = predictor_of(model.with_scheme(scheme), config.seed, mesh)
        with on(mesh):
            return (_read if cell.kind == TEXT else _find)(config, predictor, parameters, cell)
    except ValueError as error:
        return {"error": in_a_line(error)}


def _read(config: Config, predictor: Predictor, parameters: Any, cell: Cell) -> dict[str, Any]:
    """The loss of the last tokens with all the text before them as context, and by position.

    The last tokens are the same at every length.
    """
    tokens = np.repeat(cell.text.last(cell.length)[None], predictor.filled(1), axis=0)

    def nll(parameters, tokens):
        return whole(next_nll(predictor, parameters, tokens, cell.length)[0])

    found, costs = _run(nll, parameters, tokens)
    losses, ends = np.asarray(found, np.float64), position_ends(cell.length)
    if not np.isfinite(losses).all():
        return {"error": "the loss is not finite", **costs}
    parts = np.add.reduceat(losses, [0, *ends[:-1]]) / np.diff([0, *ends])
    return {
        "nll": float(losses[-cell.sizes["scored"] :].mean()),
        "position_ends": list(ends),
        "position_nll": parts.tolist(),
        "tokens_per_second": cell.length / costs["seconds"],
        **costs,
    }


def _find(config: Config, predictor: Predictor, parameters: Any, cell: Cell) -> dict[str, Any]:
    """The share of pass keys whose tokens are all the likeliest ones, given the text and the key up to each token.

    Exactly these keys would be written by greedy decoding. ``answer_nll`` is the mean negative log-likelihood of the
    key's tokens, in nats. Time and memory are those of the last case.
    """
    vocabulary = Vocabulary(load_tokenizer(config.data))
    right, losses, costs = [], [], {}
    for case in range(cell.sizes["cases"]):
        tokens, size = _prompt(vocabulary, cell, case)
        tokens = np.repeat(tokens, predictor.filled(1), axis=0)

        def answer(parameters, tokens, size=size):
            at = jnp.broadcast_to(jnp.arange(cell.length - size, cell.length), (len(tokens), size))
            hidden = hidden_at(predictor, parameters, tokens[:, :-1], at, cell.length)
            logits = whole(predictor.logits(predictor.ready(parameters), hidden)[0])
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, -size:, None], axis=-1)
            return best(logits) == tokens[0, -size:], -chosen.mean()

        (found, loss), costs = _run(answer, parameters, tokens)
        right.append(bool(np.asarray(found).all()))
        losses.append(float(loss))
    if not np.isfinite(losses).all():
        return {"error": "the logits are not finite", **costs}
    return {"accuracy": float(np.mean(right)), "answer_nll": float(np.mean(losses)), **costs}


def _prompt(vocabulary: Vocabulary, cell: Cell, case: int) -> tuple[np.ndarray, int]:
    """A text of the cell's length that ends in the pass key, and the key's number of tokens; the same for any
    extension."""

    def drawn(room: int) -> Prompt:
        generator = np.random.default_rng([_SEED, cell.length, round(1000 * cell.depth), case])
        return passkey(generator, vocabulary, cell.length + 1, cell.depth, room)

    answer = _answer(vocabulary, drawn(1).answer.decode())
    prompt = drawn(len(answer))
    return np.concatenate([prompt.tokens, answer]).astype(np.int32)[None], len(answer)


def _answer(vocabulary: Vocabulary, key: str) -> np.ndarray:
    """The tokens of the key after the question. Tokenised alone, the key would start with an extra space in many
    tokenizers."""
    return vocabulary.tokens(f"{QUESTION} {key}")[len(vocabulary.tokens(QUESTION)) :]


def _run(function: Callable, parameters: Any, tokens: np.ndarray) -> tuple[Any, dict[str, float]]:
    """The result of a compiled function, its time in seconds, and the peak memory of its program in bytes."""
    compiled = jax.jit(function).lower(parameters, tokens).compile()
    start = time.perf_counter()
    found = jax.block_until_ready(compiled(parameters, tokens))
    seconds = time.perf_counter() - start
    held = compiled.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    memory = None if held is None else sum(getattr(held, name) for name in sizes)
    return found, {"seconds": seconds, "memory_bytes": memory}
