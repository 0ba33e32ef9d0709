"""A mixture of experts: the router, the experts, and the loads of both."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from posjax._lowered import Lowered, match_varying, run
from posjax._mesh import explicit_spec
from posjax.nn.config import DecoderConfig
from posjax.nn.exchange import Exchange
from posjax.nn.grouped import grouped_product
from posjax.nn.mlp import MLP
from posjax.nn.norms import make_norm
from posjax.nn.parameters import bias_parameter, on_any_mesh, parameter
from posjax.nn.specs import ACTIVATIONS, Experts, Router


class Load(NamedTuple):
    """What the tokens of a batch ask of the experts of one layer, float32; layers may be stacked in front.

    Attributes:
        tokens: how many tokens took each expert.
        scores: for each expert the sum, over the tokens, of the softmax of the router's logits.
    """

    tokens: Float[Array, "*layers experts"]
    scores: Float[Array, "*layers experts"]


def balance_loss(spec: Experts, loads: Any, across: str | None = None) -> Float[Array, ""]:
    """How unevenly the experts are used: ``E sum_e f_e P_e`` of E experts; ``per_token`` if they are used evenly.

    ``f_e`` is the share of tokens that take expert e, and ``P_e`` the mean of its softmax scores, over the tokens of
    all layers together. Only the scores have a gradient (Fedus et al., arXiv 2101.03961, eq. 4, as transformers
    computes it for several experts of a token).

    Args:
        spec: the mixture.
        loads: a tree of the loads of all layers.
        across: a mesh axis, inside ``shard_map``, over which the tokens are split; the result is then this device's
            part of a sum over the axis.
    """
    layers = jax.tree.leaves(loads, is_leaf=lambda node: isinstance(node, Load))
    tokens, scores = (sum(part.reshape(-1, spec.count).sum(0) for part in parts) for parts in zip(*layers, strict=True))
    tokens = jax.lax.stop_gradient(tokens if across is None else jax.lax.psum(tokens, across))
    count = jnp.maximum(tokens.sum() / spec.per_token, 1)
    return spec.count * jnp.sum(tokens / count * scores / count)


class Routing(NamedTuple):
    """The experts of every token, and their weights, float32."""

    chosen: Int[Array, "tokens chosen"]
    weights: Float[Array, "tokens chosen"]


def route(
    spec: Experts, logits: Float[Array, "tokens experts"], correction: Float[Array, "experts"] | None = None
) -> Routing:
    """The experts of every token by the router's float32 logits; see ``Router``."""
    router = spec.router
    if router.score == "softmax" and router.normalized and correction is None and router.groups == 1:
        best, chosen = jax.lax.top_k(logits, spec.per_token)
        return Routing(chosen, router.scale * jax.nn.softmax(best, axis=-1))
    scores = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    # Logits have the order of their scores, and fewer ties.
    ranked = logits if correction is None and router.groups == 1 else scores
    ranked = ranked if correction is None else ranked + correction[None]
    chosen = jax.lax.top_k(_in_best_groups(router, jax.lax.stop_gradient(ranked)), spec.per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.normalized:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), router.least_sum)
    return Routing(chosen, router.scale * weights)


def _in_best_groups(router: Router, ranked):
    """The scores, and minus infinity for experts outside the best groups."""
    if router.groups == router.groups_kept:
        return ranked
    groups = ranked.reshape(len(ranked), router.groups, -1)
    of_group = jax.lax.top_k(groups, router.group_best)[0].sum(-1)
    best = jax.lax.top_k(of_group, router.groups_kept)[1]
    kept = (best[..., None] == jnp.arange(router.groups)).any(1)
    return jnp.where(kept[..., None], groups, -jnp.inf).reshape(ranked.shape)


class ExpertsMLP(MLP):
    """A mixture of experts: several MLPs, of which a router chooses a few for every token. No token is dropped.

    The output is ``sum over the chosen e of w_e mlp_e(x)``, with the choice and the weights of ``Experts.router``, plus
    the output of the shared MLP, if there is one; with ``Experts.norms`` these parts have norms of their own.

    Tokens are sorted by their experts, so that every expert multiplies only its own tokens: the cost is always that of
    ``per_token`` MLPs. Parameters of the experts have a leading axis of experts.

    Args:
        config: the layer's shape, with ``experts``.
        rngs: random streams.
    """

    PROJECTIONS: ClassVar = {}

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, spec = config.model_dim, config.experts
        count = spec.count
        self.router = parameter(rngs.params(), (width, count), ("embed", "experts"), width**-0.5)
        self.router_bias = bias_parameter((count,), ("experts",)) if spec.router.bias else None
        self.correction = bias_parameter((count,), ("experts",)) if spec.router.correction else None
        ones = jnp.ones(count, jnp.float32)
        self.scales = nnx.Param(ones, logical_axes=("experts",)) if spec.router.learned_scale else None
        super().__init__(config, rngs=rngs, experts=(count,))
        alone = replace(config, experts=None, mlp_dim=spec.shared_dim)
        self.shared = None if spec.shared_dim is None else MLP(alone, rngs=rngs)
        gated = spec.shared_gate
        self.shared_gate = parameter(rngs.params(), (width,), ("embed",), width**-0.5) if gated else None
        norm = partial(make_norm, width, config.norm)
        self.router_norm, self.experts_norm, self.experts_after = (norm() if spec.norms else None for _ in range(3))
        shares = spec.norms and self.shared is not None
        self.shared_norm, self.shared_after = (norm() if shares else None for _ in range(2))

    def with_load(
        self, x: Float[Array, "batch length embed"], counted: Bool[Array, "batch length"] | None = None
    ) -> tuple[Float[Array, "batch length embed"], Load]:
        """The output, and the load of the experts by the tokens that are ``counted``; by all when left out."""
        like = explicit_spec(x), Load(PartitionSpec(), PartitionSpec())
        return on_any_mesh(type(self)._mixed_with_load, self, x, counted, like=like)

    def _mixed(self, x):
        return self._mixed_with_load(x, None)[0]

    def _mixed_with_load(self, x, counted):
        counted = jnp.ones(x.shape[:2], bool) if counted is None else counted
        routed, load = self._routed(_through(self.experts_norm, x), self._asked(x), counted)
        routed = _through(self.experts_after, routed)
        if self.shared is None:
            return routed, load
        shared = _through(self.shared_after, self.shared._mixed(_through(self.shared_norm, x)))
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(x @ self.shared_gate[...].astype(x.dtype))[..., None]
        scale = self.config.experts.shared_scale
        return routed + (shared if scale == 1 else shared * scale), load

    def _asked(self, x):
        """What the router reads; None if it is what the experts read."""
        return None if self.router_norm is None else self.router_norm._normed(x) * x.shape[-1] ** -0.5

    def _routed(self, x, asked, counted):
        """The sum over the chosen experts, and the load; every device computes its own tokens.

        If the hidden units are split, partial sums are added.
        """
        placement = self.config.placement
        mesh = jax.sharding.get_abstract_mesh()
        parameters = {name: getattr(self, name) for name in _ROUTED if getattr(self, name) is not None}
        arrays = {name: leaf[...] for name, leaf in parameters.items()} | {"activation": self._learned}
        if mesh.empty or not placement.is_open(mesh) or not self._fits(x, mesh):
            return _Device(self.config).mixed(arrays, x, asked, counted)
        rows = PartitionSpec(placement.batch or None, placement.context)
        split = placement.heads

        experts = placement.experts if self._exchanges(mesh) else None

        def spec(name, leaf):
            mesh_axes = {"mlp": split, "experts": experts if name in _OF_EXPERTS else None}
            return PartitionSpec(*(mesh_axes.get(axis) for axis in leaf.get_metadata("logical_axes")))

        whole = PartitionSpec()
        specs = {name: spec(name, leaf) for name, leaf in parameters.items()}
        specs["activation"] = dict.fromkeys(self._learned, whole)
        shards = tuple(axis for axes in placement.split_axes[:2] for axis in axes)
        device = _Device(self.config, split, shards, experts)
        open_axes = set(mesh.axis_names) - set(mesh.manual_axes)
        return jax.shard_map(
            device.mixed, in_specs=(specs, rows, rows, rows), out_specs=(rows, Load(whole, whole)), axis_names=open_axes
        )(arrays, x, asked, counted)

    def _fits(self, x, mesh) -> bool:
        """Whether batch, tokens and hidden units can be split evenly over the devices."""
        split = self.config.placement.split_axes
        rows, tokens, hidden = (math.prod(mesh.shape[axis] for axis in axes) for axes in split)
        return x.shape[0] % rows == 0 and x.shape[1] % tokens == 0 and self.config.mlp_dim % hidden == 0

    def _exchanges(self, mesh) -> bool:
        """Whether the placement splits the experts over several devices evenly."""
        axis = self.config.placement.experts
        devices = 1 if axis is None else mesh.shape[axis]
        return devices > 1 and self.config.experts.count % devices == 0


_OF_EXPERTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_ROUTED = ("router", "router_bias", "correction", "scales", *_OF_EXPERTS)
"""The parameters of a mixture without those of the shared MLP and of norms."""


def _through(norm: nnx.Module | None, x: Array) -> Array:
    return x if norm is None else norm._normed(x)


@dataclass(frozen=True)
class _Device:
    """A mixture as one device computes it.

    Attributes:
        config: the layer's shape.
        split: the mesh axes over which the hidden units are split; the outputs of devices along them are added.
        shards: the mesh axes over which the tokens are split.
        experts: the mesh axis over which the experts are split.
    """

    config: DecoderConfig
    split: str | tuple[str, ...] | None = None
    shards: tuple[str, ...] = ()
    experts: str | None = None

    def mixed(self, parameters, x, asked, counted):
        """The sum over the chosen experts for every token, and the load by the tokens of all devices.

        The router reads ``asked``, or ``x`` without it.
        """
        spec, tokens = self.config.experts, x.reshape(-1, x.shape[-1])
        logits = self._logits(parameters, tokens if asked is None else asked.reshape(tokens.shape))
        correction = parameters.get("correction")
        routing = route(spec, logits, None if correction is None else jax.lax.stop_gradient(correction))
        if "scales" in parameters:
            scales = parameters["scales"].astype(jnp.float32)
            routing = routing._replace(weights=routing.weights * scales[routing.chosen])
        out = self._summed(parameters, tokens, routing)
        out = out if self.split is None else jax.lax.psum(out, self.split)
        return out.astype(x.dtype).reshape(x.shape), self._load(logits, routing, counted.reshape(-1))

    def _logits(self, parameters, tokens):
        router, bias = parameters["router"].astype(tokens.dtype), parameters.get("router_bias")
        logits = jnp.matmul(tokens, router, preferred_element_type=jnp.float32)
        return logits if bias is None else logits + bias.astype(jnp.float32)[None]

    def _load(self, logits, routing: Routing, counted) -> Load:
        takes = routing.chosen[..., None] == jnp.arange(self.config.experts.count)
        tokens = jnp.sum(takes & counted[:, None, None], axis=(0, 1), dtype=jnp.float32)
        scores = jnp.sum(jax.nn.softmax(logits, axis=-1) * counted[:, None], axis=0)
        load = Load(tokens, scores)
        return jax.lax.psum(load, self.shards) if self.shards else load

    def _summed(self, parameters, tokens, routing: Routing):
        """The sum over the chosen experts for every token, float32, without those of other hidden units."""
        spec = self.config.experts
        experts = routing.chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        inverse = jnp.argsort(order)
        experts, weights = experts[order], routing.weights.reshape(-1)[order, None]
        sizes = jnp.sum(experts[:, None] == jnp.arange(spec.count), axis=0, dtype=jnp.int32)
        rows = _spread(tokens, order, inverse, spec.per_token), weights
        own = {name: parameters[name] for name in (*_OF_EXPERTS, "activation") if name in parameters}
        if self.experts is None:
            out = self._weighted(own, rows, sizes, experts)
        else:
            out = Exchange(self._weighted, self.experts, self.shards)(own, rows, sizes)
        return _gathered(out, order, inverse, spec.per_token)

    def _weighted(self, parameters, rows, sizes, experts):
        """``_of_experts`` for rows and their weights."""
        rows, weights = rows
        if self.config.experts.router.on_input:
            return self._of_experts(parameters, rows * weights.astype(rows.dtype), sizes, experts)
        return self._of_experts(parameters, rows, sizes, experts) * weights

    def _of_experts(self, parameters, rows, sizes, experts):
        """For every row the output of its expert, float32; rows are sorted by expert."""

        def product(name, rows):
            out = grouped_product(rows, parameters[name].astype(rows.dtype), sizes)
            bias = parameters.get(f"{name}_bias")
            return out if bias is None else out + self._bias(name, bias)[experts]

        up = product("up", rows).astype(rows.dtype)
        gate = (product("gate", rows).astype(rows.dtype),) if "gate" in parameters else ()
        hidden = ACTIVATIONS[self.config.activation].hidden(*gate, up, **parameters["activation"])
        return product("down", hidden)

    def _bias(self, name, bias):
        """A bias, float32; that of a sum over split hidden units is added by the first device alone."""
        bias = bias.astype(jnp.float32)
        if name != "down" or self.split is None:
            return bias
        return jnp.where(jax.lax.axis_index(self.split) == 0, bias, 0)


# --- between tokens and rows sorted by expert -------------------------------------------------------------------------


def _spread(tokens, order, inverse, copies: int):
    """Rows sorted by expert: row n is the token ``order[n] // copies``."""
    return run(_Spread(copies), *match_varying((order, inverse, tokens)))[0]


def _gathered(rows, order, inverse, copies: int):
    """For every token the sum of its rows."""
    return run(_Gathered(copies), *match_varying((order, inverse, rows)))[0]


@dataclass(frozen=True)
class _Spread(Lowered):
    """The transpose of ``_Gathered``. Both read rows by number; XLA's own transpose would add row by row, slowly."""

    copies: int

    @property
    def linear(self):
        """In the tokens."""
        return 1

    def types(self, order, inverse, tokens):
        return [tokens[order // self.copies]]

    def on(self, platform, order, inverse, tokens):
        return self.types(order, inverse, tokens)

    def transposed(self, constants, cotangents):
        (d_rows,) = cotangents
        return [run(_Gathered(self.copies), *constants, d_rows)[0]]


@dataclass(frozen=True)
class _Gathered(Lowered):
    """The transpose of ``_Spread``."""

    copies: int

    @property
    def linear(self):
        """In the rows."""
        return 1

    def types(self, order, inverse, rows):
        return [rows[inverse].reshape(-1, self.copies, rows.shape[1]).sum(1)]

    def on(self, platform, order, inverse, rows):
        return self.types(order, inverse, rows)

    def transposed(self, constants, cotangents):
        (d_tokens,) = cotangents
        return [run(_Spread(self.copies), *constants, d_tokens)[0]]
