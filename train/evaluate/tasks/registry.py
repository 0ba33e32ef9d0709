"""Every task by name, and its cases."""

import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from train.config.settings.evaluate import SECTIONS, EvaluateConfig, TaskConfig
from train.evaluate.tasks.common_words import common_words, frequent_words
from train.evaluate.tasks.needles import needle_multi_key, needle_multi_query, needle_multi_value, needle_single
from train.evaluate.tasks.passkey import passkey, passkey_tokens
from train.evaluate.tasks.recall import copy, induction, mqar
from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.variables import variable_tracking
from train.evaluate.tasks.vocabulary import Vocabulary

TASKS: dict[str, Callable[..., Sample]] = {
    function.__name__: function
    for function in (
        passkey,
        passkey_tokens,
        needle_single,
        needle_multi_key,
        needle_multi_value,
        needle_multi_query,
        variable_tracking,
        common_words,
        frequent_words,
        mqar,
        copy,
        induction,
    )
}
"""The generators of samples, by the name of the task."""


def sizes_of(name: str) -> tuple[str, ...]:
    """The names of the size parameters of a task, with the depth if its answer is at a depth that can be chosen.

    The sizes are read from its section of the config, see `SECTIONS`.
    """
    return tuple(inspect.signature(TASKS[name]).parameters)[3:]


@dataclass(frozen=True)
class Cases:
    """The cases of a task at one length, and at one depth if it has one."""

    depth: float | None
    samples: tuple[Sample, ...]


def cases(name: str, section: TaskConfig, vocabulary: Vocabulary, length: int) -> Iterator[Cases]:
    """The cases of a task at a length, depth by depth; always the same ones, for every model.

    Raises ValueError for a length that is too short for the task.
    """
    sizes = {size: getattr(section, size) for size in sizes_of(name) if size != "depth"}
    depths = np.linspace(0, 1, section.depths).tolist() if "depth" in sizes_of(name) else [None]
    for number, depth in enumerate(depths):
        arguments = sizes | ({} if depth is None else {"depth": depth})
        generator = np.random.default_rng([zlib.crc32(name.encode()), length, number])
        yield Cases(depth, tuple(TASKS[name](generator, vocabulary, length, **arguments) for _ in range(section.cases)))


def lengths_of(name: str, config: EvaluateConfig, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The lengths at which a task is measured: its own, or those of ``evaluate.lengths`` that are long enough.

    Raises ValueError for own lengths that are too short, and if no length of ``evaluate.lengths`` is long enough.
    """
    section = config.section(name)
    reasons = {n: _refusal(name, section, vocabulary, n) for n in section.lengths or config.lengths}
    found = tuple(length for length, reason in reasons.items() if reason is None)
    refused = [reason for reason in reasons.values() if reason]
    if refused and (section.lengths or not found):
        raise ValueError(f"evaluate.tasks: {name}: {refused[-1]}; see evaluate.{SECTIONS[name]}.lengths")
    return found


def _refusal(name: str, section: TaskConfig, vocabulary: Vocabulary, length: int) -> str | None:
    """Why there are no cases of a task at a length; None if there are."""
    try:
        list(cases(name, section, vocabulary, length))
    except ValueError as error:
        return str(error)
    return None


def check_tasks(config: EvaluateConfig, vocabulary: Vocabulary) -> None:
    """Raises ValueError for a task that cannot be measured, before any measurement."""
    for name in config.tasks:
        lengths_of(name, config, vocabulary)
