"""LongRoPE's search on a saved run: the rescale factors with the lowest loss on longer text."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from posjax import rotary
from posjax.positions import as_array
from posjax.rotary import LongRoPE, longrope
from posjax.scheme import Scheme
from train.checkpoint.directory import FOUND
from train.checkpoint.restore import config_of, is_run, restore, results_of
from train.config import Config, EvaluateConfig
from train.config.settings.checks import check
from train.evaluate.decoder import predictor_of
from train.evaluate.mesh import mesh_for, use_mesh, whole
from train.evaluate.predictor import next_nll
from train.evaluate.saved import evaluation_documents, last_length
from train.evaluate.windows import full_pieces, last_windows
from train.model.build import Setup, model_length, scheme_of
from train.runtime.distributed import decide
from train.runtime.paths import write_file


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Traced(rotary.FrequencyRule):
    """A LongRoPE whose long list and number of unscaled first tokens are traced, so that all candidates share one
    program."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    theta: Float[Array, "half"]
    first: Int[Array, ""]
    factor: float

    def table(self, positions, *, head_dim=None, length=None, params=None, precision="exact"):
        plain = rotary.Plain(self.base).table(positions, head_dim=head_dim)
        scaled = rotary.rotary_table(positions, self.theta, attention_factor=self.factor)
        unscaled = (as_array(positions) < self.first)[..., None]
        return rotary.RotaryTable(*(jnp.where(unscaled, a, b) for a, b in zip(plain, scaled, strict=True)))


def search(
    directory: str | Path,
    overrides: Sequence[str],
    length: int,
    *,
    population: int = 64,
    iterations: int = 40,
    seed: int = 0,
    log: Callable[[str], Any] = print,
) -> LongRoPE:
    """Searches LongRoPE's long list of factors for the RoPE of a run or a released model at ``length`` tokens.

    See ``posjax.rotary.longrope.search``.

    The fitness is the mean negative log-likelihood of the last tokens of held-out text, in context of that length. The
    result is printed, and written to ``longrope.json`` in the run's directory, or in ``{output}/{name}`` for a released
    model, ready for ``scheme.extend``.

    Raises ValueError for a model without plain RoPE, or a length that is not beyond its training length.
    """
    effort = Effort(population, iterations, seed)
    config = config_of(directory, overrides)
    plain = is_run(directory) or not config.scheme.extend
    check(plain, "scheme.extend: a search starts from the model as it is; leave it out")
    scored = min(last_length(config), length)  # before `_at`, which would change it for a released model
    config = dataclasses.replace(config, evaluate=_at(config, length))
    mesh = mesh_for(config, rows=1)
    stage, model = restore(directory, config, mesh=mesh)
    trained = model_length(stage)
    check(length > trained, f"--length must exceed the model's own, {trained}, found {length}")
    check_searchable(stage)
    folder = results_of(directory, config)
    pieces = full_pieces(evaluation_documents(Setup(config)), length, config.evaluate.tokens)
    with use_mesh(mesh):
        found = search_factors(stage, model, pieces, length, effort, scored, mesh=mesh)
    extension = {"frequencies": {"name": "longrope", "original_length": trained, **options_of(found.rule)}}
    written = json.dumps({"extend": extension, "fitness": found.fitness}) + "\n"
    decide(lambda: write_file(folder / FOUND, written))
    if jax.process_index() == 0:
        for number, value in enumerate(found.history):
            log(f"iteration {number}: {value:.4f} nats per token")
        log(f"extend: {json.dumps(extension)}")
    return found.rule


def options_of(rule: LongRoPE) -> dict[str, Any]:
    """The options of a rule that a search determines, as in a config."""
    options = {name: getattr(rule, name) for name in ("short_factor", "long_factor", "unscaled_first", "factor")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


@dataclasses.dataclass(frozen=True)
class Effort:
    """The size of a search: rules at the start, generations, the seed of its draws."""

    population: int = 64
    iterations: int = 40
    seed: int = 0

    def __post_init__(self):
        for name, least in (("population", 4), ("iterations", 1)):
            found = getattr(self, name)
            check(found >= least, f"{name} of a search must be at least {least}, found {found}")


def search_factors(
    config: Config,
    model: nnx.Module,
    pieces: Sequence[Int[np.ndarray, "length+1"]],
    length: int,
    effort: Effort,
    scored: int,
    wrap: Callable[[Callable], Callable] = lambda fitness: fitness,
    mesh: Mesh | None = None,
) -> longrope.Found:
    """The search of `search` for a model and pieces of text, by the loss of the `scored` last tokens of each.

    `wrap` gets the fitness function and returns the one to use, such as one that saves every result. A mesh, over which
    the model is split, must be in use.
    """
    scheme, trained = check_searchable(config), model_length(config)
    rule, population = scheme.features.frequencies, effort.population
    half = rule.rotary_dim(model.config.head_dim) // 2
    initial = LongRoPE((1.0,) * half, (1.0,) * half, trained, factor=length / trained, base=rule.base)
    numbers = {"population": population, "parents": max(2, population // 2)}
    numbers |= {name: max(1, population // 4) for name in ("mutations", "crossovers")}
    fitness = wrap(_fitness(model, scheme, config, pieces, length, scored, mesh))
    return longrope.search(fitness, initial, seed=effort.seed, iterations=effort.iterations, **numbers)


def check_searchable(config: Config) -> Scheme:
    """The run's scheme. Raises ValueError unless every layer rotates by plain RoPE over the whole head.

    LongRoPE has a temperature, which a norm after the rotation would remove.
    """
    scheme = scheme_of(config)
    rule = scheme.features.frequencies if isinstance(scheme, Scheme) and scheme.rotates else None
    plain = type(rule) is rotary.Plain and rule.partial_rotary_factor == 1
    check(plain, f"search rescales plain RoPE over the whole head of every layer; {config.scheme.name!r} is not that")
    late = scheme.norm is not None and scheme.norm.after_features
    check(not late, "search: this model norms queries and keys after their rotation, which removes a temperature")
    return scheme


def _fitness(
    model: nnx.Module,
    scheme: Scheme,
    config: Config,
    pieces: Sequence[np.ndarray],
    length: int,
    scored: int,
    mesh: Mesh | None = None,
) -> Callable[[LongRoPE], float]:
    """The mean negative log-likelihood of the last tokens under a rule, from one compiled program."""
    graph, parameters = nnx.split(model)
    windows = last_windows(pieces, length, scored)
    tokens, weights = windows.tokens.astype(np.int32), windows.weights

    @jax.jit
    def total(parameters, theta, first, factor):
        rule = _Traced(theta=theta, first=first, factor=factor, base=scheme.features.frequencies.base)
        traced = nnx.merge(graph, parameters).with_scheme(scheme.replace(frequencies=rule))

        def row(pair):
            predictor, parameters = predictor_of(traced, config.seed, mesh)
            rows = jnp.broadcast_to(pair[0], (predictor.filled(1), *pair[0].shape))
            return (next_nll(predictor, parameters, rows, length)[0] * pair[1]).sum()

        return whole(jax.lax.map(row, (tokens, weights)).sum())

    def fitness(rule: LongRoPE) -> float:
        found, factor = rule.at_length(head_dim=model.config.head_dim)
        return float(total(parameters, found.value, np.int32(rule.unscaled_first), factor)) / windows.scored

    return fitness


def _at(config: Config, length: int) -> EvaluateConfig:
    """The evaluation at one length, with batches of one text."""
    section = config.evaluate
    sizes = {name: max(getattr(section, name), length) for name in ("tokens", "batch_tokens")}
    return dataclasses.replace(section, lengths=(length,), stride=0, **sizes)
