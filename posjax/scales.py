"""Scales of the logits that depend on the query.

A scale is the factor ``c_h(i)`` in ``z_h(i, j) = c_h(i) <phi_i, psi_j> / sqrt(d) + b_h(i, j)``: one number for each
query (and head). It multiplies the *features* ``phi``, after their map: that is the same as multiplying the query for
RoPE, but not for CoCA, whose ``phi`` is quadratic in the query. It does not change keys, so caches are unaffected.
Several scales multiply each other; the bias is not scaled, unless its spec says so (``bias.Shaw``, Inkling's).

The functions return one factor per query, float32. The specs are ``Scale``.

``visible`` is the number of keys that the mask lets each query see, its own included: a count, not a position. Under a
causal mask over an unpadded, unpacked sequence it is the index of the query plus one.
"""

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_flags, check_number, check_positive, params_of
from posjax._numbers import LARGEST, align_ranks, is_number
from posjax.positions import Positions, as_array

SSMAX_INITIAL = 0.168
"""The initial ``s`` reported for SSMax's learned scale, equal to ``ssmax_initial(1024)`` to three digits."""

DROPE_FROM_SCRATCH, DROPE_SMOLLM = 0.412, 0.103
"""Slopes ``c`` of DroPE's temperature: of its 0.5B model trained from scratch, and of SmolLM recalibrated."""


def log_n(visible: Int[Array, "*b length"], length: int, *, minimum: int = 16) -> Float[Array, "*b length"]:
    """Log-n scale, ``log(max(n, minimum)) / log(L)``, for a model trained with it from scratch.

    It keeps the entropy of attention nearly the same at every number of keys, and equals 1 at ``n = L``
    (Su, kexue.fm/archives/8823).

    Args:
        visible: ``n``, keys that each query may see.
        length: ``L``, at which the factor is 1: the training length (512 in bert4keras).
        minimum: smaller ``n`` count as this; 16 as in bert4keras. With 1 the factor for one key is 0, which does not
            change a softmax over one key, and for two keys it is ``log 2 / log L``.

    Raises:
        ValueError: if ``length`` is below 2 or ``minimum`` below 1.
    """
    return LogN(length, minimum).of(visible)


def clipped_log_n(visible: Int[Array, "*b length"], length: int) -> Float[Array, "*b length"]:
    """Log-n scale for a model trained without it, ``max(1, log(n) / log(L))`` (Su, kexue.fm/archives/9706).

    Exactly 1 up to the training length ``L``, so nothing changes there.

    Raises:
        ValueError: if ``length`` is below 2.
    """
    return ClippedLogN(length).of(visible)


def ssmax(
    visible: Int[Array, "*b length"], s: Float[Array, "heads"], b: Float[Array, "heads"] | None = None
) -> Float[Array, "*b length heads"]:
    """Scale of Scalable-Softmax, ``s_h log(n) + b_h``, where ``p_j ~ n^(s z_j)`` (Nakanishi, arXiv 2501.19399).

    The largest weight stays near 1 at any number of keys when ``s`` times the gap to the other logits exceeds 1. With
    plain softmax it falls with the number of keys. ``s = 1 / log L`` is the log-n scale with ``minimum=1``.

    Args:
        visible: ``n``, keys that each query may see; 0 counts as 1.
        s: learned slope of each head.
        b: learned offset of each head, zero if absent (the paper trains both forms).
    """
    n, *learned = align_ranks(_log(jnp.maximum(visible, 1))[..., None], s, *([] if b is None else [b]))
    s, *b = (x.astype(jnp.float32) for x in learned)
    return sum(b, n * s)


def ssmax_initial(length: int) -> float:
    """The ``s`` whose factor averages 1 over a training row: ``1 / mean_{n = 1..L} log n``.

    0.16847 at 1024, 0.19061 at 512, 0.15090 at 2048.

    Raises:
        ValueError: if ``length`` is below 2.
    """
    _check_length(length)
    return length / math.lgamma(length + 1)


def llama4_temperature(
    positions: Int[Array, "*b length"], *, floor_scale: int = 8192, attn_scale: float = 0.1
) -> Float[Array, "*b length"]:
    """Temperature of Llama 4's layers without rotation, ``1 + a ln(floor((p + 1) / f) + 1)``.

    The floor is an integer division: the factor is 1 for ``p < f - 1`` and steps to ``1 + a ln 2`` (1.0693) exactly at
    ``p = f - 1``. Negative positions (padding) get 1. Defaults and names are those of the released configuration.

    Raises:
        ValueError: if ``floor_scale`` is not positive.
    """
    return Llama4Temperature(floor_scale, attn_scale).of(positions)


def ministral_temperature(
    positions: Int[Array, "*b length"], length: int, *, beta: float = 0.1
) -> Float[Array, "*b length"]:
    """Temperature of Ministral 3 and Mistral 4, ``1 + beta ln(1 + floor(p / L))``: Llama 4's without the shift by one.

    ``length`` and ``beta`` are ``original_max_position_embeddings`` and ``llama_4_scaling_beta`` in Hugging Face's
    configurations. Negative positions (padding) get 1.

    Raises:
        ValueError: if ``length`` is not positive.
    """
    return MinistralTemperature(length, beta).of(positions)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature on the logits, ``(0.1 m ln(s) + 1)^2``, and 1 for ``s <= 1`` (Peng et al., arXiv 2309.00071).

    YaRN multiplies both rotary tables by its square root. Here it is a scale instead, which also multiplies the
    features that a partial rotary table does not rotate; use only one of the two. ``mscale`` is DeepSeek's
    ``mscale_all_dim``.

    Raises:
        ValueError: if ``factor`` is not positive.
    """
    check_positive("factor", factor)
    check_number("mscale", mscale, at_least=0)
    return (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0) ** 2


def drope_temperature(extension: float, slope: float = DROPE_FROM_SCRATCH) -> float:
    """DroPE's temperature on the logits, ``1 + c ln(s)``, for a model whose rotation was removed (Sakana AI, DroPE).

    ``extension`` is ``s``, the length over the training length; ``slope`` is ``c``, found for each model by
    perplexity at ``s > 1``.

    Raises:
        ValueError: if ``extension`` is below 1.
    """
    check_number("extension", extension)
    check(extension >= 1, f"extension must be at least 1, found {extension!r}")
    check_number("slope", slope, at_least=0)
    return 1.0 + slope * math.log(extension)


def cosine_scale(n: Int[Array, "*b length"] | float) -> Float[Array, "*b length"]:
    """``4 ln n``, the factor of CosA, whose logits are ``4 ln(n) cos(q, k)`` (Su, kexue.fm/archives/9859).

    ``n`` is half the training length (22.18 for 512), or the number of visible keys (0 counts as 1).
    """
    if is_number(n):
        check_number("n", n)
    return 4.0 * _log(jnp.maximum(jnp.asarray(n), 1))


def qk_norm_initial(length: int) -> float:
    """``log2(L^2 - L)``, the initial value of QK-norm's learned factor of the cosine (Henry et al., arXiv 2010.04245).

    ``L`` is the 97.5th percentile of the lengths of the training sequences.

    Raises:
        ValueError: if ``length`` is below 2.
    """
    _check_length(length)
    return math.log2(length * length - length)


def gradient_maximal(n: float) -> float:
    """The scale of standard normal logits at which the softmax over ``n`` of them has the largest gradient.

    The ``a`` that maximises ``a (1 - e^(a^2) / n)`` (Su, kexue.fm/archives/9812): the root of
    ``a^2 + ln(1 + 2 a^2) = ln n``, by Newton's method in ``a^2``. 2.008 for 512, 2.279 for 2048; near 0.84 sqrt(ln n).

    Raises:
        ValueError: if ``n`` is not above 1.
    """
    check_number("n", n)
    check(n > 1, f"n must be above 1, found {n!r}")
    x = wanted = math.log(n)
    for _ in range(6):
        x -= (x + math.log1p(2 * x) - wanted) / (1 + 2 / (1 + 2 * x))
    return math.sqrt(x)


def _check_length(length: int) -> None:
    check_number("length", length)
    check(length >= 2, f"length must be at least 2, because a scale divides by its logarithm; found {length!r}")


def _check_int32(name: str, value: float) -> None:
    check(value <= LARGEST, f"{name} must fit in int32, as positions do, found {value!r}")


def _log(n: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.log(n.astype(jnp.float32))


def _step_temperature(steps: Int[Array, "..."] | Float[Array, "..."], slope: float) -> Float[Array, "..."]:
    return 1.0 + np.float32(slope) * jnp.log1p(steps.astype(jnp.float32))


class Scale(abc.ABC):
    """The base class of the specs. A spec is a frozen, hashable dataclass."""

    shift_invariant: ClassVar[bool] = True
    """Whether shifting all positions by one constant leaves the factor unchanged."""

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` if there are none."""
        return {}

    @abc.abstractmethod
    def factor(
        self, params, *, positions: Positions, visible: Int[Array, "*b length"], num_heads: int
    ) -> Float[Array, "*#b #length #heads"]:
        """``c_h(i)`` of queries at ``positions`` that see ``visible`` keys, float32.

        It broadcasts to ``[batch, length, heads]``.
        """


class _OfCount(Scale):
    """A scale that reads the number of visible keys and no position. The factor is ``[..., length, 1]``."""

    def factor(self, params, *, positions, visible, num_heads) -> Float[Array, "*b length 1"]:
        """``of(visible)`` with a head axis of one."""
        return self.of(visible)[..., None]


class _OfPosition(Scale):
    """A scale that reads the position of the query. The factor is ``[..., length, 1]``."""

    shift_invariant = False

    def factor(self, params, *, positions: Positions, visible, num_heads) -> Float[Array, "*b length 1"]:
        """``of(positions)`` with a head axis of one."""
        return self.of(as_array(positions))[..., None]


class _OneFactor(Scale):
    """A scale that is one number for all queries. The factor is ``[1, 1]``."""

    value: float

    def factor(self, params, *, positions, visible, num_heads) -> Float[Array, "1 1"]:
        """``value``, float32."""
        return jnp.full((1, 1), self.value, jnp.float32)


@dataclasses.dataclass(frozen=True)
class LogN(_OfCount):
    """Spec of ``log_n``, trained with the model. The factor is ``[..., length, 1]``.

    Shift invariant, because it reads the number of visible keys and no position.
    """

    length: int
    minimum: int = 16

    def __post_init__(self):
        _check_length(self.length)
        check_positive("minimum", self.minimum)
        _check_int32("minimum", self.minimum)

    def of(self, visible: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``log(max(n, minimum)) / log(length)``."""
        return _log(jnp.maximum(visible, self.minimum)) / np.float32(math.log(self.length))


@dataclasses.dataclass(frozen=True)
class ClippedLogN(_OfCount):
    """Spec of ``clipped_log_n``, for a trained model. The factor is ``[..., length, 1]``.

    Shift invariant, because it reads the number of visible keys and no position.

    Args:
        length: ``L``, up to which the factor is 1: the training length in tokens, at least 2.
    """

    length: int

    def __post_init__(self):
        _check_length(self.length)
        _check_int32("length", self.length)

    def of(self, visible: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``max(1, log(n) / log(length))``."""
        # Compare integers: a logarithm rounded up at n = L would not give exactly 1.
        beyond = _log(jnp.maximum(visible, 1)) / np.float32(math.log(self.length))
        return jnp.where(visible > self.length, beyond, 1.0)


@dataclasses.dataclass(frozen=True)
class SSMax(Scale):
    """Spec of ``ssmax``: a learned slope per head, per layer. The factor is ``[..., length, heads]``.

    Args:
        initial: initial ``s``. 0.168 is what the method is reported to start from, at length 1024;
            ``ssmax_initial(L)`` is the same rule for another training length.
        bias: learn ``b`` too, from zero.
    """

    initial: float = SSMAX_INITIAL
    bias: bool = False

    def __post_init__(self):
        check_flags(self)
        check_number("initial", self.initial)

    def init(self, key: Array, num_heads: int) -> dict[str, Float[Array, "heads"]]:
        """``{"s": [heads]}``, and ``"b": [heads]`` with ``bias``; float32, the same for every ``key``."""
        params = {"s": jnp.full(num_heads, self.initial, jnp.float32)}
        return params | {"b": jnp.zeros(num_heads, jnp.float32)} if self.bias else params

    def factor(self, params, *, positions, visible, num_heads) -> Float[Array, "*b length heads"]:
        """``ssmax(visible, s, b)``.

        Raises:
            ValueError: if ``params`` are not those of ``init`` for ``num_heads``.
        """
        names = ("s", "b") if self.bias else ("s",)
        return ssmax(visible, *params_of(params, self, **dict.fromkeys(names, (num_heads,))))


@dataclasses.dataclass(frozen=True)
class Llama4Temperature(_OfPosition):
    """Spec of ``llama4_temperature``, for layers without rotation. The factor is ``[..., length, 1]``.

    Not shift invariant: it reads the position itself.

    Args:
        floor_scale: ``f``, how many positions make one step of the temperature.
        attn_scale: ``a``, the factor of the logarithm.
    """

    floor_scale: int = 8192
    attn_scale: float = 0.1

    def __post_init__(self):
        check_count("floor_scale", self.floor_scale)
        _check_int32("floor_scale", self.floor_scale)
        check_number("attn_scale", self.attn_scale, at_least=0)

    def of(self, positions: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``1 + attn_scale ln(floor((p + 1) / floor_scale) + 1)``."""
        p = jnp.maximum(positions, -1)
        # floor((p + 1) / f) without p + 1, which overflows at the largest int32, as the sum does for f = 1.
        one_more = p % self.floor_scale == self.floor_scale - 1
        steps = (p // self.floor_scale).astype(jnp.float32) + one_more.astype(jnp.float32)
        return _step_temperature(steps, self.attn_scale)


@dataclasses.dataclass(frozen=True)
class MinistralTemperature(_OfPosition):
    """Spec of ``ministral_temperature``. The factor is ``[..., length, 1]``.

    Not shift invariant: it reads the position itself.

    Args:
        length: ``L``, the training length in tokens, and how many positions make one step of the temperature.
        beta: the factor of the logarithm.
    """

    length: int
    beta: float = 0.1

    def __post_init__(self):
        check_count("length", self.length)
        _check_int32("length", self.length)
        check_number("beta", self.beta, at_least=0)

    def of(self, positions: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``1 + beta ln(1 + floor(p / length))``."""
        return _step_temperature(jnp.maximum(positions, 0) // self.length, self.beta)


@dataclasses.dataclass(frozen=True)
class InklingTemperature(_OfPosition):
    """Inkling's temperature of its full layers, ``1 + alpha ln(max((p + 1) / length, 1))``, with ``p`` the position.

    The factor is ``[..., length, 1]``. (From its code in transformers, where it multiplies the relative bias too; see
    ``bias.Relative``.) Not shift invariant: it reads the position itself.

    Args:
        length: up to this many tokens the factor is 1; 128,000 in Inkling 2.
        alpha: the factor of the logarithm.
    """

    length: int = 128_000
    alpha: float = 0.1

    def __post_init__(self):
        check_count("length", self.length)
        _check_int32("length", self.length)
        check_number("alpha", self.alpha, at_least=0)

    def of(self, positions: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``1 + alpha ln(max((p + 1) / length, 1))``."""
        return 1 + self.alpha * jnp.log(jnp.maximum((positions.astype(jnp.float32) + 1) / self.length, 1))


@dataclasses.dataclass(frozen=True)
class YaRNTemperature(_OneFactor):
    """Spec of ``yarn_temperature``: one constant for a target length. The factor is ``[1, 1]``.

    Args:
        extension: ``s``, target length over training length.
        mscale: DeepSeek's ``mscale_all_dim``.
    """

    extension: float
    mscale: float = 1.0

    def __post_init__(self):
        check_positive("extension", self.extension)
        yarn_temperature(self.extension, self.mscale)

    @property
    def value(self) -> float:
        """``(0.1 mscale ln(extension) + 1)^2``."""
        return yarn_temperature(self.extension, self.mscale)


@dataclasses.dataclass(frozen=True)
class DroPETemperature(_OneFactor):
    """Spec of ``drope_temperature``: one constant for a target length. The factor is ``[1, 1]``.

    Args:
        extension: ``s``, target length over training length.
        slope: ``c``; ``DROPE_FROM_SCRATCH`` or ``DROPE_SMOLLM``, or one fitted to the model.
    """

    extension: float
    slope: float = DROPE_FROM_SCRATCH

    def __post_init__(self):
        drope_temperature(self.extension, self.slope)

    @property
    def value(self) -> float:
        """``1 + slope ln(extension)``."""
        return drope_temperature(self.extension, self.slope)


@dataclasses.dataclass(frozen=True)
class Constant(_OneFactor):
    """A constant factor in addition to ``1 / sqrt(d)``. The factor is ``[1, 1]``.

    ``Constant(sqrt(d))`` cancels ``1 / sqrt(d)``, as in T5, and in Gemma 4 after its norms.

    Args:
        value: the factor, above 0.
    """

    value: float

    def __post_init__(self):
        check_positive("value", self.value)


@dataclasses.dataclass(frozen=True)
class GradientMaximal(_OneFactor):
    """Spec of ``gradient_maximal``: the constant for ``n`` visible keys. The factor is ``[1, 1]``.

    Args:
        n: how many keys a query sees, above 1.
    """

    n: int

    def __post_init__(self):
        gradient_maximal(self.n)

    @property
    def value(self) -> float:
        """``gradient_maximal(n)``."""
        return gradient_maximal(self.n)


@dataclasses.dataclass(frozen=True)
class CosineScale(_OfCount):
    """Spec of ``cosine_scale``, for logits that are cosines: use it with ``CosineNorm``; together they are CosA.

    Args:
        length: the training length; ``n`` is half of it. With None ``n`` is the number of visible keys (CosA-log n).
    """

    length: int | None = None

    def __post_init__(self):
        if self.length is not None:
            check_number("length", self.length)
            limit = "length must be at least 4, because log(length / 2) is a factor"
            check(self.length >= 4, f"{limit}; found {self.length!r}")

    def of(self, visible: Int[Array, "*b length"]) -> Float[Array, "*b length"]:
        """``4 ln(length / 2)`` as ``[1]``, or ``4 ln n`` of the visible keys."""
        return cosine_scale(visible if self.length is None else jnp.full(1, self.length / 2))


@dataclasses.dataclass(frozen=True)
class LearnedCosineScale(Scale):
    """One learned factor of the cosine per layer, initially ``qk_norm_initial(length)``: use it with ``CosineNorm``.

    Together they are the QK-norm of Henry et al. (arXiv 2010.04245). The factor is ``[1, 1]``.

    Args:
        length: ``L``, the 97.5th percentile of the lengths of the training sequences in tokens, at least 2.
    """

    length: int

    def __post_init__(self):
        qk_norm_initial(self.length)

    def init(self, key: Array, num_heads: int) -> dict[str, Float[Array, ""]]:
        """``{"g": []}``, float32, the same for every ``key``."""
        return {"g": jnp.float32(qk_norm_initial(self.length))}

    def factor(self, params, *, positions, visible, num_heads) -> Float[Array, "1 1"]:
        """``g``.

        Raises:
            ValueError: if ``params`` are not those of ``init``.
        """
        (g,) = params_of(params, self, g=())
        return g.astype(jnp.float32).reshape(1, 1)
