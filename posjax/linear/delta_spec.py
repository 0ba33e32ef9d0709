"""The spec of a layer of Gated DeltaNet, and its cache."""

import dataclasses

import jax

from posjax._checks import check, check_count, check_counts
from posjax.linear.convolution import Recent, empty_recent
from posjax.linear.delta import Memory, empty_memory
from posjax.linear.feature_maps import LinearLayer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a layer keeps of earlier tokens when decoding: the same size for any number of them.

    Args:
        memory: the state of the delta rule.
        recent: the last inputs of the convolutions of queries, keys and values.
    """

    memory: Memory
    recent: tuple[Recent, Recent, Recent]


@dataclasses.dataclass(frozen=True)
class GatedDelta(LinearLayer):
    """A layer of Gated DeltaNet (Yang et al., arXiv 2412.06464): a short convolution, then the gated delta rule.

    It reads the order of the tokens from its state alone, so that no method of position applies. Its projections are
    its own (``nn.delta.DeltaMixer``), with their own heads, so that ``Scheme.attend`` does not compute it.

    Args:
        num_heads: heads of values, decays, rates and states.
        key_dim: size of a query and a key.
        value_dim: size of a value; ``key_dim`` when left out.
        num_key_heads: heads of queries and keys, which divide ``num_heads``; ``num_heads`` when left out.
        convolution: how many of the last tokens the convolution reads, the token itself included.

    Raises:
        ValueError: for a number that is not whole and above 0, and for heads that are not a multiple of the key heads.
    """

    num_heads: int
    key_dim: int
    value_dim: int | None = None
    num_key_heads: int | None = None
    convolution: int = 4

    def __post_init__(self):
        check_counts(num_heads=self.num_heads, key_dim=self.key_dim)
        for name, value in (("value_dim", self.key_dim), ("num_key_heads", self.num_heads)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            check_count(name, getattr(self, name))
        check_count("convolution", self.convolution)
        check(
            self.num_heads % self.num_key_heads == 0,
            f"num_heads must be a multiple of num_key_heads, found {self.num_heads} and {self.num_key_heads}",
        )

    @property
    def one_sided(self) -> str:
        """Why it is for causal attention alone."""
        return "its state holds the tokens before the query alone"

    @property
    def channels(self) -> tuple[int, int, int]:
        """The channels of queries, keys and values, of all heads."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """The numbers of the states of all heads."""
        return self.num_heads * self.key_dim * self.value_dim

    def empty(self, batch: int, *, dtype=None) -> DeltaState:
        """The cache before the first token; the state is float32, and ``dtype`` is that of the convolution's inputs."""
        memory = empty_memory(batch, self.num_heads, self.key_dim, self.value_dim)
        options = {} if dtype is None else {"dtype": dtype}
        q, k, v = (empty_recent(batch, self.convolution, channels, **options) for channels in self.channels)
        return DeltaState(memory, (q, k, v))
