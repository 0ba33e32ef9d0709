"""What the slots of a scheme give to one call of attention."""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_choice, check_heads
from posjax.attention.api import BACKENDS, KERNELS
from posjax.attention.checks import checked_positions
from posjax.attention.sharded import Placement
from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions, Range, as_array, difference

_LARGEST = 2**31 - 1

Params = Mapping[str, Mapping[str, Array]]


def bound_bias(bias: Any, params: Params, heads: int, gates: tuple[Array, Array] | None) -> Bias | None:
    """The bias with its parameters, and with the gates of the tokens where it reads them (FoX).

    Raises:
        ValueError: for gates that are missing.
    """
    if bias is None:
        return None
    if not bias.reads_tokens:
        return _bound(bias, params, heads)
    check(gates is not None, f"gates: {type(bias).__name__} reads the tokens: pass what Scheme.prepare gives")
    # Gates are of tokens, and so of this device's heads.
    return bias.bind(params.get("bias"), num_heads=gates[0].shape[1], q_gates=gates[0], kv_gates=gates[1])


def _bound(bias: Any, params: Params, heads: int) -> Bias:
    try:
        return bias.bind(params.get("bias"), num_heads=heads)
    except (TypeError, KeyError) as error:
        if "bias" in params:
            raise
        why = f"{type(bias).__name__}.bind fails without them: {error}"
        raise ValueError(f"params must hold 'bias', as Scheme.init makes it: {why}") from error


def sink_logits(sinks: Any, params: Params, heads: int, given: Array | None) -> Float[Array, "heads"] | None:
    """The logits of the slot of sinks, or those that a call is given where the slot is empty.

    Raises:
        ValueError: for both.
    """
    if sinks is None:
        return given
    check(given is None, "sinks: the scheme has sinks of its own")
    return sinks.logits(params.get("sinks", {}), num_heads=heads)


def check_no_logits(*, softcap=None, sinks=None, return_residuals: bool = False, implementation=None) -> None:
    """Checks the options of ``attention`` that a call passes on, for linear attention, which has no logits.

    ``implementation`` chooses among the backends of softmax attention, which the same model may have in other layers.

    Raises:
        ValueError: for an option about logits, or an implementation that there is not.
        TypeError: for a keyword that ``attention`` does not know either, or that is no option of a call.
    """
    for name, given in (("softcap", softcap), ("sinks", sinks), ("return_residuals", return_residuals or None)):
        check(given is None, f"{name}: linear attention has no logits for it; leave it out")
    if implementation is not None:
        check_choice("implementation", implementation, (*BACKENDS, *KERNELS))


def check_no_slots(options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of ``attention`` that a scheme brings itself."""
    for name in ("bias", "scale", "far", "decay"):
        check(name not in options, f"{name}: a scheme brings its own; give it as Scheme({name}=...) or replace it")


def check_projections(q, k, v, widths: tuple[float, float]) -> None:
    """Raises ValueError for what are no arrays of heads, and for queries and keys whose widths are not of one head.

    ``widths`` are those of ``Features``.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    wanted = int(q.shape[-1] / widths[0] * widths[1])
    check(
        k.shape[-1] == wanted,
        f"k must be {wanted} wide beside a q that is {q.shape[-1]} wide (see key_size), found shape {k.shape}",
    )


def check_coordinates(caches: str, coordinates: Array | None) -> None:
    """Raises ValueError for coordinates where a cache could not keep what they are for."""
    check(
        coordinates is None or caches == "rotated",
        f"coordinates: this scheme caches {caches} keys, which are mapped by their positions when read",
    )


def check_rows(kept: Any, q: Array) -> None:
    """Raises ValueError for tokens of other rows than those that a cache was made for."""
    rows = jax.tree.leaves(kept)[0].shape[0]
    check(rows == q.shape[0], f"q must have the {rows} rows of the cache, found a batch of {q.shape[0]}")


def row_positions(across: Placement, name: str, positions: Positions | None, x) -> Positions:
    """The positions of queries or keys ``x``: those given, or 0, 1, 2, ... over the whole row.

    Raises ValueError, naming them, for positions that are not one for each token.
    """
    if positions is None:
        return Range(0, across.whole(x.shape[1]))
    return positions if across.shards > 1 else checked_positions(name, positions, x)


def scale_factor(
    scale: Any, params: Params, heads: int, positions: Positions, visible: Int[Array, "*b queries"]
) -> Float[Array, "*b queries heads"]:
    """``c_h(i)`` of all heads, for queries that stand at ``positions`` and see ``visible`` keys."""
    made = params.get("scale", {})
    return scale.factor(made, positions=as_array(positions), visible=visible, num_heads=heads)


def count_visible(
    across: Placement,
    q_positions: Positions,
    kv_positions: Positions,
    causal: bool,
    own: Mask | None,
    given: Int[Array, "*b queries"] | None,
) -> Int[Array, "*b queries"]:
    """How many keys each query sees, unchanged by a common shift of all positions.

    Args:
        across: how rows lie over a mesh.
        q_positions: of this device's queries.
        kv_positions: of this device's keys or, as a ``Range``, of the whole row.
        causal: whether a query sees only the keys at or before its position.
        own: the scheme's mask, which leaves some of them.
        given: how many there are before the mask; where it is None those at or before each query, or all where not
            causal, for contiguous keys.
    """
    at = as_array(q_positions)
    if given is not None:
        count = across.local(given, at.shape[-1])
    elif causal:
        count = jnp.minimum(difference(at, across.lowest(kv_positions)), _LARGEST - 1) + 1
    else:
        keys = kv_positions.length if isinstance(kv_positions, Range) else across.whole(kv_positions.shape[-1])
        count = jnp.full_like(at, keys)
    return count if own is None else own.visible(count, at, causal)


def all_of(*parts: Mask | None) -> Mask | None:
    """What all masks allow, those that are None left out."""
    found = [part for part in parts if part is not None]
    return None if not found else functools.reduce(operator.and_, found)
