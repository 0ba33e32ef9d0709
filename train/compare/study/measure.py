"""Measures one cell of a study: the loss of a text under an extension, or whether a pass key is found; time and
memory."""

import time
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.compare.study.cells import TEXT, Cell
from train.config import Config
from train.data.tokenizer import load_tokenizer
from train.evaluate.decoder import predictor_of
from train.evaluate.mesh import use_mesh
from train.evaluate.perplexity import losses_of, scoring
from train.evaluate.predictor import Predictor
from train.evaluate.tasks import Vocabulary
from train.evaluate.tasks.passkey import passkey_answered
from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.scoring import NO_LOGITS, following, forced
from train.evaluate.windows import whole_windows
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
        with use_mesh(mesh):
            return (_read if cell.kind == TEXT else _find)(config, predictor, parameters, cell)
    except ValueError as error:
        return {"error": in_a_line(error)}


def _read(config: Config, predictor: Predictor, parameters: Any, cell: Cell) -> dict[str, Any]:
    """The loss of the last tokens with all the text before them as context, and by position.

    The last tokens are the same at every length.
    """
    length, rows = cell.length, predictor.filled(1)
    program = _Program(scoring(predictor, rows, length)[0])
    losses = losses_of(program, parameters, whole_windows([cell.text.last(length)], length), rows)
    if losses.error:
        return {"error": losses.error, **program.costs}
    parts = {name: list(values) for name, values in losses.by_position().items()}
    speed = length / program.costs["seconds"]
    return {"nll": losses.mean(cell.sizes["scored"]), **parts, "tokens_per_second": speed, **program.costs}


def _find(config: Config, predictor: Predictor, parameters: Any, cell: Cell) -> dict[str, Any]:
    """The share of pass keys that are right, see `forced`, and the mean loss of the key's tokens, in nats.

    Time and memory are those of the last batch.
    """
    vocabulary = Vocabulary(load_tokenizer(config.data))
    samples = [_sample(vocabulary, cell, case) for case in range(cell.sizes["cases"])]
    program = _Program(jax.jit(partial(following, predictor)))
    shares, losses = forced(predictor, partial(program, parameters), samples, cell.length, rows=1)
    if not np.isfinite(shares).all():
        return {"error": NO_LOGITS, **program.costs}
    return {"accuracy": float(shares.mean()), "answer_nll": float(losses.mean()), **program.costs}


def _sample(vocabulary: Vocabulary, cell: Cell, case: int) -> Sample:
    """A case of the pass key, the same for any extension. The model reads all but its last token."""
    generator = np.random.default_rng([_SEED, cell.length, round(1000 * cell.depth), case])
    return passkey_answered(generator, vocabulary, cell.length + 1, cell.depth)


class _Program:
    """A function that is compiled at its first call; `costs` are the seconds of the last call and the peak memory."""

    def __init__(self, function: Any):
        self._function, self._compiled = function, None

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._function.lower(*arguments).compile()
        start = time.perf_counter()
        found = jax.block_until_ready(self._compiled(*arguments))
        self.costs = {"seconds": time.perf_counter() - start, "memory_bytes": _memory(self._compiled)}
        return found


def _memory(compiled: Any) -> int | None:
    """The peak memory of a program in bytes; None if it is not known."""
    held = compiled.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return None if held is None else sum(getattr(held, name) for name in sizes)
