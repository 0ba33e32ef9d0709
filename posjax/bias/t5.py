"""The relative position bias of T5 (Raffel et al., arXiv 1910.10683, section 2.1)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_counts, check_flags, check_number, params_of
from posjax._numbers import LARGEST, align_ranks
from posjax.bias.base import Bias, BiasSpec
from posjax.positions import difference


def t5_thresholds(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """First distance of every logarithmic bucket, exactly.

    With ``e = num_buckets / 2`` and ``K = num_buckets - e``, a distance ``n >= e`` has bucket
    ``min(num_buckets - 1, e + floor(K log(n / e) / log(max_distance / e)))``. So bucket ``e + t`` begins at the
    smallest ``n`` with ``n^K e^t >= max_distance^t e^K``, an inequality of integers. No logarithm is rounded, on any
    device.

    Args:
        num_buckets: buckets of one direction.
        max_distance: distance from which all distances share the last bucket.

    Returns:
        ``num_buckets - e - 1`` increasing integers, those of buckets ``e + 1 ... num_buckets - 1``.
    """
    check_counts(num_buckets=num_buckets, max_distance=max_distance)
    exact = num_buckets // 2
    steps = num_buckets - exact
    return tuple(_first_distance(exact, steps, t, max_distance) for t in range(1, steps))


def _first_distance(exact: int, steps: int, t: int, max_distance: int) -> int:
    target = max_distance**t * exact**steps
    guess = int(exact * (max_distance / exact) ** (t / steps))
    n = max(exact, guess - 2)
    while n**steps * exact**t < target:
        n += 1
    return n


def t5_bucket(
    distances: Int[Array, "..."], num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = False
) -> Int[Array, "..."]:
    """Bucket of each distance ``i - j`` (positive for keys behind the query), int32.

    Causal: keys ahead share bucket 0 with the query itself. Bidirectional: half of the buckets for each side, the keys
    ahead in the upper half. Below ``e = buckets of a side / 2`` every distance has its own bucket. Above, buckets widen
    logarithmically up to ``max_distance``; all longer distances share the last one.

    Raises:
        ValueError: if the buckets cannot be split like this, or ``max_distance`` does not exceed the exact buckets.
    """
    side = _check_buckets(num_buckets, max_distance, bidirectional)
    ahead = jnp.where(distances < 0, side, 0) if bidirectional else 0
    # The smallest int32 has no absolute value.
    n = jnp.abs(jnp.maximum(distances, -LARGEST)) if bidirectional else jnp.maximum(distances, 0)
    bucket = jnp.minimum(n, side // 2)
    for threshold in t5_thresholds(side, max_distance):
        bucket = bucket + (n >= threshold).astype(bucket.dtype)
    return (bucket + ahead).astype(jnp.int32)


def _check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    sides = 2 if bidirectional else 1
    check_count("num_buckets", num_buckets)
    check(
        num_buckets >= 2 * sides and num_buckets % sides == 0,
        f"num_buckets must be {'even and at least 4' if bidirectional else 'at least 2'}, found {num_buckets}",
    )
    side = num_buckets // sides
    check_count("max_distance", max_distance)
    check(max_distance <= LARGEST, f"max_distance must fit in int32, found {max_distance}")
    check(
        max_distance > side // 2,
        f"max_distance must exceed the {side // 2} exact buckets of a side, found {max_distance}",
    )
    return side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BucketBias(Bias):
    """``b_h(i, j) = table[bucket(i - j), h]`` with a table of shape ``[buckets, heads]``."""

    table: Float[Array, "buckets heads"]
    max_distance: int = dataclasses.field(metadata={"static": True})
    bidirectional: bool = dataclasses.field(metadata={"static": True})

    axes: ClassVar = {"table": (None, "heads")}
    by_distance: ClassVar[bool] = True

    def __post_init__(self):
        check_flags(self)

    @property
    def constant_from(self):
        """The distance at which the last bucket begins."""
        side = self.table.shape[0] // (2 if self.bidirectional else 1)
        return max(t5_thresholds(side, self.max_distance), default=side // 2)

    def values(self, q_positions, kv_positions):
        """The table at the bucket of each pair, ``[heads, q, k]`` or with a leading batch."""
        i, j = align_ranks(q_positions[..., :, None], kv_positions[..., None, :])
        bucket = t5_bucket(
            difference(i, j),
            self.table.shape[0],
            self.max_distance,
            bidirectional=self.bidirectional,
        )
        bucket = bucket.squeeze(-3) if bucket.ndim > 2 else bucket
        return jnp.moveaxis(jnp.take(self.table.T, bucket, axis=1), 0, -3)


@dataclasses.dataclass(frozen=True)
class T5(BiasSpec):
    """Spec of T5's bias (Raffel et al., arXiv 1910.10683): ``b_h(i, j) = table[bucket(i - j), h]``.

    One table for all layers. T5 itself does not use the ``1 / sqrt(d)`` scale: use ``attention(scale=1.0)``, or
    ``scales.Constant`` in a scheme.

    Train the table with a higher learning rate than the matrices. In small decoders (4 layers of width 64, AdamW, 500
    updates) the best factor of the learning rate was 100, with perplexity 4.44; a factor of 10 gave 4.49. One rate for
    all parameters gave 6.20 at the same rate and 4.86 at its best rate (docs/results.md). In ``train`` set
    ``learning_rate_factors: {"shared/*": 100}``, or try factors with ``compare.sweep``.

    Args:
        num_buckets: size of the table, both sides together when bidirectional.
        max_distance: longer distances share one bucket. Keep it below the training length: a bucket that no training
            pair reaches stays at its initial value, and every longer context uses it.
        bidirectional: half of the buckets for the keys ahead.
        stddev: standard deviation of the normal initialisation.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    stddev: float = 0.02
    shared_across_layers = True
    shift_invariant = True

    def __post_init__(self):
        check_flags(self)
        _check_buckets(self.num_buckets, self.max_distance, self.bidirectional)
        check_number("stddev", self.stddev, at_least=0)

    @property
    def one_sided(self) -> str | None:
        """``"bidirectional=True"``, or None if it is set."""
        return None if self.bidirectional else "bidirectional=True"

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``{"table": [buckets, heads]}``, float32."""
        return {"table": self.stddev * jax.random.normal(key, (self.num_buckets, num_heads), jnp.float32)}

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> BucketBias:
        """The bias with its table.

        Raises:
            ValueError: if ``params`` does not hold a table of ``num_buckets`` rows.
        """
        (table,) = params_of(params, self, table=(self.num_buckets, num_heads))
        return BucketBias(table, self.max_distance, self.bidirectional)
