"""A layer of Gated DeltaNet as a Flax NNX module, in place of attention."""

import math
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check, describe
from posjax._mesh import explicit_spec
from posjax.attention.placement import Placement
from posjax.linear import DeltaState, Memory, Recent, empty_memory, gated_delta, short_convolution
from posjax.masks import Mask, Segments
from posjax.nn.config import DecoderConfig
from posjax.nn.lora import project
from posjax.nn.norms import RMSNorm
from posjax.nn.parameters import on_any_mesh, parameter, placement_of
from posjax.nn.specs import Norm

_CHOSEN_RATES = 1e-3, 1e-1
"""Between these the steps of a new layer's decay are drawn, evenly in their logarithm."""


class DeltaMixer(nnx.Module):
    """A layer of Gated DeltaNet (Yang et al., arXiv 2412.06464; as in Qwen3-Next), with its own projections and heads:

        q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v));   q <- q / (|q| sqrt(key_dim)),  k <- k / |k|
        g = -exp(a) softplus(x W_d + b),   beta = sigmoid(x W_r)
        y = (N(gated_delta(q, k, v, g, beta)) silu(x W_z)) W_o

    N is an RMS norm over each head. The order of the tokens is in the state and in the convolution: positions change
    nothing. ``DecoderConfig.biases``, norms of queries and keys, and all else that changes projections or logits of
    attention do not apply.

    Args:
        config: of this layer; see ``DecoderConfig.of_layer``.
        rngs: random streams.
    """

    PROJECTIONS: ClassVar = {"q": 1, "k": 1, "v": 1, "gate": 1, "rate": 1, "decay": 1, "o": 2}

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, self.scheme = config, config.scheme
        spec, width = config.scheme.linear, config.model_dim
        into = partial(parameter, stddev=width**-0.5)
        keys = (spec.num_key_heads, spec.key_dim), ("kv_heads", "head_dim")
        values = (spec.num_heads, spec.value_dim), ("heads", "head_dim")
        convolved = partial(parameter, stddev=spec.convolution**-0.5)
        for name, (shape, axes) in {"q": keys, "k": keys, "v": values}.items():
            setattr(self, name, into(rngs.params(), (width, *shape), ("embed", *axes)))
            kernel = convolved(rngs.params(), (spec.convolution, *shape), (None, *axes))
            setattr(self, f"{name}_convolution", kernel)
        self.gate = into(rngs.params(), (width, *values[0]), ("embed", *values[1]))
        self.rate = into(rngs.params(), (width, spec.num_heads), ("embed", "heads"))
        self.decay = into(rngs.params(), (width, spec.num_heads), ("embed", "heads"))
        self.decay_bias, self.decay_log = _decays(rngs, spec.num_heads)
        self.norm = RMSNorm(spec.value_dim, "head_dim", Norm(eps=config.norm.eps))
        stddev = (spec.num_heads * spec.value_dim * 2 * config.num_layers) ** -0.5
        self.o = parameter(rngs.params(), (*values[0], width), (*values[1], "embed"), stddev)
        self.adapters = nnx.Dict()

    def __call__(
        self, x: Float[Array, "batch length embed"], *, mask: Mask | None = None
    ) -> Float[Array, "batch length embed"]:
        """The layer over whole sequences, or over the documents of ``mask``, which begin with an empty state.

        Padding between two tokens of one document counts as a token in the convolution, not in the state.

        Raises:
            ValueError: for a mask that is not ``Segments``, and for a sequence that is split over a mesh.
        """
        check(
            mask is None or isinstance(mask, Segments),
            f"mask: Gated DeltaNet reads whole documents, so only masks.Segments is supported, found {describe(mask)}",
        )
        ids = jnp.zeros(x.shape[:2], jnp.int32) if mask is None else mask.q_ids
        mixed = partial(DeltaMixer._mixed, placement=self._placement(x))
        return on_any_mesh(lambda self, *arguments: mixed(self, *arguments)[0], self, x, ids)

    def decode(
        self, x: Float[Array, "batch tokens embed"], cache: DeltaState, inputs
    ) -> tuple[Float[Array, "batch tokens embed"], DeltaState]:
        """The layer on new tokens, which continue the state of the cache, and the state after them."""
        decoded = partial(DeltaMixer._decoded, placement=self._placement(x))
        specs = explicit_spec(x), jax.tree.map(explicit_spec, cache)
        return on_any_mesh(decoded, self, x, inputs.valid, cache, like=specs)

    def _placement(self, x) -> Placement:
        return placement_of(self.config.placement, x, self.v[...])

    def _decoded(self, x, valid: Bool[Array, "batch tokens"], cache: DeltaState, *, placement: Placement):
        """``_mixed`` for tokens with padding anywhere: it is moved behind them, where it changes nothing."""
        ids = jnp.where(valid, 0, -1)
        if x.shape[1] == 1:
            return self._mixed(x, ids, cache, placement=placement)
        order = jnp.argsort(~valid, axis=1, stable=True)
        x, ids = jnp.take_along_axis(x, order[..., None], axis=1), jnp.take_along_axis(ids, order, axis=1)
        out, cache = self._mixed(x, ids, cache, placement=placement)
        return jnp.take_along_axis(out, jnp.argsort(order, axis=1)[..., None], axis=1), cache

    def _mixed(
        self, x, ids: Int[Array, "batch length"], cache: DeltaState | None = None, *, placement: Placement
    ) -> tuple[Array, DeltaState]:
        """The output and the state after the last token."""
        recent = (None,) * 3 if cache is None else cache.recent
        states = dict(zip("qkv", recent, strict=True))
        (q, k, v), recent = zip(*(self._convolved(name, x, ids, state) for name, state in states.items()), strict=True)
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
        steps = jax.nn.softplus(_small(self, "decay", x) + self.decay_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.decay_log[...].astype(jnp.float32)) * steps
        rate = jax.nn.sigmoid(_small(self, "rate", x))
        arrays = q.astype(x.dtype), k.astype(x.dtype), v, decay, rate
        out, memory = _on_mesh(arrays, ids, None if cache is None else cache.memory, placement, self.scheme)
        gate = jax.nn.silu(project(self, "gate", x).astype(jnp.float32))
        out = (self.norm(out).astype(jnp.float32) * gate).astype(x.dtype)
        return project(self, "o", out), DeltaState(memory, recent)

    def _convolved(self, name: str, x, ids, state: Recent | None) -> tuple[Array, Recent]:
        """Queries, keys or values behind the convolution and its activation."""
        heads = project(self, name, x)
        kernel = getattr(self, f"{name}_convolution")[...]
        flat = heads.reshape(*heads.shape[:2], -1)
        out, state = short_convolution(flat, kernel.reshape(kernel.shape[0], -1), segment_ids=ids, state=state)
        return jax.nn.silu(out).astype(x.dtype).reshape(heads.shape), state


def _decays(rngs: nnx.Rngs, heads: int) -> tuple[nnx.Param, nnx.Param]:
    """The bias and the log factor of the decay of a new layer, drawn as in Mamba 2 (arXiv 2405.21060).

    So heads keep what they hold for between about one and a thousand tokens.
    """
    low, high = map(math.log, _CHOSEN_RATES)
    steps = jnp.exp(jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high))
    factors = jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)
    bias = steps + jnp.log(-jnp.expm1(-steps))  # softplus(bias) is the step
    return nnx.Param(bias, logical_axes=("heads",)), nnx.Param(jnp.log(factors), logical_axes=("heads",))


def _small(mixer: DeltaMixer, name: str, x: Float[Array, "*b embed"]) -> Float[Array, "*b heads"]:
    """One number for each head, float32."""
    weight, adapter = getattr(mixer, name)[...], mixer.adapters.get(name)
    out = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return out if adapter is None else out + adapter(x).astype(jnp.float32)


def _unit(x: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
    """``x / |x|``, float32; 1e-6 is added to the square, as in the released code."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)


def _on_mesh(arrays: tuple, ids, state: Memory | None, placement: Placement, scheme) -> tuple[Array, Memory]:
    """``gated_delta``; every device of a mesh computes its own rows and heads, if they can be split evenly."""
    q, _, v, *_ = arrays
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not placement.is_open(mesh):
        return gated_delta(*arrays, segment_ids=ids, state=state)
    placement.check_axes(mesh.shape)
    rows, shards, devices = (math.prod(mesh.shape[axis] for axis in axes) for axes in placement.split_axes)
    placement.check_scheme(scheme, shards)
    if v.shape[0] % rows or v.shape[2] % devices:
        return gated_delta(*arrays, segment_ids=ids, state=state)
    repeats = placement.for_key_heads(mesh.shape, q.shape[2]).repeats
    arrays = tuple(jnp.repeat(x, repeats, axis=2) for x in arrays[:2]) + arrays[2:]
    state = empty_memory(v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    batch, heads = placement.batch or None, placement.heads
    tokens, memory = PartitionSpec(batch, None, heads), Memory(PartitionSpec(batch, heads), PartitionSpec(batch))

    def of_device(arrays, ids, state):
        return gated_delta(*arrays, segment_ids=ids, state=state)

    specs = {"in_specs": (tokens, PartitionSpec(batch), memory), "out_specs": (tokens, memory)}
    open_axes = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(of_device, **specs, axis_names=open_axes)(arrays, ids, state)
