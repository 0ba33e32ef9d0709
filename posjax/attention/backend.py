"""The base class of backends, and backends in plain JAX.

A backend computes a call with all keys of a sequence or with part of them. With part of the keys, the forward pass
takes the results of the other keys and merges its own into them (see ``posjax.attention.rows``), and the backward pass
takes sums of gradients and adds its own to them: with the weights ``P = exp(z - L)`` and ``D = rowsum(dO * O) - dL`` of
all keys, the gradients of each part are independent. A kernel reads and writes these sums in the same pass over memory.
"""

import abc
import dataclasses
from collections.abc import Callable

import jax

from posjax.attention.call import Call
from posjax.attention.rows import PerQuery, Rows, merged, per_query_of


class Backend(abc.ABC):
    """What computes attention. A subclass is hashable: it is part of the key of compiled programs."""

    effects: frozenset = frozenset()
    """The side effects that JAX must know when it traces a call: those of an interpreted kernel."""

    def refusal(self, call: Call) -> str | None:
        """Why the backend does not support a call, or None."""
        return None

    def needs_ranges(self, call: Call) -> bool:
        """Whether the backend supports the bias of a call only if positions are ranges."""
        return False

    @abc.abstractmethod
    def forward(self, call: Call) -> Rows:
        """The results for each query."""

    def merge(self, call: Call, so_far: Rows) -> Rows:
        """The results over the keys so far and the keys of ``call``, in the dtype of the statistics."""
        return merged(so_far, self.forward(call))

    def per_query_of(self, call: Call, rows: Rows, cotangents: Rows) -> PerQuery:
        """The input of the backward pass for each query, from the results and their cotangents."""
        return per_query_of(rows, rows.lse, cotangents)

    @abc.abstractmethod
    def backward(self, call: Call, per_query: PerQuery, *, of_bias: bool) -> Call:
        """The cotangent of the call; without ``of_bias`` that of the bias may be 0."""

    @abc.abstractmethod
    def add(self, call: Call, per_query: PerQuery, so_far: Call) -> Call:
        """The sums of cotangents so far plus the cotangents from the keys of ``call``.

        Sums are None for positions, and where they are not wanted; those of the queries are of scaled queries.
        """


@dataclasses.dataclass(frozen=True)
class JaxBackend(Backend):
    """A backend in plain JAX.

    Args:
        compute: the results of a call whose queries are scaled.
        gradients: its cotangent, from ``PerQuery``.
    """

    compute: Callable[[Call], Rows]
    gradients: Callable[[Call, PerQuery], Call]

    def forward(self, call):
        return self.compute(call.scaled)

    def backward(self, call, per_query, *, of_bias):
        scaled, transpose = jax.vjp(lambda call: call.scaled, call)
        return transpose(self.gradients(scaled, per_query))[0]

    def add(self, call, per_query, so_far):
        return added(so_far, self.gradients(call.scaled, per_query))


def added(so_far: Call, gradients: Call) -> Call:
    """Sums of cotangents plus those of a part, for ``Backend.add``."""

    def plus(a, b):
        return None if a is None else a + b.astype(a.dtype)

    # A number of a call is a leaf only where it is an array: a sum that is not wanted is none.
    softcap = None if so_far.softcap is None else gradients.softcap
    gradients = dataclasses.replace(gradients, q_positions=None, kv_positions=None, scale=1.0, softcap=softcap)
    return jax.tree.map(plus, so_far, gradients, is_leaf=lambda leaf: leaf is None)
