"""Searches LongRoPE's factors for a study, once, on text that no cell reads."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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
from train.evaluate.mesh import use_mesh
from train.evaluate.search import Effort, check_searchable, options_of, search_factors
from train.model.build import extension_of, model_length

TRIED, CHOSEN = "search", "found"
"""The kinds of rows of a search: a rule that was tried, and the final result."""

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """The search of a study.

    Args:
        config: the config of the study.
        model_digest: the hash of the model.
        tokens: one text of the length that is searched for, with one more token, the last target.
        effort: the size of the search.
    """

    config: Config
    model_digest: str
    tokens: np.ndarray
    effort: Effort

    @property
    def length(self) -> int:
        """The length that factors are searched for."""
        return len(self.tokens) - 1

    @property
    def scored(self) -> int:
        """The number of scored tokens at the end."""
        return min(scored(self.config), self.length)

    def refusal(self, entry: SchemeConfig) -> str:
        """Why no search is possible for an entry: the model allows none, or the extension does not fit the model."""
        try:
            check_searchable(self.config)
            extension_of(self.config, with_factors(entry, {"long_factor": ()}), self.length)
        except ValueError as error:
            return str(error)
        return ""

    @property
    def key(self) -> dict[str, Any]:
        """Everything that a rule's fitness depends on."""
        digest = hashlib.sha256(np.asarray(self.tokens, np.int32).tobytes()).hexdigest()[:12]
        return {"model": self.model_digest, "length": self.length, "scored": self.scored, "digest": digest}

    def known(self, rows: Sequence[Row]) -> dict[str, Any] | None:
        """The options that this search found earlier."""
        key = {"kind": CHOSEN, "effort": dataclasses.asdict(self.effort)} | self.key
        found = (row["options"] for row in rows if all(row.get(name) == value for name, value in key.items()))
        return next(found, None)

    def run(
        self,
        model: nnx.Module,
        rows: Sequence[Row],
        keep: Callable[[Row], object],
        log: Callable[[str], object],
        mesh: Mesh | None = None,
    ) -> dict[str, Any]:
        """Searches, on the model's mesh, and saves every tried rule and the result."""
        tried = [row for row in rows if row["kind"] == TRIED and self.key.items() <= row.items()]
        nll = {row["rule"]: row["nll"] for row in tried}

        def remembered(fitness: Callable[[LongRoPE], float]) -> Callable[[LongRoPE], float]:
            def cached(rule: LongRoPE) -> float:
                name = json.dumps([rule.long_factor, rule.unscaled_first])
                if name not in nll:
                    nll[name] = fitness(rule)
                    log(f"{nll[name]:.4f} nats per token")
                    keep({"kind": TRIED, **self.key, "rule": name, "nll": nll[name]})
                return nll[name]

            return cached

        arguments = (self.config, model, [self.tokens], self.length, self.effort, self.scored)
        with use_mesh(mesh):
            rule = search_factors(*arguments, remembered, mesh).rule
        options = options_of(rule)
        keep({"kind": CHOSEN, **self.key, "effort": dataclasses.asdict(self.effort), "options": options})
        return options


def with_factors(entry: SchemeConfig, options: Mapping[str, Any]) -> SchemeConfig:
    """The entry that needed a search, with the options that the search found."""
    change = entry.extend["frequencies"]
    return dataclasses.replace(entry, extend={**entry.extend, "frequencies": {**options, **change}})


def search_of(config: Config, model_digest: str) -> Search:
    """The search that a config names. Raises ValueError for sizes or texts that allow no search."""
    section = config.compare.search
    return Search(
        config, model_digest, search_text(config), Effort(section.population, section.iterations, config.seed)
    )


def search_text(config: Config) -> np.ndarray:
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
