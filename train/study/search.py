"""LongRoPE's factors for a study, found once, on text that no cell reads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from rich.console import Console

from posjax.rotary import LongRoPE
from train.config import Config, SchemeConfig
from train.data import documents, load_tokenizer
from train.model import own_length
from train.search import Sizes, search_factors
from train.settings.checks import check
from train.study.cells import append_row, read_rows

SEARCH = "search"


def searched(config: Config, entry: SchemeConfig, directory: Path, model: nnx.Module, console: Console) -> SchemeConfig:
    """The entry, with LongRoPE's factors where it names LongRoPE without; every rule that is tried is kept."""
    if not is_to_be_searched(entry):
        return entry
    change = entry.extend["frequencies"]
    found = _found(config, directory, model, console)
    factors = {"short_factor": list(found.short_factor), "long_factor": list(found.long_factor)}
    options = factors | {"unscaled_first": found.unscaled_first, "factor": found.factor}
    return dataclasses.replace(entry, extend={**entry.extend, "frequencies": {**options, **change}})


def is_to_be_searched(entry: SchemeConfig) -> bool:
    """Whether an entry names LongRoPE without its factors."""
    change = entry.extend.get("frequencies")
    return isinstance(change, Mapping) and change.get("name") == "longrope" and "long_factor" not in change


def _found(config: Config, directory: Path, model: nnx.Module, console: Console) -> LongRoPE:
    sizes = config.compare.search
    length = sizes.length or 2 * own_length(config)
    tokens = _text(config, length)

    def told(line: str) -> None:
        console.print(f"search of LongRoPE's factors: {line}", markup=False)

    known = {row["rule"]: row["nll"] for row in read_rows(directory) if row["kind"] == SEARCH}

    def remembered(fitness: Any) -> Any:
        def of(rule: LongRoPE) -> float:
            name = json.dumps([length, rule.long_factor, rule.unscaled_first])
            if name not in known:
                known[name] = fitness(rule)
                told(f"{known[name]:.4f} nats per token")
                append_row(directory, {"kind": SEARCH, "rule": name, "nll": known[name]})
            return known[name]

        return of

    limits = Sizes(sizes.population, sizes.iterations, config.seed)
    return search_factors(config, model, [tokens], length, limits, remembered).rule


def _text(config: Config, length: int) -> Any:
    """The beginning of the longest document, far from its end, which cells read."""
    span = max(config.evaluate.lengths)
    found = documents(dataclasses.replace(config.data, held_out=0.0), "train")
    longest = max(found, key=lambda document: len(document.text))
    tokens = load_tokenizer(config.data).encode(longest.text)[1:-1]
    check(
        len(tokens) > span + length + 1,
        f"compare.search: no document is long enough for a search at {length} tokens beside a text of {span}",
    )
    return tokens[: length + 1]
