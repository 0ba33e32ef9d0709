"""What is measured of a trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from train.config.settings.checks import check, check_distinct, check_positive, check_row_length, unknown
from train.config.settings.train import MeshConfig

SECTIONS = {
    "passkey": "passkey",
    "passkey_tokens": "passkey_tokens",
    "needle_single": "needles",
    "needle_multi_key": "needles",
    "needle_multi_value": "needles",
    "needle_multi_query": "needles",
    "variable_tracking": "variable_tracking",
    "common_words": "words",
    "frequent_words": "words",
    "mqar": "mqar",
    "copy": "copy",
    "induction": "induction",
}
"""The tasks that `evaluate.tasks` may name, and the section with the sizes of each."""


RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
"""The tasks that `evaluate.ruler.tasks` may name."""


@dataclass(frozen=True)
class TaskConfig:
    """The sizes that every task has. Every model gets the same cases, with any seed."""

    lengths: tuple[int, ...] = ()  # in tokens, with the answer; if empty, `evaluate.lengths` that are long enough
    cases: int = 20  # at each length, or at each depth of each length

    def sizes(self) -> dict[str, int]:
        """The sizes that must be positive, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class DepthConfig(TaskConfig):
    """A task whose answer is at a depth: 0 is the beginning of the text, 1 its end, just before the question."""

    depths: int = 5  # evenly from 0 to 1


@dataclass(frozen=True)
class PasskeyTokensConfig(DepthConfig):
    """A passkey among random symbols, for small models."""

    key_tokens: int = 5


@dataclass(frozen=True)
class NeedlesConfig(DepthConfig):
    """Sentences that assign numbers to things, in filler text. Only the single needle has a depth."""

    keys: int = 4  # things with a number, one of which is asked for
    values: int = 4  # numbers of one thing
    queries: int = 4  # things, all of which are asked for
    digits: int = 5  # of every number


@dataclass(frozen=True)
class VariablesConfig(TaskConfig):
    """Chains of variables, each set to the value of the previous one."""

    chains: int = 2  # one of which is asked for
    hops: int = 2  # variables of a chain after its first


@dataclass(frozen=True)
class WordsConfig(TaskConfig):
    """Lists of words, of which the most frequent are asked for."""

    common: int = 3  # words of `common_words` that appear often in the list
    often: int = 6  # how often these appear
    seldom: int = 2  # how often every other word appears
    frequent: int = 3  # words of `frequent_words` that are asked for
    power: float = 2.0  # exponent of the power law by which the words of `frequent_words` are drawn


@dataclass(frozen=True)
class MqarConfig(TaskConfig):
    """Pairs of symbols, then the first symbol of each pair again; its partner must be recalled."""

    pairs: int = 4
    power: float = 0.01  # parameter of the power law of the distance from a pair to its query


@dataclass(frozen=True)
class RulerConfig(TaskConfig):
    """RULER's tasks, whose answers the model writes; as in RULER, 500 cases make a table."""

    tasks: tuple[str, ...] = ()
    essays: str = ""  # a file with the text of the haystack, as Paul Graham's essays
    squad: str = ""  # dev-v2.0.json of SQuAD, for qa_1
    hotpotqa: str = ""  # hotpot_dev_distractor_v1.json of HotpotQA, for qa_2


@dataclass(frozen=True)
class LongPPLConfig:
    """The loss of tokens that need a long context; see train.evaluate.key_tokens. The paper: `short` is 4096."""

    short: int = 0  # tokens of the short context; 0: not measured
    step: int = 1024  # tokens that are compared in one short context
    alpha: float = 2.0  # how much likelier the long context makes a key token, in nats
    beta: float = -2.0  # its log-probability in the long context is above this
    evaluator: str = ""  # a run or a released model that finds the key tokens; each model finds its own if empty


_TASK_SECTIONS = tuple(dict.fromkeys(SECTIONS.values()))


@dataclass(frozen=True)
class EvaluateMesh(MeshConfig):
    """The mesh that a model is measured on."""

    key = "evaluate.mesh"


@dataclass(frozen=True)
class EvaluateConfig:
    """Perplexity on the held-out documents, in windows of each length, and tasks whose answers are right or wrong."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    tokens: int = 131072  # tokens measured at each length
    batch_tokens: int = 4096  # tokens computed at a time, by all devices together
    mesh: EvaluateMesh | None = None  # default: all devices; rows over as many as possible, each row over the rest
    stride: int = 0  # tokens by which a sliding window moves, and which are scored; 0: no sliding windows
    averaged: bool = True  # whether a run with train.ema is used, and exported, with its averaged parameters
    tasks: tuple[str, ...] = ()
    passkey: DepthConfig = field(default_factory=DepthConfig)
    passkey_tokens: PasskeyTokensConfig = field(default_factory=PasskeyTokensConfig)
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    variable_tracking: VariablesConfig = field(default_factory=VariablesConfig)
    words: WordsConfig = field(default_factory=WordsConfig)
    mqar: MqarConfig = field(default_factory=MqarConfig)
    copy: TaskConfig = field(default_factory=TaskConfig)
    induction: DepthConfig = field(default_factory=DepthConfig)
    ruler: RulerConfig = field(default_factory=RulerConfig)
    longppl: LongPPLConfig = field(default_factory=LongPPLConfig)

    def __post_init__(self):
        check_positive("evaluate", self, "tokens", "batch_tokens")
        check(bool(self.lengths), "evaluate.lengths is empty: name at least one length")
        self._check_lengths("evaluate.lengths", self.lengths)
        check(self.tokens >= self.lengths[-1], _too_few("tokens", self.lengths[-1], self.tokens))
        most, stride = self.lengths[0], self.stride
        check(0 <= stride <= most, f"evaluate.stride must be from 0 to the shortest length, {most}, found {stride}")
        for task in self.tasks:
            check(task not in RULER, f"evaluate.tasks: {task!r} is a task of RULER; name it in evaluate.ruler.tasks")
            if task not in SECTIONS:
                raise unknown("evaluate.tasks", task, list(SECTIONS), "task")
        check_distinct("evaluate.tasks", self.tasks, "leave one out")
        self._check_longppl()
        for task in self.ruler.tasks:
            if task not in RULER:
                raise unknown("evaluate.ruler.tasks", task, list(RULER), "task")
        check_distinct("evaluate.ruler.tasks", self.ruler.tasks, "leave one out")
        for name in (*_TASK_SECTIONS, "ruler"):
            self._check_section(f"evaluate.{name}", getattr(self, name))
        check(self.words.power >= 0.5, f"evaluate.words.power must be at least 0.5, found {self.words.power}")

    def _check_longppl(self) -> None:
        short, step, longest = self.longppl.short, self.longppl.step, self.lengths[-1]
        check(short >= 0 and step > 0, f"evaluate.longppl: short and step must be positive, found {short} and {step}")
        check(short < longest, f"evaluate.longppl.short must be below the longest length, {longest}, found {short}")
        check(
            not short or short + step <= self.batch_tokens,
            f"evaluate.batch_tokens must hold a window of evaluate.longppl, short + step = {short + step} tokens, "
            f"found {self.batch_tokens}",
        )

    @property
    def ruler_lengths(self) -> tuple[int, ...]:
        """The lengths of RULER's tasks."""
        return self.ruler.lengths or self.lengths

    def section(self, task: str) -> TaskConfig:
        """The sizes of a task."""
        return getattr(self, SECTIONS[task])

    def _check_section(self, name: str, section: TaskConfig) -> None:
        check_positive(name, section, *section.sizes())
        self._check_lengths(f"{name}.lengths", section.lengths)
        depths = getattr(section, "depths", 2)
        check(depths > 1, f"{name}.depths counts the first and the last, so it must be at least 2, found {depths}")

    def _check_lengths(self, name: str, lengths: tuple[int, ...]) -> None:
        """Raises ValueError for lengths that do not rise from 2, or exceed the tokens computed at a time."""
        check(min(lengths, default=2) > 1, f"{name} must all be above 1, found {min(lengths, default=2)}")
        check_row_length(name, max(lengths, default=2))
        rising = all(a < b for a, b in pairwise(lengths))
        check(rising, f"{name} must rise, found {list(lengths)}")
        longest = max(lengths, default=0)
        check(self.batch_tokens >= longest, _too_few("batch_tokens", longest, self.batch_tokens))


def _too_few(name: str, longest: int, found: int) -> str:
    return f"evaluate.{name} must hold the longest window ({longest}), found {found}"
