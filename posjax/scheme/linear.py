"""Linear attention with the choices of a scheme, in one pass or with a state."""

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
    """Norm, kernel and rotation around the forms of ``posjax.linear``. It has no logits, so it reads no other slots."""

    scheme: Choices
    caches: ClassVar[str] = "state"

    def attend(
        self, q, k, v, params: Params, where: Where, *, causal=True, mask=None, visible=None, gates=None, **options
    ):
        """One pass over whole sequences or segments; ``visible`` and ``gates`` are not used."""
        where.placement.check_scheme(self.scheme)
        check(
            mask is None or isinstance(mask, masks.Segments),
            f"mask: linear attention sees whole documents, so only masks.Segments is supported, found {shown(mask)}",
        )
        check_no_logits(**options)
        ids, form = None if mask is None else mask.q_ids, linear.chunked if causal else linear.bidirectional
        out = self._run(form, (q, k, v), params, where, ids)
        return out[0] if causal else out

    def step(
        self, projected, cache: LinearState, params: Params, where: Where, new: NewTokens, options, partition
    ) -> tuple[Array, LinearState]:
        """Attention of new tokens over the state, and the state after them."""
        check_no_logits(**options)
        return self._run(partial(linear.chunked, state=cache), projected, params, where, new.ids)

    def _run(self, form: Callable, projected, params: Params, where: Where, ids: Array | None):
        """The result of ``form``, one of the forms of ``posjax.linear``, on raw projections with segment ids."""
        q, k, v = projected if ids is None else without_padding(masks.Segments(ids), *projected)
        return form(v=v, segment_ids=ids, **self._features(q, k, params, where))

    def _features(self, q, k, params: Params, where: Where) -> dict[str, Array | None]:
        """The arguments of a form, from raw queries and keys."""
        if self.scheme.norm is not None:
            q, k = self.scheme.norm.apply(params.get("norm", {}), q, k)
        features, rotations = self.scheme.features, {}
        if features is not None:
            positions = {"rotate_q": where.queries(features, q), "rotate_k": where.keys(features, k)}
            rotations = {name: partial(self._rotated, params, at) for name, at in positions.items()}
        return linear.features(self.scheme.linear, q, k, params=params.get("linear"), **rotations)

    def _rotated(self, params: Params, at, x):
        return self.scheme.features.query(params.get("features", {}), x, at, head_dim=x.shape[-1])

    def empty(
        self, batch: int, capacity: int, *, num_heads: int, num_kv_heads: int, head_dim: int, chunk: int, dtype
    ) -> LinearState:
        """The state before the first token, for any capacity."""
        return linear.empty_state(batch, num_kv_heads, self.scheme.linear.size(head_dim), head_dim)


def check_no_logits(*, softcap=None, sinks=None, return_residuals: bool = False, implementation=None) -> None:
    """Checks the options of ``attention`` for linear attention, which has no logits.

    ``implementation`` is ignored: it is for layers of the same model with softmax attention.

    Raises:
        ValueError: for an option about logits, or an unknown implementation.
        TypeError: for an unknown keyword.
    """
    for name, value in (("softcap", softcap), ("sinks", sinks), ("return_residuals", return_residuals or None)):
        check(value is None, f"{name}: linear attention has no logits for it; leave it out")
    if implementation is not None:
        check_choice("implementation", implementation, IMPLEMENTATIONS)
