"""LongRoPE: a rescale factor for every frequency, found by search, and the search itself (arXiv:2402.13753)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._angles import Frequencies, as_real_positions, exact
from posjax._checks import check, check_choice, check_counts, check_length, check_positive, describe
from posjax.positions import Positions
from posjax.rotary.dynamic import excess, scaled
from posjax.rotary.ntk import ntk_exponents
from posjax.rotary.rules import FrequencyRule, Length, check_number, inverse_powers, per_token
from posjax.rotary.scalings import NTKByParts
from posjax.rotary.tables import RotaryTable, rotary_table


@dataclass(frozen=True)
class LongRoPE(FrequencyRule):
    """theta_t / lambda_t with searched factors, one list for short and one for long inputs (arXiv:2402.13753).

    short_factor, long_factor: lambda_t, w/2 numbers each. The long ones are used when the current length is greater
        than ``original_length``, for the whole row (Hugging Face: for the whole batch).
    original_length: L, the length in tokens that the model was trained on.
    factor: s; cos and sin are multiplied by sqrt(1 + ln s / ln L) (1 for s <= 1), for short inputs too. ``factor`` or
        ``attention_factor`` is required.
    attention_factor: if given, the multiplier of cos and sin.
    select: ``"by_length"``, or ``"short"`` or ``"long"`` to fix the choice, as servers do; then no length is read. Or
        ``"dynamic"`` (microsoft/LongRoPE): the factors are 1 + (lambda_t - 1) (s_cur - 1) / (s - 1), with lambda_t of
        the long list and s_cur = max(1, length / original_length). s_cur also replaces s in the multiplier. Up to
        ``original_length`` this is plain RoPE.
    unscaled_first: n-hat, how many first positions keep the angles and the unit factor of plain RoPE, as in the paper's
        search. 0 in released models. Above 0 the angle between two tokens depends on their absolute positions.

    Switching lists changes all keys: cache keys before rotation, or keep the length fixed. Frequencies are exact for
    traced lengths too, except in the dynamic form (see ``dynamic.py``).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float | None = None
    attention_factor: float | None = None
    select: str = "by_length"
    unscaled_first: int = 0

    hf_type: ClassVar[str] = "longrope"
    hf_keys: ClassVar[dict[str, str]] = {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_length": "original_max_position_embeddings",
        "factor": "factor",
        "attention_factor": "attention_factor",
    }

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            check(isinstance(values, list | tuple), f"{name} must be a list of numbers, found {describe(values)}")
            for value in values:
                check_number(f"every {name}", value)
                check(value > 0, f"every {name} must be positive, found {value!r}")
            object.__setattr__(self, name, tuple(values))
        check_number("original_length", self.original_length, at_least=2)
        check(
            self.factor is not None or self.attention_factor is not None,
            "LongRoPE needs factor (new length / original_length) or attention_factor",
        )
        for name, least in (("factor", 1), ("attention_factor", 0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=least)
        check_choice("select", self.select, ("by_length", "short", "long", "dynamic"))
        check(
            self.select != "dynamic" or (self.factor is not None and self.factor > 1),
            f"select 'dynamic' needs a factor above 1, found {self.factor!r}",
        )
        whole = isinstance(self.unscaled_first, int | np.integer) and not isinstance(self.unscaled_first, bool)
        check(
            whole and self.unscaled_first >= 0,
            f"unscaled_first must be a whole number of at least 0, found {describe(self.unscaled_first)}",
        )
        super().__post_init__()

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """The rotary width, which both lists must fit."""
        width = super().rotary_dim(head_dim)
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            check(
                count == width // 2, f"{name} must have {width // 2} numbers for a rotary width {width}, found {count}"
            )
        return width

    @property
    def reads_length(self) -> bool:
        """Whether the choice of the list depends on the length."""
        return self.select in ("by_length", "dynamic")

    @property
    def shift_invariant(self) -> bool:
        """False if the first positions keep the plain angles."""
        return self.unscaled_first == 0

    @property
    def table_factor(self) -> float:
        """sqrt(1 + ln factor / ln original_length), unless given."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def at_length(
        self, length: Length | None = None, *, head_dim: int | None = None
    ) -> tuple[Frequencies, float | Float[Array, "*lengths 1 1"]]:
        """As :meth:`FrequencyRule.at_length`, for positions from ``unscaled_first`` on; ``length`` None means
        ``original_length``.
        """
        check_length(length)
        plain = self.inverse_frequencies(head_dim)
        length = self.original_length if length is None else length
        if self.select == "dynamic":
            return self._dynamic(plain, excess(length, self.original_length))
        short, long = (exact(plain / np.asarray(factors)) for factors in (self.short_factor, self.long_factor))
        if self.select != "by_length":
            return (short if self.select == "short" else long), self.table_factor
        is_long = length > self.original_length
        if isinstance(is_long, bool | np.bool):
            return (long if is_long else short), self.table_factor
        choice = jax.tree.map(lambda a, b: jnp.where(is_long[..., None], a, b), long, short)
        return choice, self.table_factor

    def _dynamic(self, plain: np.ndarray, beyond: np.ndarray | Float[Array, "*lengths"]):
        """Frequencies and factor at the scale 1 + ``beyond``."""
        growth = (np.asarray(self.long_factor) - 1) / (self.factor - 1)
        values = scaled(plain, 1 / (1 + growth.astype(beyond.dtype) * beyond[..., None]))
        if self.attention_factor is not None:
            return values, self.table_factor
        xp = jnp if isinstance(beyond, jax.Array) else np
        return values, per_token(xp.sqrt(1 + xp.log1p(beyond) / math.log(self.original_length)))

    def table(
        self,
        positions: Positions,
        *,
        head_dim: int | None = None,
        length: Length | None = None,
        params: dict[str, Array] | None = None,
        precision: str = "exact",
    ) -> RotaryTable:
        """As :meth:`FrequencyRule.table`, with plain RoPE at every position below ``unscaled_first``."""
        table = super().table(positions, head_dim=head_dim, length=length, params=params, precision=precision)
        if not self.unscaled_first:
            return table
        plain = rotary_table(positions, self.inverse_frequencies(head_dim), precision=precision)
        first = as_real_positions(positions)[..., None] < self.unscaled_first
        return RotaryTable(*(jnp.where(first, *pair) for pair in zip(plain, table, strict=True)))

    def to_hf(self):
        """Hugging Face's "longrope". Raises ValueError if ``select`` or ``unscaled_first`` is not the default."""
        check(self.select == "by_length", f"to_hf: Hugging Face always selects by length, not {self.select!r}")
        check(self.unscaled_first == 0, f"to_hf: Hugging Face has no unscaled_first, found {self.unscaled_first}")
        return super().to_hf()


UNSCALED_FIRST = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The values of n-hat that the paper's search tries."""


class Found(NamedTuple):
    """What a search found: the best rule, its fitness, and the best fitness at the start and after every iteration."""

    rule: LongRoPE
    fitness: float
    history: tuple[float, ...]


class _Individual(NamedTuple):
    """lambda_t as numbers of steps above 1, non-decreasing in t, and the index of n-hat in the choices."""

    steps: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class _Space:
    """The search space: lambda_t = 1 + steps * step <= 1 + top * step, and the choices of n-hat."""

    initial: LongRoPE
    top: int
    step: float
    choices: tuple[int, ...]

    def individual(self, factors: Float[np.ndarray, "half"], first: int) -> _Individual:
        """The individual nearest to given factors: on the grid, in range, non-decreasing."""
        steps = np.clip(np.rint((np.asarray(factors) - 1) / self.step), 0, self.top).astype(int)
        return _Individual(tuple(np.maximum.accumulate(steps).tolist()), self.choices.index(first))

    def rule(self, one: _Individual, **options) -> LongRoPE:
        """The rule that an individual encodes."""
        factors = tuple(round(1 + steps * self.step, 9) for steps in one.steps)
        return replace(self.initial, long_factor=factors, unscaled_first=self.choices[one.first], **options)

    def seeds(self) -> list[_Individual]:
        """Position interpolation, NTK-aware scaling and YaRN, with n-hat 0, and the given list."""
        rule = self.initial
        width = 2 * len(self.initial.long_factor)
        plain = np.ones(width // 2)
        yarn = NTKByParts(rule.factor, rule.original_length, base=rule.base, head_dim=width)
        by_parts = inverse_powers(rule.base, width) / yarn.inverse_frequencies()
        known = (rule.factor * plain, rule.factor ** -ntk_exponents(width), by_parts)
        seeds = [self.individual(factors, 0) for factors in known]
        return [*seeds, self.individual(rule.long_factor, rule.unscaled_first)]

    def mutate(self, one: _Individual, probability: float, random: np.random.Generator) -> _Individual:
        """Redraws each lambda_t between its neighbours, and n-hat from its choices, with the given probability."""
        steps = list(one.steps)
        for t in np.flatnonzero(random.random(len(steps)) < probability):
            low = steps[t - 1] if t else 0
            high = steps[t + 1] if t + 1 < len(steps) else self.top
            steps[t] = int(random.integers(low, high + 1))
        redrawn = random.random() < probability
        return _Individual(tuple(steps), int(random.integers(len(self.choices))) if redrawn else one.first)


def _cross(a: _Individual, b: _Individual, random: np.random.Generator) -> _Individual:
    """Takes each lambda_t from a random parent, then sorts the list: each one lies between those of the parents."""
    from_a = random.random(len(a.steps)) < 0.5
    steps = np.sort(np.where(from_a, a.steps, b.steps))
    return _Individual(tuple(steps.tolist()), a.first if random.random() < 0.5 else b.first)


def search(
    fitness: Callable[[LongRoPE], float],
    initial: LongRoPE,
    *,
    seed: int = 0,
    population: int = 64,
    parents: int = 32,
    mutations: int = 16,
    crossovers: int = 16,
    probability: float = 0.3,
    iterations: int = 40,
    reach: float = 1.25,
    step: float = 0.01,
    unscaled_first: Sequence[int] = UNSCALED_FIRST,
) -> Found:
    """Evolves the long list of ``initial`` and its ``unscaled_first`` (arXiv:2402.13753, algorithm 1 and table 4).

    The space: lambda_t non-decreasing in t, in [1, reach * factor] in steps of ``step``; n-hat from ``unscaled_first``.
    The start: position interpolation, NTK-aware scaling, YaRN and the given list, each rounded to that grid, and
    mutations of them. Each iteration keeps the ``parents`` best individuals so far. It adds ``mutations`` mutants of
    random parents, in which each lambda_t is redrawn between its neighbours with ``probability``, and ``crossovers``
    crossings of two parents. The same seed gives the same search.

    fitness: of a rule with ``select="long"``, lower is better, such as the perplexity of long documents. It is called
        once for each rule; NaN counts as infinite. 1,344 calls at most by default.
    initial: gives the lengths of the lists, ``factor``, ``original_length``, base and all other fixed settings. To
        get a short list by search, copy the long list found into ``short_factor`` (``dataclasses.replace``).

    Returns the best rule with the ``select`` of ``initial``, never worse than any of the four it started from.
    Raises ValueError for sizes that are not positive, fewer than 4 individuals or more parents than individuals, a
    ``reach`` below 1, an ``initial`` without factor, and an ``unscaled_first`` that does not hold 0 and the
    value of ``initial``.
    """
    space = _space(initial, reach, step, tuple(unscaled_first))
    _check_sizes(population, parents, mutations, crossovers, probability, iterations)
    random = np.random.default_rng(seed)
    seeds = space.seeds()
    rest = [space.mutate(seeds[i % len(seeds)], probability, random) for i in range(population - len(seeds))]
    known: dict[_Individual, float] = {}

    def best(candidates) -> list[_Individual]:
        for one in candidates:
            if one not in known:
                value = float(fitness(space.rule(one, select="long")))
                known[one] = math.inf if math.isnan(value) else value
        return sorted(dict.fromkeys(candidates), key=known.__getitem__)[:parents]

    kept = best([*seeds, *rest])
    history = [known[kept[0]]]
    for _ in range(iterations):
        mutated = [space.mutate(kept[random.integers(len(kept))], probability, random) for _ in range(mutations)]
        pairs = (random.integers(len(kept), size=2) for _ in range(crossovers))
        kept = best([*kept, *mutated, *(_cross(kept[a], kept[b], random) for a, b in pairs)])
        history.append(known[kept[0]])
    return Found(space.rule(kept[0]), history[-1], tuple(history))


def _space(initial: LongRoPE, reach: float, step: float, choices: tuple[int, ...]) -> _Space:
    check(isinstance(initial, LongRoPE), f"initial must be a LongRoPE rule, found {describe(initial)}")
    check(initial.factor is not None, "initial needs factor (new length / original_length), which bounds the search")
    check_number("reach", reach, at_least=1)
    check_positive("step", step)
    check(
        {0, initial.unscaled_first} <= set(choices),
        f"unscaled_first must hold 0 and that of initial, {initial.unscaled_first}; found {choices}",
    )
    return _Space(initial, int((reach * initial.factor - 1) / step + 1e-6), step, choices)


def _check_sizes(population, parents, mutations, crossovers, probability, iterations) -> None:
    check_counts(
        population=population, parents=parents, mutations=mutations, crossovers=crossovers, iterations=iterations
    )
    check(population >= 4, f"population must be at least 4, the number of rules at the start, found {population}")
    check(parents <= population, f"parents must be at most the population of {population}, found {parents}")
    check(0 < probability <= 1, f"probability must be in (0, 1], found {probability!r}")
