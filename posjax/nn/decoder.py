"""A Transformer for any scheme: causal language model, or bidirectional encoder."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from posjax import _serial
from posjax._checks import check, check_array, check_length, check_tokens, check_valid, describe
from posjax._mesh import axes_of, explicit_spec, on_auto_axes
from posjax._numbers import at_least_float32
from posjax.attention.rows import ATTENDED
from posjax.masks import Segments
from posjax.nn.attention import LayerInputs
from posjax.nn.block import Block
from posjax.nn.config import DecoderConfig
from posjax.nn.experts import Load
from posjax.nn.lookup import lookup
from posjax.nn.lora import attach
from posjax.nn.norms import make_norm
from posjax.nn.parameters import bias_parameter, parameter, placed, plain, scheme_parameters
from posjax.positions import Positions, Range, as_array, from_segments
from posjax.scheme import Layers, Scheme
from posjax.scheme.choices import check_reach
from posjax.scheme.executors import layer_of, with_layer

Loads = tuple[tuple[Load | None, ...], ...]
"""The loads of the experts of a decoder; see ``Decoder.hidden_and_loads``."""

_SAVE_ATTENDED = jax.checkpoint_policies.save_only_these_names(ATTENDED)


def _and_attended(policy: Callable) -> Callable:
    """A policy that also saves the results of attention, which are small but take long to recompute."""

    def combined(*args, **parameters):
        saved = _SAVE_ATTENDED(*args, **parameters)
        return saved if saved is True else policy(*args, **parameters)

    return combined


_POLICIES = {
    "dots": _and_attended(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "offload": _and_attended(jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")),
    "attention": _SAVE_ATTENDED,
    "full": None,
}


@partial(jax.tree_util.register_dataclass, data_fields=["stacks", "used"], meta_fields=["capacity"])
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """The cache of a decoder.

    Args:
        stacks: ``stacks[p][n]`` is the cache of layer n in the period of pattern p, with a leading axis of repeats.
        used: how many tokens of each row are in the cache.
        capacity: the most tokens of a row.
    """

    stacks: tuple
    used: Int[Array, "batch"]
    capacity: int


_serial.register(DecoderCache)


class Decoder(nnx.Module):
    """Token embedding, blocks, final norm, logits.

    Blocks are stacked by pattern of ``config.patterns``: every parameter of ``stacks[p][n]`` has a leading axis of the
    pattern's repeats. The parameter tree does not depend on ``scan_layers`` or ``remat``.

    Args:
        config: the shape.
        rngs: random streams, ``nnx.Rngs(seed)``.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, vocabulary = config.model_dim, config.vocab_size
        into = partial(parameter, stddev=width**-0.5)
        self.embed = into(rngs.params(), (vocabulary, width), ("vocab", "embed"))
        embedding = config.layers.embedding
        made = {} if embedding is None else embedding.init(rngs.params(), width)
        self.embedding = scheme_parameters({"embedding": made} if made else {})
        sharing = _sharing_layers(config)
        shared = [each.scheme.init_shared(rngs.params(), each.num_heads, each.head_dim) for each in sharing]
        self.shared = nnx.List([scheme_parameters(made) for made in shared])
        self.embedding_norm = make_norm(width, config.norm) if config.embedding_norm else None
        self.stacks = nnx.List([_stack(layers, repeats, rngs) for layers, repeats in config.patterns])
        self.norm = make_norm(width, config.norm)
        self.head = None if config.tied_head else into(rngs.params(), (width, vocabulary), ("embed", "vocab"))
        self.head_bias = bias_parameter((vocabulary,), ("vocab",)) if "head" in config.biases else None
        if config.lora is not None:
            attach(self.stacks, config.lora, rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Positions | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        coordinates: Float[Array, "*b length axes"] | Int[Array, "*b length axes"] | None = None,
    ) -> Float[Array, "batch length vocab"]:
        """Logits of every token, float32; the arguments are those of ``hidden``."""
        arguments = {"positions": positions, "segment_ids": segment_ids, "length": length, "coordinates": coordinates}
        return self.logits(self.hidden(tokens, **arguments))

    def hidden(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Positions | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        coordinates: Float[Array, "*b length axes"] | Int[Array, "*b length axes"] | None = None,
    ) -> Float[Array, "batch length embed"]:
        """The output of the blocks for every token, after the last norm: the input of ``logits``.

        On a mesh all arguments are in the order of the layout of ``config.placement``.

        Args:
            tokens: int32 ids from 0 to ``vocab_size - 1``. Other ids raise no error: larger ids get the embedding of
                the last token; negative ids count from the end (-1 is the last token), at most to the first token.
            positions: of the tokens; when left out 0, 1, 2, ... or, with ``segment_ids``, counted inside each segment.
                With a bias that gives the same result for both counts, positions are counted in the row
                (``Layers.counts_in_row``).
            segment_ids: documents packed into a row, each contiguous and with its own id; tokens of different documents
                do not see each other. Negative ids are padding.
            length: the current length for schemes that read it (dynamic NTK); the length of the row when left out.
            coordinates: positions for features and embedding only, ``[batch, length, axes]`` or ``[length, axes]``: in
                several axes (images), or real-valued. Masks, biases and scales still read ``positions``.

        Raises:
            ValueError: for shapes that do not fit, tokens that are not integers, a length that is not positive, and
                rows longer than a learned embedding. Positions in an array are not checked, nor the lengths of packed
                documents: a token beyond the embedding gets NaN.
        """
        arguments = {"positions": positions, "segment_ids": segment_ids, "length": length, "coordinates": coordinates}
        return self.hidden_and_loads(tokens, **arguments)[0]

    def hidden_and_loads(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Positions | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        coordinates: Float[Array, "*b length axes"] | Int[Array, "*b length axes"] | None = None,
    ) -> tuple[Float[Array, "batch length embed"], Loads]:
        """The result of ``hidden``, and the loads of the experts of all layers; padding does not count in them.

        ``loads[p][n]`` is the ``Load`` of layer n in the period of pattern p, with a leading axis of repeats; None for
        a layer without experts.
        """
        _check_shapes(tokens, positions, segment_ids, coordinates)
        check_length(length)
        inputs = self._layer_inputs(tokens, positions, segment_ids, length, coordinates)
        places = inputs.positions
        if isinstance(places, Range) and places.is_static and coordinates is None:
            check_reach(self.config.layers.reach, "tokens", places.start + places.length)
        x = self._embed(tokens, inputs)
        loads = []
        for stack in self.stacks:
            x, load = self._run(stack, x, inputs)
            loads.append(load)
        return self.norm(x), tuple(loads)

    def logits(self, hidden: Float[Array, "*b embed"]) -> Float[Array, "*b vocab"]:
        """Logits from the result of ``hidden``, float32: ``cap(logit_scale (hidden matrix + bias))``."""
        rows = explicit_spec(hidden)[:-1]
        matrix = self.output_matrix
        row_axes = {axis for part in rows for axis in axes_of(part)}
        vocab_axes = tuple(axis for axis in axes_of(explicit_spec(matrix)[1]) if axis not in row_axes)
        compute = partial(_logits, finish=self.config.finish_logits)
        return on_auto_axes(compute, hidden, matrix, self.output_bias, like=PartitionSpec(*rows, vocab_axes or None))

    @property
    def output_matrix(self) -> Float[Array, "embed vocab"]:
        """The matrix from the last hidden states to the logits."""
        return self.embed[...].T if self.head is None else self.head[...]

    @property
    def output_bias(self) -> Float[Array, "vocab"] | None:
        """The bias of the logits, or None."""
        return None if self.head_bias is None else self.head_bias[...]

    def init_cache(self, batch: int, capacity: int, *, chunk: int = 1) -> DecoderCache:
        """An empty cache for ``decode``.

        Args:
            batch: batch rows.
            capacity: the most tokens of a row, prompt and generated ones.
            chunk: the most tokens that are decoded at once, for instance the length of the prompt.

        Raises:
            ValueError: for a number that is not whole and above 0, and a capacity beyond a learned embedding.
        """

        def stacked(layer: DecoderConfig, repeats: int):
            cache = layer.scheme.init_cache(batch, capacity, **layer.cached, chunk=chunk, dtype=layer.dtype)
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (repeats, *leaf.shape)), cache)

        stacks = tuple(tuple(stacked(layer, n) for layer in layers) for layers, n in self.config.patterns)
        return DecoderCache(stacks, jnp.zeros(batch, jnp.int32), capacity)

    def decode(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: DecoderCache,
        *,
        length: int | Int[Array, "..."],
        valid: Bool[Array, "batch tokens"] | None = None,
        positions: Int[Array, "batch tokens"] | None = None,
        coordinates: Float[Array, "batch tokens axes"] | Int[Array, "batch tokens axes"] | None = None,
    ) -> tuple[Float[Array, "batch tokens vocab"], DecoderCache]:
        """Logits of tokens that follow those in the cache, and the cache with these tokens.

        Any split into calls, of chunks or single tokens, gives the same logits as one full forward pass at the same
        ``length``. Rows may hold padding anywhere.

        Args:
            tokens: the next tokens of every row.
            cache: from ``init_cache``, or an earlier call.
            length: the current length for schemes that read it (dynamic NTK, LongRoPE): that of the whole text, prompt
                and new tokens, in every call. If it changed between calls, cached keys and new ones would have
                different frequencies, unlike in any full forward pass. Other schemes ignore it.
            valid: False for padding; everything is valid when left out.
            positions: of the tokens, at least 0 and increasing along a row; the number of earlier tokens of the row
                when left out.
            coordinates: see ``__call__``.

        Raises:
            ValueError: for a bidirectional model, or shapes that do not fit. Rows with more tokens than the capacity of
                the cache get NaN.
        """
        arguments = {"valid": valid, "positions": positions, "coordinates": coordinates}
        hidden, cache = self.decode_hidden(tokens, cache, length=length, **arguments)
        return self.logits(hidden), cache

    def decode_hidden(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: DecoderCache,
        *,
        length: int | Int[Array, "..."],
        valid: Bool[Array, "batch tokens"] | None = None,
        positions: Int[Array, "batch tokens"] | None = None,
        coordinates: Float[Array, "batch tokens axes"] | Int[Array, "batch tokens axes"] | None = None,
    ) -> tuple[Float[Array, "batch tokens embed"], DecoderCache]:
        """``decode``, but with the input of ``logits`` in place of the logits: of a prompt only the last are needed."""
        check(self.config.causal, "a bidirectional model (causal=False) cannot decode: every token sees those ahead")
        check_tokens("tokens", tokens)
        rows = cache.used.shape[0]
        check(tokens.shape[0] == rows, f"tokens must have the {rows} rows of the cache, found shape {tokens.shape}")
        check_length(length)
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        check_valid(valid, "tokens", tokens.shape)
        _check_shapes(tokens, positions, None, coordinates)
        if positions is not None:
            check_array("positions", positions)
        seen = cache.used[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32)
        index = jnp.where(valid, seen - 1, 0)
        token_positions = index if positions is None else jnp.broadcast_to(positions, tokens.shape)
        inputs = LayerInputs(token_positions, None, index + 1, length, self._shared(), coordinates, valid)
        x = self._embed(tokens, inputs)
        stacks = []
        for stack, caches in zip(self.stacks, cache.stacks, strict=True):
            x, caches = self._run_decode(stack, caches, x, inputs)
            stacks.append(caches)
        fits = seen[:, -1] <= cache.capacity
        hidden = jnp.where(fits[:, None, None], self.norm(x), jnp.nan)
        return hidden, DecoderCache(tuple(stacks), seen[:, -1], cache.capacity)

    def with_scheme(self, scheme: Scheme | Layers) -> "Decoder":
        """A decoder over the same parameters with another scheme; see ``Scheme.extend``.

        Raises:
            ValueError: if the scheme needs parameters of other names or shapes.
        """
        config = dataclasses.replace(self.config, scheme=scheme)
        graph, wanted = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
        state = nnx.state(self)
        shapes = [jax.tree.map(jnp.shape, nnx.to_pure_dict(s)) for s in (state, wanted)]
        why = f"scheme: {describe(scheme)} does not fit the parameters of {describe(self.config.scheme)}"
        check(shapes[0] == shapes[1], why)
        return nnx.merge(graph, state)

    def _layer_inputs(self, tokens, positions, segment_ids, length, coordinates) -> LayerInputs:
        (rows, columns), layout = tokens.shape, self.config.placement.layout
        if positions is not None and not isinstance(positions, Range) and jnp.ndim(positions) == 2:
            positions = jnp.broadcast_to(positions, (rows, columns))
        if coordinates is not None:
            coordinates = jnp.broadcast_to(coordinates, (rows, columns, coordinates.shape[-1]))
        ids = None if segment_ids is None else layout.restore(segment_ids)
        # A Range counts the tokens of the whole row in their original order, for any layout.
        row = Range(0, columns)
        in_segments = row if ids is None else layout.apply(from_segments(ids))
        visible = self._in_layout(in_segments) + 1
        if not self.config.causal:
            visible = jnp.full_like(visible, columns) if ids is None else layout.apply(_segment_sizes(ids))
        if positions is None:
            positions = row if self.config.layers.counts_in_row else in_segments
        return LayerInputs(
            positions=positions,
            mask=None if segment_ids is None else Segments(segment_ids, finite=True),
            visible=visible,
            length=columns if length is None else length,
            shared=self._shared(),
            coordinates=coordinates,
            counted=None if segment_ids is None else segment_ids >= 0,
        )

    def _in_layout(self, positions: Positions):
        """Positions as an array; a ``Range`` is put into the order of the layout."""
        array = as_array(positions)
        return self.config.placement.layout.apply(array) if isinstance(positions, Range) else array

    def _shared(self) -> dict:
        shared = {}
        for layer, params in zip(_sharing_layers(self.config), self.shared, strict=True):
            bias = layer.scheme.bias
            shared |= {scheme: plain(params) for scheme in self.config.layers.kinds if scheme.bias == bias}
        return shared

    def _embed(self, tokens, inputs: LayerInputs):
        """The embeddings of tokens and positions."""
        learned = plain(self.embedding).get("embedding", {})
        places = inputs.positions, inputs.coordinates
        x = on_auto_axes(self._embedded, self.embed[...], learned, tokens, *places, like=explicit_spec(tokens))
        x = placed(x, self.config.placement)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _embedded(self, table, learned, tokens, positions, coordinates):
        x = lookup(table, tokens, self.config.placement)
        x = x.astype(at_least_float32(x.dtype))  # scale and position embeddings need more than bfloat16
        x = x if self.config.embedding_scale == 1 else x * self.config.embedding_scale
        spec = self.config.layers.embedding
        if spec is not None:
            places = self._in_layout(positions) if coordinates is None else coordinates[..., 0]
            x = x + spec.embed(learned, places, self.config.model_dim)
        return x.astype(self.config.dtype)

    def _run(self, stack: nnx.List, x, inputs: LayerInputs):
        """Runs the blocks of one pattern for all its repeats, in ``lax.scan`` or in a Python loop; also their loads."""
        graph, state = nnx.split(stack)

        def period(x, layer):
            loads = []
            for block in nnx.merge(graph, layer):
                x, load = block.with_load(x, inputs)
                x = placed(x, self.config.placement)
                loads.append(load)
            return x, tuple(loads)

        if self.config.remat != "none":
            period = jax.checkpoint(period, policy=_POLICIES[self.config.remat])
        if self.config.scan_layers:
            return jax.lax.scan(period, x, state)
        loads = []
        for n in range(jax.tree.leaves(state)[0].shape[0]):
            x, load = period(x, jax.tree.map(lambda leaf, n=n: leaf[n], state))
            loads.append(load)
        return x, jax.tree.map(lambda *of_repeats: jnp.stack(of_repeats), *loads)

    def _run_decode(self, stack: nnx.List, caches: tuple, x, inputs: LayerInputs):
        """Runs the blocks of one pattern on new tokens for all its repeats, in ``lax.scan`` or in a Python loop.

        The caches are carried, so that new tokens are written in place.
        """
        graph, state = nnx.split(stack)

        def period(carry, layer):
            (x, caches), (number, parameters) = carry, layer
            after = []
            for block, cache in zip(nnx.merge(graph, parameters), caches, strict=True):
                x, own = block.decode(x, layer_of(cache, number), inputs)
                after.append(with_layer(cache, own, number))
            return (x, tuple(after)), None

        repeats = jax.tree.leaves(state)[0].shape[0]
        if self.config.scan_layers:
            return jax.lax.scan(period, (x, caches), (jnp.arange(repeats), state))[0]
        for n in range(repeats):
            (x, caches), _ = period((x, caches), (n, jax.tree.map(lambda leaf, n=n: leaf[n], state)))
        return x, caches


def _logits(hidden, matrix, bias, *, finish):
    return finish(jnp.matmul(hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32), bias)


def logical_axes(model: nnx.Module) -> dict:
    """The logical names of the axes of every parameter, in the nested dict of ``nnx.to_pure_dict(nnx.state(model))``.

    A stacked parameter has ``"layers"`` first. Axes without a name are ``None``.
    """

    def name(leaf: nnx.Variable):
        axes = leaf.get_metadata("logical_axes")
        return ("layers",) * (leaf.get_value().ndim - len(axes)) + axes

    return nnx.to_pure_dict(
        jax.tree.map(name, nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def _stack(layers: tuple[DecoderConfig, ...], repeats: int, rngs: nnx.Rngs) -> nnx.List:
    """The blocks of one pattern with their parameters stacked over its repeats."""

    @nnx.split_rngs(splits=repeats)
    @nnx.vmap
    def build(rngs):
        return nnx.List([Block(layer, rngs=rngs) for layer in layers])

    return build(rngs)


def _sharing_layers(config: DecoderConfig) -> list[DecoderConfig]:
    """A layer for each distinct bias whose parameters all layers share."""
    by_bias = {}
    for layer in config.every_layer:
        bias = layer.scheme.bias
        if bias is not None and bias.shared_across_layers:
            by_bias.setdefault(bias, layer)
    return list(by_bias.values())


def _check_shapes(tokens, positions, segment_ids, coordinates) -> None:
    check_tokens("tokens", tokens)
    columns = tokens.shape[1]
    check(columns > 0, f"tokens must hold at least one token, found shape {tokens.shape}")
    if segment_ids is not None:
        check_array("segment_ids", segment_ids)
        shape = segment_ids.shape
        check(shape == tokens.shape, f"segment_ids must have the shape of tokens, {tokens.shape}, found {shape}")
    if positions is not None:
        shape = (positions.length,) if isinstance(positions, Range) else jnp.shape(positions)
        fits = shape in ((columns,), (1, columns), tokens.shape)
        check(fits, f"positions must have shape {(columns,)} or {tokens.shape}, found {shape}")
    if coordinates is not None:
        check_array("coordinates", coordinates)
        shape = coordinates.shape
        fits = len(shape) > 1 and shape[:-1] in ((columns,), (1, columns), tokens.shape)
        check(fits, f"coordinates must have shape [*{tokens.shape}, axes] or [{columns}, axes], found {shape}")


def _segment_sizes(segment_ids):
    """For each token, the number of tokens in its segment: before it, itself, and after it."""
    after = jnp.flip(from_segments(jnp.flip(segment_ids, -1)), -1)
    return from_segments(segment_ids) + 1 + after
