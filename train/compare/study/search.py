"""Searches LongRoPE's factors for a study, once, on text that no cell reads."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
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
from train.data.tokenizer import load_tokenizer
from train.evaluate.mesh import on
from train.evaluate.search import Effort, options_of, search_factors
from train.model.build import extension_of, model_length
from train.runtime.rows import key_of

Row = Mapping[str, Any]


class Search:
    """The search of a study, whose rows have the `nll` of every `rule` that was tried, and the `options` found.

    Args:
        config: the config of the study.
        model: the hash of the model; see `digest_of_model`.

    Raises ValueError for sizes or texts that allow no search.
    """

    def __init__(self, config: Config, model: str):
        section = config.compare.search
        self._config, self._model, self._tokens = config, model, _search_text(config)
        self._effort = Effort(section.population, section.iterations, config.seed)
        self._length = len(self._tokens) - 1
        self._scored = min(scored(config), self._length)

    @cached_property
    def _key(self) -> str:
        """A hash of all that a rule's fitness depends on."""
        return key_of([self._model, self._length, self._scored, self._tokens.tolist()])

    @property
    def _result(self) -> dict[str, Any]:
        return {"key": self._key, "effort": dataclasses.asdict(self._effort)}

    def known(self, rows: Sequence[Row]) -> dict[str, Any] | None:
        """The options that this search found earlier."""
        return next((row["options"] for row in rows if self._result.items() <= row.items()), None)

    def run(
        self,
        entry: SchemeConfig,
        model: nnx.Module,
        rows: Sequence[Row],
        keep: Callable[[Row], object],
        log: Callable[[str], object],
        mesh: Mesh | None = None,
    ) -> dict[str, Any]:
        """Searches for an entry, on the model's mesh, and keeps every tried rule and the result.

        Raises ValueError if the model allows no search, or the extension does not fit it.
        """
        extension_of(self._config, with_factors(entry, {"long_factor": ()}), self._length)
        nll = {row["rule"]: row["nll"] for row in rows if row["key"] == self._key and "rule" in row}

        def remembered(fitness: Callable[[LongRoPE], float]) -> Callable[[LongRoPE], float]:
            def cached(rule: LongRoPE) -> float:
                name = json.dumps([rule.long_factor, rule.unscaled_first])
                if name not in nll:
                    nll[name] = fitness(rule)
                    log(f"{nll[name]:.4f} nats per token")
                    keep({"key": self._key, "rule": name, "nll": nll[name]})
                return nll[name]

            return cached

        arguments = (self._config, model, [self._tokens], self._length, self._effort, self._scored)
        with on(mesh):
            options = options_of(search_factors(*arguments, remembered, mesh).rule)
        keep({**self._result, "options": options})
        return options


def with_factors(entry: SchemeConfig, options: Mapping[str, Any]) -> SchemeConfig:
    """The entry that needed a search, with the options that the search found."""
    change = entry.extend["frequencies"]
    return dataclasses.replace(entry, extend={**entry.extend, "frequencies": {**options, **change}})


def _search_text(config: Config) -> np.ndarray:
    """The beginning of the longest document; cells read only its end.

    Raises ValueError if no document is long enough for both, and for a length that is not beyond the model's own.
    """
    own = model_length(config)
    length = config.compare.search.length or 2 * own
    check(length > own, f"compare.search.length must exceed the model's own, {own}, found {length}")
    span, tokenizer = max(config.evaluate.lengths), load_tokenizer(config.data)
    longest = max(all_documents(config.data), key=lambda document: len(document.text))
    tokens = [*tokenizer.opening, *tokenizer.tokens(longest.text)]
    check(
        len(tokens) > span + length + 1,
        f"compare.search: no document has {span + length + 2} tokens, for a search of LongRoPE's factors at {length} "
        f"beside a text of {span}; name longer ones, or leave it out by compare.only",
    )
    return np.asarray(tokens[: length + 1], np.int32)
