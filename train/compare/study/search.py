"""Searches LongRoPE's factors for a study, once, on text that no cell reads."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from posjax.rotary import LongRoPE
from train.compare.study.cells import scored
from train.config import Config, SchemeConfig
from train.config.settings.checks import check
from train.data.sources import all_documents
from train.evaluate.mesh import use_mesh
from train.evaluate.search import Effort, options_of, search_factors
from train.model.build import Setup, extension_of, model_length
from train.report.numbers import Row
from train.runtime.rows import key_of

Once = Callable[[str, Callable[[], Row]], Row]
"""Gives the row with a key that was kept, or else makes and keeps it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """The search of a study.

    Args:
        config: the config of the study.
        model: the hash of the model; see `digest_of_model`.
        tokens: the text of the length that is searched for, with one more token, the last target.
        effort: the size of the search.
    """

    config: Config
    model: str
    tokens: np.ndarray
    effort: Effort

    @cached_property
    def key(self) -> str:
        """A hash of all that the factors depend on: that of their row, whose `options` they are."""
        return key_of([dataclasses.asdict(self.effort), *self._of_a_rule])

    @property
    def _of_a_rule(self) -> list[Any]:
        """All that a rule's fitness depends on."""
        return [self.model, scored(self.config), self.tokens.tolist()]

    def run(
        self, entry: SchemeConfig, model: nnx.Module, once: Once, log: Callable[[str], object], mesh: Mesh | None
    ) -> dict[str, Any]:
        """Searches for an entry, on the model's mesh; every rule that is tried has a row, with its `nll`.

        Raises ValueError if the model allows no search, or the extension does not fit it.
        """
        length = len(self.tokens) - 1
        extension_of(self.config, with_factors(entry, {"long_factor": ()}), length)

        def remembered(fitness: Callable[[LongRoPE], float]) -> Callable[[LongRoPE], float]:
            def try_rule(rule: LongRoPE) -> Row:
                nll = fitness(rule)
                log(f"{nll:.4f} nats per token")
                return {"rule": _name(rule), "nll": nll}

            return lambda rule: once(key_of([_name(rule), *self._of_a_rule]), lambda: try_rule(rule))["nll"]

        arguments = (self.config, model, [self.tokens], length, self.effort, min(scored(self.config), length))
        with use_mesh(mesh):
            return options_of(search_factors(*arguments, remembered, mesh).rule)


def _name(rule: LongRoPE) -> list[Any]:
    """What a search changes of a rule."""
    return [rule.long_factor, rule.unscaled_first]


def with_factors(entry: SchemeConfig, options: Mapping[str, Any]) -> SchemeConfig:
    """The entry that needed a search, with the options that the search found."""
    change = entry.extend["frequencies"]
    return dataclasses.replace(entry, extend={**entry.extend, "frequencies": {**options, **change}})


def search_of(setup: Setup, model: str) -> Search:
    """The search that a config names. Raises ValueError for sizes or texts that allow no search."""
    section = setup.config.compare.search
    effort = Effort(section.population, section.iterations, setup.config.seed)
    return Search(setup.config, model, _search_text(setup), effort)


def _search_text(setup: Setup) -> np.ndarray:
    """The beginning of the longest document; cells read only its end.

    Raises ValueError if no document is long enough for both, and for a length that is not beyond the model's own.
    """
    config, tokenizer = setup.config, setup.tokenizer
    own = model_length(config)
    length = config.compare.search.length or 2 * own
    check(length > own, f"compare.search.length must exceed the model's own, {own}, found {length}")
    span = max(config.evaluate.lengths)
    longest = max(all_documents(config.data), key=lambda document: len(document.text))
    tokens = [*tokenizer.opening, *tokenizer.tokens(longest.text)]
    check(
        len(tokens) > span + length + 1,
        f"compare.search: no document has {span + length + 2} tokens, for a search of LongRoPE's factors at {length} "
        f"beside a text of {span}; name longer ones, or leave LongRoPE out",
    )
    return np.asarray(tokens[: length + 1], np.int32)
