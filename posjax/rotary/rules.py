"""Frequency rules, which compute the inverse frequencies of the rotary pairs of a head; plain RoPE and p-RoPE.

A rule is a frozen, hashable dataclass, so that it can be a static argument of ``jit``. The scaling rules are in
``scalings.py``, ``ntk.py``, ``dynamic.py``, ``longrope.py`` and ``clex.py``. Everything known on the host is computed
in float64, and its angles are exact: within 5e-7 of float64 at any int32 position.
"""

import math
import numbers
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Float, Int

from posjax._angles import Frequencies, exact
from posjax._checks import check, check_choice, check_even, check_number, describe
from posjax._slots import is_custom_class
from posjax.positions import Positions
from posjax.rotary.tables import RotaryTable, rotary_table

Length = int | Int[Array, ""] | Int[Array, "batch"] | Int[Array, "batch length"]


def is_host(length: Length) -> bool:
    """Whether the length is known before tracing, so that float64 can be used."""
    return isinstance(length, int | np.integer | np.ndarray)


def per_token(factor: Float[Array, "*lengths"]) -> Float[Array, "*lengths 1 1"]:
    """The factor of each row ``[batch, 1, 1]`` or token ``[batch, length, 1]``, for a table; scalars unchanged."""
    return factor[(..., *(None,) * (3 - factor.ndim))] if factor.ndim else factor


@dataclass(frozen=True, kw_only=True)
class FrequencyRule:
    """The base class of frequency rules.

    base: b of theta_t = b^(-2t/w).
    head_dim: d, the size of a head; may be passed to ``at_length(head_dim=...)`` instead.
    partial_rotary_factor: the share of the head that is rotated, w = int(d * factor), as GPT-NeoX counts it. For a
        width that is known, the share is w / d.
    """

    base: float = 10_000.0
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0

    reads_length: ClassVar[bool] = False
    """Whether the rule reads the current length (dynamic NTK, LongRoPE, CLEX)."""
    num_axes: ClassVar[int] = 1
    """How many coordinates a position has."""
    shift_invariant: ClassVar[bool] = True
    """Whether the angle between two tokens depends only on the difference of their positions."""
    hf_type: ClassVar[str | None] = None
    """Hugging Face's ``rope_type``, or None for a rule that it does not have."""
    hf_keys: ClassVar[dict[str, str]] = {}
    """Field of the rule -> key of Hugging Face's dictionary, besides rope_theta and partial_rotary_factor."""

    def __post_init__(self):
        check_number("base", self.base)
        check(self.base > 1, f"base must be greater than 1, found {self.base!r}")
        check_number("partial_rotary_factor", self.partial_rotary_factor)
        whole = self.head_dim is None or isinstance(self.head_dim, numbers.Integral)
        check(whole, f"head_dim must be a whole number, found {describe(self.head_dim)}")
        self._check_width()

    def _check_width(self) -> None:
        share = self.partial_rotary_factor
        check(0 < share <= 1, f"partial_rotary_factor must be in (0, 1], found {share!r}")
        if self.head_dim is not None:
            self.rotary_dim()

    def _head_dim(self, head_dim: int | None) -> int:
        size = head_dim if self.head_dim is None else self.head_dim
        check(size is not None, f"{type(self).__name__} needs a head_dim: set its field or pass head_dim=")
        check(head_dim in (None, size), f"head_dim={head_dim} but the rule was made for head_dim={size}")
        return size

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """w, how many features of a head are rotated: int(head_dim * partial_rotary_factor), which must be even.

        If only rounding keeps the product below an even number, w is that number: 88 * (60 / 88) is 59.99999999999999.
        """
        size = self._head_dim(head_dim)
        width = int(size * self.partial_rotary_factor)
        if width % 2 and math.isclose(size * self.partial_rotary_factor, width + 1, rel_tol=1e-15):
            width += 1
        named = f"rotary width int({size} * {self.partial_rotary_factor}) of head_dim={size}"
        check_even(named if self.partial_rotary_factor != 1 else "head_dim", width)
        return width

    def inverse_frequencies(self, head_dim: int | None = None) -> Float[np.ndarray, "w/2"]:
        """theta_t in float64 on the host, radians per position, t = 0 .. w/2 - 1."""
        return self._scaled(inverse_powers(self.base, self.rotary_dim(head_dim)))

    def _scaled(self, inverse_frequencies: Float[np.ndarray, "half"]) -> Float[np.ndarray, "half"]:
        """The frequencies of the rule, from the plain ones."""
        return inverse_frequencies

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin (Hugging Face's attention_factor or attention_scaling)."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """A second factor of the logits, besides ``table_factor``, that some models use (see YaRN); else 1."""
        return 1.0

    def at_length(self, length: Length | None = None, *, head_dim: int | None = None) -> tuple[Frequencies, float]:
        """(inverse frequencies, attention factor): the second multiplies cos and sin.

        ``length`` is read only by rules with ``reads_length``; None means their training length. A Python int or a
        NumPy array gives exact frequencies, a traced one float32. Lengths ``[batch]`` give ``[batch, w/2]``, and a
        factor ``[batch, 1, 1]`` if the factor depends on the length too.
        ``head_dim`` is needed if the rule has none. Raises ValueError if neither is given, or if the two differ.
        """
        inverse_frequencies = self.inverse_frequencies(head_dim)
        if is_custom_class(type(self)):
            self._check_custom(inverse_frequencies, head_dim)
        return exact(inverse_frequencies), self.table_factor

    def _check_custom(self, inverse_frequencies: Any, head_dim: int | None) -> None:
        """Raises ValueError unless a rule from outside the library gave a NumPy array with a number for each pair."""
        name = f"{type(self).__name__}.inverse_frequencies"
        pairs = self.rotary_dim(head_dim) // 2
        check(
            isinstance(inverse_frequencies, np.ndarray),
            f"{name} must give a NumPy array, made in float64, found {describe(inverse_frequencies)}",
        )
        check(
            inverse_frequencies.shape == (pairs,),
            f"{name} must give {pairs} numbers, one for each pair, found {inverse_frequencies.shape}",
        )

    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """Learned parameters of the rule, ``{}`` if there are none."""
        return {}

    def table(
        self,
        positions: Positions,
        *,
        head_dim: int | None = None,
        length: Length | None = None,
        params: dict[str, Array] | None = None,
        precision: str = "exact",
    ) -> RotaryTable:
        """The cosines and sines of every position, times the attention factor; see ``posjax.rotary_table``.

        Rules whose angles are more than a position times a frequency (several axes, unscaled first tokens, learned
        frequencies) override this method.
        """
        check(
            length is not None or not self.reads_length,
            f"{type(self).__name__} reads the current length: pass length=",
        )
        inverse_frequencies, factor = self.at_length(length, head_dim=head_dim)
        return rotary_table(positions, inverse_frequencies, attention_factor=factor, precision=precision)

    def to_hf(self) -> dict[str, Any]:
        """The rule as Hugging Face's ``rope_parameters`` (transformers 5). ``from_hf`` reads it back.

        Raises ValueError for rules that Hugging Face does not have.
        """
        check(self.hf_type is not None, f"to_hf: Hugging Face has no rope_type for {type(self).__name__}")
        values = {"rope_type": self.hf_type, "rope_theta": self.base}
        if self.partial_rotary_factor != 1:
            values["partial_rotary_factor"] = self._written_share()
        for name, key in self.hf_keys.items():
            value = getattr(self, name)
            if value is not None:
                values[key] = list(value) if isinstance(value, tuple) else value
        return values

    def _written_share(self) -> float:
        """The share, the next float if int(head_dim * share) is below the rotary width, as others compute it."""
        share = self.partial_rotary_factor
        short = self.head_dim is not None and int(self.head_dim * share) < self.rotary_dim() < self.head_dim
        return math.nextafter(share, 1) if short else share


@dataclass(frozen=True)
class OfFactor(FrequencyRule):
    """A rule with a ``factor`` of at least 1: usually the target length divided by the training length."""

    factor: float

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)


@dataclass(frozen=True)
class OverRule(FrequencyRule):
    """A rule made from another rule of one axis.

    rule: that rule (YaRN, dynamic NTK, ...); None is RoPE with this object's base, head_dim and partial rotary factor.
        If a rule is given, it sets those three.
    """

    rule: FrequencyRule | None = None

    def __post_init__(self):
        if self.rule is not None:
            one = isinstance(self.rule, FrequencyRule) and self.rule.num_axes == 1
            check(one, f"rule must be a frequency rule of one axis, found {describe(self.rule)}")
            for name in ("base", "head_dim", "partial_rotary_factor"):
                mine = getattr(self, name)
                its = getattr(self.rule, name)
                check(mine in (getattr(type(self), name), its), f"{name}={mine!r} but the rule has {name}={its!r}")
                object.__setattr__(self, name, its)
        super().__post_init__()

    @property
    def _rule(self) -> FrequencyRule:
        shared = {"head_dim": self.head_dim, "partial_rotary_factor": self.partial_rotary_factor}
        return Plain(self.base, **shared) if self.rule is None else self.rule

    def _check_width(self) -> None:
        rule = self._rule  # if this makes a new rule, its own checks run
        if rule.head_dim is not None:
            self.rotary_dim()

    @property
    def table_factor(self) -> float:
        """The rule's factor of cos and sin."""
        return self._rule.table_factor

    @property
    def softmax_scale(self) -> float:
        """The rule's factor of the logits."""
        return self._rule.softmax_scale

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """w, the rotary width of the rule."""
        return self._rule.rotary_dim(head_dim)

    def inverse_frequencies(self, head_dim: int | None = None) -> Float[np.ndarray, "w/2"]:
        """The inverse frequencies of the rule, in its order."""
        return self._rule.inverse_frequencies(head_dim)


def check_fixed(rule: FrequencyRule, change: str) -> None:
    """Raises ValueError for a rule that reads the length, or whose angles are more than position times frequency.

    ``change`` is what would be done with its frequencies, for the message.
    """
    name = type(rule).__name__
    check(not rule.reads_length, f"rule: {name} reads the current length, so its frequencies are not fixed")
    fixed = all(getattr(type(rule), hook) is getattr(FrequencyRule, hook) for hook in ("at_length", "table"))
    check(fixed, f"rule: {name} makes its own table; only position times frequency can be {change}")


def inverse_powers(base: float, width: int) -> Float[np.ndarray, "width/2"]:
    """theta_t = base^(-2t/width) for t = 0 .. width/2 - 1, in float64."""
    return base ** -(np.arange(0, width, 2, dtype=np.float64) / width)


@dataclass(frozen=True)
class Plain(FrequencyRule):
    """RoPE: theta_t = base^(-2t/w), w the rotary width (RoFormer, arXiv:2104.09864, section 3.2.2).

    With ``partial_rotary_factor`` below 1 only the first w = int(d * factor) features rotate, and the exponents are
    over w (GPT-NeoX, GPT-J).
    """

    base: float = 10_000.0

    hf_type: ClassVar[str] = "default"


@dataclass(frozen=True)
class Proportional(FrequencyRule):
    """p-RoPE: keep the int(p * d // 2) highest frequencies of the full head, set the rest to zero (arXiv:2410.06205).

    theta_t = base^(-2t/d) / factor for t < int(p d // 2), else 0, with p = ``partial_rotary_factor``. Unlike in partial
    rotary, the exponents are over the full head size d. p = 1 is RoPE and p = 0 is NoPE. Gemma 4's global layers use
    p = 0.25; Hugging Face calls it "proportional".

    partial_rotary_factor: p, the share of the pairs that rotate, those of the highest frequencies.
    factor: the target length divided by the training length, at least 1.
    """

    partial_rotary_factor: float = field(default=0.75, kw_only=False)
    factor: float = field(default=1.0, kw_only=True)

    hf_type: ClassVar[str] = "proportional"
    hf_keys: ClassVar[dict[str, str]] = {"factor": "factor"}

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, at_least=1)

    def _check_width(self) -> None:
        share = self.partial_rotary_factor
        check(0 <= share <= 1, f"partial_rotary_factor must be in [0, 1], found {share!r}")
        if self.head_dim is not None:
            self.rotary_dim()

    def rotary_dim(self, head_dim: int | None = None) -> int:
        """The whole head: the pairs that do not rotate have frequency zero."""
        size = self._head_dim(head_dim)
        check_even("head_dim", size)
        return size

    def _scaled(self, inverse_frequencies):
        half = inverse_frequencies.size
        rotating = int(self.partial_rotary_factor * 2 * half // 2)
        return np.where(np.arange(half) < rotating, inverse_frequencies, 0.0) / self.factor


def inverse_frequencies(head_dim: int, base: float = 10_000.0, *, partial_rotary_factor: float = 1.0) -> Frequencies:
    """RoPE's inverse frequencies theta_t = base^(-2t/w), t = 0 .. w/2 - 1, w = int(head_dim * partial_rotary_factor).

    Radians per position, in exact fixed point; NumPy and jnp functions use ``.value``, the float32 array ``[w/2]``.
    Raises ValueError for an odd width. (RoFormer, arXiv:2104.09864, section 3.2.2)
    """
    return Plain(base, head_dim=head_dim, partial_rotary_factor=partial_rotary_factor).at_length()[0]


def check_angles(frequencies: Any, precision: str) -> None:
    """Raises ValueError unless ``frequencies`` is a rule and ``precision`` is one of ``rotary_table``."""
    made = isinstance(frequencies, FrequencyRule)
    check(made, f"frequencies must be a frequency rule such as Plain(), found {describe(frequencies)}")
    check_choice("precision", precision, ("exact", "hf"))
