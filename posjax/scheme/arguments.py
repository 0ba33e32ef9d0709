"""The arguments of softmax attention that come from the slots of a scheme."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check
from posjax._numbers import LARGEST
from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions, Range, as_array, difference
from posjax.scheme.calls import Params, Where
from posjax.scheme.slots import BiasSlot, SinkSlot


def bound_bias(bias: BiasSlot | None, params: Params, heads: int, gates: tuple[Array, Array] | None) -> Bias | None:
    """The bias with its parameters, and with the gates of the tokens if it reads them (FoX).

    Raises:
        ValueError: for missing gates.
    """
    if bias is None:
        return None
    if not bias.reads_tokens:
        return _bound(bias, params, heads)
    check(gates is not None, f"gates: {type(bias).__name__} reads the tokens: pass the result of Scheme.prepare")
    # Gates are those of this device's heads.
    return bias.bind(params.get("bias"), num_heads=gates[0].shape[1], q_gates=gates[0], kv_gates=gates[1])


def _bound(bias: BiasSlot, params: Params, heads: int) -> Bias:
    try:
        return bias.bind(params.get("bias"), num_heads=heads)
    except (TypeError, KeyError) as error:
        if "bias" in params:
            raise
        why = f"{type(bias).__name__}.bind fails without them: {error}"
        raise ValueError(f"params must hold 'bias', as Scheme.init makes it: {why}") from error


def sink_logits(
    sinks: SinkSlot | None, params: Params, heads: int, given: Array | None
) -> Float[Array, "heads"] | None:
    """The logits of the sinks of a scheme, or those given to the call if the slot is empty.

    Raises:
        ValueError: if both the scheme and the call have sinks.
    """
    if sinks is None:
        return given
    check(given is None, "sinks: the scheme has its own sinks")
    return sinks.logits(params.get("sinks", {}), num_heads=heads)


def check_no_slots(options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of ``attention`` that are slots of a scheme."""
    for name in ("bias", "scale", "remap", "decay"):
        check(name not in options, f"{name}: a scheme has its own; give it as Scheme({name}=...) or replace it")


def count_visible(
    where: Where, q_positions: Positions, causal: bool, own: Mask | None, given: Int[Array, "*b queries"] | None
) -> Int[Array, "*b queries"]:
    """How many keys each query sees, unchanged by a common shift of all positions.

    Args:
        where: the tokens of the call.
        q_positions: of this device's queries.
        causal: whether a query sees only the keys at or before its position.
        own: the scheme's mask.
        given: how many keys each query sees without the scheme's mask. If None, keys are contiguous, and a query sees
            all keys at or before its position, or all keys if not causal.
    """
    at, placement, kv_positions = as_array(q_positions), where.placement, where.kv_positions
    if given is not None:
        count = placement.local(given, at.shape[-1])
    elif causal:
        count = jnp.minimum(difference(at, placement.lowest(kv_positions)), LARGEST - 1) + 1
    else:
        keys = kv_positions.length if isinstance(kv_positions, Range) else placement.whole(kv_positions.shape[-1])
        count = jnp.full_like(at, keys)
    return count if own is None else own.visible(count, at, causal)
