"""Checks of single arguments of ``attention``, beyond their shapes."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_finite, is_known, shown
from posjax.attention.own import heads_of
from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions, Range, as_array


def check_scale(scale, name: str = "scale") -> None:
    """Raises ValueError unless ``scale`` is None, a finite number or an array.

    The numbers of an array are checked if it holds one for each head, or one in all. Factors of tokens are data, as
    queries are: those of padding may be NaN.
    """
    if scale is None:
        return
    check(
        isinstance(scale, numbers.Real | jax.Array | np.ndarray) and not isinstance(scale, bool),
        f"{name} must be a number or an array, found {shown(scale)}; named scales go in Scheme(scale=...)",
    )
    if np.ndim(scale) < 2:
        check_finite(name, scale)


def check_masks(q, k, *given: Mask | None) -> None:
    """Raises ValueError for masks that do not fit a call; called before a mesh splits batch and heads."""
    for mask in given:
        if mask is None:
            continue
        mask.check(q.shape[0], q.shape[1], k.shape[1])
        found = heads_of(mask)
        fits = found in (None, 1, q.shape[2])
        check(fits, f"mask: it has one pattern for each of {found} heads, but q has {q.shape[2]}")


def checked_positions(name: str, positions: Positions | None, x) -> Positions:
    """The positions of a call's queries or keys ``x``, as a range or an int32 array; from 0 if None.

    Raises ValueError unless they are integers, one for each token.
    """
    batch, length = x.shape[:2]
    if positions is None:
        return Range(0, length)
    if isinstance(positions, Range):
        check(positions.length == length, f"{name} must cover {length} tokens, found a Range of {positions.length}")
        return positions
    positions = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    check(jnp.issubdtype(positions.dtype, jnp.integer), f"{name} must be integers, found {positions.dtype}")
    hint = f"; for one position a row write {name}[:, None]" if length == 1 and positions.shape == (batch,) else ""
    check(
        positions.shape in ((length,), (1, length), (batch, length)),
        f"{name} must have shape {(length,)} or {(batch, length)}, found {positions.shape}{hint}",
    )
    positions = as_array(positions)
    return positions.squeeze(0) if positions.shape == (1, length) else positions


def check_sinks(sinks, heads: int) -> None:
    """Raises ValueError unless ``sinks`` is None or one logit for each head."""
    fits = sinks is None or (isinstance(sinks, jax.Array | np.ndarray) and sinks.shape == (heads,))
    check(fits, f"sinks must have shape {(heads,)}, one logit per query head, found {shown(sinks)}")


def rates(decay, dtype) -> Float[Array, "size"] | None:
    """The rates of decay as an array without a gradient, none below 0.

    Raises ValueError for a negative or infinite rate; a traced negative one counts as 0.
    """
    if decay is None:
        return None
    if is_known(decay):
        lowest = np.min(np.asarray(decay, np.float64), initial=np.inf)
        check(lowest >= 0, f"decay must not be negative: its rates are those of exp(-a (i - j)), found {lowest:g}")
        check_finite("decay", decay)
    return jax.lax.stop_gradient(jnp.maximum(jnp.asarray(decay, dtype), 0))


def check_ahead(bias: Bias | None, mask: Mask | None, q_positions: Positions, kv_positions: Positions) -> None:
    """Raises ValueError for a bias that grows without bound if the first query is known to see a key ahead.

    That is known for positions that are ranges and a mask without arrays; other calls are not checked.
    """
    if bias is None or not bias.grows_ahead:
        return
    key = _seen_ahead(mask, q_positions, kv_positions)
    check(
        key is None,
        f"bias: this {type(bias).__name__} grows without bound for keys ahead, and the first query sees the key at "
        f"position {key}; use mask=Causal(), or symmetric=True if every token sees both sides",
    )


def _seen_ahead(mask: Mask | None, q_positions: Positions, kv_positions: Positions) -> int | None:
    """The position of a key ahead that the first query is known to see, or None."""
    ranges = all(isinstance(p, Range) and p.is_static for p in (q_positions, kv_positions))
    if not ranges or jax.tree.leaves(mask):
        return None
    first, stop = q_positions.start, kv_positions.start + kv_positions.length
    ahead = np.arange(max(first + 1, kv_positions.start), stop).astype(np.int32)
    seen = np.ones(ahead.shape, bool) if mask is None else mask.allowed(np.array([first], np.int32), ahead)
    if isinstance(seen, jax.core.Tracer) or not np.any(seen):
        return None
    return int(ahead[np.argmax(np.any(seen, axis=tuple(range(np.ndim(seen) - 1))))])
