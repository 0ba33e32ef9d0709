"""Linear attention with the choices of a scheme, in one pass or with a state for all keys."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from jaxtyping import Array

from posjax import linear, masks
from posjax._checks import check, check_choice, shown
from posjax.attention.api import IMPLEMENTATIONS
from posjax.attention.padding import without_padding
from posjax.linear import LinearState
from posjax.scheme.calls import NewTokens, Params, Where
from posjax.scheme.choices import Choices


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """Norm, kernel and rotation around the forms of ``posjax.linear``; it has no logits for other slots to change."""

    scheme: Choices
    caches: ClassVar[str] = "state"

    def attend(
        self, q, k, v, params: Params, where: Where, *, causal=True, mask=None, visible=None, gates=None, **options
    ):
        """One pass over whole rows, which only segments narrow; no slot reads counts or gates."""
        where.across.check_scheme(self.scheme)
        check(
            mask is None or isinstance(mask, masks.Segments),
            f"mask: linear attention sees whole documents, so masks.Segments is all it takes, found {shown(mask)}",
        )
        check_no_logits(**options)
        ids, form = None if mask is None else mask.q_ids, linear.chunked if causal else linear.bidirectional
        out = self._run(form, (q, k, v), params, where, ids)
        return out[0] if causal else out

    def step(
        self, projected, kept: LinearState, params: Params, where: Where, new: NewTokens, options, partition
    ) -> tuple[Array, LinearState]:
        """Attention of new tokens over the state, and the state after them."""
        check_no_logits(**options)
        return self._run(partial(linear.chunked, state=kept), projected, params, where, new.ids)

    def _run(self, form: Callable, projected, params: Params, where: Where, ids: Array | None):
        """One of the forms, of raw projections and the segments of their tokens."""
        q, k, v = projected if ids is None else without_padding(masks.Segments(ids), *projected)
        return form(v=v, segment_ids=ids, **self._features(q, k, params, where))

    def _features(self, q, k, params: Params, where: Where) -> dict[str, Array | None]:
        """The arguments of the forms, of raw queries and keys."""
        if self.scheme.norm is not None:
            q, k = self.scheme.norm.apply(params.get("norm", {}), q, k)
        features, turns = self.scheme.features, {}
        if features is not None:
            places = {"rotate_q": where.queries(features, q), "rotate_k": where.keys(features, k)}
            turns = {name: partial(self._rotated, params, at) for name, at in places.items()}
        return linear.features(self.scheme.linear, q, k, params=params.get("linear"), **turns)

    def _rotated(self, params: Params, at, x):
        return self.scheme.features.query(params.get("features", {}), x, at, head_dim=x.shape[-1])

    def stored(self, params: Params, k, v, at, **sizes):
        """Raises ValueError: keys are not kept one by one."""
        raise ValueError("stored: linear attention keeps one state for all keys; use init_cache and decode")

    def attend_stored(self, q, k, v, params: Params, where: Where, **options):
        """Raises ValueError: keys are not kept one by one."""
        raise ValueError("attend_stored: linear attention keeps one state for all keys; use init_cache and decode")

    def empty(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int, dtype
    ) -> LinearState:
        """The state before the first token, whatever the capacity."""
        return linear.empty_state(batch, num_kv_heads, self.scheme.linear.size(head_dim), head_dim)


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
        check_choice("implementation", implementation, IMPLEMENTATIONS)
