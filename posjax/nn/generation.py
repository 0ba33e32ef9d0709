"""Generates tokens with a decoder: one compiled program for all of them, or a stream of one step after the other.

A prompt is read into the cache in chunks. Then every step chooses a token for each row, and decodes it for the next.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain, pairwise
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from posjax._checks import (
    check,
    check_array,
    check_counts,
    check_length,
    check_number,
    check_tokens,
    check_valid,
    describe,
    is_known,
)
from posjax._mesh import explicit_spec, has_explicit, on_auto_axes
from posjax._numbers import LARGEST
from posjax.nn.decoder import Decoder, DecoderCache
from posjax.scheme.choices import check_reach

_NONE = -1  # stands where a row has no token


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen: from ``softmax(logits / temperature)``, of the likeliest tokens alone if that is asked.

    Args:
        temperature: 0 takes the likeliest token. The smaller it is, the closer are the draws to that.
        top_k: draw from this many of the likeliest tokens (Fan et al., arXiv 1805.04833); 0 for all. Tokens as likely
            as the last of them may be drawn too.
        top_p: draw from the smallest set of likeliest tokens whose probability reaches this, at least one token
            (nucleus sampling: Holtzman et al., arXiv 1904.09751); 1 for all. The probability is that after
            ``temperature`` and ``top_k``.

    Raises:
        ValueError: for a temperature below 0, a ``top_k`` that is not whole or below 0, and a ``top_p`` that is not
            above 0 and at most 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        check_number("temperature", self.temperature, at_least=0)
        whole = isinstance(self.top_k, Integral) and not isinstance(self.top_k, bool)
        check(whole and self.top_k >= 0, f"top_k must be a whole number of at least 0, found {describe(self.top_k)}")
        check_number("top_p", self.top_p)
        check(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, found {self.top_p}")


_GREEDY = Sampling(temperature=0)


def choose(
    key: Key[Array, ""] | None, logits: Float[Array, "rows vocab"], sampling: Sampling = _GREEDY
) -> Int32[Array, "rows"]:
    """The next token of every row.

    Args:
        key: of the draws; not read at temperature 0.
        logits: of every token of the vocabulary.
        sampling: how it is chosen; the likeliest token when left out.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    # Below the largest logit, so that no small temperature makes it infinite, or 0 / 0 if float32 rounds that to 0.
    below = logits - logits.max(-1, keepdims=True)
    scaled = jnp.where(below == 0, 0, below / sampling.temperature)
    if sampling.top_p < 1:
        return _from_nucleus(key, scaled, sampling.top_p)
    return jax.random.categorical(key, scaled).astype(jnp.int32)


def _from_nucleus(key, logits, top_p: float):
    """A draw from the smallest set of likeliest tokens whose probability reaches ``top_p``."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(sorted_logits)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # the probability of all tokens before
    place = jax.random.categorical(key, jnp.where(likelier < top_p, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Generated(NamedTuple):
    """Tokens after prompts.

    Args:
        tokens: the new tokens of each row, and -1 after its end: after a stop token, and from the first logits on that
            are not finite.
        counts: how many tokens of each row come before its end. The stop token is not counted.
    """

    tokens: Int32[Array, "rows tokens"]
    counts: Int32[Array, "rows"]


def generate(
    model: Decoder,
    prompts: Int[Array, "rows prompt"],
    new_tokens: int,
    *,
    sampling: Sampling = _GREEDY,
    stop: Collection[int] = (),
    key: Key[Array, ""] | None = None,
    valid: Bool[Array, "rows prompt"] | None = None,
    length: int | Int[Array, "#rows"] | None = None,
    positions: Int[Array, "#rows text"] | None = None,
    chunk: int = 256,
    init_cache: Callable[..., DecoderCache] = Decoder.init_cache,
) -> Generated:
    """The tokens after every prompt, in one compiled program, which ends when all rows have ended.

    Equal arguments give equal tokens. Another call with the same shapes, settings and ``init_cache`` compiles nothing.

    Args:
        model: a decoder, not a bidirectional one.
        prompts: ids; prompts of different lengths are padded to the longest, with any ids, on the right or the left.
        new_tokens: the most that a row gets.
        sampling: how they are chosen; the likeliest ones when left out.
        stop: tokens that end a row, for instance that of the end of a text.
        key: of the draws; not needed at temperature 0.
        valid: False for padding of ``prompts``; everything is valid when left out. Padding takes no slot in the cache.
        length: for schemes that read it (dynamic NTK, LongRoPE): one for all rows, or one for each. When left out it is
            that of a row's whole text, its prompt and ``new_tokens``.
        positions: of all tokens of a row's text, ``prompt + new_tokens`` of them, as a rule of ``training_positions``
            gives them; 0, 1, 2, ... when left out.
        chunk: how many tokens of the prompts are read at once. Each chunk reads all parameters.
        init_cache: makes the empty cache, with the arguments of ``Decoder.init_cache``: to split it over a mesh.

    Raises:
        ValueError: for a bidirectional model, arguments that do not fit, a row without a valid token, draws without a
            key, and texts longer than a learned embedding.
    """
    given = {"sampling": sampling, "stop": stop, "key": key, "valid": valid, "length": length}
    given |= {"positions": positions, "chunk": chunk, "init_cache": init_cache}
    return _run(*_prepared(model, prompts, new_tokens, **given))


def stream(
    model: Decoder,
    prompts: Int[Array, "rows prompt"],
    new_tokens: int,
    *,
    sampling: Sampling = _GREEDY,
    stop: Collection[int] = (),
    key: Key[Array, ""] | None = None,
    valid: Bool[Array, "rows prompt"] | None = None,
    length: int | Int[Array, "#rows"] | None = None,
    positions: Int[Array, "#rows text"] | None = None,
    chunk: int = 256,
    init_cache: Callable[..., DecoderCache] = Decoder.init_cache,
) -> Iterator[Int32[np.ndarray, "rows"]]:
    """The columns of ``generate(...).tokens``, one by one as they are computed, up to the end of the last row.

    The device computes a token while the host handles the one before. Arguments and errors are those of ``generate``;
    on a mesh, its axes must be Auto.
    """
    given = {"sampling": sampling, "stop": stop, "key": key, "valid": valid, "length": length}
    given |= {"positions": positions, "chunk": chunk, "init_cache": init_cache}
    program, inputs = _prepared(model, prompts, new_tokens, **given)
    check(not has_explicit(inputs), "stream: the mesh has Explicit axes; use Auto ones, or generate")
    return _steps(program, inputs)


class _Inputs(NamedTuple):
    """The arrays of a program."""

    state: nnx.State
    prompts: Int[Array, "rows prompt"]
    valid: Bool[Array, "rows prompt"] | None
    length: Int[Array, "#rows"] | None
    positions: Int[Array, "#rows text"] | None
    key: Key[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class _Program:
    """What is known when a program is compiled; ``length`` is None for one in the inputs."""

    graph: nnx.GraphDef
    new_tokens: int
    sampling: Sampling
    stop: tuple[int, ...]
    length: int | None
    chunk: int
    init_cache: Callable[..., DecoderCache]

    def begin(self, inputs: _Inputs) -> tuple[Array, Array, DecoderCache]:
        """Reads the prompts; returns the first token of each row, which rows go on, and the cache."""
        model, (rows, columns) = self._model(inputs), inputs.prompts.shape
        total, reach = columns + self.new_tokens, self._model(inputs).config.layers.reach
        cache = self.init_cache(model, rows, total if reach is None else min(total, reach), chunk=self.chunk)
        prompts = jnp.pad(inputs.prompts.astype(jnp.int32), ((0, 0), (0, -columns % self.chunk)))
        valid = jnp.ones(inputs.prompts.shape, bool) if inputs.valid is None else inputs.valid
        valid = jnp.pad(valid, ((0, 0), (0, -columns % self.chunk)))
        chunks = [jnp.moveaxis(x.reshape(rows, -1, self.chunk), 1, 0) for x in (prompts, valid)]

        def read(kept, chunk):
            last, cache = kept
            hidden, cache = self._decode(inputs, *chunk, cache)
            return (_last_valid(hidden, chunk[1], last), cache), None

        empty = jnp.zeros((rows, model.config.model_dim), model.config.dtype)
        (last, cache), _ = jax.lax.scan(read, (empty, cache), chunks)
        return *self._choose(inputs, last, jnp.ones(rows, bool), 0), cache

    def follow(self, inputs: _Inputs, token, going, cache: DecoderCache, n) -> tuple[Array, Array, DecoderCache]:
        """The n-th token after the one before, as ``begin`` returns the first. Rows that have ended take no slot."""
        hidden, cache = self._decode(inputs, jnp.maximum(token, 0)[:, None], going[:, None], cache)
        return *self._choose(inputs, hidden[:, 0], going, n), cache

    def ends(self, tokens: Int[Array, "*b"]) -> Bool[Array, "*b"]:
        """Which tokens end their rows."""
        return jnp.isin(tokens, jnp.asarray((_NONE, *self.stop), jnp.int32))

    def _model(self, inputs: _Inputs) -> Decoder:
        return nnx.merge(self.graph, inputs.state)

    def _choose(self, inputs: _Inputs, hidden, going, n):
        logits = self._model(inputs).logits(hidden)
        key = None if inputs.key is None else jax.random.fold_in(inputs.key, n)
        drawn = going & jnp.isfinite(logits).all(-1)
        token = jnp.where(drawn, choose(key, logits, self.sampling), _NONE)
        return token, ~self.ends(token)

    def _decode(self, inputs: _Inputs, tokens, valid, cache: DecoderCache):
        length = inputs.length if self.length is None else self.length
        positions = inputs.positions
        if positions is not None:
            index = cache.used[:, None] + jnp.cumsum(valid, axis=1) - 1
            positions = jnp.broadcast_to(positions, (len(tokens), positions.shape[-1]))
            positions = jnp.take_along_axis(positions, jnp.clip(index, 0, positions.shape[-1] - 1), axis=1)
        return self._model(inputs).decode_hidden(tokens, cache, valid=valid, length=length, positions=positions)


def _last_valid(hidden, valid, otherwise):
    """The hidden state of each row's last valid token; ``otherwise`` for rows without one."""
    column = valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
    found = jnp.take_along_axis(hidden, column[:, None, None], axis=1)[:, 0]
    return jnp.where(valid.any(1)[:, None], found, otherwise)


@partial(jax.jit, static_argnums=0)
def _run(program: _Program, inputs: _Inputs) -> Generated:
    # Types of loops would have to name Explicit axes of a mesh from the start.
    rows = PartitionSpec(*explicit_spec(inputs.prompts)[:1])
    return on_auto_axes(partial(_all_tokens, program), inputs, like=Generated(rows, rows))


def _all_tokens(program: _Program, inputs: _Inputs) -> Generated:
    token, going, cache = program.begin(inputs)
    found = jnp.full((len(token), program.new_tokens), _NONE, jnp.int32).at[:, 0].set(token)

    def more(kept):
        n, _, _, going, _ = kept
        return (n < program.new_tokens) & going.any()

    def step(kept):
        n, found, token, going, cache = kept
        token, going, cache = program.follow(inputs, token, going, cache, n)
        return n + 1, found.at[:, n].set(token), token, going, cache

    found = jax.lax.while_loop(more, step, (1, found, token, going, cache))[1]
    return Generated(found, (~program.ends(found)).sum(1, dtype=jnp.int32))


def _steps(program: _Program, inputs: _Inputs) -> Iterator[Int32[np.ndarray, "rows"]]:
    def queued():
        token, going, cache = _begin(program, inputs)
        yield token, going
        for n in range(1, program.new_tokens):
            token, going, cache = _follow(program, inputs, token, going, cache, np.int32(n))
            yield token, going

    for token, going in _one_ahead(queued()):
        yield np.asarray(token)
        if not np.asarray(going).any():
            return


def _one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, each after the next one was asked for."""
    for before, _ in pairwise(chain(items, [None])):
        yield before


@partial(jax.jit, static_argnums=0)
def _begin(program: _Program, inputs: _Inputs):
    token, going, cache = program.begin(inputs)
    return _whole(token), _whole(going), cache


@partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _follow(program: _Program, inputs: _Inputs, token, going, cache, n):
    token, going, cache = program.follow(inputs, token, going, cache, n)
    return _whole(token), _whole(going), cache


def _whole(x: Array) -> Array:
    """The array, replicated over the mesh in use, so that every process can read it."""
    alone = jax.sharding.get_abstract_mesh().empty
    return x if alone else jax.lax.with_sharding_constraint(x, PartitionSpec())


def _prepared(
    model, prompts, new_tokens, *, sampling, stop, key, valid, length, positions, chunk, init_cache
) -> tuple[_Program, _Inputs]:
    """The program and its inputs; raises the errors of ``generate``."""
    check(model.config.causal, "a bidirectional model (causal=False) cannot generate: every token sees those ahead")
    _check_prompts(prompts, valid)
    _check_choices(new_tokens, sampling, stop, key, chunk)
    (rows, columns), layers = prompts.shape, model.config.layers
    check_reach(layers.reach, "prompts, with the new tokens", _longest(prompts, valid) + new_tokens)
    _check_places(length, positions, rows, columns + new_tokens)
    if length is None:
        each = valid is not None and layers.reads_length
        length = jnp.sum(valid, axis=1, dtype=jnp.int32) + new_tokens if each else columns + new_tokens
    known = int(length) if isinstance(length, Integral) else None
    graph, state = nnx.split(model)
    stop = tuple(sorted(map(int, stop)))
    program = _Program(graph, int(new_tokens), sampling, stop, known, min(int(chunk), columns), init_cache)
    length, key = (None if known else length), (key if sampling.temperature > 0 else None)
    return program, _Inputs(state, prompts, valid, length, positions, key)


def _longest(prompts, valid) -> int:
    """The tokens of the longest prompt; at least 1 if that is not known."""
    if valid is None:
        return prompts.shape[1]
    return int(np.asarray(valid).sum(1).max()) if is_known(valid) else 1


def _check_prompts(prompts: Any, valid: Any) -> None:
    check_tokens("prompts", prompts)
    shape = prompts.shape
    check(0 not in shape, f"prompts must hold at least one token, found shape {shape}")
    if valid is None:
        return
    check_valid(valid, "prompts", shape)
    if is_known(valid):
        counts = np.asarray(valid).sum(1)
        check(counts.min() > 0, f"valid: row {counts.argmin()} has no token; give every prompt at least one")


def _check_choices(new_tokens: Any, sampling: Any, stop: Any, key: Any, chunk: Any) -> None:
    check_counts(new_tokens=new_tokens, chunk=chunk)
    check(isinstance(sampling, Sampling), f"sampling must be a posjax.nn.Sampling, found {describe(sampling)}")
    needs_key = key is None and sampling.temperature > 0
    check(not needs_key, f"key is needed to draw with {sampling}: pass one, for instance jax.random.key(0)")
    ids = isinstance(stop, Collection) and all(isinstance(token, Integral) and 0 <= token < LARGEST for token in stop)
    check(ids, f"stop must be a collection of ids of tokens, found {describe(stop)}")


def _check_places(length: Any, positions: Any, rows: int, total: int) -> None:
    check_length(length)
    shape = jnp.shape(length) if length is not None else ()
    check(shape in ((), (1,), (rows,)), f"length must be one number, or one for each of {rows} rows, found {shape}")
    if positions is not None:
        check_array("positions", positions)
        wanted = f"positions must be those of all tokens, [{total}] or [{rows}, {total}]"
        check(positions.shape in ((total,), (1, total), (rows, total)), f"{wanted}, found {describe(positions)}")
